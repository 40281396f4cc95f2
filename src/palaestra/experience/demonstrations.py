"""Demonstrations: episodes of an oracle or a person, in the tokens of one model, to be imitated.

    DIR/demonstrations.json                       the prompt format of the model, and where the episodes come from
        00000001_<episode>.safetensors, index.jsonl   a trajectory archive

A directory belongs to one prompt format (tokenizer, chat template, codec, picture rule, history); another model refuses
it, because its prompts and replies would be other tokens. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from palaestra.config import Section
from palaestra.errors import CheckpointError, ConfigError, ExperienceError
from palaestra.experience.trajectory import Source, Trajectory
from palaestra.experience.trajectory_archive import TrajectoryArchive, TrajectoryEntry
from palaestra.files.atomic import read_json, write_json

MANIFEST = "demonstrations.json"
SCHEMA = 1


class DemonstrationsConfig(Section):
    """Demonstrations to imitate: alone (`algorithm.name: supervised`), or beside the episodes that are played."""

    path: Path | None = None
    """Directory that `palaestra demos record` or `demos import` wrote. null: none."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks whose demonstrations are used; empty: all."""
    share: float = Field(default=0.25, ge=0, le=0.9)
    """Share of demonstrations in an update beside `trainer.batch_size` episodes: 0.25 adds one for every three. No
    effect with `supervised`, which learns from nothing else."""
    weight: float = Field(default=0.1, ge=0, le=1e6)
    """Weight of the mean cross entropy of demonstrated tokens in the loss of a policy gradient (`grpo`, `ppo`). No
    effect with algorithms that imitate: there a demonstration counts as much as an accepted episode."""

    @field_validator("path")
    @classmethod
    def _make_absolute(cls, path: Path | None) -> Path | None:
        # A run may be resumed from another working directory.
        return None if path is None else path.expanduser().absolute()

    def count_per_update(self, batch_size: int) -> int:
        """Demonstrations in an update beside `batch_size` episodes; at least one unless the share is 0."""
        if self.path is None or self.share == 0:
            return 0
        return max(1, round(batch_size * self.share / (1 - self.share)))


class Demonstrations:
    """A directory of demonstrations."""

    def __init__(self, path: Path, *, tasks: Sequence[str] = (), place: str = "demonstrations.path") -> None:
        """`tasks`: use only the demonstrations of these tasks. `place`: where the path is from, for messages."""
        self.path, self.manifest = path, _read_manifest(path, place)
        archive = TrajectoryArchive(path)
        try:
            entries = archive.entries()
        except OSError as error:
            raise ConfigError(place, str(path), f"cannot be read ({error.strerror})") from None
        self.damaged = {path / name: reason.removeprefix(f"{path / name} ") for name, reason in archive.damaged.items()}
        """Files that cannot be read, and the reasons. They are not among the demonstrations."""
        missing = [name for name in tasks if all(entry.task != name for entry in entries)]
        if missing:
            names = ", ".join(sorted({entry.task for entry in entries})) or "none"
            raise ConfigError("demonstrations.tasks", missing[0], "no demonstration of it", f"There are: {names}")
        self.entries = [entry for entry in entries if not tasks or entry.task in tasks]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def prompt_format(self) -> dict[str, Any]:
        """The prompt format of the model that they were written for."""
        return dict(self.manifest["prompt_format"])

    @property
    def about(self) -> dict[str, Any]:
        """Further facts of the manifest, such as the source and the model."""
        facts = self.manifest.get("about")
        return dict(facts) if isinstance(facts, dict) else {}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the prompt format."""
        return format_fingerprint(self.prompt_format)

    def check_format(self, own: Mapping[str, Any]) -> None:
        """`ConfigError` if a model with the prompt format `own` would see or write other tokens."""
        difference = find_format_difference(self.prompt_format, own)
        if difference:
            remedy = "Record or import them again with this configuration, or use the model they were made for"
            raise ConfigError("demonstrations.path", str(self.path), difference, remedy)

    def count_tasks(self) -> dict[str, int]:
        """Number of demonstrations of each task."""
        return dict(sorted(Counter(entry.task for entry in self.entries).items()))

    def load(self, entry: TrajectoryEntry) -> Trajectory:
        """A demonstration; `ExperienceError` if its file is damaged or holds a sampled episode."""
        file, remedy = self.path / entry.file, "Restore the file, or delete it and start a new run."
        try:
            trajectory = Trajectory.load(file)
        except OSError as error:
            raise ExperienceError(f"demonstration {file} cannot be read ({error.strerror}). {remedy}") from None
        except ExperienceError as error:
            raise ExperienceError(f"{error} {remedy}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ExperienceError(f"demonstration {file} holds wrong values ({error}). {remedy}") from None
        if trajectory.source is not Source.DEMONSTRATION:
            raise ExperienceError(f"{file} is not a demonstration: a policy sampled it.")
        return trajectory


class DemonstrationWriter:
    """Adds demonstrations to a directory, which is created if it does not exist."""

    def __init__(self, path: Path, prompt_format: Mapping[str, Any], *, about: Mapping[str, Any] | None = None) -> None:
        """`about`: further facts for the manifest of a new directory, as plain JSON."""
        own = json.loads(json.dumps(prompt_format))
        try:
            if (path / MANIFEST).exists():
                present = Demonstrations(path, place="--output")
                difference = find_format_difference(present.prompt_format, own)
                if difference:
                    raise ConfigError("--output", str(path), difference, "Name a new directory")
                if not os.access(path, os.W_OK):
                    raise ConfigError("--output", str(path), "cannot be written", "Name a new directory")
            elif path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ConfigError("--output", str(path), "exists and holds no demonstrations", "Name a new directory")
            else:
                path.mkdir(parents=True, exist_ok=True)
                document = {"schema": SCHEMA, "prompt_format": own, "fingerprint": format_fingerprint(own)}
                write_json(path / MANIFEST, {**document, "about": dict(about or {})})
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise ConfigError("--output", str(path), reason, "Name another directory") from None
        self._archive = TrajectoryArchive(path)

    def add(self, trajectory: Trajectory) -> TrajectoryEntry:
        """Add a demonstration; `ExperienceError` for a sampled episode and for one without turns."""
        is_demonstration = trajectory.source is Source.DEMONSTRATION
        if not is_demonstration or not trajectory.turns or not all(turn.is_demonstration for turn in trajectory.turns):
            raise ExperienceError(f"episode {trajectory.episode_id} is not a demonstration.")
        try:
            return self._archive.append(trajectory)
        except OSError as error:
            text = f"{self._archive.directory} cannot be written ({error.strerror})."
            raise ExperienceError(f"{text} What was written before is kept; repeat the command to add more.") from None


class DemonstrationSampler:
    """Draws demonstrations in epochs, each in an order of its own that follows from the seed."""

    def __init__(self, demonstrations: Demonstrations, *, seed: int) -> None:
        if not len(demonstrations):
            remedy = "Record some: palaestra demos record CONFIG --episodes 100 --output DIR"
            raise ConfigError("demonstrations.path", str(demonstrations.path), "holds no demonstration", remedy)
        self.demonstrations = demonstrations
        self._entries = {entry.file: entry for entry in demonstrations.entries}
        self._seed, self._epoch = seed, 0
        self._remaining = self._shuffle()

    @property
    def epochs(self) -> float:
        """How often all demonstrations were drawn, with the fraction of the present epoch."""
        return self._epoch + 1 - len(self._remaining) / len(self._entries)

    def draw(self, count: int) -> list[Trajectory]:
        """The next `count` demonstrations. One repeats only after all others were drawn."""
        drawn = []
        for _ in range(count):
            if not self._remaining:
                self._epoch += 1
                self._remaining = self._shuffle()
            drawn.append(self.demonstrations.load(self._entries[self._remaining.pop(0)]))
        return drawn

    def state(self) -> dict[str, Any]:
        """The position as plain JSON."""
        return {"epoch": self._epoch, "remaining": list(self._remaining)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; demonstrations that were added since then belong to the next epochs."""
        remaining = [str(name) for name in state["remaining"]]
        missing = [name for name in remaining if name not in self._entries]
        if missing:
            reason = f"the checkpoint continues with {missing[0]}, which is not among the demonstrations"
            remedy = "Restore the directory, or start a new run with --warm-start"
            raise CheckpointError("demonstrations.path", str(self.demonstrations.path), reason, remedy)
        self._epoch, self._remaining = int(state["epoch"]), remaining

    def _shuffle(self) -> list[str]:
        order = sorted(self._entries)
        random.Random(f"demonstrations {self._seed} {self._epoch}").shuffle(order)
        return order


def _read_manifest(path: Path, place: str) -> dict[str, Any]:
    manifest = read_json(path / MANIFEST)
    if manifest is None and (path / MANIFEST).is_file():
        remedy = "Restore the file, or record the demonstrations again in a new directory"
        raise ConfigError(place, str(path), f"its {MANIFEST} cannot be read", remedy)
    if manifest is None:
        remedy = "Check the path, or record some: palaestra demos record CONFIG --episodes 100 --output DIR"
        raise ConfigError(place, str(path), f"holds no {MANIFEST}", remedy)
    if manifest.get("schema") != SCHEMA:
        reason = f"its manifest has schema {manifest.get('schema')!r}; this version reads {SCHEMA}"
        raise ConfigError(place, str(path), reason, "Record the demonstrations again")
    if not isinstance(manifest.get("prompt_format"), dict):
        raise ConfigError(place, str(path), "its manifest has no prompt format", "Record the demonstrations again")
    return manifest


def format_fingerprint(prompt_format: Mapping[str, Any]) -> str:
    """SHA-256 of a prompt format."""
    return hashlib.sha256(json.dumps(prompt_format, sort_keys=True).encode()).hexdigest()


def find_format_difference(written: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The first key in which two prompt formats differ, as a reason; empty if they are the same."""
    own = json.loads(json.dumps(own))
    for key in sorted({*written, *own}):
        if written.get(key) != own.get(key):
            values = (_abbreviate(written.get(key)), _abbreviate(own.get(key)))
            return f"was made for another {key.replace('_', ' ')} ({values[0]}; this configuration has {values[1]})"
    return ""


def _abbreviate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}…"
