"""What must never be shown: told by the name of a variable, by a value we know, or by the shape of a token.

Used wherever text leaves for a file, a log or an answer. Errs on the side of hiding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["Redactor", "is_secret_name", "shown_environment"]

HIDDEN = "***"
_NAME = re.compile(r"key|token|secret|passw|credential|auth|cookie|private|_pat$", re.IGNORECASE)
_HARMLESS = re.compile(r"^(SSH_AUTH_SOCK|XAUTHORITY|TOKENIZERS_PARALLELISM|PYTHONHASHSEED|PYTHON_KEYRING_BACKEND)$")
_SHAPES = re.compile(
    r"(?P<head>\bBearer\s+)[^\s@'\"]{4,}"
    # Without the @ behind it, it is a port.
    r"|(?P<user>://[^\s/:@]+:)[^\s@'\"]+(?=@)"
    r"|\b(?:hf|sk|ghp|gho|github_pat|xox[abp]|glpat|wandb_v1)[-_][A-Za-z0-9_-]{12,}"
    r"|\bAKIA[0-9A-Z]{16}\b|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])(?=.*(?:wandb|api))"
)
_SHORTEST = 8


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds something to hide."""
    return bool(_NAME.search(name)) and not _HARMLESS.match(name)


class Redactor:
    """Takes secrets out of text: values it was told, and what looks like a token."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        long_first = sorted({value for value in values if len(value) >= _SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, long_first))) if long_first else None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Redactor:
        """One that knows the values of every variable with a secret's name."""
        return cls(value for name, value in environment.items() if is_secret_name(name))

    def __call__(self, text: str) -> str:
        """The text with every secret replaced."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        return _SHAPES.sub(lambda found: (found["head"] or found["user"] or "") + HIDDEN, text)


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as it may be shown and stored, in order."""
    redact = Redactor.of_environment(environment)
    return {name: HIDDEN if is_secret_name(name) else redact(value) for name, value in sorted(environment.items())}
