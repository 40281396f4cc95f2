"""Where a run is on Weights & Biases: its address, or the command that uploads what was kept on disk.

Reads directories and output; never imports `wandb` and never goes online itself.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palaestra.files.run_directory import RunDirectory
from palaestra.runs.wire import API_SCHEMA

__all__ = ["Tracking", "tracking_of"]

_URL = re.compile(rb"View run .{0,200}?at:? (https://[^\s\x1b\"]+)")
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Tracking:
    """What W&B has of a run, as far as its directory tells."""

    __pydantic_config__ = API_SCHEMA

    state: Literal["off", "online", "offline", "uploaded"]
    url: str = ""
    sync_command: str = ""
    """Uploads what is not uploaded yet; to be typed as it stands."""
    pending: tuple[str, ...] = ()
    """Directories that are not uploaded yet."""
    remedy: str = ""
    """What to do first, when the command would not work here."""


def tracking_of(run: RunDirectory, url: str = "") -> Tracking:
    """Look at a run; `url` is what its telemetry already told."""
    attempts = run.attempts()
    # Our own trainer keeps one W&B directory per run, others one per working directory.
    places = [run.path, *(attempt.path for attempt in attempts), *(attempt.work for attempt in attempts)]
    offline = sorted({path for place in places for path in _offline(place)})
    pending = tuple(str(path) for path in offline if not list(path.glob("*.wandb.synced")))
    url = url or next((found for attempt in reversed(attempts) if (found := _address(attempt.stdout))), "")
    if pending:
        missing = importlib.util.find_spec("wandb") is None
        remedy = "pip install 'palaestra[wandb]', then wandb login" if missing else "wandb login, once"
        return Tracking("offline", url, shlex.join(["wandb", "sync", *pending]), pending, remedy)
    if offline:
        return Tracking("uploaded", url)
    if url:
        return Tracking("online", url)
    if any(list(place.glob("wandb/run-*/run-*.wandb")) for place in places):
        # Of our own trainer, which keeps W&B quiet and writes the address into its journal.
        return Tracking("online", next((found for one in reversed(attempts) if (found := _address(one.journal))), ""))
    return Tracking("off")


def _offline(place: Path) -> list[Path]:
    """What wandb keeps on disk: `wandb/offline-run-<time>-<id>/` below the directory it was given."""
    found = place.glob("wandb/offline-run-*")
    return [path for path in found if path.is_dir() and not path.is_symlink() and list(path.glob("run-*.wandb"))]


def _address(output: Path) -> str:
    """The last address that wandb printed; it does so at the beginning and at the end."""
    try:
        with open(output, "rb") as file:
            text = file.read(_READ_BYTES)
            if len(text) == _READ_BYTES:
                file.seek(max(_READ_BYTES, output.stat().st_size - _READ_BYTES))
                text += file.read(_READ_BYTES)
    except OSError:
        return ""
    found = _URL.findall(text)
    return found[-1].decode("ascii", "replace") if found else ""
