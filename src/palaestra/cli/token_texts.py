"""The words behind token ids, for pages that show what a model said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.evaluation.viewer import TokenTexts

__all__ = ["run_texts", "token_texts"]


def token_texts(path: Path) -> TokenTexts:
    """By a tokenizer.json, or by the one in a model's directory."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("--tokenizer", str(path), "no such file", "Give a tokenizer.json or the directory it is in")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        remedy = "Install it: pip install 'palaestra[vlm]'"
        raise ConfigError("--tokenizer", str(path), "the tokenizers package is not installed", remedy) from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises nothing narrower
        raise ConfigError("--tokenizer", str(path), f"is no tokenizer ({error})") from None
    known: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in known:
            known[token] = (
                tokenizer.decode([token], skip_special_tokens=False) or tokenizer.id_to_token(token) or str(token)
            )
        return known[token]

    return lambda ids: [text(token) for token in ids]


def run_texts(run: Path) -> TokenTexts | None:
    """By the tokenizer of the model a run trains, if it lies on this machine; None when it does not."""
    from palaestra.policy.vlm.loading import BUILT_IN

    try:
        name = json.loads((run / "resolved.json").read_text())["model"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    directory = BUILT_IN.get(name) or Path(str(name)).expanduser()
    try:
        return token_texts(directory)
    except ConfigError:
        return None
