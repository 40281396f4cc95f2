"""`Trajectory`: one episode of a model that operates a screen, with proof of where every token came from.

A turn is one look and one answer: the pictures it was shown (by their SHA-256), the exact prompt token ids, the tokens
it sampled, the log-probability and the policy version of each. What is recorded cannot be edited: arrays are read-only,
and a digest over everything is kept in the file.

The policy and the learner stand in different layers and meet here: the learner asks about a recorded turn
(`TurnInput`), the policy answers for exactly its tokens (`TokenLogProbs`, `ParsedReply`). Nothing is re-tokenised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from palaestra.errors import ExperienceError
from palaestra.files.atomic import write_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SCHEMA", "Outcome", "ParsedReply", "TokenLogProbs", "Trajectory", "Turn", "TurnInput", "turn_inputs"]

SCHEMA = 2
"""2: turns name the weights they were drawn from, and rewards are what the environment paid and nothing else."""
READABLE = (1, 2)
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
ARRAYS = {"prompt_ids": np.int32, "token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}
"""The arrays of a turn."""


class Outcome(StrEnum):
    """How an episode ended."""

    SUCCESS = "success"
    FAILURE = "failure"
    """Over, and not solved: the verifier's word, or the model gave up."""
    TRUNCATED = "truncated"
    """The step limit was reached."""
    UNREADABLE = "unreadable"
    """The model's text could not be read as an action too many times."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The screen broke. Nothing can be learned from it, and it is no reward."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One look at the screen and one answer to it."""

    pictures: tuple[str, ...]
    """SHA-256 of the pictures in the prompt, in its order; the last one is the screen as it was."""
    image_sizes: tuple[tuple[int, int], ...]
    """Width and height at which the model saw each of them."""
    prompt_ids: Ints
    token_ids: Ints
    """What was sampled, the end token included."""
    log_probs: Floats
    """Of each sampled token, under the distribution it was drawn from."""
    versions: Ints
    """Which weights each of them was drawn from."""
    text: str
    action: Mapping[str, Any] | None
    """What the text was understood as, in screen pixels; None when it could not be read."""
    unreadable: str = ""
    """Why it could not be read."""
    reward: float = 0.0
    """What the environment paid for this turn, never edited; 0 for a reply that was not performed."""
    weights: str = ""
    """Fingerprint of the weights that the tokens were drawn from; empty when it was not recorded."""

    def __post_init__(self) -> None:
        for name, kind in ARRAYS.items():
            array = np.array(getattr(self, name), kind)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"a turn with {len(self.token_ids)} tokens, {len(self.log_probs)} log-probabilities and "
                f"{len(self.versions)} versions: every token needs one of each"
            )
        if len(self.pictures) != len(self.image_sizes):
            raise ValueError(f"{len(self.pictures)} pictures and {len(self.image_sizes)} sizes")
        if (self.action is None) != bool(self.unreadable):
            raise ValueError("a turn has an action, or the reason why it has none")

    def facts(self) -> dict[str, Any]:
        """Everything but the arrays, as plain JSON."""
        facts = {name: getattr(self, name) for name in _TURN_FACTS}
        return facts | {"action": None if self.action is None else dict(self.action)}


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode on one screen."""

    episode_id: str
    task: Mapping[str, Any]
    """The task with everything decided (`TaskSpec.facts()`): name, seed, params, instruction, step limit, screen."""
    turns: tuple[Turn, ...]
    outcome: Outcome
    pictures: Mapping[str, bytes] = field(repr=False)
    """Every picture once, encoded as it came from the screen, by its SHA-256."""
    reason: str = ""
    """Why it ended so, when there is more to say than the outcome."""
    group: str = ""
    """Episodes of one group share task, params and seed, and are compared with each other."""
    attempt: int = 0
    """How many sessions broke under this episode before this one."""
    session_id: str = ""
    temperature: float = 1.0
    """What the tokens were sampled at; log-probabilities are of that distribution."""
    codec: str = ""
    last_picture: str = ""
    """The screen after the last action."""
    started_at: float = 0.0
    seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What the verifier had to say in the end."""

    def __len__(self) -> int:
        return len(self.turns)

    def total_reward(self) -> float:
        """Everything the environment paid."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> bool:
        """Whether the verifier said so."""
        return self.outcome is Outcome.SUCCESS

    @property
    def learnable(self) -> bool:
        """Whether anything can be learned from it: the screen held, and the model said something."""
        return self.outcome is not Outcome.ENVIRONMENT_FAILED and bool(self.turns)

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest weights that acted; (-1, -1) when none did."""
        versions = [int(version) for turn in self.turns for version in turn.versions]
        return min(versions, default=-1), max(versions, default=-1)

    def facts(self) -> dict[str, Any]:
        """Everything about the episode that is neither an array nor a turn, as plain JSON."""
        facts = {name: getattr(self, name) for name in _EPISODE_FACTS}
        return facts | {"task": dict(self.task), "detail": dict(self.detail), "outcome": self.outcome.value}

    def to_bytes(self) -> bytes:
        """One self-contained document: tensors and JSON, no code."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in ARRAYS:
            parts = [getattr(turn, name) for turn in self.turns]
            arrays[name] = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        arrays |= {f"picture.{sha}": np.frombuffer(data, np.uint8) for sha, data in sorted(self.pictures.items())}
        turns = [turn.facts() | {"prompt": len(turn.prompt_ids), "tokens": len(turn.token_ids)} for turn in self.turns]
        facts = {"schema": SCHEMA, "episode": self.facts(), "turns": turns}
        written = json.dumps(facts, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        return safetensors.numpy.save(arrays, {"trajectory": written, "digest": _digest(arrays, written)})

    @classmethod
    def from_bytes(cls, data: bytes, *, place: str = "a trajectory") -> Trajectory:
        """The trajectory in these bytes; `ExperienceError` when it is not what was written."""
        try:
            length = int.from_bytes(data[:8], "little")
            head = json.loads(data[8 : 8 + length])["__metadata__"]
            facts = json.loads(head["trajectory"])
            arrays = safetensors.numpy.load(data)
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ExperienceError(f"{place} is no trajectory ({error}).") from None
        if facts.get("schema") not in READABLE:
            raise ExperienceError(
                f"{place} has schema {facts.get('schema')!r}; this version reads {' and '.join(map(str, READABLE))}. "
                "Use the version of palaestra that wrote it, or a newer one."
            )
        if _digest(arrays, head["trajectory"]) != head.get("digest"):
            raise ExperienceError(f"{place} is not what was written: its digest differs.")
        return _rebuild(facts, arrays)

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not synced: there are thousands, and a torn one is found out by its digest.
        write_bytes(path, self.to_bytes(), durable=False)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read it back."""
        return cls.from_bytes(path.read_bytes(), place=str(path))


_TURN_FACTS = "pictures image_sizes text action unreadable reward weights".split()
_EPISODE_FACTS = "episode_id reason group attempt session_id temperature codec last_picture started_at seconds".split()


def _digest(arrays: Mapping[str, npt.NDArray[Any]], facts: str) -> str:
    total = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        total.update(name.encode())
        total.update(np.ascontiguousarray(arrays[name]).tobytes())
    return total.hexdigest()


def _rebuild(facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Trajectory:
    turns, prompt, token = [], 0, 0
    for turn in facts["turns"]:
        if facts["schema"] == 1 and turn["action"] is None:
            # Schema 1 wrote the learner's penalty for an unreadable reply where the environment's reward belongs.
            turn["reward"] = 0.0
        rows = {"prompt_ids": slice(prompt, prompt + turn.pop("prompt"))}
        rows |= dict.fromkeys(("token_ids", "log_probs", "versions"), slice(token, token + turn.pop("tokens")))
        turn["pictures"] = tuple(turn["pictures"])
        turn["image_sizes"] = tuple((int(width), int(height)) for width, height in turn["image_sizes"])
        turn |= {name: arrays[name][part] for name, part in rows.items()}
        turns.append(Turn(**turn))
        prompt, token = rows["prompt_ids"].stop, rows["token_ids"].stop
    pictures = {
        name.removeprefix("picture."): data.tobytes() for name, data in arrays.items() if name.startswith("picture.")
    }
    episode = facts["episode"] | {"outcome": Outcome(facts["episode"]["outcome"])}
    return Trajectory(turns=tuple(turns), pictures=pictures, **episode)


@dataclass(frozen=True, eq=False)
class TurnInput:
    """One recorded turn with everything needed to compute its log-probabilities again."""

    turn: Turn
    pictures: Mapping[str, bytes] = field(repr=False)
    """Encoded pictures by SHA-256; at least those that the turn names."""
    temperature: float = 1.0
    """What the tokens were sampled at."""


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """What a policy says about the sampled tokens of B turns, the longest of which has G."""

    log_probs: Tensor
    """`[B, G]` of the recorded token ids, at the temperature they were sampled at; 0 where padded."""
    mask: Tensor
    """`[B, G]` bool: True where there is a token, from the left."""
    entropy: Tensor | None = None
    """`[B, G]` nats, of the distribution each token was drawn from; 0 where padded. None unless asked for."""
    values: Tensor | None = None
    """`[B]`, read at the last prompt token. None unless asked for."""


class ParsedReply(NamedTuple):
    """What the tokens of a recorded turn mean to a policy."""

    text: str
    action: Mapping[str, Any] | None
    """As `Turn.action`; None when the text is no action."""
    image_size: tuple[int, int]
    """Width and height at which this model sees the screen that the turn answers."""


def turn_inputs(trajectory: Trajectory) -> list[TurnInput]:
    """The turns of an episode, in order, each with the pictures of the whole."""
    return [TurnInput(turn, trajectory.pictures, trajectory.temperature) for turn in trajectory.turns]
