"""Putting runs away and bringing them back: directory, row and rows of checkpoints together. Blocks; for threads.

Whatever is interrupted is finished by doing it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from palaestra.errors import ConfigError, IllegalTransition, UnknownRun
from palaestra.files.home import Home
from palaestra.files.run_directory import check_run_id
from palaestra.runs.archive.packing import (
    pack,
    purgeable,
    shorten_log,
    size_of,
    surplus_of,
    throw_away,
    thrown_away,
    undelete,
    unpack,
)
from palaestra.runs.archive.retention import RetentionAction, RetentionPolicy, plan_retention, surplus_checkpoints
from palaestra.runs.checkpoints.catalogue import CheckpointIndex
from palaestra.runs.checkpoints.deploying import in_use
from palaestra.runs.record import RunRecord
from palaestra.runs.store.registry import Registry
from palaestra.runs.video.clip import clips_of, prune

__all__ = ["RunArchive"]


class RunArchive:
    """What is done with runs that have ended, on one state directory."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        catalogue: CheckpointIndex | None,
        policy: RetentionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._home, self._registry, self._catalogue = home, registry, catalogue
        self._policy, self._clock = policy, clock

    def archive(self, record: RunRecord) -> RunRecord:
        """Pack a run."""
        if record.archived:
            return record
        self._check_unused(record)
        return self._put(pack(self._home, record, self._clock()))

    def meant(self, name: str) -> str:
        """The id of the one run that was put away and whose id begins so; the name itself when there is none."""
        away = {run.run_id for run in self._registry.runs(archived=True)} | set(thrown_away(self._home))
        if name in away or self._registry.get(check_run_id(name)) is not None:
            return name
        found = sorted(run_id for run_id in away if run_id.startswith(name))
        if len(found) > 1:
            raise UnknownRun("run", name, "several runs begin so", f"Which of {', '.join(found[:5])}?")
        return found[0] if found else name

    def restore(self, run_id: str) -> RunRecord:
        """Unpack a run, or bring back one that was thrown away, unpacked in either case."""
        record = self._registry.get(check_run_id(run_id))
        if record is None:
            return self._put(undelete(self._home, run_id))
        if not record.archived:
            raise IllegalTransition(f"{run_id} is neither archived nor deleted")
        return self._put(unpack(self._home, record))

    def delete(self, record: RunRecord) -> None:
        """Throw a run away; `restore` brings it back until it is purged."""
        self._check_unused(record)
        throw_away(self._home, record, self._clock())
        self._registry.delete(record.run_id)

    def plan(self, busy: Collection[str]) -> list[RetentionAction]:
        """Everything the retention policy does; runs that somebody looks after, and what is deployed, stay."""
        everything = [*self._registry.runs(), *self._registry.runs(archived=True)]
        free = [run for run in everything if run.run_id not in busy]
        used = in_use(self._home)
        runs = self._home.runs.resolve()
        spared = {path.relative_to(runs).parts[0] for path in used if path.is_relative_to(runs)}
        plan = plan_retention(free, self._policy, self._clock(), spared)
        going = {doom.run_id for doom in plan}
        ended = [run for run in free if run.phase.has_ended and run.supervised and not run.archived]
        staying = [run for run in ended if run.run_id not in going]
        if self._policy.keep_checkpoints is not None:
            deployed = {str(path) for path in used}
            rows = self._registry.checkpoints()
            plan += surplus_checkpoints(staying, rows, self._policy.keep_checkpoints, deployed)
        return [*plan, *(doom for run in staying for doom in self._trimmings(run.run_id)), *self._purges()]

    def carry_out(self, doom: RetentionAction, record: RunRecord) -> None:
        """Do to a run what the plan says."""
        run = self._home.run(record.run_id)
        if doom.action == "archive":
            self.archive(record)
        elif doom.action == "delete":
            self.delete(record)
        elif doom.action == "prune":
            for path in doom.paths:
                _remove(Path(path))
            self._recall(record)
        elif doom.action == "clips":
            prune(run, self._policy.keep_clips or 0)
        elif doom.action == "shorten":
            for attempt in run.attempts():
                shorten_log(attempt.stdout, self._policy.log_mb)

    def purge(self, doom: RetentionAction) -> None:
        """Remove for good what lies in the trash."""
        for path in doom.paths:
            shutil.rmtree(path)

    def _trimmings(self, run_id: str) -> Iterator[RetentionAction]:
        run, keep, log_mb = self._home.run(run_id), self._policy.keep_clips, self._policy.log_mb
        surplus = [] if keep is None else clips_of(run)[keep:]
        if surplus:
            size = sum(clip.size_bytes for clip in surplus)
            paths = tuple(clip.path for clip in surplus)
            yield RetentionAction(run_id, "clips", f"{len(surplus)} clips beyond the newest {keep}", size, paths)
        gone = sum(surplus_of(attempt.stdout, log_mb) for attempt in run.attempts())
        if gone:
            yield RetentionAction(run_id, "shorten", f"an output is longer than {log_mb} MB; its middle goes", gone)

    def _purges(self) -> Iterator[RetentionAction]:
        limit = self._policy.undo_days
        for run_id, path, days in purgeable(self._home, limit, self._clock()):
            why = f"thrown away {days:.0f} days ago; it can be brought back for {limit:g}"
            yield RetentionAction(run_id, "purge", why, size_of(path), (str(path),))

    def _check_unused(self, record: RunRecord) -> None:
        mine = self._home.run(record.run_id).path.resolve()
        for path, now in in_use(self._home).items():
            if path.is_relative_to(mine):
                remedy = (
                    f"palaestra checkpoints deploy {now.checkpoint_id} makes copies that outlive it; then try again"
                )
                raise ConfigError("run", record.run_id, f"{path} is deployed in {now.env_id}, or was before", remedy)

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
