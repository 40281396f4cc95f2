"""Trained policies: cards grouped by environment and algorithm, and whether one can act in the chosen environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from palaestra.runs.checkpoints.deploy import Deployment
from palaestra.runs.phase import Phase
from palaestra.runs.play.state import PolicyStatus
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.runner import RunnerCapabilities
from palaestra.studio.model.revision import Revised

Integrity: TypeAlias = Literal["verified", "unchecked", "damaged"]
_VERSION = re.compile(r"-v\d+$")
"""Ends the id of a Gymnasium environment, which may have a namespace as the name of a screen task has."""


@dataclass(frozen=True)
class CheckpointCard:
    """A checkpoint as the user sees it."""

    record: CheckpointRecord
    integrity: Integrity
    is_deployed: bool
    is_newest_success: bool
    """Whether it is the newest checkpoint of a run that succeeded, in its group."""
    mismatch: str = ""
    """Why it cannot act in the chosen environment; empty when it can."""
    can_play: bool = True
    """Whether its trainer's policies can act at all."""

    @property
    def title(self) -> str:
        """Algorithm and steps."""
        algorithm = self.record.agent_id.partition("/")[2] or self.record.agent_id or self.record.format
        return f"{algorithm} · {self.record.step_text} steps" if self.record.env_step is not None else algorithm


@dataclass(frozen=True)
class CheckpointGroup:
    """Cards of one environment and agent."""

    env_id: str
    agent_id: str
    cards: tuple[CheckpointCard, ...]


class CheckpointsModel(Revised):
    """All checkpoints, the one that is chosen, and the one that is being loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = False
        self.chosen = ""
        self.search = ""
        self.curves: dict[str, list[float]] = {}
        """Returns of the run of each checkpoint, for its sparkline, by run id."""
        self.activating: PolicyStatus | None = None
        """The policy that is being loaded into the play, or that has failed."""
        self.acting: PolicyStatus | None = None
        """The policy that acts in the play."""
        self.has_stopped = False
        """Whether the policy that has failed acted before."""
        self._records: tuple[CheckpointRecord, ...] = ()
        self._deployments: dict[str, Deployment] = {}

    def set_all(self, records: Iterable[CheckpointRecord], deployments: Sequence[Deployment]) -> None:
        """The list has arrived."""
        self._records = tuple(records)
        self._deployments = {one.sha256: one for one in deployments}
        self.is_loaded = True
        self.touch()

    def update(self, record: CheckpointRecord) -> None:
        """One checkpoint was verified or imported."""
        others = tuple(one for one in self._records if one.path != record.path)
        self._records = (record, *others)
        self.touch()

    def set_curve(self, run_id: str, returns: Sequence[float]) -> None:
        """The returns of a run have arrived."""
        self.curves[run_id] = list(returns)
        self.touch()

    def choose(self, checkpoint_id: str) -> None:
        """Choose a checkpoint."""
        if checkpoint_id != self.chosen:
            self.chosen = checkpoint_id
            self.touch()

    def set_search(self, text: str) -> None:
        """Filter the cards."""
        if text != self.search:
            self.search = text
            self.touch()

    def set_policies(self, activating: PolicyStatus | None, acting: PolicyStatus | None) -> None:
        """What the play reports about the policy that is being loaded, and the one that acts."""
        if (activating, acting) == (self.activating, self.acting):
            return
        if activating != self.activating:
            previous = self.acting if acting is None else None
            self.has_stopped = (
                activating is not None
                and activating.state == "failed"
                and previous is not None
                and previous.checkpoint == activating.checkpoint
            )
        self.activating, self.acting = activating, acting
        self.touch()

    def get(self, checkpoint_id: str) -> CheckpointRecord | None:
        """A checkpoint by its id."""
        return next((record for record in self._records if record.checkpoint_id == checkpoint_id), None)

    def for_warm_start(self, runner: str, env_id: str) -> list[CheckpointRecord]:
        """The checkpoints of a runner that were trained in an environment, newest first."""
        return sorted(
            (
                record
                for record in self._records
                if record.agent_id.partition("/")[0] == runner and not find_mismatch(record.env_id, env_id)
            ),
            key=lambda record: record.created,
            reverse=True,
        )

    def __len__(self) -> int:
        return len(self._records)

    def groups(
        self, env_id: str, runners: Mapping[str, RunnerCapabilities], runs: Mapping[str, RunRecord]
    ) -> list[CheckpointGroup]:
        """The cards, those for the chosen environment first, newest first in each group."""
        words = self.search.lower().split()
        grouped: dict[tuple[str, str], list[CheckpointRecord]] = {}
        for record in self._records:
            text = f"{record.checkpoint_id} {record.agent_id} {record.env_id} {record.run_id}".lower()
            if all(word in text for word in words):
                grouped.setdefault((record.env_id, record.agent_id), []).append(record)
        groups = []
        for (group_env, agent_id), records in grouped.items():
            records.sort(key=lambda record: record.created, reverse=True)
            success = next((one.path for one in records if _has_succeeded(one, runs)), "")
            runner = runners.get(agent_id.partition("/")[0])
            can_play = runner is None or runner.offline_inference
            cards = tuple(
                CheckpointCard(
                    record,
                    _integrity(record),
                    record.sha256 in self._deployments,
                    record.path == success,
                    find_mismatch(record.env_id, env_id),
                    can_play,
                )
                for record in records
            )
            groups.append(CheckpointGroup(group_env, agent_id, cards))
        return sorted(
            groups,
            key=lambda group: (find_mismatch(group.env_id, env_id) != "", group.env_id, -group.cards[0].record.created),
        )


def find_mismatch(trained: str, chosen: str) -> str:
    """Why a policy that was trained in one environment cannot act in another; empty when it can."""
    one, other = trained.removeprefix("compiled/"), chosen.removeprefix("compiled/")
    if not one or one == other or (_is_screen_task(one) and _is_screen_task(other)):
        return ""  # a model that acts on a screen acts on any screen
    return f"It was trained in {trained}, and {chosen} is chosen."


def _is_screen_task(name: str) -> bool:
    return "/" in name and ":" not in name and not name.startswith("palaestra/") and not _VERSION.search(name)


def _integrity(record: CheckpointRecord) -> Integrity:
    if record.verified is None:
        return "unchecked"
    return "verified" if record.verified >= 0 else "damaged"


def _has_succeeded(record: CheckpointRecord, runs: Mapping[str, RunRecord]) -> bool:
    run = runs.get(record.run_id)
    return run is not None and run.phase is Phase.SUCCEEDED
