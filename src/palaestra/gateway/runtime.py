"""The seam between the gateway and whatever carries sessions: processes on this machine, pods in a cluster.

A runtime makes, finds and removes sessions and says when one died. It decides nothing about leases, limits or tokens,
and the gateway knows nothing of processes or pods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["Address", "LostCallback", "Runtime"]

LostCallback: TypeAlias = Callable[[str, str], None]
"""Called with a session's id and the reason why it is gone."""


@dataclass(frozen=True)
class Address:
    """Where a session answers."""

    host: str
    port: int
    prefix: str = ""
    """What every path inside the session begins with, such as `/sessions/4f2a`; empty for a session on its own."""

    @property
    def url(self) -> str:
        """Everything before the path inside the session."""
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Host and port as a URL and a `Host` header name them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Runtime(Protocol):
    """Makes sessions and removes them. Everything it makes carries the gateway's label, so that it can be found."""

    @property
    def session_types(self) -> Sequence[str]:
        """What can be asked for."""

    async def start(self, lost: LostCallback) -> None:
        """Remove what an earlier gateway left behind, then be ready. `lost` is called once for every session that
        died without having been deleted, however it died.
        """

    async def create(self, session_id: str, session_type: str) -> Address:
        """Make a session and return when it answers.

        `SessionFailed` with a reason when it cannot be made; then nothing of it is left.
        """

    async def delete(self, session_id: str) -> None:
        """Remove a session and everything it holds; harmless when it is not there.

        `SessionFailed` when it may still be there, so that the caller tries again.
        """

    async def list(self) -> Mapping[str, Address]:
        """Every session that carries our label, whoever made it."""

    def facts(self) -> Mapping[str, int]:
        """What carries the sessions, counted by state; for health and metrics. `ready` is always among them."""

    async def stop(self) -> None:
        """Remove every session and whatever carried them."""
