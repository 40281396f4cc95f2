"""Who sent a request to the gateway, as far as its tokens tell."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

__all__ = ["CALLER", "Caller"]

CALLER = "palaestra.caller"
"""Where the ASGI scope of a request that was let in holds its `Caller`."""


@dataclass(frozen=True)
class Caller:
    """An operator, who may use every session, or a client, who may use those whose tokens it was given."""

    operator: bool
    session_token: bytes = field(default=b"", repr=False)
    """What the request says to be the token of the session that it is about."""

    def may_use(self, session_token: str) -> bool:
        """Whether a session with this token may be used, renewed and closed."""
        # Compared in full whatever the first bytes are, so that the time taken tells nothing.
        return self.operator or hmac.compare_digest(self.session_token, session_token.encode())
