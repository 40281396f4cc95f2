"""By which names the service may be addressed, and what listening beyond this machine means.

A web page can have a browser send requests to any address, under a name of the page's choosing that it has resolve to
this machine. Such a request carries the page's name as its `Host`, and is refused by it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

__all__ = ["AllowedHosts", "exposure_warning", "is_host_name", "is_loopback", "reachable_host"]

_NAME = re.compile(r"\[[0-9a-f:.]+\]|[a-z0-9._-]+", re.IGNORECASE)
_HEADER = re.compile(rf"(?P<name>{_NAME.pattern})(?::\d{{1,5}})?", re.IGNORECASE)
_EVERYWHERE = ("", "0.0.0.0", "::")


class AllowedHosts:
    """Decides which `Host` headers are answered.

    Always this machine's loopback names. When the service listens beyond them, also the address that the connection
    came to, the name of the machine, and the name to listen on. `allowed` adds others; `*` allows every name.
    """

    def __init__(self, host: str, allowed: Sequence[str] = ()) -> None:
        self._any = "*" in allowed
        self._beyond = not is_loopback(host)
        names = {"localhost", *allowed}
        if self._beyond:
            names |= {socket.gethostname(), *({host} - set(_EVERYWHERE))}
        self._names = frozenset(_canonical(name) for name in names)

    def allows(self, header: str, server: str | None) -> bool:
        """Whether a request with this header, to this address of ours, is answered."""
        if self._any:
            return True
        found = _HEADER.fullmatch(header)
        if found is None:
            return False
        name = _canonical(found["name"])
        if name in self._names or is_loopback(name):
            return True
        return self._beyond and server is not None and name == _canonical(server)


def is_host_name(text: str) -> bool:
    """Whether a text is a host's name or address, and nothing more."""
    return _NAME.fullmatch(text) is not None or (":" in text and _HEADER.fullmatch(f"[{text}]") is not None)


def is_loopback(host: str) -> bool:
    """Whether only this machine itself can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_host(host: str) -> str:
    """Where this machine's own clients reach a service that listens on a host."""
    if host in _EVERYWHERE:
        return "::1" if host == "::" else "127.0.0.1"
    return host


def exposure_warning(host: str, port: int) -> str:
    """What whoever lets others in should know; empty for a service of this machine alone."""
    if is_loopback(host):
        return ""
    where = "every address of this machine" if host in _EVERYWHERE else host
    number = port or "PORT"
    return (
        f"the service listens on {where} without encryption: whoever can read the network reads the token, and can "
        "start programs on this machine with it. Listen on 127.0.0.1 and use a tunnel "
        f"(ssh -L {number}:127.0.0.1:{number} HOST), or put a proxy with TLS in front"
    )


def _canonical(name: str) -> str:
    name = name.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
