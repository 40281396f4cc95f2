"""Hides secrets in text, recognised by the name of a variable or key, by known values, or by the format of a token.

Used wherever text is written to a file, a log, an error or a response. In doubt, text is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HIDDEN = "***"
_NAME = re.compile(r"key|token|secret|passw|credential|auth|cookie|private|_pat$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^(SSH_AUTH_SOCK|XAUTHORITY|TOKENIZERS_PARALLELISM|PYTHONHASHSEED|PYTHON_KEYRING_BACKEND)$")
_TOKEN_FORMATS = re.compile(
    r"(?P<head>\bBearer\s+)[^\s@'\"]{4,}"
    # Without an @ after it, it is a port.
    r"|(?P<user>://[^\s/:@]+:)[^\s@'\"]+(?=@)"
    # Hugging Face tokens have letters and digits only; `hf-internal-testing` is an organisation.
    r"|\bhf_[A-Za-z0-9]{12,}"
    r"|\b(?:sk|ghp|gho|github_pat|xox[abp]|glpat|wandb_v1)[-_][A-Za-z0-9_-]{12,}"
    r"|\bAKIA[0-9A-Z]{16}\b|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])(?=.*(?:wandb|api))"
)
_MIN_SECRET_LENGTH = 8
_MAX_DEPTH = 100
"""Data that is nested deeper is hidden, because errors are also made from what a client sent."""
_KEY = re.compile(
    r"(?:.*[_-])?(?:(?:api|access|secret|private|signing|encryption)[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|credentials?|(?:api|access|auth|bearer|refresh|session|hf|wandb|github)[_-]?token)|token",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)=(?P<value>.+)", re.DOTALL)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name is a secret."""
    return bool(_NAME.search(name)) and not _NOT_SECRET.match(name)


def is_secret_key(name: str) -> bool:
    """Whether a configuration key or command line option is a secret.

    Stricter than for variables: `max_tokens`, `pad_token`, `tokenizer` and `author` are not secrets.
    """
    last = name.lstrip("-").rpartition(".")[2]
    return is_secret_name(last) if _VARIABLE.fullmatch(last) else bool(_KEY.fullmatch(last))


def redact_secrets(value: Any, name: str = "") -> Any:
    """Nested data with the values of secret keys, and tokens and passwords in texts, replaced."""
    return _redact_nested(value, name, _MAX_DEPTH)


def _redact_nested(value: Any, name: str, levels: int) -> Any:
    if levels == 0:
        return HIDDEN
    # An array has no single truth value, so only texts are compared with the empty one.
    is_empty = value is None or (isinstance(value, str) and not value)
    if not is_empty and not isinstance(value, bool | dict | list | tuple) and is_secret_key(name):
        return HIDDEN
    if isinstance(value, str):
        return _redact_word(value)
    if isinstance(value, dict):
        return {key: _redact_nested(item, str(key), levels - 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_redact_nested(item, name, levels - 1) for item in value)
    return value


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line with secrets replaced: `--api-key=***` or `--api-key ***`."""
    redacted: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        is_value = previous.startswith("-") and "=" not in previous and not word.startswith("-")
        redacted.append(HIDDEN if is_value and is_secret_key(previous) else _redact_word(word))
    return redacted


def _redact_word(text: str) -> str:
    match = _ASSIGNMENT.fullmatch(text)
    if match is not None and is_secret_key(match["name"]):
        return f"{match['name']}={HIDDEN}"
    return _redact_tokens(text)


class Redactor:
    """Replaces known secret values and everything that looks like a token."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        longest_first = sorted({value for value in values if len(value) >= _MIN_SECRET_LENGTH}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Redactor:
        """A redactor for the values of all secret environment variables."""
        return cls(value for name, value in environment.items() if is_secret_name(name))

    def __call__(self, text: str) -> str:
        """Replace every secret in a text."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        return _TOKEN_FORMATS.sub(lambda match: (match["head"] or match["user"] or "") + HIDDEN, text)


_redact_tokens = Redactor()


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with secrets replaced, sorted by name."""
    redact = Redactor.from_environment(environment)
    return {name: HIDDEN if is_secret_name(name) else redact(value) for name, value in sorted(environment.items())}
