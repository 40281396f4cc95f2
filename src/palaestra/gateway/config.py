"""The configuration of a gateway, and the tokens that clients and operators send."""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from palaestra.config import Section
from palaestra.errors import ConfigError
from palaestra.http.hosts import is_loopback

TOKEN_VARIABLE = "PALAESTRA_GATEWAY_TOKEN"
"""The environment variable with the token when no file is named; it is not passed on to sessions."""

OPERATOR_TOKEN_VARIABLE = "PALAESTRA_GATEWAY_OPERATOR_TOKEN"
"""The same for the operator's token."""

_MIN_TOKEN = 16
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_GATEWAY_NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
_LABEL_VALUE = r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?"


class KubernetesConfig(Section):
    """Where session pods run and which manifests they are created from."""

    namespace: str = Field("palaestra", pattern=_DNS_LABEL, max_length=63)
    """Namespace of the session pods; it must exist."""
    name: str = Field("gateway", pattern=_DNS_LABEL, max_length=40)
    """Name of the gateway, a label of its pods. Two gateways of one name in one namespace delete each other's pods."""
    manifests: dict[str, Path] = Field(default_factory=dict)
    """File with the pod manifest of each session type. Empty: the manifest that comes with Palaestra, as `browser`."""
    image: str | None = Field(None, min_length=1)
    """Image of the session in the manifest that comes with Palaestra; your own manifests name theirs."""
    kubeconfig: Path | None = None
    """Kubeconfig file. None: the pod's service account, else KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    """Context in that file. None: its current context."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of the session in a pod whose manifest has no containerPort."""
    ready_s: float = Field(120.0, gt=0)
    """Seconds from the creation of a pod until it must be ready, including the pull of its image."""
    unschedulable_s: float = Field(15.0, ge=0)
    """Seconds a pod may stay unscheduled. Make it longer than a cluster autoscaler takes to add a node."""
    lifetime_s: int = Field(3600, ge=10)
    """Maximum lifetime of a session in seconds, renewed or not. The pods of a killed gateway end after it, too."""

    @field_validator("manifests")
    @classmethod
    def _check_type_names(cls, manifests: dict[str, Path]) -> dict[str, Path]:
        for name in manifests:
            if len(name) > 63 or not re.fullmatch(_LABEL_VALUE, name):
                raise ValueError(f"session type {name!r} must be 1 to 63 of letters, digits, '-', '_' and '.'")
        return manifests


class GatewayConfig(Section):
    """Settings of a gateway."""

    name: str | None = Field(None, pattern=_GATEWAY_NAME, max_length=20)
    """Name of the gateway, with which the ids of its sessions begin: `a-4f2a…`. Required with peers and with the
    runtime `servers`; different for every gateway behind one address. None: ids have no name."""
    peers: dict[str, str] = Field(default_factory=dict)
    """Name and URL (http) of every other gateway behind the same address. Requests about their sessions are forwarded
    to them, and sessions that do not fit here are opened there. All must accept the same tokens."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but a loopback address needs a token."""
    port: int = Field(8700, ge=0, le=65535)
    """Port to listen on; 0 picks a free one and prints it."""
    token_file: Path | None = None
    """File of mode 0600 with the token that clients must send. None: from PALAESTRA_GATEWAY_TOKEN."""
    operator_token_file: Path | None = None
    """File of mode 0600 with the operator's token, which allows using and closing every session. Clients can only use
    and close sessions that they opened. None: from PALAESTRA_GATEWAY_OPERATOR_TOKEN, if that is set."""
    allow_anonymous: bool = False
    """Serve without a token, only on a loopback address. Every program on this machine can then open and close any
    session."""
    max_sessions: int = Field(16, ge=1, le=10_000)
    """Maximum number of open sessions; further ones are refused with 429. A browser page takes 50 MB or more."""
    ttl_s: float = Field(60.0, gt=0)
    """Default lease: seconds a session lives without a request."""
    min_ttl_s: float = Field(1.0, gt=0)
    """Shortest lease a client may ask for."""
    max_ttl_s: float = Field(3600.0, gt=0)
    """Longest lease a client may ask for: how long an abandoned session may keep its memory."""
    runtime: Literal["local", "kubernetes", "servers"] = "local"
    """Where sessions run: in processes of the gateway on this machine, in pods of a cluster, or on session servers that
    were started elsewhere (`session_servers`)."""
    session_servers: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """URLs of running session servers for each session type, such as `{browser: ["http://10.0.0.5:8700"]}`; for the
    runtime `servers` only. Their sessions outlive the gateway: the next gateway of the same name adopts them."""
    keep_sessions: bool = False
    """When stopped, stop at once and leave the sessions to the next gateway of this name, instead of draining and
    closing them; for the runtime `servers` only."""
    kubernetes: KubernetesConfig = Field(default_factory=lambda: KubernetesConfig.model_validate({}))
    """The cluster and its manifests; for the kubernetes runtime only."""
    servers: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=256)
    """Session servers that run sessions, one per core by default. A server that dies loses only its own sessions."""
    warm: int = Field(1, ge=0, le=16)
    """Size of the warm pool; each member takes the memory of an idle browser. Local: servers that replace a dead one at
    once. In a cluster: ready pods of every session type."""
    session_types: tuple[str, ...] = Field(("browser",), min_length=1)
    """Session types that clients may ask for; in a cluster the manifests define them. `simple_data_entry` is an alias
    of `browser`."""
    server_command: tuple[str, ...] = Field(
        (sys.executable, "-m", "palaestra.sessions.server", "--port", "0"), min_length=1
    )
    """Command that starts a session server; it must print {"port": number} when it is ready."""
    server_start_s: float = Field(60.0, gt=0)
    """Seconds a session server may take to get ready, and seconds opening a session waits for one."""
    request_timeout_s: float = Field(120.0, gt=0)
    """Maximum duration of a proxied request; beyond it the session counts as hung."""
    max_body_bytes: int = Field(64 << 20, ge=1)
    """Largest request body that is forwarded to a session."""
    drain_s: float = Field(30.0, ge=0)
    """Seconds that open sessions may continue after SIGTERM before they are closed."""
    state_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / f"palaestra-gateway-{os.getuid()}")
    """Directory in which the gateways of a user register, so that the next one can clean up after a killed one."""
    stop_with_stdin: bool = False
    """Stop when standard input ends, so that a gateway does not outlive the process that started it."""

    @model_validator(mode="after")
    def _check_consistency(self) -> GatewayConfig:
        if not self.min_ttl_s <= self.ttl_s <= self.max_ttl_s:
            raise ValueError(f"ttl_s {self.ttl_s:g} lies outside min_ttl_s {self.min_ttl_s:g} to {self.max_ttl_s:g}")
        if (self.peers or self.runtime == "servers") and self.name is None:
            raise ValueError("peers and the runtime 'servers' need a name, such as name=a")
        if (self.runtime == "servers") != bool(self.session_servers):
            raise ValueError("the runtime 'servers' and session_servers need each other")
        if self.keep_sessions and self.runtime != "servers":
            raise ValueError(f"keep_sessions needs the runtime 'servers', not {self.runtime!r}")
        if self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(f"allow_anonymous needs a loopback host, not {self.host!r}")
        return self

    @field_validator("peers")
    @classmethod
    def _check_peers(cls, peers: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name, url in peers.items():
            if not re.fullmatch(_GATEWAY_NAME, name) or len(name) > 20:
                raise ValueError(f"the name {name!r} must be 1 to 20 of a-z, 0-9 and '-'")
            if name == info.data.get("name"):
                raise ValueError(f"{name!r} is the name of this gateway; name the others")
            if not re.fullmatch(r"http://[^/\s@?#]+/?", url):
                raise ValueError(f"{url!r} is not a URL such as http://10.0.0.6:8700")
        return peers

    @field_validator("session_servers")
    @classmethod
    def _check_session_servers(cls, servers: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for session_type, urls in servers.items():
            if not urls:
                raise ValueError(f"session type {session_type!r} has no server")
            for url in urls:
                if not re.fullmatch(r"http://[^/\s@?#]+/?", url):
                    raise ValueError(f"{url!r} is not a URL such as http://10.0.0.5:8700")
        return {session_type: tuple(url.rstrip("/") for url in urls) for session_type, urls in servers.items()}


def read_token(config: GatewayConfig, environment: MutableMapping[str, str]) -> str | None:
    """The clients' token, None for anonymous access; `ConfigError` when a token is required and missing.

    Removes it from `environment`, so that child processes do not get it.
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
        raise ConfigError(place, "(not shown)", reason, "Create another one: openssl rand -hex 32")
    return _check_token(place, token)


def _read_token_at(
    file: Path | None, file_place: str, variable: str, environment: MutableMapping[str, str]
) -> tuple[str, str | None]:
    """The name of the file setting or variable that holds a token, and the token; the file takes precedence."""
    from_environment = environment.pop(variable, None)
    return (variable, from_environment) if file is None else (file_place, _read_file(file, file_place))


def _check_token(place: str, token: str) -> str:
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        reason = f"must be at least {_MIN_TOKEN} printable characters without spaces"
        raise ConfigError(place, "(not shown)", reason, "Create one: openssl rand -hex 32")
    return token


def _read_file(path: Path, place: str) -> str:
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ConfigError(place, str(path), "other users can read it", f"chmod 600 {path}")
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(place, str(path), f"cannot be read ({error})") from None
