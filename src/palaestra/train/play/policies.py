"""Policies of a play: processes that receive observations and return actions.

A policy process reads messages (`runs.play.protocol`) from standard input and writes them to standard output:

    it writes   {"type": "ready", "observation_space", "action_space", "notes"}, or {"type": "failed", "text", "remedy"}
                a tabular policy adds "q_table" to "ready": action values by state, which plays draw on the cells
    it reads    {"type": "begin", "instruction", "seed"} at the beginning of an episode (no reply)
    it reads    {"type": "act", "arrays": [{"name", "dtype", "shape"}], "action_mask"}, payload: the arrays or a picture
    it writes   {"type": "action", "action", "outputs"}; "chunk": true when the action is a list of actions to perform
                one with several tables adds the "q_table" that it uses when that changes in an episode; null: none

It ends when its standard input is closed. Our own checkpoints act in `own_policy.py`, those of Stable-Baselines3 and
CleanRL in `runs/runners/programs/policy_program.py`; other runners bring a program of their own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from palaestra.runs.play.protocol import Message, MessageBuffer, pack
from palaestra.runs.play.state import PolicyStatus
from palaestra.train.play.environment import PlayEnvironment, PolicyInput
from palaestra.train.play.grid import QTable, read_q_table

_MAX_CHUNK = 1024
_END_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20

Moment: TypeAlias = tuple[int, int]
"""Number of the episode and of the step."""


@dataclass(frozen=True, kw_only=True)
class PolicyCommand:
    """The command of a policy process, as the run service plans it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the worker."""
    cwd: str = ""


class Policy(Protocol):
    """Acts on observations, one at a time."""

    def begin(self, instruction: str, seed: int) -> None:
        """Begin an episode."""

    def ask(self, observation: PolicyInput) -> None:
        """Ask for the next action; `read` returns it later."""

    def read(self) -> Iterator[Message]:
        """The messages that have arrived; `EOFError` when the policy is gone."""

    def fileno(self) -> int:
        """A descriptor that is readable when messages have arrived; -1 if they never wait."""

    def close(self) -> None:
        """End it."""


class PolicyProcess:
    """A policy in a process of its own."""

    def __init__(self, command: PolicyCommand) -> None:
        self._process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **command.environment},
            cwd=Path(command.cwd) if command.cwd else None,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._buffer = MessageBuffer()

    def begin(self, instruction: str, seed: int) -> None:
        """Begin an episode."""
        self._write(pack({"type": "begin", "instruction": instruction, "seed": seed}))

    def ask(self, observation: PolicyInput) -> None:
        """Send an observation."""
        arrays = [
            {"name": name, "dtype": array.dtype.str, "shape": list(array.shape)}
            for name, array in observation.arrays.items()
        ]
        payload = b"".join(np.ascontiguousarray(array).tobytes() for array in observation.arrays.values())
        header = {"type": "act", "arrays": arrays, "action_mask": observation.action_mask}
        self._write(pack(header, payload or observation.picture))

    def read(self) -> Iterator[Message]:
        """The messages that have arrived."""
        data = os.read(self._output.fileno(), _READ_BYTES)
        if not data:
            raise EOFError(self._describe_end())
        try:
            yield from self._buffer.add(data)
        except ValueError as error:
            raise EOFError(f"the policy process sent something else than messages ({error})") from None

    def fileno(self) -> int:
        """Its output."""
        return self._output.fileno()

    def close(self) -> None:
        """Close its input, and kill it if it does not end."""
        with contextlib.suppress(OSError):
            self._input.close()
        self._output.close()
        # It has nothing to save; while it loads it would notice the closed input only at the end.
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)

    def _write(self, data: bytes) -> None:
        # A broken pipe means that the process is gone; reading its output then reports the end.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(data)
            self._input.flush()

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the policy process closed its output"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the policy process {how}"


class ActingPolicy:
    """A policy that is asked about one observation at a time, and its answer to the current one."""

    def __init__(self, policy: Policy, status: PolicyStatus) -> None:
        self.policy, self.status = policy, status
        self.outputs: dict[str, Any] = {}
        self.own_table: QTable | None = None
        """Values of actions by state, of policies with one table."""
        self.q_table: QTable | None = None
        """The table that is in use at this moment."""
        self._asked_at: Moment | None = None
        self._answer: list[Any] = []
        """The action for the current observation, followed by the rest of its chunk; empty until it has arrived."""

    @property
    def has_answer(self) -> bool:
        """Whether the action for the current observation is known."""
        return bool(self._answer)

    def begin(self, instruction: str, seed: int) -> None:
        """Begin an episode."""
        self.discard()
        self.q_table = self.own_table
        self.policy.begin(instruction, seed)

    def ask(self, now: Moment, observation: Callable[[], PolicyInput]) -> None:
        """Ask about the observation at a moment, unless its answer is known or another answer is on its way."""
        if not self._answer and self._asked_at is None:
            self._asked_at = now
            self.policy.ask(observation())

    def accept(self, message: Message, now: Moment) -> bool:
        """Take an answer; False if it is about an observation that has passed."""
        asked_at, self._asked_at = self._asked_at, None
        # An answer that is too late for its step still says which table the policy uses in this episode.
        if "q_table" in message.header and asked_at is not None and asked_at[0] == now[0]:
            self.q_table = read_q_table(message.header["q_table"])
        if asked_at != now:
            return False
        action = message.header.get("action")
        is_chunk = message.header.get("chunk") is True and isinstance(action, list) and action
        self._answer = list(action)[:_MAX_CHUNK] if is_chunk and action is not None else [action]
        outputs = message.header.get("outputs")
        self.outputs = dict(outputs) if isinstance(outputs, dict) else {}
        return True

    def take(self) -> Any:
        """The action for the current observation. The rest of its chunk answers the next ones."""
        return self._answer.pop(0)

    def discard(self) -> None:
        """Forget the answer: a person acted instead, or the episode ended."""
        self._answer.clear()


class RandomPolicy:
    """Random actions, without a process."""

    def __init__(self, environment: PlayEnvironment) -> None:
        self._environment = environment
        self._replies: list[Message] = [Message({"type": "ready"})]

    def begin(self, instruction: str, seed: int) -> None:
        """Nothing to do: the environment seeds its random actions."""

    def ask(self, observation: PolicyInput) -> None:
        """Draw an action."""
        self._replies.append(Message({"type": "action", "action": self._environment.random_action()}))

    def read(self) -> Iterator[Message]:
        """The action that was asked for."""
        replies, self._replies = self._replies, []
        yield from replies

    def fileno(self) -> int:
        """-1: replies never wait."""
        return -1

    def close(self) -> None:
        """Nothing to do."""


def read_arrays(message: Message) -> dict[str, Any]:
    """The arrays in a message to a policy."""
    arrays, offset = {}, 0
    for entry in message.header.get("arrays") or ():
        kind, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        arrays[str(entry["name"])] = np.frombuffer(message.payload, kind, count, offset).reshape(shape)
        offset += count * kind.itemsize
    return arrays


def command_from_json(data: Mapping[str, Any]) -> PolicyCommand:
    """The command in a message of the run service."""
    argv: Sequence[Any] = data["argv"]
    return PolicyCommand(
        argv=tuple(map(str, argv)), environment=dict(data.get("environment") or {}), cwd=str(data.get("cwd") or "")
    )
