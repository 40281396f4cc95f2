"""How a browser gets access: a link that works once is exchanged for a cookie, which is valid for reading only.

A browser cannot send the token by itself, and the token in an address would stay in its history. A client that has the
token asks for a link. The link works once, within ten minutes, and sets a cookie that scripts cannot read. The cookie
is signed with the token: it survives a restart of the service, and a new token revokes it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from palaestra.http.asgi import Message, Scope, Send

LINK_LIFETIME_S = 600.0
COOKIE_LIFETIME_S = 14 * 24 * 3600
WEB_PREFIX = "/web/"
_MAX_LINKS = 100
_Clock: TypeAlias = Callable[[], float]

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
# A run may contain a page or a picture with scripts. Opened by its address, it must not act with the cookie.
_DATA_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
_COMMON_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class WebAccess:
    """Issues links and cookies, and checks them."""

    def __init__(self, token: str, clock: _Clock = time.time) -> None:
        self._key, self._clock = token.encode(), clock
        # Cookies are shared by all ports of a host: services of two state directories must not replace each other's.
        self.cookie_name = f"palaestra_{hashlib.sha256(b'cookie ' + self._key).hexdigest()[:12]}"
        self._links: dict[str, tuple[float, str]] = {}

    def create_link(self, target: str) -> str:
        """A secret that `redeem_link` exchanges once for `target` and a cookie."""
        now = self._clock()
        self._links = {link: value for link, value in self._links.items() if value[0] > now}
        while len(self._links) >= _MAX_LINKS:
            del self._links[next(iter(self._links))]
        link = secrets.token_urlsafe(32)
        self._links[link] = (now + LINK_LIFETIME_S, target)
        return link

    def redeem_link(self, link: str) -> str | None:
        """The target of a link, which is used up; None if it is unknown, used or too old."""
        expires, target = self._links.pop(link, (0.0, ""))
        return target if expires > self._clock() else None

    def create_cookie(self, *, secure: bool) -> str:
        """The value of a `Set-Cookie` header."""
        expires = str(int(self._clock() + COOKIE_LIFETIME_S))
        attributes = f"Path=/; Max-Age={COOKIE_LIFETIME_S}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"
        return f"{self.cookie_name}={expires}.{self._sign(expires)}; {attributes}"

    def allows(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the cookie of a request permits it: reading, over HTTP, and not on behalf of another site."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return False
        # Another port of this host is the same site, so `SameSite` does not cover it. Old browsers send no such header.
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return False
        # Cookies are shared by all ports of a host, and those of other programs may have any form.
        pairs = (part.strip().partition("=") for part in headers.get(b"cookie", b"").decode("latin-1").split(";"))
        cookie = next((value for name, _, value in pairs if name == self.cookie_name), "")
        expires, _, signature = cookie.partition(".")
        if not expires.isascii() or not expires.isdigit():
            return False
        if not hmac.compare_digest(signature.encode(), self._sign(expires).encode()):
            return False
        return int(expires) > self._clock()

    def _sign(self, expires: str) -> str:
        return hmac.new(self._key, f"web cookie {expires}".encode(), "sha256").hexdigest()


def is_public(path: str) -> bool:
    """Whether a path needs no access: the files of the page hold no data, and a link is its own proof."""
    return path.startswith(WEB_PREFIX) and path != f"{WEB_PREFIX}links"


def add_browser_headers(scope: Scope, send: Send) -> Send:
    """A `send` that adds the security headers of answers to browsers."""
    policy = _PAGE_POLICY if scope["path"].startswith(WEB_PREFIX) else _DATA_POLICY
    fields = {**_COMMON_HEADERS, "content-security-policy": policy}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            present = {name.lower() for name, _ in headers}
            missing = {name: value for name, value in fields.items() if name.encode() not in present}
            if b"cache-control" not in present:
                missing["cache-control"] = "no-store"
            headers += [(name.encode(), value.encode()) for name, value in missing.items()]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers
