"""`Trajectory`: one recorded episode of a model that operates a screen.

A turn holds the pictures of the prompt (by SHA-256), the exact prompt tokens, the sampled tokens, and the
log-probability and policy version of each. Arrays are read-only, and the file contains a digest of everything.

Imports no torch: the run service shows trajectories. What a policy makes of a recorded turn is in `turn_scoring`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from palaestra.errors import ExperienceError
from palaestra.files.atomic import write_bytes

SCHEMA = 3
"""Since 2, turns record the fingerprint of the weights, and rewards are those of the environment. Since 3, episodes
record their source."""
READABLE = (1, 2, 3)
NOT_SAMPLED = -1
"""Version of the tokens of a demonstration, which no policy sampled."""
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
ARRAYS = {"prompt_ids": np.int32, "token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}
"""The arrays of a turn."""


class Source(StrEnum):
    """Origin of the replies of an episode."""

    POLICY = "policy"
    """Sampled by the policy that is trained."""
    DEMONSTRATION = "demonstration"
    """Written from the actions of an oracle or a person. It has no log-probabilities and is never on-policy data."""


class Outcome(StrEnum):
    """How an episode ended."""

    SUCCESS = "success"
    FAILURE = "failure"
    """Not solved: by the verifier, or the model gave up."""
    TRUNCATED = "truncated"
    """The step limit was reached."""
    UNREADABLE = "unreadable"
    """Too many unreadable replies in a row."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The session failed. The episode is not learned from."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One screen and one reply."""

    pictures: tuple[str, ...]
    """SHA-256 of the pictures in the prompt, in order; the last is the current screen."""
    image_sizes: tuple[tuple[int, int], ...]
    """Width and height of each picture in the prompt."""
    prompt_ids: Ints
    token_ids: Ints
    """The sampled tokens, including the end token."""
    log_probs: Floats
    """Of each sampled token, under the distribution it was sampled from."""
    versions: Ints
    """Policy version of each sampled token."""
    text: str
    action: Mapping[str, Any] | None
    """The action read from the text, in screen pixels; None if unreadable."""
    unreadable: str = ""
    """Why it is unreadable."""
    reward: float = 0.0
    """Reward of the environment for this turn; 0 for a reply that was not performed."""
    weights: str = ""
    """Fingerprint of the weights that sampled the tokens; empty if not recorded."""

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

    @property
    def is_demonstration(self) -> bool:
        """Whether a token of it was not sampled by a policy."""
        return bool((self.versions == NOT_SAMPLED).any())

    def facts(self) -> dict[str, Any]:
        """Everything but the arrays, as plain JSON."""
        facts = {name: getattr(self, name) for name in _TURN_FACTS}
        return facts | {"action": None if self.action is None else dict(self.action)}


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode on one screen."""

    episode_id: str
    task: Mapping[str, Any]
    """The resolved task (`TaskSpec.facts()`): name, seed, params, instruction, step limit, screen."""
    turns: tuple[Turn, ...]
    outcome: Outcome
    pictures: Mapping[str, bytes] = field(repr=False)
    """Encoded pictures by SHA-256."""
    reason: str = ""
    """Further explanation of the outcome."""
    group: str = ""
    """Episodes of one group share task, params and seed, and are compared with each other."""
    attempt: int = 0
    """Number of failed sessions of this episode before this one."""
    session_id: str = ""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities include it."""
    codec: str = ""
    last_picture: str = ""
    """The screen after the last action."""
    started_at: float = 0.0
    seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Final details of the verifier."""
    source: Source = Source.POLICY

    def __len__(self) -> int:
        return len(self.turns)

    def total_reward(self) -> float:
        """Sum of the rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> bool:
        """Whether the task was solved, by the verifier."""
        return self.outcome is Outcome.SUCCESS

    @property
    def learnable(self) -> bool:
        """Whether it can be learned from: no environment failure, and at least one turn."""
        return self.outcome is not Outcome.ENVIRONMENT_FAILED and bool(self.turns)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest policy version; (-1, -1) without tokens."""
        versions = [int(version) for turn in self.turns for version in turn.versions]
        return min(versions, default=-1), max(versions, default=-1)

    def facts(self) -> dict[str, Any]:
        """Everything about the episode that is neither an array nor a turn, as plain JSON."""
        facts = {name: getattr(self, name) for name in _EPISODE_FACTS}
        return facts | {
            "task": dict(self.task),
            "detail": dict(self.detail),
            "outcome": self.outcome.value,
            "source": self.source.value,
        }

    def to_bytes(self) -> bytes:
        """Serialise to safetensors bytes with JSON metadata."""
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
        """Deserialise; `ExperienceError` if the bytes are invalid or altered."""
        try:
            length = int.from_bytes(data[:8], "little")
            head = json.loads(data[8 : 8 + length])["__metadata__"]
            facts = json.loads(head["trajectory"])
            arrays = safetensors.numpy.load(data)
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ExperienceError(f"{place} cannot be read as a trajectory ({error}).") from None
        if facts.get("schema") not in READABLE:
            raise ExperienceError(
                f"{place} has schema {facts.get('schema')!r}; this version reads {READABLE[0]} to {READABLE[-1]}. "
                "Use the version of palaestra that wrote it, or a newer one."
            )
        if _digest(arrays, head["trajectory"]) != head.get("digest"):
            raise ExperienceError(f"{place} is not what was written: its digest differs.")
        return _rebuild(facts, arrays)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not synced to disk: there are thousands of files, and the digest detects torn ones.
        write_bytes(path, self.to_bytes(), durable=False)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read a file."""
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
            # Schema 1 stored the learner's penalty for an unreadable reply as the reward.
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
    episode = dict(facts["episode"])
    episode |= {"outcome": Outcome(episode["outcome"]), "source": Source(episode.get("source", Source.POLICY))}
    return Trajectory(turns=tuple(turns), pictures=pictures, **episode)
