"""`Peers`: the other gateways behind the same address.

The id of a session begins with the name of the gateway that has it, so that a load balancer can route by id. A gateway
that gets a request about a peer's session forwards it, so that a load balancer which cannot route works, too. A request
is forwarded once: what a peer has forwarded is answered here, whichever gateway the id names. A gateway without a free
slot asks each peer once to open the session.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.auth import PROXY_PREFIX
from palaestra.gateway.error_responses import send_error
from palaestra.gateway.metrics import PeerCounts
from palaestra.gateway.proxy import NOT_FOR_PEERS, Destination, Proxy, parse_proxy_path
from palaestra.gateway.runtime import Address, owner_name
from palaestra.http.asgi import Receive, Scope, Send

FORWARDED_BY = b"x-palaestra-forwarded-by"
"""Header with the name of the gateway that forwarded a request."""
ASK_S = 5.0
"""Seconds to wait for a list of sessions or gateways from a peer."""
CONNECT_S = 2.0
AVOID_S = 5.0
"""Seconds for which no session is opened on a peer that could not be reached."""

_SESSION_PATH = re.compile(rb"/sessions/([A-Za-z0-9_-]{1,64})(?:/renew)?")


@dataclass(frozen=True)
class Peer:
    """Another gateway."""

    name: str
    url: str

    @property
    def address(self) -> Address:
        """Host and port."""
        parts = urlsplit(self.url)
        return Address(parts.hostname or "", parts.port or 80)


def is_forwarded(scope: Scope) -> bool:
    """Whether a peer has forwarded this request."""
    return any(name == FORWARDED_BY for name, _ in scope["headers"])


class Peers:
    """Forwards requests about sessions of other gateways, and asks those gateways for sessions and lists."""

    def __init__(
        self,
        name: str,
        urls: Mapping[str, str],
        client: aiohttp.ClientSession,
        proxy: Proxy,
        *,
        open_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_s`: seconds that a peer may take to open a session."""
        self._name, self._client, self._proxy, self._open_s, self._clock = name, client, proxy, open_s, clock
        self._peers = {peer: Peer(peer, url.rstrip("/")) for peer, url in urls.items()}
        self._avoid_until = dict.fromkeys(self._peers, 0.0)
        self._first = 0
        self.forwarded: Counter[str] = Counter(dict.fromkeys(self._peers, 0))
        """Requests forwarded to each peer."""
        self.opened: Counter[str] = Counter(dict.fromkeys(self._peers, 0))
        """Sessions opened on each peer because there was no room here."""

    def counts(self) -> list[PeerCounts]:
        """What was asked of each peer, and whether it could be reached when it was last needed."""
        now = self._clock()
        return [
            PeerCounts(name, now >= self._avoid_until[name], self.forwarded[name], self.opened[name])
            for name in self._peers
        ]

    async def forward_foreign(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Forward the request if it is about the session of a peer; returns whether it was.

        Raises `SessionRefused` (400) for a path that is not well-formed.
        """
        peer = self._find_owner(scope["raw_path"])
        if peer is None:
            return False
        try:
            if is_forwarded(scope):
                text = (
                    f"gateway {self._name} was sent a request about a session of gateway {peer.name} by another "
                    "gateway. Compare the names in gateway.peers of all gateways with their gateway.name."
                )
                raise SessionFailed("peer_loop", text)
            self._proxy.check(scope)
            self.forwarded[peer.name] += 1
            await self._proxy.forward(scope, receive, send, self._destination(peer, scope["raw_path"]))
            self._avoid_until[peer.name] = 0.0
        except SessionFailed as failure:
            if failure.reason == "peer_unreachable":
                self._avoid(peer)
            await send_error(send, failure)
        except SessionRefused as refusal:
            await send_error(send, refusal, close=refusal.status in (408, 413))
        return True

    async def open(self, document: Mapping[str, Any], scope: Scope) -> dict[str, Any] | None:
        """Open a session on the first peer that has room; None when none has, or when a peer asks itself."""
        if is_forwarded(scope):
            return None
        peers = list(self._peers.values())
        # Another peer comes first each time, so that sessions spread.
        self._first = (self._first + 1) % max(1, len(peers))
        for peer in (*peers[self._first :], *peers[: self._first]):
            if self._clock() < self._avoid_until[peer.name]:
                continue
            status, answer = await self._ask(peer, "POST", "/sessions", scope, self._open_s, document)
            if status == 201 and isinstance(answer, dict):
                self.opened[peer.name] += 1
                return answer
        return None

    async def list_all(self, path: str, key: str, scope: Scope) -> dict[str, list[dict[str, Any]] | None]:
        """The list `key` in the response of every peer to GET `path`; None for a peer that does not answer."""
        if is_forwarded(scope):
            return {}

        async def list_one(peer: Peer) -> list[dict[str, Any]] | None:
            status, answer = await self._ask(peer, "GET", path, scope, ASK_S)
            found = answer.get(key) if status == 200 and isinstance(answer, dict) else None
            return found if isinstance(found, list) else None

        lists = await asyncio.gather(*map(list_one, self._peers.values()))
        return dict(zip(self._peers, lists, strict=True))

    def _find_owner(self, raw_path: bytes) -> Peer | None:
        if raw_path.startswith(PROXY_PREFIX):
            return self._peers.get(owner_name(parse_proxy_path(raw_path)[0]))
        match = _SESSION_PATH.fullmatch(raw_path)
        return None if match is None else self._peers.get(owner_name(match[1].decode()))

    def _destination(self, peer: Peer, raw_path: bytes) -> Destination:
        server = f"gateway {peer.name} at {peer.url}"
        return Destination(
            peer.address,
            raw_path,
            dropped=NOT_FOR_PEERS,
            added=((FORWARDED_BY, self._name.encode()),),
            subject=server,
            server=server,
            timeout_reason="peer_timeout",
            unreachable_reason="peer_unreachable",
            lost_reason="peer_lost",
        )

    async def _ask(
        self, peer: Peer, method: str, path: str, scope: Scope, seconds: float, document: Any = None
    ) -> tuple[int, Any]:
        """Status and JSON document of a peer's response, with the caller's token; status 0 without a response."""
        sent = {FORWARDED_BY.decode(): self._name}
        sent |= {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S)
        try:
            async with self._client.request(
                method, peer.url + path, json=document, headers=sent, timeout=timeout, allow_redirects=False
            ) as response:
                self._avoid_until[peer.name] = 0.0
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError):
            self._avoid(peer)
        except ValueError:
            pass  # the body is not JSON: no gateway answers there
        return 0, None

    def _avoid(self, peer: Peer) -> None:
        self._avoid_until[peer.name] = self._clock() + AVOID_S
