"""`Trajectory`: one episode of a model that operates a screen, with proof of where every token came from.

A turn is one look and one answer: the pictures it was shown (by their SHA-256), the exact prompt token ids, the tokens
it sampled, the log-probability and the policy version of each. Learning reads these and re-tokenises nothing. What is
recorded cannot be edited: arrays are read-only, and a digest over everything is kept in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from palaestra.errors import ExperienceError
from palaestra.files.atomic import write_bytes

__all__ = ["SCHEMA", "Outcome", "Trajectory", "Turn"]

SCHEMA = 2
"""2: turns name the weights they were drawn from, and rewards are what the environment paid and nothing else."""
READABLE = (1, 2)
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


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
        for name, kind in (
            ("prompt_ids", np.int32), ("token_ids", np.int32), ("log_probs", np.float32), ("versions", np.int32),
        ):  # fmt: skip
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
        found = [int(version) for turn in self.turns for version in turn.versions]
        return (min(found), max(found)) if found else (-1, -1)

    def to_bytes(self) -> bytes:
        """One self-contained document: tensors and JSON, no code."""
        arrays = dict(self._arrays())
        written = json.dumps(asdict(_Facts.of(self)), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
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
        return _rebuilt(facts, arrays)

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not synced: there are thousands, and a torn one is found out by its digest.
        write_bytes(path, self.to_bytes(), durable=False)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read it back."""
        return cls.from_bytes(path.read_bytes(), place=str(path))

    def _arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name in ("prompt_ids", "token_ids", "log_probs", "versions"):
            parts = [getattr(turn, name) for turn in self.turns]
            yield name, np.concatenate(parts) if parts else np.zeros(0, np.float32)
        for sha, data in sorted(self.pictures.items()):
            yield f"picture.{sha}", np.frombuffer(data, np.uint8)


@dataclass(frozen=True)
class _Facts:
    """Everything about a trajectory that is not an array."""

    schema: int
    episode: dict[str, Any]
    turns: list[dict[str, Any]]

    @classmethod
    def of(cls, trajectory: Trajectory) -> _Facts:
        episode = {
            name: getattr(trajectory, name)
            for name in (
                "episode_id", "reason", "group", "attempt", "session_id", "temperature", "codec", "last_picture",
                "started_at", "seconds",
            )
        }  # fmt: skip
        episode |= {
            "task": dict(trajectory.task), "detail": dict(trajectory.detail), "outcome": trajectory.outcome.value,
        }  # fmt: skip
        turns = [
            {
                "pictures": turn.pictures, "image_sizes": turn.image_sizes, "text": turn.text,
                "action": None if turn.action is None else dict(turn.action), "unreadable": turn.unreadable,
                "reward": turn.reward, "weights": turn.weights, "prompt": len(turn.prompt_ids),
                "tokens": len(turn.token_ids),
            }
            for turn in trajectory.turns
        ]  # fmt: skip
        return cls(SCHEMA, episode, turns)


def _digest(arrays: Mapping[str, npt.NDArray[Any]], facts: str) -> str:
    total = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        total.update(name.encode())
        total.update(np.ascontiguousarray(arrays[name]).tobytes())
    return total.hexdigest()


def _rebuilt(facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Trajectory:
    turns, prompt, token = [], 0, 0
    for known in facts["turns"]:
        known = dict(known)
        if facts["schema"] == 1 and known["action"] is None:
            # Schema 1 wrote the learner's penalty for an unreadable reply where the environment's reward belongs.
            known["reward"] = 0.0
        prompt_end, token_end = prompt + known.pop("prompt"), token + known.pop("tokens")
        turns.append(
            Turn(
                pictures=tuple(known.pop("pictures")), image_sizes=_pairs(known.pop("image_sizes")),
                prompt_ids=arrays["prompt_ids"][prompt:prompt_end], token_ids=arrays["token_ids"][token:token_end],
                log_probs=arrays["log_probs"][token:token_end], versions=arrays["versions"][token:token_end], **known,
            )
        )  # fmt: skip
        prompt, token = prompt_end, token_end
    pictures = {
        name.removeprefix("picture."): data.tobytes() for name, data in arrays.items() if name.startswith("picture.")
    }
    episode = dict(facts["episode"])
    return Trajectory(
        turns=tuple(turns), pictures=pictures, outcome=Outcome(episode.pop("outcome")), **episode
    )  # fmt: skip


def _pairs(sizes: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(width), int(height)) for width, height in sizes)
