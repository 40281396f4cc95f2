"""How the service listens and looks after runs, and the file in which that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from palaestra.config import parse_section
from palaestra.config.file import read_config_file
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.http.hosts import is_host_name
from palaestra.runs.client.connect import holder_of
from palaestra.runs.supervisor.config import SupervisorConfig

__all__ = ["SETTINGS_FILE", "ServiceConfig", "service_config", "settings_changed"]

SETTINGS_FILE = "service.yaml"


class ServiceConfig(SupervisorConfig):
    """How the service listens, and how runs are looked after."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, other machines can connect with the token, which is sent unencrypted."""
    allowed_hosts: tuple[str, ...] = Field(default=(), max_length=100)
    """Further `Host` names that the service answers to, such as that of a proxy; `*` allows all."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one; clients find it in the state directory."""
    idle_exit_s: float | None = Field(default=None, gt=0)
    """Leave when nothing runs, waits or asks for this long; null stays."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What goes into service.log."""

    @field_validator("allowed_hosts")
    @classmethod
    def _check_host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name != "*" and not is_host_name(name):
                raise ValueError(f"{name!r} is not the name or address of a host, without scheme and port")
        return value


def service_config(home: Home, given: Mapping[str, Any]) -> ServiceConfig:
    """What was given on top of what `service.yaml` of the state directory says, if there is one."""
    path = home.path / SETTINGS_FILE
    lasting = read_config_file(path) if path.exists() else {}
    return parse_section(ServiceConfig, {**lasting, **given}, place="service")


def settings_changed(home: Home) -> str:
    """A sentence when `service.yaml` was changed after the service that runs had read it; else empty."""
    path = home.path / SETTINGS_FILE
    since = (read_json(home.lock) or {}).get("since")
    if not path.exists() or holder_of(home) is None or not isinstance(since, int | float):
        return ""
    changed = path.stat().st_mtime > since
    return f"{path} was changed after the service started, which goes on with what stood there" if changed else ""
