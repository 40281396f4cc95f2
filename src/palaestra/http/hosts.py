"""Host names and addresses: which `Host` headers a service answers, and the warning for listening beyond this machine.

A web page can make a browser send requests to this machine under a name that the page's owner controls (DNS
rebinding). The `Host` header of such a request holds that name, so checking the header refuses the request.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

_NAME = re.compile(r"\[[0-9a-f:.]+\]|[a-z0-9._-]+", re.IGNORECASE)
_HEADER = re.compile(rf"(?P<name>{_NAME.pattern})(?::\d{{1,5}})?", re.IGNORECASE)
_ALL_ADDRESSES = ("", "0.0.0.0", "::")


class AllowedHosts:
    """Decides which `Host` headers a service answers.

    Loopback names are always allowed. When the service listens beyond this machine, so are the address that the
    connection came to, the host name of the machine, and `host` itself. `allowed` adds others; `*` allows every name.
    """

    def __init__(self, host: str, allowed: Sequence[str] = ()) -> None:
        self._allows_any = "*" in allowed
        self._is_exposed = not is_loopback(host)
        names = {"localhost", *allowed}
        if self._is_exposed:
            names |= {socket.gethostname(), *({host} - set(_ALL_ADDRESSES))}
        self._names = frozenset(_canonical(name) for name in names)

    def allows(self, header: str, server: str | None) -> bool:
        """Whether to answer a request with this header that came to the address `server`."""
        if self._allows_any:
            return True
        match = _HEADER.fullmatch(header)
        if match is None:
            return False
        name = _canonical(match["name"])
        if name in self._names or is_loopback(name):
            return True
        return self._is_exposed and server is not None and name == _canonical(server)


def is_host_name(text: str) -> bool:
    """Whether a text is a host name or an IP address, without scheme and port."""
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_host(host: str) -> str:
    """The host to which clients on this machine connect when a service listens on `host`."""
    if host in _ALL_ADDRESSES:
        return "::1" if host == "::" else "127.0.0.1"
    return host


def exposure_warning(host: str, port: int) -> str:
    """The warning about a service that other machines can reach; empty for a loopback host."""
    if is_loopback(host):
        return ""
    where = "every address of this machine" if host in _ALL_ADDRESSES else host
    number = port or "PORT"
    return (
        f"the service listens on {where} without encryption: anyone who can read the network traffic gets the token, "
        "and with it can start programs on this machine. Listen on 127.0.0.1 and use a tunnel "
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
