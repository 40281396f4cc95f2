"""What a gateway can be told, and the token it asks for."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from palaestra.config import Section
from palaestra.errors import ConfigError
from palaestra.gateway.pods.config import KubernetesConfig
from palaestra.http.hosts import is_loopback

__all__ = ["OPERATOR_TOKEN_VARIABLE", "TOKEN_VARIABLE", "GatewayConfig", "read_operator_token", "read_token"]

TOKEN_VARIABLE = "PALAESTRA_GATEWAY_TOKEN"
"""The environment variable the token is taken from when no file is named; it is not handed on to sessions."""

OPERATOR_TOKEN_VARIABLE = "PALAESTRA_GATEWAY_OPERATOR_TOKEN"
"""The same for the operator's token."""

_MIN_TOKEN = 16


class GatewayConfig(Section):
    """How a gateway serves sessions."""

    host: str = "127.0.0.1"
    """The address to listen on. Anything but this machine itself needs a token."""
    port: int = Field(8700, ge=0, le=65535)
    """The port to listen on; 0 takes a free one and says which."""
    token_file: Path | None = None
    """File of mode 0600 that holds the token clients must send. None: from PALAESTRA_GATEWAY_TOKEN."""
    operator_token_file: Path | None = None
    """File of mode 0600 that holds the operator's token, with which every session can be used and closed. Clients can
    do so only with sessions they opened. None: from PALAESTRA_GATEWAY_OPERATOR_TOKEN, if that is set."""
    allow_anonymous: bool = False
    """Serve without a token. Only on this machine itself; any program that runs here can then open and close sessions,
    its own and others'."""
    max_sessions: int = Field(16, ge=1, le=10_000)
    """Sessions open at once; further ones are refused with 429. A browser page costs 50 MB and more."""
    ttl_s: float = Field(60.0, gt=0)
    """How long a session lives without a request, when its client does not say."""
    min_ttl_s: float = Field(1.0, gt=0)
    """The shortest lease that can be asked for."""
    max_ttl_s: float = Field(3600.0, gt=0)
    """The longest lease that can be asked for: how long a session may be forgotten and still cost memory."""
    runtime: Literal["local", "kubernetes"] = "local"
    """What carries sessions: processes on this machine, or pods of a cluster."""
    kubernetes: KubernetesConfig = Field(default_factory=lambda: KubernetesConfig.model_validate({}))
    """The cluster and what its pods are made from; for the kubernetes runtime only."""
    servers: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=256)
    """Session servers that carry sessions, one per core by default. A server that dies takes only its own along."""
    warm: int = Field(1, ge=0, le=16)
    """What waits in reserve, each an idle browser's memory: servers to replace a dead one at once, or, in a cluster,
    ready pods of every session type."""
    session_types: tuple[str, ...] = Field(("browser",), min_length=1)
    """What clients may ask for; in a cluster the manifests say so. Where there is `browser`, `simple_data_entry` is
    another name for it."""
    server_command: tuple[str, ...] = Field(
        (sys.executable, "-m", "palaestra.sessions.server", "--port", "0"), min_length=1
    )
    """What starts a session server; it must print {"port": number} when it is ready."""
    server_start_s: float = Field(60.0, gt=0)
    """How long a session server may take to get ready; also how long an opening waits for one."""
    request_timeout_s: float = Field(120.0, gt=0)
    """How long one proxied request may take; then the session counts as hung."""
    max_body_bytes: int = Field(64 << 20, ge=1)
    """The largest request that is forwarded to a session."""
    drain_s: float = Field(30.0, ge=0)
    """After SIGTERM, how long running sessions may go on before they are closed."""
    state_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / f"palaestra-gateway-{os.getuid()}")
    """Where gateways of one user leave word of themselves, so that the next one can clean up after a killed one."""
    stop_with_stdin: bool = False
    """Stop when standard input ends: for a parent that must not leave its gateway behind."""

    @model_validator(mode="after")
    def _consistent(self) -> GatewayConfig:
        if not self.min_ttl_s <= self.ttl_s <= self.max_ttl_s:
            raise ValueError(f"ttl_s {self.ttl_s:g} lies outside min_ttl_s {self.min_ttl_s:g} to {self.max_ttl_s:g}")
        if self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(f"allow_anonymous needs a loopback host, not {self.host!r}")
        return self


def read_token(config: GatewayConfig, environment: MutableMapping[str, str]) -> str | None:
    """The token, None when anybody may come in; `ConfigError` when there is none and there should be.

    Takes it out of `environment`, so that no child process gets to see it.
    """
    place, token = _read_token_at(config.token_file, "gateway.token_file", TOKEN_VARIABLE, environment)
    if token is None:
        if config.allow_anonymous:
            return None
        remedy = f"Name a file of mode 0600, set {TOKEN_VARIABLE}, or allow_anonymous on a loopback host"
        raise ConfigError("gateway.token_file", None, "a gateway needs a token", remedy)
    return _check_token(place, token)


def read_operator_token(
    config: GatewayConfig, environment: MutableMapping[str, str], client_token: str | None
) -> str | None:
    """The operator's token, None without one. Removes it from `environment`, so that child processes do not get it."""
    file, variable = config.operator_token_file, OPERATOR_TOKEN_VARIABLE
    place, token = _read_token_at(file, "gateway.operator_token_file", variable, environment)
    if token is None:
        return None
    if client_token is None:
        reason = "without a token for clients all callers are the same"
        raise ConfigError(place, "(not shown)", reason, "Leave it out, or give clients a token")
    if token == client_token:
        reason = "is also the clients' token"
        raise ConfigError(place, "(not shown)", reason, "Make another one: openssl rand -hex 32")
    return _check_token(place, token)


def _read_token_at(
    file: Path | None, file_place: str, variable: str, environment: MutableMapping[str, str]
) -> tuple[str, str | None]:
    """The name of the file setting or variable that holds a token, and the token; the file takes precedence."""
    from_environment = environment.pop(variable, None)
    return (variable, from_environment) if file is None else (file_place, _from_file(file, file_place))


def _check_token(place: str, token: str) -> str:
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        reason = f"must be at least {_MIN_TOKEN} printable characters without spaces"
        raise ConfigError(place, "(not shown)", reason, "openssl rand -hex 32 makes a good one")
    return token


def _from_file(path: Path, place: str) -> str:
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ConfigError(place, str(path), "others can read it", f"chmod 600 {path}")
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(place, str(path), f"cannot be read ({error})") from None
