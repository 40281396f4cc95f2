"""HTTP calls with a deadline, retried only where a retry is harmless.

A call that never reached the other side is always repeated; one that may have been heard only if the caller says that
it is `repeatable`; one that was answered never, unless the answer came from a proxy that could not reach the session.
What remains is an exception of ours: `SessionRefused` for an answer of 4xx, `SessionFailed` for everything that
broke on the way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from palaestra.errors import ConfigError, SessionFailed
from palaestra.sessions.wire import error_told

__all__ = ["Answer", "HttpCaller", "Patience"]

_IN_BETWEEN = (502, 503, 504)

CONNECT_S = 5.0
"""A connection that takes longer to be made is given up, which is safe to repeat, before the attempt as a whole is."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for an answer, and how often to ask again."""

    attempt_s: float = 20.0
    """Seconds one attempt may take, beyond what the action itself asks to wait."""
    attempts: int = 4
    """Attempts in all. 1 never repeats anything."""
    pause_s: float = 0.1
    """The pause before the second attempt, shortened at random by up to half; it doubles from one to the next."""

    def __post_init__(self) -> None:
        if self.attempt_s <= 0 or self.attempts < 1 or self.pause_s < 0:
            raise ConfigError("patience", self, "wants attempt_s above 0, attempts from 1 and pause_s from 0")

    def pause(self, attempt: int, rng: random.Random) -> float:
        """Seconds between attempt number `attempt`, counted from 0, and the next."""
        return float(self.pause_s * 2**attempt * rng.uniform(0.5, 1.0))


@dataclass(frozen=True)
class Answer:
    """What came back, with a status below 400."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Dropped(Exception):
    """The connection broke; whether the request was heard is not known."""


async def _dropped(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Keep the library from repeating, unasked, a GET whose connection broke: in some dialects a GET clicks."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _Dropped(str(error) or type(error).__name__) from None


class HttpCaller:
    """Calls to one address; close it when done. Connections are kept and may be shared by many sessions."""

    def __init__(
        self, url: str, *, token: str | None = None, patience: Patience | None = None, rng: random.Random | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ConfigError("url", url, "must begin with http:// or https://")
        self.url = url.rstrip("/")
        self.patience = patience or Patience()
        self._headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
        self._rng = rng or random.Random()
        self._http: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None,
        repeatable: bool = False, extra_s: float = 0.0, params: Mapping[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        """Ask and wait; `extra_s` is added to the deadline of each attempt."""
        attempt = 0
        while True:
            error, again = await self._attempt(method, path, body, headers or {}, extra_s, params)
            if isinstance(error, Answer):
                return error
            attempt += 1
            if attempt >= self.patience.attempts or not (again == "always" or (again == "maybe" and repeatable)):
                raise error
            await asyncio.sleep(self.patience.pause(attempt - 1, self._rng))

    async def _attempt(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], extra_s: float,
        params: Mapping[str, str] | None,
    ) -> tuple[Answer | Exception, str]:  # fmt: skip
        """The answer; or the error, and whether to repeat it: `always`, `maybe` (if it is harmless) or `never`."""
        seconds = self.patience.attempt_s + extra_s
        place = f"{method} {self.url}{path}"
        try:
            async with self._session().request(
                method, self.url + path, data=body, params=params, headers={**self._headers, **headers},
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S), allow_redirects=False,
            ) as response:  # fmt: skip
                answer = Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return SessionFailed("unreachable", f"{place}: no connection ({error})"), "always"
        except TimeoutError:
            return SessionFailed("timeout", f"{place}: no answer within {seconds:g} s"), "maybe"
        except (_Dropped, aiohttp.ClientError) as error:
            return SessionFailed("unreachable", f"{place}: the connection broke ({error})"), "maybe"
        if answer.status < 400:
            return answer, "never"
        told = error_told(answer.status, answer.body, retry_after=_seconds(answer.headers.get("Retry-After")))
        broken = isinstance(told, SessionFailed) and told.reason != "bad_answer"
        return told, "maybe" if answer.status in _IN_BETWEEN and not broken else "never"

    def _session(self) -> aiohttp.ClientSession:
        # Made on first use, because it belongs to the loop it is made in.
        if self._http is None or self._http.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0)
            self._http = aiohttp.ClientSession(
                connector=connector, middlewares=(_dropped,), cookie_jar=aiohttp.DummyCookieJar(), max_field_size=16_384
            )
        return self._http

    async def close(self) -> None:
        """Let go of the connections. Harmless when repeated."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None
