"""The state of a run on Weights & Biases: its URL, or the command that uploads offline data.

Reads directories and output. Never imports `wandb` and never connects to the network.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palaestra.extras import install_command, is_installed
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.wire import API_SCHEMA

_URL = re.compile(rb"View run .{0,200}?at:? (https://[^\s\x1b\"]+)")
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Tracking:
    """The W&B state of a run, according to its directory."""

    __pydantic_config__ = API_SCHEMA

    state: Literal["off", "online", "offline", "uploaded"]
    url: str = ""
    sync_command: str = ""
    """Command that uploads the pending directories."""
    pending: tuple[str, ...] = ()
    """Directories that are not uploaded yet."""
    remedy: str = ""
    """What to do before running the command."""


def read_tracking(run: RunDirectory, url: str = "") -> Tracking:
    """Read the W&B state of a run; `url` is the one known from its telemetry."""
    attempts = run.attempts()
    # Palaestra's trainer has one W&B directory per run, others have one per working directory.
    roots = [run.path, *(attempt.path for attempt in attempts), *(attempt.work for attempt in attempts)]
    offline = sorted({path for root in roots for path in _find_offline_runs(root)})
    pending = tuple(str(path) for path in offline if not list(path.glob("*.wandb.synced")))
    url = url or _last_url([attempt.stdout for attempt in attempts])
    if pending:
        is_missing = not is_installed("wandb")
        remedy = f"{install_command('wandb')}, then wandb login" if is_missing else "wandb login, once"
        return Tracking("offline", url, shlex.join(["wandb", "sync", *pending]), pending, remedy)
    if offline:
        return Tracking("uploaded", url)
    if url:
        return Tracking("online", url)
    if any(list(root.glob("wandb/run-*/run-*.wandb")) for root in roots):
        # Palaestra's trainer silences W&B and writes the URL to its journal.
        return Tracking("online", _last_url([attempt.journal for attempt in attempts]))
    return Tracking("off")


def _find_offline_runs(root: Path) -> list[Path]:
    """Find the directories `wandb/offline-run-<time>-<id>/` that wandb keeps below its directory."""
    paths = root.glob("wandb/offline-run-*")
    return [path for path in paths if path.is_dir() and not path.is_symlink() and list(path.glob("run-*.wandb"))]


def _last_url(files: Sequence[Path]) -> str:
    """Return the last URL that wandb printed, in the newest file with one. It prints it at the start and at the end."""
    for path in reversed(files):
        try:
            with open(path, "rb") as file:
                text = file.read(_READ_BYTES)
                if len(text) == _READ_BYTES:
                    file.seek(max(_READ_BYTES, path.stat().st_size - _READ_BYTES))
                    text += file.read(_READ_BYTES)
        except OSError:
            continue
        urls = _URL.findall(text)
        if urls:
            return str(urls[-1].decode("ascii", "replace"))
    return ""
