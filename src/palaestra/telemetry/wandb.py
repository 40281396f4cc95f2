"""Curves for Weights & Biases, online or kept on disk to be uploaded later.

Imports `wandb` when a sink is opened, and never prompts: going online without credentials is refused before a
run exists on either side. Offline, `close` logs the command that uploads the run. `episode_return` and
`episode_length` are the trainer's own when it reports them, and otherwise the means of the episodes since the
last update.
"""

from __future__ import annotations

import importlib
import logging
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from palaestra.errors import ConfigError
from palaestra.telemetry.episode import EpisodeMeans
from palaestra.telemetry.event import EpisodeSummary, Event, TrainingStep

__all__ = ["WandbSink", "require_wandb"]

_log = logging.getLogger(__name__)

Mode = Literal["online", "offline"]


def require_wandb(mode: Mode, environ: Mapping[str, str] | None = None) -> Any:
    """The wandb module; refused, before anything starts, without it or without credentials to go online."""
    try:
        module = importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "telemetry.wandb",
            mode,
            f"needs the wandb package ({error})",
            "Run pip install 'palaestra[wandb]', or set telemetry.wandb to off",
        ) from error
    _require_credentials(mode, os.environ if environ is None else environ)
    return module


class WandbSink:
    """One W&B run. `module` stands in for the wandb package, for tests."""

    def __init__(
        self,
        project: str,
        run_name: str,
        mode: Mode,
        directory: str | Path,
        config: Mapping[str, Any],
        *,
        module: Any = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if module is None:
            module = require_wandb(mode, environ)
        else:
            _require_credentials(mode, os.environ if environ is None else environ)
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._run = module.init(
                project=project,
                name=run_name,
                mode=mode,
                dir=str(directory),
                config=dict(config),
                # Our progress display owns the terminal; wandb would wrap stdout and print banners over it.
                settings={"silent": True, "console": "off"},
            )
        except (module.Error, OSError) as error:
            remedy = "Try telemetry.wandb = offline and upload the run later"
            raise ConfigError("telemetry.wandb", mode, f"wandb did not start: {error}", remedy) from error
        self._mode = mode
        self._episodes = EpisodeMeans()
        self._closed = False

    def emit(self, event: Event) -> None:
        """Log an update's metrics; count an episode in; ignore the rest, and everything after `close`."""
        if self._closed:
            return
        if isinstance(event, EpisodeSummary):
            self._episodes.add(event)
        elif isinstance(event, TrainingStep):
            self._log(event.env_step, self._episodes.take() | event.metrics)

    def flush(self) -> None:
        """Nothing to do: wandb hands on in a process of its own."""

    def close(self) -> None:
        """Finish the run; offline, say how to upload it."""
        if self._closed:
            return
        self._closed = True
        left_over = self._episodes.take()
        if left_over:
            self._log(self._episodes.env_step, left_over)
        # The run's files lie in DIR/files; `wandb sync` wants DIR.
        directory = Path(self._run.dir).parent
        self._run.finish()
        if self._mode == "offline":
            _log.info("This run was kept offline. To upload it: wandb sync %s", directory)

    def _log(self, env_step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=env_step)


def _require_credentials(mode: Mode, environ: Mapping[str, str]) -> None:
    if mode == "offline" or environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    home = environ.get("HOME", "")
    places = [environ["NETRC"]] if "NETRC" in environ else [f"{home}/.netrc", f"{home}/_netrc"]
    if not any(_knows(Path(place), host) for place in places):
        raise ConfigError(
            "telemetry.wandb",
            mode,
            f"no credentials for {host}: WANDB_API_KEY is not set and no .netrc entry names the host",
            "Run wandb login, or set telemetry.wandb to offline and upload the run later",
        )


def _knows(path: Path, host: str) -> bool:
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
