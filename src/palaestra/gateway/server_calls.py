"""`ServerCalls`: opens, deletes and lists the sessions of session servers over HTTP, for the runtimes that use them."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from palaestra.errors import SessionFailed, SessionRefused


class ServerCalls:
    """Calls to session servers; `aiohttp.ClientError` when a server cannot be reached."""

    def __init__(self, client: aiohttp.ClientSession, *, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def open_session(self, url: str, session_id: str) -> None:
        """Open a session on the server at `url`. `SessionFailed` or `SessionRefused` when it does not open one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._client.post(f"{url}/sessions", json={"session_id": session_id}) as response:
                    body = await response.json(content_type=None) if response.status != 201 else {}
        except TimeoutError:
            text = f"the session server did not open a session within {self._timeout_s:g} s"
            raise SessionFailed("open_timeout", text) from None
        except ValueError:
            raise SessionFailed("open_failed", "the session server's response is not JSON") from None
        if response.status != 201:
            raise _open_error(response.status, body)

    async def delete_session(self, url: str, session_id: str) -> None:
        """Delete a session; does nothing when the server does not have it. `SessionFailed` when it may still exist."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._client.delete(f"{url}/sessions/{session_id}") as response:
                    await response.read()
        except TimeoutError:
            raise SessionFailed("delete_timeout", f"session {session_id} could not be closed in time") from None
        if response.status >= 500:
            text = f"session {session_id} could not be closed (status {response.status})"
            raise SessionFailed("delete_failed", text)

    async def list_sessions(self, url: str, *, timeout_s: float) -> set[str]:
        """The ids of all open sessions; `ValueError` for a response that is not a session server's."""
        async with asyncio.timeout(timeout_s), self._client.get(f"{url}/sessions") as response:
            document: Any = await response.json(content_type=None)
        if response.status != 200 or not isinstance(document, dict) or not isinstance(document.get("sessions"), list):
            raise ValueError(f"status {response.status} without a list of sessions")
        return {str(name) for name in document["sessions"]}


def _open_error(status: int, body: object) -> SessionFailed | SessionRefused:
    """The exception for a session server's error response to opening a session."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message", f"the session server responded with status {status}"))
    if 400 <= status < 500:
        return SessionRefused(str(error.get("code", "refused")), message, status=status)
    return SessionFailed(str(error.get("reason", "open_failed")), message)
