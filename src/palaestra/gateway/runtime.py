"""`Runtime`, the interface between the gateway and what runs sessions: processes on this machine or pods in a cluster.

A runtime creates, lists and deletes sessions and reports when one dies. It decides nothing about leases, limits or
tokens, and the gateway knows nothing about processes or pods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

LostCallback: TypeAlias = Callable[[str, str], None]
"""Called with the id of a session that died and the reason."""


def owner_name(session_id: str) -> str:
    """The name of the gateway in a session id; empty for the id of a gateway without a name."""
    return session_id.rpartition("-")[0]


@dataclass(frozen=True)
class Address:
    """The HTTP address of a session."""

    host: str
    port: int
    prefix: str = ""
    """Prefix of every path of the session, such as `/sessions/4f2a`; empty for a server that is one session."""

    @property
    def url(self) -> str:
        """The URL to which paths of the session are appended."""
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Host and port as in a URL and a `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Runtime(Protocol):
    """Creates and deletes sessions. All it creates is labelled with the gateway's name, so that it can be found."""

    @property
    def session_types(self) -> Sequence[str]:
        """The types of sessions that can be created."""

    async def start(self, on_lost: LostCallback) -> None:
        """Remove what an earlier gateway left behind and get ready. `on_lost` is called once for every session that
        died without having been deleted.
        """

    async def create(self, session_id: str, session_type: str) -> Address:
        """Create a session and return when it answers.

        `SessionFailed` with a reason when it cannot be created; nothing is left of it then.
        """

    async def delete(self, session_id: str) -> None:
        """Delete a session and everything it holds; does nothing when it does not exist.

        `SessionFailed` when it may still exist, so that the caller tries again.
        """

    async def list(self) -> Mapping[str, Address]:
        """Every session with this gateway's label, also those that another process created."""

    def counts(self) -> Mapping[str, int]:
        """Servers or pods counted by state, for health and metrics; always has `ready`."""

    async def stop(self) -> None:
        """Delete every session and all processes or pods."""
