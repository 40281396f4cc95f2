"""Logs metrics to Weights & Biases, online or to disk for a later upload.

`wandb` is imported when a sink is opened and never prompts: going online without credentials is refused before a run is
created. `notice` says where the run is, or how it is uploaded.
"""

from __future__ import annotations

import importlib
import netrc
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from palaestra.errors import ConfigError
from palaestra.telemetry.scalar_sink import ScalarSink

Mode = Literal["online", "offline"]


def require_wandb(mode: Mode, environ: Mapping[str, str] | None = None) -> Any:
    """Import wandb; `ConfigError` if it is not installed, or online without credentials."""
    try:
        module = importlib.import_module("wandb")
        if not hasattr(module, "init"):  # the directory that W&B writes beside a script, as a package without code
            raise ImportError("No module named 'wandb'")
    except ImportError as error:
        raise ConfigError(
            "telemetry.wandb",
            mode,
            f"needs the wandb package ({error})",
            "Run pip install 'palaestra[wandb]', or set telemetry.wandb to off",
        ) from error
    _require_credentials(mode, os.environ if environ is None else environ)
    return module


class WandbSink(ScalarSink):
    """One W&B run. Tests replace the wandb package by `module`."""

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
        super().__init__()
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
                # Otherwise wandb wraps stdout and prints over our progress display.
                settings={"silent": True, "console": "off"},
            )
        except (module.Error, OSError) as error:
            remedy = "Try telemetry.wandb = offline and upload the run later"
            raise ConfigError("telemetry.wandb", mode, f"wandb did not start: {error}", remedy) from error
        self._mode = mode

    @property
    def notice(self) -> str:
        """The URL of the run, or the command that uploads it; empty if W&B has no URL for it."""
        if self._mode == "offline":
            # The files of the run are in DIR/files; `wandb sync` needs DIR.
            return (
                f"Upload this run to W&B when it has ended: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
            )
        url = getattr(self._run, "url", None)
        return f"View run at {url}" if url else ""

    def flush(self) -> None:
        """Do nothing: wandb sends data in its own process."""

    def _finish(self) -> None:
        self._run.finish()

    def _write(self, env_step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=env_step)


def find_host(environ: Mapping[str, str]) -> str:
    """The host that runs are sent to."""
    return urlsplit(environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether the variables or a .netrc file hold credentials for the host."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = environ.get("HOME", "")
    paths = [environ["NETRC"]] if "NETRC" in environ else [f"{home}/.netrc", f"{home}/_netrc"]
    return any(_has_login(Path(path), find_host(environ)) for path in paths)


def _require_credentials(mode: Mode, environ: Mapping[str, str]) -> None:
    if mode == "online" and not has_credentials(environ):
        raise ConfigError(
            "telemetry.wandb",
            mode,
            f"no credentials for {find_host(environ)}: WANDB_API_KEY is not set and no .netrc entry names the host",
            "Run wandb login, or set telemetry.wandb to offline and upload the run later",
        )


def _has_login(path: Path, host: str) -> bool:
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
