"""The names that each family uses for the keys of `palaestra.sessions.keys`.

Every named key has one spelling per family, which encoding uses. Decoding accepts more: names regardless of case,
underscores, hyphens and spaces, and `SYNONYMS`. A single character stands for itself in every family. All other names
are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from palaestra.config import closest_names
from palaestra.policy.codecs.decoding import DecodeError, abbreviate
from palaestra.sessions.keys import NAMED, is_known_key

SYNONYMS: Mapping[str, str] = {
    "return": "Enter", "esc": "Escape", "del": "Delete", "ins": "Insert", "pgup": "PageUp", "pgdn": "PageDown",
    "left": "ArrowLeft", "up": "ArrowUp", "right": "ArrowRight", "down": "ArrowDown", "ctrl": "Control",
    "option": "Alt", "win": "Meta", "windows": "Meta", "super": "Meta", "cmd": "Meta", "command": "Meta",
    "spacebar": "Space",
}  # fmt: skip
"""Accepted in every family, in addition to the canonical names."""


@dataclass(frozen=True)
class KeyNames:
    """One family's names of keys, in both directions."""

    named: Mapping[str, str]
    """Spelling of each named key."""
    characters: Mapping[str, str] = field(default_factory=dict)
    """Spelling of characters that do not stand for themselves."""
    capitals: bool = False
    """Letters are written in upper case and mean the key, not the upper-case letter."""

    def spelling(self, key: str) -> str | None:
        """How the family writes a key; None if it cannot."""
        key = "Space" if key == " " else key
        if key in NAMED:
            return self.named[key]
        if self.capitals and key.isascii() and key.isalpha():
            return None if key.isupper() else key.upper()
        return self.characters.get(key, key)

    def key(self, spelling: str) -> str:
        """The key with this spelling."""
        if spelling == " ":
            return "Space"
        if len(spelling) == 1:
            if not is_known_key(spelling):
                raise DecodeError("unknown_key", f"{abbreviate(spelling)} is a character without a key")
            return spelling.lower() if self.capitals and spelling.isascii() else spelling
        known = self._spellings()
        key = known.get(_plain(spelling))
        if key is None:
            close = closest_names(_plain(spelling), known, count=1) if len(spelling) <= 40 else []
            remedy = f" Did you mean {close[0]!r}?" if close else ""
            raise DecodeError("unknown_key", f"{abbreviate(spelling)} is not a key.{remedy}")
        return key

    def keys(self, spelling: str) -> tuple[str, ...]:
        """The key with this spelling, or several keys joined by `+`, such as `ctrl+a`."""
        parts = [part.strip() for part in spelling.split("+")]
        if len(parts) > 1 and all(parts):
            return tuple(self.key(part) for part in parts)
        return (self.key(spelling),)

    def _spellings(self) -> dict[str, str]:
        known = {_plain(name): name for name in NAMED} | dict(SYNONYMS)
        known |= {_plain(spelling): name for name, spelling in self.named.items()}
        return known | {_plain(spelling): character for character, spelling in self.characters.items()}


def _plain(spelling: str) -> str:
    return "".join(character for character in spelling.lower() if character not in "_- ")


PYAUTOGUI_KEYS = KeyNames(
    {name: name.removeprefix("Arrow").lower() for name in NAMED} | {"Escape": "esc", "Control": "ctrl", "Meta": "win"}
)
"""Lower case, as Qwen and UI-TARS write them."""

OPENAI_KEYS = KeyNames(
    {name: name.upper() for name in NAMED} | {"Escape": "ESC", "Control": "CTRL", "Meta": "SUPER"}, capitals=True
)
"""Upper case; `["CTRL", "A"]` is Control and the key a."""

XDOTOOL_KEYS = KeyNames(
    {name: name.removeprefix("Arrow") for name in NAMED}
    | {"Enter": "Return", "Backspace": "BackSpace", "PageUp": "Page_Up", "PageDown": "Page_Down"}
    | {"CapsLock": "Caps_Lock", "Control": "ctrl", "Shift": "shift", "Alt": "alt", "Meta": "super", "Space": "space"},
    characters={
        "!": "exclam", '"': "quotedbl", "#": "numbersign", "$": "dollar", "%": "percent", "&": "ampersand",
        "'": "apostrophe", "(": "parenleft", ")": "parenright", "*": "asterisk", "+": "plus", ",": "comma",
        "-": "minus", ".": "period", "/": "slash", ":": "colon", ";": "semicolon", "<": "less", "=": "equal",
        ">": "greater", "?": "question", "@": "at", "[": "bracketleft", "\\": "backslash", "]": "bracketright",
        "^": "asciicircum", "_": "underscore", "`": "grave", "{": "braceleft", "|": "bar", "}": "braceright",
        "~": "asciitilde",
    },
)  # fmt: skip
"""X11 key names, joined by `+`, as Anthropic's tool takes them."""
