r"""Calls such as `type(content='it\'s')` as text, read by a scanner that knows strings and nothing else.

A call is a name and, in parentheses, named arguments that are quoted strings. In a string a backslash escapes itself,
either quote, and the letters of a newline, tab, return or character number (`\n`, `\t`, `\r`, `\x3c`, `\u00e4`);
another letter after it is refused, since families disagree about what it would mean.

Models forget to escape a quote, as in `type(content='it's')`. A call with one argument is read all the same if only one
quote can be the last: the one before a parenthesis that ends the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palaestra.policy.codecs.decoding import Refusal, shown

__all__ = ["Call", "call_at", "quoted"]

_HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(\s*")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(['\"])")
_BODY = {
    "'": re.compile(r"([^'\\]*(?:\\.[^'\\]*)*)'", re.DOTALL),
    '"': re.compile(r'([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL),
}
_ONE_ARGUMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(['\"])(.*)\3\s*\)")
_UNESCAPED = r"(?<!\\)(?:\\\\)*"
_NEXT = re.compile(r"\s*(,\s*|\))")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_LETTERS = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class Call:
    """A call that was read, and where it stands in the text."""

    name: str
    arguments: dict[str, str]
    span: tuple[int, int]


def call_at(text: str, start: int) -> Call:
    """The call that begins at `start`."""
    try:
        return _escaped_call(text, start)
    except Refusal:
        call = _call_with_bare_quotes(text, start)
        if call is None:
            raise
        return call


def _call_with_bare_quotes(text: str, start: int) -> Call | None:
    """A call of one argument whose text holds quotes that are not escaped; None if this is not what it is."""
    line = text[start:].partition("\n")[0].rstrip()
    whole = _ONE_ARGUMENT.fullmatch(line)
    if whole is None:
        return None
    name, argument, quote, body = whole.groups()
    if not re.search(rf"{_UNESCAPED}{quote}", body) or re.search(rf"{_UNESCAPED}\\$", body):
        return None
    # What looks like another argument is no text of this one; the rules say what is wrong with it.
    if re.search(rf"{quote}\s*,\s*[A-Za-z_][A-Za-z0-9_]*\s*=", body):
        return None
    if re.search(rf"{quote}\s*\)", body):
        reason = f"the text of {argument} holds quotes that are not escaped, and it is not clear where it ends"
        raise Refusal("syntax", reason)
    return Call(name, {argument: _ESCAPE.sub(_escaped, body)}, (start, start + len(line)))


def _escaped_call(text: str, start: int) -> Call:
    """The call that begins at `start` and is written by the rules."""
    head = _HEAD.match(text, start)
    if head is None:
        raise Refusal("syntax", f"no call such as click(...) at character {start}")
    arguments: dict[str, str] = {}
    at = head.end()
    if text.startswith(")", at):
        return Call(head[1], arguments, (start, at + 1))
    while True:
        name = _NAME.match(text, at)
        if name is None:
            raise Refusal("syntax", f"no argument such as name='text' at character {at}")
        body = _BODY[name[2]].match(text, name.end())
        if body is None:
            raise Refusal("syntax", f"the text of {name[1]} has no end")
        if name[1] in arguments:
            raise Refusal("syntax", f"the argument {shown(name[1])} is given twice")
        arguments[name[1]] = _ESCAPE.sub(_escaped, body[1])
        after = _NEXT.match(text, body.end())
        if after is None:
            raise Refusal("syntax", f"neither a comma nor a parenthesis at character {body.end()}")
        at = after.end()
        if after[1] == ")":
            return Call(head[1], arguments, (start, at))


def quoted(text: str) -> str:
    """The text as a string of the call syntax."""
    for character, escape in (("\\", "\\\\"), ("'", "\\'"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        text = text.replace(character, escape)
    # A tokenizer would take `<|box_end|>` for the mark and not for its letters.
    return "'" + text.replace("<|", "\\x3c|") + "'"


def _escaped(match: re.Match[str]) -> str:
    number = match[1] or match[2]
    if number is not None:
        return chr(int(number, 16))
    if match[3] not in _LETTERS:
        raise Refusal("syntax", f"{shown(match[0])} is no escape this grammar has")
    return _LETTERS[match[3]]
