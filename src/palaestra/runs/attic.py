"""Putting runs away and bringing them back: directory, row and rows of checkpoints together. Blocks; for threads.

Whatever is interrupted is finished by doing it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from palaestra.errors import IllegalTransition
from palaestra.runs.archiving import pack, purge, shorten_log, throw_away, undelete, unpack
from palaestra.runs.layout import Home
from palaestra.runs.media.clip import prune
from palaestra.runs.record import RunRecord
from palaestra.runs.retention import Doom, RetentionPolicy, doomed, surplus_checkpoints
from palaestra.runs.run_id import checked_run_id
from palaestra.runs.store.registry import Registry

__all__ = ["Attic"]


class _Catalogue(Protocol):
    def recall(self, home: Home, run: RunRecord) -> None:
        """Make the rows of a run's checkpoints follow what lies there now."""


class Attic:
    """What is done with runs that have ended, on one state directory."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        catalogue: _Catalogue | None,
        policy: RetentionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._home, self._registry, self._catalogue = home, registry, catalogue
        self._policy, self._clock = policy, clock

    def archive(self, record: RunRecord) -> RunRecord:
        """Pack a run."""
        return record if record.archived else self._put(pack(self._home, record, self._clock()))

    def restore(self, run_id: str) -> RunRecord:
        """Unpack a run, or bring back one that was thrown away, unpacked in either case."""
        record = self._registry.get(checked_run_id(run_id))
        if record is None:
            return self._put(undelete(self._home, run_id))
        if not record.archived:
            raise IllegalTransition(f"{run_id} is neither archived nor deleted")
        return self._put(unpack(self._home, record))

    def delete(self, record: RunRecord) -> None:
        """Throw a run away; `restore` brings it back until it is purged."""
        throw_away(self._home, record, self._clock())
        self._registry.delete(record.run_id)

    def plan(self, busy: Collection[str]) -> list[Doom]:
        """What the retention policy does away with; runs that somebody looks after stay."""
        everything = [*self._registry.runs(), *self._registry.runs(archived=True)]
        free = [run for run in everything if run.run_id not in busy]
        plan = doomed(free, self._policy, self._clock())
        going = {doom.run_id for doom in plan}
        if self._policy.keep_checkpoints is None:
            return plan
        staying = [run for run in free if run.run_id not in going and not run.archived]
        rows = self._registry.checkpoints()
        return plan + surplus_checkpoints(staying, rows, self._policy.keep_checkpoints)

    def carry_out(self, doom: Doom, record: RunRecord) -> None:
        """Do to a run what the plan says."""
        if doom.action == "prune":
            for path in doom.paths:
                _remove(Path(path))
            self._recall(record)
        elif doom.action == "archive":
            self.archive(record)
        else:
            self.delete(record)

    def tidy(self) -> None:
        """Shorten long outputs and remove old clips of runs that have ended; empty the trash of what is old."""
        for record in self._registry.runs():
            if record.phase.ended and record.supervised:
                self._tidy(record.run_id)
        purge(self._home, self._policy.undo_days, self._clock())

    def _tidy(self, run_id: str) -> None:
        run = self._home.run(run_id)
        for attempt in run.attempts():
            shorten_log(attempt.stdout, self._policy.log_mb)
        if self._policy.keep_clips is not None:
            prune(run, self._policy.keep_clips)

    def _put(self, record: RunRecord) -> RunRecord:
        self._registry.put(record)
        self._recall(record)
        return record

    def _recall(self, record: RunRecord) -> None:
        if self._catalogue is not None:
            self._catalogue.recall(self._home, record)


def _remove(checkpoint: Path) -> None:
    if checkpoint.is_dir():
        shutil.rmtree(checkpoint, ignore_errors=True)
    else:
        checkpoint.unlink(missing_ok=True)
