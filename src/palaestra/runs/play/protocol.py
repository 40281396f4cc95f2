"""The messages of a play, between the worker process, the run service and its clients.

A message is a JSON header with a `type`, and a payload of bytes: a picture, or the arrays of an observation. Sockets,
pipes and WebSockets carry the same bytes: two little-endian 32-bit lengths, the header, the payload. Clients send the
controls below; workers send states, steps and notices (`runs.play.state`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeGuard, get_args

from palaestra.errors import ConfigError
from palaestra.strict_json import dump_json, read_json

_LENGTHS = struct.Struct("<II")
MAX_HEADER_BYTES = 1 << 22
MAX_PAYLOAD_BYTES = 1 << 28
MAX_CONTROL_BYTES = 1 << 16
LOAD = "load"
"""Type of the message with which the service asks the worker to start a policy: `status` and `command`."""
REFUSE = "refuse"
"""Type of the message with which the service reports a policy that it did not plan: `status`."""
"""Longest message of a client."""

NO_SUCH_PLAY = 4404
"""Code with which the service closes a WebSocket to a play that it does not know."""

Mode: TypeAlias = Literal["human", "hybrid", "agent"]
Actor: TypeAlias = Literal["human", "agent"]
MODES: tuple[str, ...] = get_args(Mode)
MIN_SPEED, MAX_SPEED = 0.05, 100.0
_MAX_ACTION_DEPTH = 64


class Message(NamedTuple):
    """A header and a payload."""

    header: dict[str, Any]
    payload: bytes = b""

    @property
    def type(self) -> str:
        """What the message is."""
        return str(self.header.get("type", ""))


def pack(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """A message as bytes."""
    text = dump_json(header, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


def unpack(data: bytes) -> Message:
    """One message from exactly its bytes; `ValueError` if they are not a message."""
    buffer = MessageBuffer()
    messages = list(buffer.add(data))
    if len(messages) != 1 or buffer.has_part:
        raise ValueError("these bytes are not one whole message")
    return messages[0]


class MessageBuffer:
    """Puts messages together from the pieces that a stream delivers."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def has_part(self) -> bool:
        """Whether a part of a message has arrived."""
        return bool(self._data)

    def add(self, data: bytes) -> Iterator[Message]:
        """Add bytes; yields the messages that are complete. `ValueError` when the bytes are no message."""
        self._data += data
        while len(self._data) >= _LENGTHS.size:
            header_bytes, payload_bytes = _LENGTHS.unpack_from(self._data)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise ValueError(f"a message of {header_bytes + payload_bytes} bytes is too long")
            payload_start = _LENGTHS.size + header_bytes
            end = payload_start + payload_bytes
            if len(self._data) < end:
                return
            text, payload = bytes(self._data[_LENGTHS.size : payload_start]), bytes(self._data[payload_start:end])
            del self._data[:end]
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("the header of a message is not a JSON object")
            yield Message(header, payload)


@dataclass(frozen=True)
class Reset:
    """Begin a new episode."""

    type: ClassVar[str] = "reset"
    seed: int | None = None
    """None continues with the next seed."""

    def __post_init__(self) -> None:
        if self.seed is not None and (not _is_integer(self.seed) or not 0 <= self.seed < 2**31):
            raise ConfigError("seed", self.seed, "must be a whole number from 0 to 2147483647")


@dataclass(frozen=True)
class SingleStep:
    """Make one step while the play is paused."""

    type: ClassVar[str] = "step"


@dataclass(frozen=True)
class Pause:
    """Stop or continue stepping."""

    type: ClassVar[str] = "pause"
    on: bool

    def __post_init__(self) -> None:
        _check_flag("pause.on", self.on)


@dataclass(frozen=True)
class SetSpeed:
    """Change the pace: 1 is the pace of the environment."""

    type: ClassVar[str] = "speed"
    factor: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        if not is_number or not MIN_SPEED <= self.factor <= MAX_SPEED:
            raise ConfigError("speed.factor", self.factor, f"must lie between {MIN_SPEED} and {MAX_SPEED:g}")


@dataclass(frozen=True)
class SetMode:
    """Choose who acts: a person, an agent, or an agent that a person can override."""

    type: ClassVar[str] = "mode"
    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("mode", self.mode, f"is none of {', '.join(MODES)}")


@dataclass(frozen=True)
class Act:
    """The action of the person: held until the next one, or performed once in environments that wait for a move."""

    type: ClassVar[str] = "act"
    action: Any
    """None releases the controls: then the agent acts in hybrid mode, and nothing or a no-op in human mode."""
    input: int = 0
    """Number of the input; the first step that it affects reports it."""

    def __post_init__(self) -> None:
        fault = _find_action_fault(self.action)
        if fault:
            raise ConfigError("act.action", self.action, fault)
        if not _is_integer(self.input) or not 0 <= self.input < 2**53:
            raise ConfigError("act.input", self.input, "must be a whole number")


@dataclass(frozen=True)
class TakeControl:
    """In hybrid mode, hand control to the person or back to the agent."""

    type: ClassVar[str] = "control"
    by: Actor

    def __post_init__(self) -> None:
        if self.by not in get_args(Actor):
            raise ConfigError("control.by", self.by, "is neither human nor agent")


@dataclass(frozen=True)
class LoadPolicy:
    """Load a policy in the background; the current one acts until it is ready."""

    type: ClassVar[str] = "load_policy"
    checkpoint: str
    """Id of a checkpoint or a prefix of it, a path on the service's machine, or `random`."""
    deterministic: bool = True
    consent: str = ""
    """The digest that `policy` reported, to agree to a load that executes foreign code."""

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint, str) or not 0 < len(self.checkpoint) <= 4096 or "\0" in self.checkpoint:
            raise ConfigError("load_policy.checkpoint", self.checkpoint, "is not the id or path of a checkpoint")
        _check_flag("load_policy.deterministic", self.deterministic)
        if not isinstance(self.consent, str) or len(self.consent) > 64:
            raise ConfigError("load_policy.consent", self.consent, "is not a digest")


@dataclass(frozen=True)
class RemovePolicy:
    """Remove the policy."""

    type: ClassVar[str] = "remove_policy"


@dataclass(frozen=True)
class SetRecording:
    """Start or stop recording; applies from the next episode on."""

    type: ClassVar[str] = "recording"
    on: bool

    def __post_init__(self) -> None:
        _check_flag("recording.on", self.on)


Control: TypeAlias = (
    Reset | SingleStep | Pause | SetSpeed | SetMode | Act | TakeControl | LoadPolicy | RemovePolicy | SetRecording
)
CONTROLS: dict[str, type[Control]] = {kind.type: kind for kind in get_args(Control)}


def encode_control(control: Control) -> bytes:
    """A control as bytes."""
    return pack({"type": control.type} | {field.name: getattr(control, field.name) for field in fields(control)})


def decode_control(data: bytes) -> Control:
    """The control that a client sent; `ConfigError` if it is invalid."""
    if len(data) > MAX_CONTROL_BYTES:
        raise ConfigError("message", f"{len(data)} bytes", f"is longer than {MAX_CONTROL_BYTES} bytes")
    try:
        header_bytes, payload_bytes = _LENGTHS.unpack_from(data)
        if payload_bytes or len(data) != _LENGTHS.size + header_bytes:
            raise ValueError("its lengths do not match")
        header = read_json(data[_LENGTHS.size :])
    except (ValueError, struct.error) as error:
        raise ConfigError("message", data[:40], f"is not a control ({error})") from None
    return control_from_header(header)


def control_from_header(header: Any) -> Control:
    """The control in a header; `ConfigError` if it is invalid."""
    type_ = header.get("type") if isinstance(header, dict) else None
    kind = CONTROLS.get(type_) if isinstance(type_, str) else None
    if kind is None:
        raise ConfigError("message.type", type_, f"is none of {', '.join(CONTROLS)}")
    values = {name: value for name, value in header.items() if name != "type"}
    known = {field.name for field in fields(kind)}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{kind.type}.{name}", values[name], "unknown key", f"Known: {', '.join(sorted(known)) or 'none'}"
            )
    try:
        return kind(**values)
    except TypeError:
        required = {field.name for field in fields(kind) if field.default is MISSING}
        missing = sorted(required - values.keys())
        raise ConfigError(kind.type, sorted(values), f"{', '.join(missing)} is missing") from None


def _find_action_fault(action: object) -> str:
    """Why no environment can perform an action; empty when one might."""
    level: list[object] = [action]
    for _ in range(_MAX_ACTION_DEPTH + 1):
        if any(_is_integer(item) and not -(2**63) <= item < 2**64 for item in level):
            return "holds a number beyond 64 bits"
        level = [part for item in level for part in _list_parts(item)]
        if not level:
            return ""
    return f"is nested deeper than {_MAX_ACTION_DEPTH} levels"


def _list_parts(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_flag(place: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(place, value, "must be true or false")
