"""Settings of the run service, and the file that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from palaestra.config import parse_section
from palaestra.config.file import read_config_file
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.http.hosts import is_host_name
from palaestra.runs.client.connect import find_lock_holder
from palaestra.runs.supervisor.config import SupervisorConfig

SETTINGS_FILE = "service.yaml"


class ServiceConfig(SupervisorConfig):
    """Settings of the run service and of its supervisor."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, other machines can connect with the token, which is sent unencrypted."""
    allowed_hosts: tuple[str, ...] = Field(default=(), max_length=100)
    """Further `Host` names that the service answers to, such as that of a proxy; `*` allows all."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 chooses a free port; clients find it in the state directory."""
    idle_exit_s: float | None = Field(default=None, gt=0)
    """Exit after this many seconds without runs, queued runs and requests; null: never."""
    play_idle_s: float = Field(default=300.0, gt=0)
    """End a play after this many seconds without a client."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of service.log."""

    @field_validator("allowed_hosts")
    @classmethod
    def _check_host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name != "*" and not is_host_name(name):
                raise ValueError(f"{name!r} is not the name or address of a host, without scheme and port")
        return value


def service_config(home: Home, settings: Mapping[str, object]) -> ServiceConfig:
    """The given settings on top of those in `service.yaml` of the state directory, if there is one."""
    path = home.path / SETTINGS_FILE
    stored = read_config_file(path) if path.exists() else {}
    return parse_section(ServiceConfig, {**stored, **settings}, place="service")


def changed_settings_warning(home: Home) -> str:
    """A warning when `service.yaml` was changed after the running service had read it; else empty."""
    path = home.path / SETTINGS_FILE
    started = (read_json(home.lock) or {}).get("since")
    if not path.exists() or find_lock_holder(home) is None or not isinstance(started, int | float):
        return ""
    changed = path.stat().st_mtime > started
    return f"{path} was changed after the service started, which still uses the old settings" if changed else ""
