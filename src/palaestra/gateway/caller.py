"""The caller of a gateway request, as identified by its tokens."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

__all__ = ["CALLER", "Caller"]

CALLER = "palaestra.caller"
"""Key of the `Caller` in the ASGI scope of an authorised request."""


@dataclass(frozen=True)
class Caller:
    """An operator may use every session; a client may use the sessions whose tokens it has."""

    operator: bool
    session_token: bytes = field(default=b"", repr=False)
    """The session token that the request carries."""

    def may_use(self, session_token: str) -> bool:
        """Whether a session with this token may be used, renewed and closed."""
        # Constant time, so that the duration does not reveal how much of a guess is right.
        return self.operator or hmac.compare_digest(self.session_token, session_token.encode())
