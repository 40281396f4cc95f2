"""Checks of the runner `spade-bdi` that need none of its packages: the text of plans, and an XMPP server.

The parser of AgentSpeak is licensed under the GPL and runs in the environment of the worker only. The check here finds
the errors that leave a statement open, also before that environment exists.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

_TOKEN = re.compile(
    r"""(?P<line_comment> (?://|\#).* )
      | (?P<comment> /\* )
      | (?P<string> "(?:[^"\\]|\\.)*" )
      | (?P<quote> " )
      | (?P<number> \d*\.\d+ )
      | (?P<word> \.?[A-Za-z_]\w*(?:\.[a-z]\w*)* )
      | (?P<arrow> <-|:- )
      | (?P<operator> =\.\. )
      | (?P<opening> [(\[{] )
      | (?P<closing> [)\]}] )
      | (?P<stop> \. )
      | (?P<other> \S )""",
    re.VERBOSE,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MAX_ANSWER_BYTES = 4096
_STREAM = re.compile(rb"<(?:[\w.-]+:)?stream[\s>]")


class SyntaxFault(NamedTuple):
    """An error in the text of plans."""

    line: int
    reason: str


def find_syntax_fault(text: str) -> SyntaxFault | None:
    """The first bracket, quote, comment or statement of AgentSpeak plans that is not closed; None if there is none."""
    statement = _Statement()
    comment_line = 0
    for number, line in enumerate(text.split("\n"), 1):
        position = 0
        while position < len(line):
            if comment_line:
                end = line.find("*/", position)
                if end < 0:
                    break
                comment_line, position = 0, end + 2
                continue
            token = _TOKEN.search(line, position)
            if token is None:
                break
            position = token.end()
            if token.lastgroup == "comment":
                comment_line = number
            elif token.lastgroup != "line_comment":
                fault = statement.add(str(token.lastgroup), token.group(), number)
                if fault is not None:
                    return fault
    if comment_line:
        return SyntaxFault(comment_line, "the comment that begins with /* has no end")
    return statement.find_open_end()


class _Statement:
    """The tokens of a belief, goal, rule, plan or directive so far."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._brackets: list[tuple[str, int]] = []
        self._line = 0
        self._is_directive = self._has_arrow = False

    def add(self, kind: str, text: str, line: int) -> SyntaxFault | None:
        """Add a token; returns the fault that it reveals."""
        if kind == "quote":
            return SyntaxFault(line, "the text that begins with a quotation mark has no end in this line")
        if not self._line:
            self._line, self._is_directive = line, text == "{"
        if kind == "opening":
            self._brackets.append((text, line))
        elif kind == "closing":
            if not self._brackets:
                return SyntaxFault(line, f"{text} closes no bracket")
            if text != _CLOSING[self._brackets[-1][0]]:
                return self._open_bracket(f"{text} in line {line}")
            self._brackets.pop()
            if self._is_directive and not self._brackets:
                self._clear()
        elif kind == "arrow":
            if self._has_arrow:
                reason = f"a second {text} in the statement that begins in line {self._line}: a full stop is missing"
                return SyntaxFault(line, reason)
            self._has_arrow = True
        elif kind == "stop":
            if self._brackets:
                return self._open_bracket(f"the full stop in line {line}")
            self._clear()
        return None

    def find_open_end(self) -> SyntaxFault | None:
        """The fault of a text that ends here."""
        if self._brackets:
            return self._open_bracket("the end of the file")
        if self._line:
            return SyntaxFault(self._line, "the statement that begins here has no full stop at its end")
        return None

    def _open_bracket(self, before: str) -> SyntaxFault:
        bracket, line = self._brackets[-1]
        return SyntaxFault(line, f"{bracket} is not closed before {before}")


def begin_stream(host: str, port: int, domain: str, timeout_s: float) -> str:
    """Begin an XMPP stream, as a client does; returns the address of the server. `OSError` if it begins none."""
    header = (
        f"<?xml version='1.0'?><stream:stream to={quoteattr(domain)} version='1.0' xmlns='jabber:client' "
        "xmlns:stream='http://etherx.jabber.org/streams'>"
    )
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as connection:
        address = str(connection.getpeername()[0])
        connection.sendall(header.encode())
        answer = b""
        while _STREAM.search(answer) is None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = connection.recv(_MAX_ANSWER_BYTES)
            except TimeoutError:
                raise ConnectionError(f"it began no XMPP stream within {timeout_s:g} s") from None
            answer += data
            if not data or len(answer) > _MAX_ANSWER_BYTES:
                raise ConnectionError(f"it began no XMPP stream; its answer was {answer[:60]!r}")
        with contextlib.suppress(OSError):
            connection.sendall(b"</stream:stream>")
        return address
