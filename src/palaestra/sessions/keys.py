"""The keys that actions can press, and their codes in a browser.

A key is named as in the DOM (`Enter`, `ArrowLeft`, `Control`) or by its character (`a`, `ß`, `+`). Codecs translate the
names of other model families.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """The properties of one key in a browser."""

    name: str
    """`KeyboardEvent.key`."""
    code: str
    """`KeyboardEvent.code`, the position on a US keyboard; empty for other characters."""
    number: int
    """`KeyboardEvent.keyCode`, which some pages still use."""
    text: str = ""
    """The text it types."""


def _build_named_keys() -> dict[str, Key]:
    plain = {
        "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "Backspace": (8, ""), "Delete": (46, ""),
        "Insert": (45, ""), "Home": (36, ""), "End": (35, ""), "PageUp": (33, ""), "PageDown": (34, ""),
        "ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""), "CapsLock": (20, ""),
    }  # fmt: skip
    keys = {name: Key(name, name, number, text) for name, (number, text) in plain.items()}
    keys |= {f"F{n}": Key(f"F{n}", f"F{n}", 111 + n) for n in range(1, 13)}
    modifiers = (
        ("Control", "ControlLeft", 17),
        ("Shift", "ShiftLeft", 16),
        ("Alt", "AltLeft", 18),
        ("Meta", "MetaLeft", 91),
    )
    keys |= {name: Key(name, code, number) for name, code, number in modifiers}
    keys["Space"] = Key(" ", "Space", 32, " ")
    return keys


NAMED: dict[str, Key] = _build_named_keys()
"""Keys that have a name."""

MODIFIERS: dict[str, int] = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}
"""Modifier keys and their bits in input events."""

_ROW = {
    "`": ("Backquote", 192), "-": ("Minus", 189), "=": ("Equal", 187), "[": ("BracketLeft", 219),
    "]": ("BracketRight", 221), "\\": ("Backslash", 220), ";": ("Semicolon", 186), "'": ("Quote", 222),
    ",": ("Comma", 188), ".": ("Period", 190), "/": ("Slash", 191),
}  # fmt: skip
_SHIFTED = dict(zip('~!@#$%^&*()_+{}|:"<>?', "`1234567890-=[]\\;',./", strict=True))


def is_known_key(name: str) -> bool:
    """Whether `name` is a named key or a single printable character."""
    return name in NAMED or (len(name) == 1 and name.isprintable())


def get_key(name: str) -> Key:
    """The key of this name, which must be known."""
    if name in NAMED:
        return NAMED[name]
    if name == " ":
        return NAMED["Space"]
    base = _SHIFTED.get(name, name.lower())
    if "a" <= base <= "z" and len(base) == 1:
        return Key(name, f"Key{base.upper()}", ord(base.upper()), name)
    if "0" <= base <= "9":
        return Key(name, f"Digit{base}", ord(base), name)
    code, number = _ROW.get(base, ("", 0))
    return Key(name, code, number, name)
