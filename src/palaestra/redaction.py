"""What must never be shown: told by the name of a variable or key, by a value we know, or by the shape of a token.

Used wherever text leaves for a file, a log, an error or an answer. Errs on the side of hiding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Redactor", "is_secret_key", "is_secret_name", "redact_command", "redact_environment", "redact_secrets"]

HIDDEN = "***"
_NAME = re.compile(r"key|token|secret|passw|credential|auth|cookie|private|_pat$", re.IGNORECASE)
_HARMLESS = re.compile(r"^(SSH_AUTH_SOCK|XAUTHORITY|TOKENIZERS_PARALLELISM|PYTHONHASHSEED|PYTHON_KEYRING_BACKEND)$")
_SHAPES = re.compile(
    r"(?P<head>\bBearer\s+)[^\s@'\"]{4,}"
    # Without the @ behind it, it is a port.
    r"|(?P<user>://[^\s/:@]+:)[^\s@'\"]+(?=@)"
    # Tokens of Hugging Face hold letters and digits only; `hf-internal-testing` is an organisation.
    r"|\bhf_[A-Za-z0-9]{12,}"
    r"|\b(?:sk|ghp|gho|github_pat|xox[abp]|glpat|wandb_v1)[-_][A-Za-z0-9_-]{12,}"
    r"|\bAKIA[0-9A-Z]{16}\b|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])(?=.*(?:wandb|api))"
)
_SHORTEST = 8
_KEY = re.compile(
    r"(?:.*[_-])?(?:(?:api|access|secret|private|signing|encryption)[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|credentials?|(?:api|access|auth|bearer|refresh|session|hf|wandb|github)[_-]?token)|token",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)=(?P<value>.+)", re.DOTALL)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds something to hide."""
    return bool(_NAME.search(name)) and not _HARMLESS.match(name)


def is_secret_key(name: str) -> bool:
    """Whether a key of a configuration, or an option, holds something to hide.

    Stricter than for variables: `max_tokens`, `pad_token`, `tokenizer` and `author` are no secrets.
    """
    last = name.lstrip("-").rpartition(".")[2]
    return is_secret_name(last) if _VARIABLE.fullmatch(last) else bool(_KEY.fullmatch(last))


def redact_secrets(value: Any, name: str = "") -> Any:
    """Plain data as it may be shown: what secret keys hold, and tokens and passwords in texts, replaced."""
    if value is not None and value != "" and not isinstance(value, bool | dict | list | tuple) and is_secret_key(name):
        return HIDDEN
    if isinstance(value, str):
        return _shown_word(value)
    if isinstance(value, dict):
        return {key: redact_secrets(item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redact_secrets(item, name) for item in value)
    return value


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line as it may be shown: `--api-key=***`, and `***` behind an option of such a name."""
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        shown.append(HIDDEN if is_value and is_secret_key(before) else _shown_word(word))
    return shown


def _shown_word(text: str) -> str:
    found = _ASSIGNMENT.fullmatch(text)
    if found is not None and is_secret_key(found["name"]):
        return f"{found['name']}={HIDDEN}"
    return _BY_SHAPE(text)


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


_BY_SHAPE = Redactor()


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as it may be shown and stored, in order."""
    redact = Redactor.of_environment(environment)
    return {name: HIDDEN if is_secret_name(name) else redact(value) for name, value in sorted(environment.items())}
