"""Settings of the supervisor and of the run service, and the file that holds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from palaestra.config import Section, parse_section
from palaestra.config.file import read_config_file
from palaestra.files.home import Home
from palaestra.http.hosts import is_host_name
from palaestra.runs.archive.retention import RetentionPolicy
from palaestra.runs.notifications.notification import WebhookConfig
from palaestra.runs.remote.hosts import HostConfig, check_hosts

SETTINGS_FILE = "service.yaml"
DEFAULT_PORT = 8710


class SupervisorConfig(Section):
    """How runs are scheduled and monitored."""

    max_running: int = Field(default_factory=lambda: max(1, os.cpu_count() or 1), ge=1)
    """Maximum number of concurrent runs; further runs are queued."""
    poll_every_s: float = Field(default=0.05, gt=0)
    """Seconds between two reads of telemetry."""
    alarm_every_s: float = Field(default=1.0, gt=0)
    """Seconds between two checks of every run for alarms."""
    no_episode_steps: int = Field(default=50_000, ge=0)
    """Alarm if no episode finishes within this many steps (0: never)."""
    min_free_disk_mb: int = Field(default=512, ge=0)
    """Launches are refused below this much free disk space."""
    sample_every_s: float = Field(default=5.0, gt=0)
    """Seconds between two samples of CPU, memory and GPU usage of every run."""
    scan_every_s: float = Field(default=5.0, gt=0)
    """Seconds between two searches for runs started with `palaestra train`."""
    retention: RetentionPolicy = RetentionPolicy()
    """Retention policy: applied by `palaestra runs gc`, and automatically if `every_h` is given."""
    hosts: dict[str, HostConfig] = Field(default_factory=dict, max_length=1000)
    """Other machines that runs can be sent to, by name; `--on NAME` uses one."""

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, value: dict[str, HostConfig]) -> dict[str, HostConfig]:
        check_hosts(value)
        return value


class ServiceConfig(SupervisorConfig):
    """Settings of the run service and of its supervisor."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, other machines can connect with the token, which is sent unencrypted."""
    allowed_hosts: tuple[str, ...] = Field(default=(), max_length=100)
    """Further `Host` names that the service answers to, such as that of a proxy; `*` allows all."""
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one. When the default is in use, for example by the service of another state
    directory, a free port is chosen; a port that is given is refused then. Clients find it in the state directory."""
    idle_exit_s: float | None = Field(default=None, gt=0)
    """Exit after this many seconds without runs, queued runs and requests; null: never."""
    play_idle_s: float = Field(default=300.0, gt=0)
    """End a play after this many seconds without a client."""
    webhooks: tuple[WebhookConfig, ...] = Field(default=(), max_length=20)
    """Addresses that receive notifications about runs; `palaestra runs webhooks --test` sends them one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of service.log, which is rotated at 10 MB; the last three are kept."""

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
