"""Sessions from a gateway: opened when there is room, kept alive while they are held, given back when closed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.client import SessionClient
from palaestra.sessions.http_caller import Answer, HttpCaller, Patience
from palaestra.sessions.wire import SESSION_TOKEN_HEADER, written
from palaestra.strict_json import read_json

__all__ = ["GatewayClient"]

_log = logging.getLogger(__name__)
_JSON = {"Content-Type": "application/json"}


class GatewayClient:
    """A gateway at a URL. Close it to give every session back that was opened through it."""

    def __init__(
        self, url: str, *, token: str | None = None, patience: Patience | None = None, rng: random.Random | None = None
    ) -> None:
        self._caller = HttpCaller(url, token=token, patience=patience, rng=rng)
        self._held: dict[str, SessionClient] = {}
        self._renewing: dict[str, asyncio.Task[None]] = {}

    async def open(
        self, session_type: str = "browser", *, ttl_s: float = 60.0, within_s: float = 300.0
    ) -> SessionClient:
        """A session that is kept alive until it is closed; waits up to `within_s` seconds for room."""
        body = written({"session_type": session_type, "ttl_s": ttl_s})
        end = asyncio.get_running_loop().time() + within_s
        while True:
            try:
                answer = await self._caller.call("POST", "/sessions", body, headers=_JSON, extra_s=within_s)
                break
            except SessionRefused as refusal:
                wait = 1.0 if refusal.retry_after is None else refusal.retry_after
                if refusal.status != 429 or asyncio.get_running_loop().time() + wait > end:
                    raise
                await asyncio.sleep(wait)
        name, token = _opened(answer)
        # The gateway's token opens sessions; this one says which of them are ours.
        owned = {} if token is None else {SESSION_TOKEN_HEADER: token}

        async def give_up() -> None:
            await self._let_go(name)
            await self._caller.call("DELETE", f"/sessions/{name}", headers=owned, repeatable=True)

        url = f"{self._caller.url}/proxy/{name}"
        session = SessionClient(url, caller=self._caller, give_up=give_up, headers=owned, session_id=name)
        self._held[name] = session
        renewing = self._renew(name, ttl_s, {**_JSON, **owned})
        self._renewing[name] = asyncio.create_task(renewing, name=f"palaestra-lease-{name}")
        return session

    async def close(self) -> None:
        """Give everything back."""
        await asyncio.gather(*(session.close() for session in list(self._held.values())))
        await self._caller.close()

    async def _renew(self, name: str, ttl_s: float, headers: Mapping[str, str]) -> None:
        """Three times within each term, so that one renewal may be lost and another be late."""
        body = written({"ttl_s": ttl_s})
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                await self._caller.call("POST", f"/sessions/{name}/renew", body, headers=headers, repeatable=True)
            except SessionRefused as refusal:
                # The lease is gone; the next call of whoever holds the session is told so.
                _log.warning("session %s is no longer ours: %s", name, refusal)
                self._renewing.pop(name, None)
                return
            except SessionFailed as failure:
                _log.warning("the lease of session %s was not renewed: %s", name, failure)

    async def _let_go(self, name: str) -> None:
        self._held.pop(name, None)
        renewing = self._renewing.pop(name, None)
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


def _opened(answer: Answer) -> tuple[str, str | None]:
    """The session's id, and its token where the gateway gives it one."""
    try:
        document = read_json(answer.body)
        token = document.get("session_token")
        return str(document["session_id"]), None if token is None else str(token)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"the gateway opened no session ({error}): {answer.body[:100]!r}"
        raise SessionFailed("bad_answer", text) from None
