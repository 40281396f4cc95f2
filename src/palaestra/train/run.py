"""The training loop of every run, and what happens around each update.

`run_updates` is the loop: next batch, update, publish, release. `train` puts a run around it: everything that can be
refused is refused before the run directory exists; after that every update is in the journal, evaluations and
checkpoints happen on time, and an interruption or a failure leaves the last good state on disk. What a run trains on
and with, `palaestra.train.vector` and `palaestra.train.screens` wire.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from safetensors import SafetensorError

from palaestra.errors import CheckpointError, CollectorFailed, ExperienceError, NonFiniteError
from palaestra.files.atomic import write_json
from palaestra.files.checkpoint import Kind, list_checkpoints
from palaestra.files.run_directory import Attempt, RunDirectory, start_attempt
from palaestra.learner.algorithm import Learner
from palaestra.learner.checkpoint import TrainingCheckpoint, load_checkpoint, save_checkpoint
from palaestra.telemetry import Telemetry, open_telemetry
from palaestra.telemetry.config import check_telemetry
from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, LogLine, PhaseChanged, TrainingStep
from palaestra.transport.source import Batch, ExperienceSource, Timing
from palaestra.transport.weights import WeightPublisher

if TYPE_CHECKING:
    from palaestra.train.config import RunConfig
    from palaestra.train.screen_config import ScreenRunConfig

__all__ = ["RunSchedule", "TrainingResult", "Update", "Wiring", "run_updates", "train"]


class Update(NamedTuple):
    """One pass through the loop."""

    batch: Batch[Any]
    metrics: dict[str, float]


def run_updates(
    source: ExperienceSource[Any],
    learner: Learner[Any, Any],
    publisher: WeightPublisher[Any],
    is_complete: Callable[[], bool],
) -> Iterator[Update]:
    """Train until `is_complete`, or until the source has nothing more because it was asked to stop."""
    publisher.publish(learner.version, learner.weights())
    while not is_complete():
        began = time.perf_counter()
        batch = source.next_batch()
        if batch is None:
            return
        waited = time.perf_counter() - began
        try:
            metrics = learner.update(batch.experience, poll=source.raise_if_failed)
        except CollectorFailed:
            source.requeue(batch)
            raise
        # Published first: an actor that finds room must find the weights that made it.
        publisher.publish(learner.version, learner.weights())
        source.release(batch, learner.version)
        timing = Timing(waited, time.perf_counter() - began)
        yield Update(batch, metrics | source.metrics(batch, timing))


class Intervals(Protocol):
    """The keys of a section `trainer` that say when something is due."""

    eval_every: int | None
    checkpoint_every: int | None
    checkpoint_seconds: float
    keep_checkpoints: int


@dataclass(frozen=True)
class RunSchedule:
    """How long a run is, and when it reports, evaluates and saves."""

    every: Intervals
    total: int
    unit: Literal["steps", "updates"]
    """What `total` and the progress display count."""
    score_metric: str
    """What the best checkpoint is chosen by."""
    log_interval: int = 1
    keep_first: bool = False
    """Whether the checkpoint from before training is kept for comparison."""


class Wiring(Protocol):
    """What a run is made of, for one kind of experience."""

    kind: Kind
    """Of its checkpoints."""
    schedule: RunSchedule

    @property
    def source(self) -> ExperienceSource[Any]:
        """Where experience comes from."""

    @property
    def learner(self) -> Learner[Any, Any]:
        """What learns from it."""

    @property
    def publisher(self) -> WeightPublisher[Any]:
        """Where new weights go."""

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """The run exists: be ready for the first batch."""

    def save_policy(self) -> bytes | Callable[[Path], object]:
        """What a checkpoint holds of the policy: a file, or a function that writes a directory."""

    def load_policy(self, path: Path) -> None:
        """Take over the weights of a checkpoint."""

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Refuse a checkpoint that does not fit, before anything is loaded."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of held-out play."""

    def notices(self) -> Sequence[tuple[str, str]]:
        """What a person should know at the start: level and text."""

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """What went wrong since the last update without ending the run; may add metrics about it."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    run: RunDirectory
    steps: int
    final: dict[str, float]
    checkpoint: Path
    interrupted: bool


def train(
    config: RunConfig | ScreenRunConfig,
    wire: Callable[[ExitStack], Wiring],
    *,
    root: Path,
    run_id: str,
    given: str = "",
    argv: Sequence[str] = (),
    resume: RunDirectory | None = None,
    checkpoint: Path | None = None,
    into: Attempt | None = None,
    warm_start: Path | None = None,
) -> TrainingResult:
    """Train to the end of the configuration: in a new run, as another attempt of one, or `into` a prepared attempt.

    `checkpoint` is what a resume goes on from, by default the run's newest. `warm_start` is a checkpoint whose weights,
    and nothing else, it begins with. `wire` builds the parts; what they hold is released with the stack.
    """
    check_telemetry(config.telemetry)
    with ExitStack() as stack:
        wiring = wire(stack)
        if warm_start is not None:
            with refuse_malformed(warm_start):
                wiring.load_policy(load_checkpoint(warm_start, kind=wiring.kind).policy)

        def load(path: Path) -> bool:
            assert resume is not None
            with refuse_malformed(path):
                found = load_checkpoint(path, kind=wiring.kind)
                wiring.check_resume(found, resume)
                return restore(wiring, found)

        exact = resume is None or resume.load_checkpoint(load, checkpoint)
        resolved, schedule = config.resolved(), wiring.schedule
        run, attempt = start_attempt(
            resolved, root=root, run_id=run_id, given=given, argv=argv, resume=resume, into=into
        )
        telemetry = stack.enter_context(
            open_telemetry(
                config.telemetry, run.path, run.run_id, schedule.total, resolved, attempt.journal, unit=schedule.unit
            )
        )
        telemetry.emit(PhaseChanged("running", "resumed" if resume else "started"))
        for level, text in wiring.notices():
            telemetry.emit(LogLine(level, text))
        if not exact:
            text = "The environments could not be brought back to where they stood: they start fresh episodes."
            telemetry.emit(LogLine("warning", text))
        return _Run(wiring, resolved, run, attempt, telemetry).execute()


@contextmanager
def refuse_malformed(path: Path) -> Iterator[None]:
    """Make a `CheckpointError` of what a part says about a checkpoint that is whole and was not written by us."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        reason = f"a part of it cannot be used ({type(error).__name__}: {error})"
        raise CheckpointError("checkpoint", str(path), reason, "Use another checkpoint") from error


def restore(parts: Wiring | Any, checkpoint: TrainingCheckpoint) -> bool:
    """Continue from a checkpoint; whether the environments stand where they stood."""
    parts.load_policy(checkpoint.policy)
    parts.learner.load_state(checkpoint.learner)
    parts.source.progress.load(checkpoint.progress)
    return bool(parts.source.load_state(checkpoint.source))


class _Run:
    """Telemetry, evaluation, checkpoints and interruption around the updates."""

    def __init__(
        self, wiring: Wiring, resolved: dict[str, Any], run: RunDirectory, attempt: Attempt, telemetry: Telemetry
    ) -> None:
        self._wiring, self._schedule, self._progress = wiring, wiring.schedule, wiring.source.progress
        self._resolved, self._run, self._attempt, self._telemetry = resolved, run, attempt, telemetry
        self._interruption = _Interruption()
        self._final: dict[str, float] = {}
        self._best = -float("inf")
        self._best_path: Path | None = None
        self._saved: Path | None = None
        self._saved_at = 0.0

    def execute(self) -> TrainingResult:
        """Train to the end, or until an interruption."""
        wiring, stop = self._wiring, self._interruption
        try:
            with stop.watch(self._warn):
                self._save(None)
                wiring.open(self._attempt, self._telemetry, lambda: stop.requested)
                try:
                    for update in run_updates(wiring.source, wiring.learner, wiring.publisher, self._is_over):
                        self._after(update)
                finally:
                    wiring.source.close()
                    wiring.publisher.close()
                checkpoint = self._save(self._score(self._final))
        except BaseException as error:
            if isinstance(error, NonFiniteError | CollectorFailed | ExperienceError):
                # The learner has put its weights back to what they were before the update that failed.
                self._save_after_failure()
            self._telemetry.emit(PhaseChanged("failed", self._run.add_resume_hint(error, self._saved)))
            raise
        ending = ("stopped", "interrupted") if stop.requested else ("succeeded", "done")
        self._telemetry.emit(PhaseChanged(*ending))
        return TrainingResult(self._run, self._progress.steps, self._final, checkpoint, stop.requested)

    def _is_over(self) -> bool:
        done = self._progress.steps if self._schedule.unit == "steps" else self._progress.updates
        return self._interruption.requested or done >= self._schedule.total

    def _after(self, update: Update) -> None:
        every, metrics, number = self._schedule.every, update.metrics, self._progress.updates
        if _is_due(every.eval_every, number):
            metrics |= self._wiring.evaluate()
        self._final = metrics
        for text in self._wiring.warnings(metrics):
            self._warn(text)
        first = self._progress.episodes - len(update.batch.episodes) + 1
        self._telemetry.emit_many(
            EpisodeSummary(e.env_step, first + i, e.env_index, e.episode_return, e.length)
            for i, e in enumerate(update.batch.episodes)
        )
        if _is_due(self._schedule.log_interval, number):
            self._telemetry.emit(TrainingStep(number, self._progress.steps, metrics))
        overdue = time.monotonic() - self._saved_at > every.checkpoint_seconds
        if overdue or _is_due(every.checkpoint_every, number) or _is_due(every.eval_every, number):
            self._save(self._score(metrics))

    def _warn(self, text: str) -> None:
        self._telemetry.emit(LogLine("warning", text))

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        # Results with and without exploration are not compared: a run that evaluates is judged by that alone.
        return metrics.get(self._schedule.score_metric)

    def _save(self, score: float | None) -> Path:
        """A checkpoint of this moment (once), remembered as the best if its score says so."""
        wiring, number = self._wiring, self._progress.updates
        path = self._attempt.checkpoints / f"update_{number:08d}"
        if path != self._saved:
            sha256 = save_checkpoint(
                path,
                kind=wiring.kind,
                policy=wiring.save_policy(),
                learner=wiring.learner.state(),
                source=wiring.source.state(),
                progress=self._progress.facts(),
                about={"config": self._resolved, "run_id": self._run.run_id, "score": score},
            )
            best = score is not None and score >= self._best
            if best and score is not None:
                self._best, self._best_path = score, path
                write_json(self._attempt.best, {"checkpoint": path.name, "score": score})
            self._telemetry.emit(CheckpointSaved(number, self._progress.steps, str(path), sha256, best, score))
            self._saved = path
            self._remove_old()
        self._saved_at = time.monotonic()
        return path

    def _save_after_failure(self) -> None:
        try:
            self._save(None)
        except (OSError, CheckpointError) as error:
            # What ended the run matters more, and the checkpoint before is still there.
            self._warn(f"No checkpoint could be written: {error}")

    def _remove_old(self) -> None:
        kept = list_checkpoints(self._attempt.checkpoints)
        for path in kept[int(self._schedule.keep_first) : -self._schedule.every.keep_checkpoints]:
            if path != self._best_path:
                shutil.rmtree(path)


class _Interruption:
    """Whether Ctrl-C, SIGTERM or a closed terminal asked the run to finish its update, save and stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watch(self, report: Callable[[str], None]) -> Iterator[None]:
        """Catch the signals inside the block; a second one has its usual effect. Puts the handlers back afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread alone
            return

        def first(number: int, frame: FrameType | None) -> None:
            self.requested = True
            for each in caught:
                signal.signal(each, signal.SIG_DFL)
            report("Stopping: this update is finished and saved first. Ctrl-C again leaves at once.")

        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # A signal found ignored (nohup, a job in the background) stays ignored: whoever started us meant it.
        caught = [each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, first) for each in caught}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _is_due(every: int | None, update: int) -> bool:
    return every is not None and update % every == 0
