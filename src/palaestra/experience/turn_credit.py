"""What the learner made of recorded episodes: the advantage and the value of each turn.

    trajectories/learned.jsonl      beside the trajectories of an attempt: one line per episode of each update

Advantages exist only after the episodes of a batch are compared, when the trajectories are already on disk and never
change. Training appends to this file, and viewers join it with the trajectories by episode id. A damaged line is
skipped: the file explains an update and is never read back by training. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.files.atomic import write_bytes

FILE = "learned.jsonl"


@dataclass(frozen=True)
class EpisodeCredit:
    """An episode in one update."""

    episode_id: str
    version: int
    """Version of the weights after the update."""
    advantages: tuple[float | None, ...]
    """Of each turn, as used in the loss; None for a turn that was not learned from."""
    values: tuple[float | None, ...]
    """Of each turn, as predicted before the update; None if the algorithm has no value."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, rounded to four digits after the point."""
        return {
            "episode_id": self.episode_id,
            "version": self.version,
            "advantages": [_round(number) for number in self.advantages],
            "values": [_round(number) for number in self.values],
        }

    @classmethod
    def from_json(cls, facts: Any) -> EpisodeCredit:
        """The record from JSON; KeyError, TypeError or ValueError if it is invalid."""
        advantages, values = (
            tuple(None if number is None else float(number) for number in facts[name])
            for name in ("advantages", "values")
        )
        return cls(str(facts["episode_id"]), int(facts["version"]), advantages, values)


def append_credits(directory: Path, credits: Sequence[EpisodeCredit]) -> None:
    """Append the episodes of an update, with one write."""
    lines = [json.dumps(credit.to_json(), separators=(",", ":")) for credit in credits]
    if lines:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / FILE).open("ab") as file:
            file.write("\n".join([*lines, ""]).encode())


def read_credits(directory: Path) -> dict[str, EpisodeCredit]:
    """The last record of each episode, by episode id; empty without a file."""
    credits: dict[str, EpisodeCredit] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for line in (directory / FILE).read_bytes().splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                credit = EpisodeCredit.from_json(json.loads(line))
                credits[credit.episode_id] = credit
    return credits


def keep_credits(directory: Path, episode_ids: Iterable[str]) -> None:
    """Remove the records of all other episodes, so that the file does not outgrow the archive."""
    credits, kept = read_credits(directory), set(episode_ids)
    remaining = [credit for name, credit in credits.items() if name in kept]
    if len(remaining) < len(credits):
        lines = [json.dumps(credit.to_json(), separators=(",", ":")) + "\n" for credit in remaining]
        write_bytes(directory / FILE, "".join(lines).encode(), durable=False)


def _round(number: float | None) -> float | None:
    return round(number, 4) if number is not None and math.isfinite(number) else None
