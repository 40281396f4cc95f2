"""Other machines that runs can be sent to: their settings, their addresses, and the names that a run may give.

A run names a host of the settings, a group of hosts, `any`, or an address: `user@host`, `user@host:22`, a name of the
SSH configuration, `ray://host` or `http://host:8265`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, field_validator

from palaestra.config import Section, closest_names
from palaestra.errors import ConfigError
from palaestra.redaction import is_secret_name
from palaestra.runs.record import HERE

ANY = "any"
RAY_CLIENT_PORT, RAY_JOBS_PORT = 10001, 8265
_SSH = re.compile(r"(?:(?P<user>[\w.+-]+)@)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?")
_RAY = re.compile(r"ray://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?/?")
_HTTP = re.compile(r"https?://[^\s/@]+(?:/[^\s]*)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class HostAddress:
    """Where a machine is."""

    kind: Literal["ssh", "ray"]
    target: str
    """For SSH `user@host` or a name of its configuration; for Ray the URL of the job server."""
    port: int | None = None
    """The port of SSH; None uses its configuration."""


def parse_address(text: str, place: str = "on") -> HostAddress:
    """Read an address. `ConfigError` if it is none.

    `ray://host` and `ray://host:10001` are the address of Ray's client, whose cluster takes jobs at
    `http://host:8265`; another port in `ray://` is taken for that of the job server.
    """
    remedy = "Write user@host, user@host:22, a name of the SSH configuration, ray://host or http://host:8265"
    if "://" in text:
        ray = _RAY.fullmatch(text)
        if ray is not None:
            port = int(ray["port"] or RAY_CLIENT_PORT)
            _check_port(place, text, port)
            port = RAY_JOBS_PORT if port == RAY_CLIENT_PORT else port
            return HostAddress("ray", f"http://{ray['host']}:{port}")
        if _HTTP.fullmatch(text):
            return HostAddress("ray", text.rstrip("/"))
        raise ConfigError(place, text, "is not the address of a Ray cluster", remedy)
    ssh = _SSH.fullmatch(text)
    # A leading dash would be an option of ssh.
    if ssh is None or text.startswith("-") or ssh["host"].startswith("-"):
        raise ConfigError(place, text, "is not the address of a machine", remedy)
    if ssh["port"] is not None:
        _check_port(place, text, int(ssh["port"]))
    host = ssh["host"].strip("[]")
    target = f"{ssh['user']}@{host}" if ssh["user"] else host
    return HostAddress("ssh", target, None if ssh["port"] is None else int(ssh["port"]))


def _check_port(place: str, text: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ConfigError(place, text, f"{port} is not a port", "Ports are 1 to 65535")


class HostConfig(Section):
    """A machine that runs can be sent to."""

    address: str
    """`user@host`, `user@host:22`, a name of the SSH configuration, `ray://host` or `http://host:8265`."""
    python: str = "python3"
    """Interpreter on that machine, Python 3.11 or newer, with the packages of the trainer."""
    directory: str = "~/.palaestra"
    """Directory on that machine for code and runs: an absolute path, or one that begins with `~/`."""
    max_running: int | None = Field(default=None, ge=1)
    """Maximum number of concurrent runs there; null: one per processor, for a Ray cluster 16."""
    gpus: tuple[str, ...] | None = None
    """Indices of the GPUs that can be leased there; null asks nvidia-smi. Ray leases its GPUs itself."""
    groups: tuple[str, ...] = Field(default=(), max_length=100)
    """Names of groups that `--on` may give instead of a machine."""
    ssh_options: tuple[str, ...] = Field(default=(), max_length=100)
    """Further words for the ssh command, such as `-i`, `~/.ssh/cluster_key`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of runs there. Secrets are refused, because the settings are stored."""
    forward: tuple[str, ...] = Field(default=(), max_length=100)
    """Environment variables of the service that runs there get as well, such as `WANDB_API_KEY`."""
    min_free_disk_mb: int = Field(default=512, ge=0)
    """Launches are refused below this much free disk space there."""
    lost_after_s: float | None = Field(default=None, gt=0)
    """Seconds without an answer after which a run there is recorded as lost, for machines that may be taken away;
    null: never."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        try:
            parse_address(value)
        except ConfigError as error:
            raise ValueError(f"{error.reason}: {error.remedy}") from None
        return value

    @field_validator("directory")
    @classmethod
    def _check_directory(cls, value: str) -> str:
        if not value.startswith(("/", "~/")) or value.strip("/~") == "" or "\0" in value:
            raise ValueError(f"{value!r} is neither an absolute path nor one that begins with ~/")
        return value.rstrip("/")

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if is_secret_name(name):
                raise ValueError(f"{name} looks like a secret and would be stored: name it in `forward` instead")
        return value


@dataclass(frozen=True)
class Host:
    """A machine and its settings."""

    name: str
    """Its name in the settings, or the address that the run gave."""
    config: HostConfig
    address: HostAddress

    def describe(self) -> str:
        """How messages name it."""
        return self.name if self.name == self.config.address else f"{self.name} ({self.config.address})"


class HostTable:
    """The machines of the settings, and what a run's `on` means."""

    def __init__(self, hosts: Mapping[str, HostConfig]) -> None:
        self._hosts = {name: Host(name, config, parse_address(config.address)) for name, config in hosts.items()}

    def candidates(self, on: str | None) -> tuple[str, ...]:
        """The machines on which a run may be launched. `ConfigError` for a name that means none."""
        if on is None or on == HERE:
            return (HERE,)
        if on == ANY:
            return (HERE, *self._hosts)
        group = tuple(name for name, host in self._hosts.items() if on in host.config.groups)
        if group:
            return group
        if on in self._hosts:
            return (on,)
        named = next((name for name, host in self._hosts.items() if host.config.address == on), None)
        if named is not None:
            return (named,)
        parse_address(on)
        known = [*self._hosts, *{group for host in self._hosts.values() for group in host.config.groups}]
        # A name of the SSH configuration looks like a misspelt host of ours.
        if known and "@" not in on and "." not in on and ":" not in on and closest_names(on, known):
            remedy = f"Nearest: {', '.join(closest_names(on, known))}. Write user@{on} for a machine of that name"
            raise ConfigError("on", on, "no such host or group in the settings of the service", remedy)
        return (on,)

    def get(self, name: str, python: str | None = None) -> Host:
        """The machine of a candidate's name. `python` is the interpreter of one that the settings do not have."""
        if name in self._hosts:
            return self._hosts[name]
        for host in self._hosts.values():
            # A run may have been sent to the address before it was in the settings.
            if host.config.address == name:
                return replace(host, name=name)
        config = HostConfig(address=name) if python is None else HostConfig(address=name, python=python)
        return Host(name, config, parse_address(name))


def check_hosts(hosts: Mapping[str, HostConfig]) -> None:
    """`ValueError` for names of hosts and groups that `--on` could not tell apart."""
    groups = {group for host in hosts.values() for group in host.groups}
    for name in (*hosts, *groups):
        if not _NAME.fullmatch(name) or name == ANY:
            raise ValueError(f"{name!r} cannot name a host or a group: use letters, digits, dot, dash and underscore")
    both = sorted(groups & set(hosts))
    if both:
        raise ValueError(f"{both[0]!r} names both a host and a group")
