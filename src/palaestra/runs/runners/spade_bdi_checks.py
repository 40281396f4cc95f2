"""Configuration and checks of the runner `spade-bdi` that need none of its packages: keys, plans, an XMPP server.

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

from pydantic import Field, field_validator, model_validator

from palaestra.config import Section
from palaestra.redaction import is_secret_name
from palaestra.runs.wire import JsonObject

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of agents that a run keeps."""
_BARE_JID = re.compile(r"""[^\s"&'/:<>@]+@[^\s"&'/<>@]+""")
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


class BdiSkillConfig(Section):
    """Q-learning, as the plans use it."""

    learning_rate: float = Field(0.1, gt=0, le=1)
    """Step size of an update."""
    discount: float = Field(0.99, ge=0, le=1)
    """Discount factor per step."""
    epsilon_start: float = Field(1.0, gt=0, le=1)
    """Probability of a random action of a new skill."""
    epsilon_end: float = Field(0.05, gt=0, le=1)
    """Probability of a random action after the decay."""
    epsilon_decay_steps: int = Field(20_000, ge=1)
    """Steps of a skill until epsilon reaches `epsilon_end`."""
    exponential_decay: bool = False
    """Decay by equal ratios instead of equal differences."""
    initial_value: float = 0.0
    """Value of all actions of a new skill."""
    confidence_window: int = Field(20, ge=1, le=10_000)
    """Episodes without exploration over which the success of a skill is averaged; its confidence is unknown until half
    of them are played."""


class XmppConfig(Section):
    """The XMPP server. Without a host, a server that only this machine can reach runs in the worker."""

    host: str = ""
    """Host of an external server. Empty: an embedded server on the loopback interface."""
    port: int = Field(0, ge=0, le=65_535)
    """Port. 0: a free port for the embedded server, 5222 for an external one."""
    jid: str = ""
    """Account at the external server: `agent@example.org`."""
    password_variable: str = Field("PALAESTRA_XMPP_PASSWORD", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable of the run service that holds the password of that account."""
    verify_tls: bool = True
    """Verify the certificate of the external server."""
    timeout_s: float = Field(30.0, gt=0, le=600)
    """Seconds for the start of the embedded server, and for the login."""
    peers: tuple[str, ...] = Field(default=(), max_length=100)
    """Accounts whose messages become beliefs and goals of the agent, such as `operator@example.org`. Messages of others
    are ignored."""

    @field_validator("password_variable")
    @classmethod
    def _check_variable(cls, value: str) -> str:
        if not is_secret_name(value):
            raise ValueError("must be a name that is known to hold a secret, such as MY_PASSWORD: others are stored")
        return value

    @field_validator("peers")
    @classmethod
    def _check_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for peer in value:
            if not _BARE_JID.fullmatch(peer):
                raise ValueError(f"{peer!r} is not the JID of an account, such as operator@example.org (no resource)")
        # Servers write the sender of a message in lower case.
        return tuple(peer.lower() for peer in value)

    @model_validator(mode="after")
    def _check_account(self) -> XmppConfig:
        if self.host and not _BARE_JID.fullmatch(self.jid.partition("/")[0]):
            raise ValueError("an external server needs jid, such as agent@example.org")
        if self.jid and not self.host:
            raise ValueError("jid needs host; the embedded server creates its own account")
        return self


class SpadeBdiConfig(Section):
    """Configuration of a run of a BDI agent."""

    episodes: int = Field(1000, ge=1)
    """Number of episodes."""
    env_kwargs: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the environment, such as `is_slippery` or `map_name`."""
    asl: str | None = None
    """Path of an AgentSpeak file (null: the plans that ship for the environment)."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes after this many steps (null: the environment's own limit; 500 if it has none)."""
    q_learning: BdiSkillConfig = BdiSkillConfig.model_validate({})
    """The Q-learning skill."""
    cache_threshold: float = Field(0.6, ge=0, le=1)
    """Confidence from which the plans cache a skill as a policy; the belief `cache_threshold`."""
    save_as: str = ""
    """Keep the last checkpoint under this name in `custom/spade_bdi` of the state directory, also after a stop."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Episodes between checkpoints (null: only at the end)."""
    report_every: int = Field(20, ge=1)
    """Episodes between two reports of metrics."""
    belief_interval_s: float = Field(1.0, ge=0.1)
    """Minimum seconds between two reports of beliefs."""
    xmpp: XmppConfig = XmppConfig.model_validate({})
    """The XMPP server."""

    @field_validator("save_as")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value and not NAME.fullmatch(value):
            raise ValueError("may hold letters, digits, dot, dash and underscore only, at most 63, no leading dot")
        return value


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
