r"""Parser for calls such as `type(content='it\'s')`. It never evaluates the text.

A call is a name and, in parentheses, named arguments that are quoted strings. In a string a backslash escapes itself,
either quote, and the letters of a newline, tab, return or character number (`\n`, `\t`, `\r`, `\x3c`, `\u00e4`);
any other escape is rejected, since families disagree about its meaning.

Models forget to escape a quote, as in `type(content='it's')`. A call with one argument is accepted nevertheless if only
one quote can be the closing one: the one before a parenthesis that ends the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palaestra.policy.codecs.decoding import DecodeError, abbreviate

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
    """A parsed call and its position in the text."""

    name: str
    arguments: dict[str, str]
    span: tuple[int, int]


def parse_call(text: str, start: int) -> Call:
    """Parse the call that begins at `start`."""
    try:
        return _parse_escaped(text, start)
    except DecodeError:
        call = _parse_unescaped(text, start)
        if call is None:
            raise
        return call


def _parse_unescaped(text: str, start: int) -> Call | None:
    """Parse a call of one argument whose text contains unescaped quotes; None if it is something else."""
    line = text[start:].partition("\n")[0].rstrip()
    match = _ONE_ARGUMENT.fullmatch(line)
    if match is None:
        return None
    name, argument, mark, body = match.groups()
    if not re.search(rf"{_UNESCAPED}{mark}", body) or re.search(rf"{_UNESCAPED}\\$", body):
        return None
    # The text seems to contain another argument: report the error of the strict parser instead.
    if re.search(rf"{mark}\s*,\s*[A-Za-z_][A-Za-z0-9_]*\s*=", body):
        return None
    if re.search(rf"{mark}\s*\)", body):
        reason = f"the text of {argument} holds quotes that are not escaped, and it is not clear where it ends"
        raise DecodeError("syntax", reason)
    return Call(name, {argument: _unescape(body)}, (start, start + len(line)))


def _parse_escaped(text: str, start: int) -> Call:
    """Parse a call whose strings are escaped correctly."""
    head = _HEAD.match(text, start)
    if head is None:
        raise DecodeError("syntax", f"no call such as click(...) at character {start}")
    arguments: dict[str, str] = {}
    at = head.end()
    if text.startswith(")", at):
        return Call(head[1], arguments, (start, at + 1))
    while True:
        name = _NAME.match(text, at)
        if name is None:
            raise DecodeError("syntax", f"no argument such as name='text' at character {at}")
        body = _BODY[name[2]].match(text, name.end())
        if body is None:
            raise DecodeError("syntax", f"the text of {name[1]} has no end")
        if name[1] in arguments:
            raise DecodeError("syntax", f"the argument {abbreviate(name[1])} is given twice")
        arguments[name[1]] = _unescape(body[1])
        after = _NEXT.match(text, body.end())
        if after is None:
            raise DecodeError("syntax", f"neither a comma nor a parenthesis at character {body.end()}")
        at = after.end()
        if after[1] == ")":
            return Call(head[1], arguments, (start, at))


def quote(text: str) -> str:
    """The text as a string literal of the call syntax."""
    for character, escape in (("\\", "\\\\"), ("'", "\\'"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        text = text.replace(character, escape)
    # A tokenizer would read `<|box_end|>` as the special token.
    return "'" + text.replace("<|", "\\x3c|") + "'"


def _unescape(body: str) -> str:
    return _ESCAPE.sub(_escaped_character, body)


def _escaped_character(match: re.Match[str]) -> str:
    number = match[1] or match[2]
    if number is not None:
        return chr(int(number, 16))
    if match[3] not in _LETTERS:
        raise DecodeError("syntax", f"{abbreviate(match[0])} is not an escape of this grammar")
    return _LETTERS[match[3]]
