"""The section `environment` of a configuration: where sessions come from, and the check of its values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from palaestra.config import Section
from palaestra.errors import ConfigError

DEFAULT_PORT = 8700
ROWS_TASK = "simple_data_entry/rows"
"""The only task of the query-string dialect."""


class EnvironmentConfig(Section):
    """Where sessions come from."""

    gateway: str | None = None
    """URL of a gateway. null: training starts one on this machine and stops it at the end."""
    cluster_host: str | None = None
    """Host (or host:port) of a gateway in a cluster."""
    session_servers: tuple[str, ...] = ()
    """URLs of running session servers, used without a gateway. Each episode opens a session on one of them."""
    dialect: Literal["json", "query"] = "json"
    """Protocol of the sessions. `json`: Palaestra's own. `query`: the query-string dialect (`GET /act?action_type=…`)
    of existing images and servers, which have the task simple_data_entry/rows."""
    reuse_screens: bool = False
    """Allow episodes to begin on the screen that the previous one left. Required for `query` with session_servers,
    because such a server is one session without a reset."""
    act_delay_s: float = Field(default=1.0, ge=0, le=60)
    """With `query`: seconds from an action to its screenshot. Shorter is faster and may miss what the action does."""
    namespace: str = "default"
    """Namespace of the cluster's gateway. It is only recorded; the gateway has its own setting."""
    session_timeout: float = Field(default=300.0, gt=0)
    """Seconds after which an unused session is removed."""
    token_file: Path | None = None
    """File with the token of the gateway (or of a proxy in front of session_servers). null: the gateway's from
    PALAESTRA_GATEWAY_TOKEN, if that is set."""
    servers: int | None = Field(default=None, ge=1)
    """Session servers of the gateway that training starts. null: one per eight actors, at most one per core."""

    @field_validator("session_servers", mode="before")
    @classmethod
    def _accept_single_url(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("session_servers")
    @classmethod
    def _check_urls(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(url.rstrip("/") for url in given)
        for url in urls:
            if not re.match(r"https?://[^/\s]", url):
                raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
            if "@" in urlsplit(url).netloc:
                raise ValueError("holds a user or password, which would be stored with the run: use token_file")
        if len(set(urls)) != len(urls):
            raise ValueError("names a server twice")
        return urls

    @property
    def url(self) -> str | None:
        """The URL of the gateway; None when training starts one."""
        if self.gateway is not None:
            return self.gateway.rstrip("/")
        if self.cluster_host is None:
            return None
        host = self.cluster_host
        if "://" in host:
            return host.rstrip("/")
        return f"http://{host}" if ":" in host else f"http://{host}:{DEFAULT_PORT}"


def check_environment(environment: EnvironmentConfig, *, group_size: int, actors: int) -> None:
    """Refuse values that contradict each other, the number of actors, or the group size."""
    places = {
        "gateway": environment.gateway,
        "cluster_host": environment.cluster_host,
        "session_servers": environment.session_servers or None,
    }
    named = {key: value for key, value in places.items() if value is not None}
    if len(named) > 1:
        (first, value), (second, other) = list(named.items())[:2]
        raise ConfigError(f"environment.{second}", other, f"environment.{first} says {value}", "Give one of them")
    if environment.dialect == "query":
        _check_query_dialect(environment, group_size, actors)
    elif environment.reuse_screens:
        raise ConfigError(
            "environment.reuse_screens", True, "sessions with a reset begin on a new screen", "Leave it out"
        )


def _check_query_dialect(environment: EnvironmentConfig, group_size: int, actors: int) -> None:
    servers = environment.session_servers
    if environment.url is None and not servers:
        raise ConfigError(
            "environment.dialect",
            "query",
            "the gateway that training starts only has json sessions",
            "Set environment.session_servers, or environment.gateway with an actor.session_type that uses it",
        )
    if not servers:
        return
    if not environment.reuse_screens:
        raise ConfigError(
            "environment.session_servers",
            list(servers),
            "a server of the query dialect cannot be reset",
            "Set environment.reuse_screens=true to begin each episode on the screen of the previous one, or use a "
            "gateway that creates a pod for every session",
        )
    if group_size > 1:
        raise ConfigError(
            "environment.reuse_screens",
            True,
            f"a group of {group_size} must begin on the same screen",
            "Use rejection_sampling or ppo, or a gateway that creates a pod for every session",
        )
    if actors > len(servers):
        raise ConfigError(
            "actor_pool.target_concurrent_actors",
            actors,
            f"is more than the {len(servers)} servers of environment.session_servers, each of which is one screen",
            f"Set it to {len(servers)}, or name more servers",
        )
