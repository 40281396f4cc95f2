"""The training loop, and the run around it.

`run_updates` is the loop: next batch, update, publish, release. `train` runs it in a run directory, with telemetry,
evaluations and checkpoints; invalid settings raise before the directory is created, and an interruption or a failure
leaves the last good state on disk. `palaestra.train.vector` and `palaestra.train.screens` build the components.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TextIO, TypeAlias, cast

from safetensors import SafetensorError

from palaestra.errors import CheckpointError, CollectorFailed, ConfigError, ExperienceError, NonFiniteError, RankFailed
from palaestra.files.atomic import write_json
from palaestra.files.checkpoint import Kind, list_checkpoints
from palaestra.files.run_directory import Attempt, RunDirectory, start_attempt
from palaestra.learner.algorithm import Learner
from palaestra.learner.checkpoint import TrainingCheckpoint, load_checkpoint, save_checkpoint
from palaestra.telemetry import Telemetry, open_telemetry
from palaestra.telemetry.config import check_telemetry
from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, LogLine, PhaseChanged, TrainingStep
from palaestra.transport.ranks import ALONE, Ranks, join_ranks
from palaestra.transport.source import Batch, ExperienceSource, Timing
from palaestra.transport.weights import WeightPublisher

if TYPE_CHECKING:
    from palaestra.train.config import RunConfig, TrainerConfig
    from palaestra.train.screen_config import ScreenRunConfig, ScreenTrainerConfig


RunCallback: TypeAlias = Callable[[dict[str, float]], bool | None]
"""Called after every update with its metrics, `update` and `env_step` among them; returning False ends the run."""


class Update(NamedTuple):
    """Result of one iteration of the loop."""

    batch: Batch[Any]
    metrics: dict[str, float]


def run_updates(
    source: ExperienceSource[Any],
    learner: Learner[Any, Any],
    publisher: WeightPublisher[Any],
    is_complete: Callable[[], bool],
    ranks: Ranks = ALONE,
) -> Iterator[Update]:
    """Train until `is_complete`, or until the source returns no batch because the run was asked to stop.

    If the weights cannot be published in one of the `ranks`, all of them fail together.
    """

    def publish() -> None:
        weights = learner.weights()  # in all processes, if they are divided
        ranks.run(lambda: publisher.publish(learner.version, weights))

    publish()
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
        # Publish first: a collector that gets a free slot must find the new weights.
        try:
            publish()
        except CollectorFailed:
            # The update is made; a resumed run must not make it again, and publishes it first.
            source.release(batch, learner.version)
            raise
        source.release(batch, learner.version)
        timing = Timing(waited, time.perf_counter() - began)
        yield Update(batch, metrics | source.metrics(batch, timing))


@dataclass(frozen=True)
class RunSchedule:
    """Length of a run, and intervals of its reports, evaluations and checkpoints."""

    every: TrainerConfig | ScreenTrainerConfig
    """Intervals, in updates and seconds."""
    total: int
    unit: Literal["steps", "updates"]
    """Unit of `total` and of the progress display."""
    score_metric: str
    """Metric that selects the best checkpoint."""
    log_interval: int = 1
    keep_first: bool = False
    """Whether to keep the checkpoint from before training."""
    evaluate_first: bool = False
    """Whether to evaluate before the first update of a new run."""


def raise_if_complete(run: RunDirectory, *, key: str, total: int, done: int, unit: str = "steps") -> None:
    """Raise `ConfigError` if a run that is to be resumed has reached `total`, the value of `trainer.<key>`."""
    if done >= total:
        reason = f"run {run.run_id} has taken {done} {unit} already"
        remedy = f"Raise it to train on, for example trainer.{key}={2 * done}"
        raise ConfigError(f"trainer.{key}", total, reason, remedy)


class RunComponents(Protocol):
    """The components of a run for one kind of experience."""

    kind: Kind
    """Kind of its checkpoints."""
    schedule: RunSchedule

    @property
    def source(self) -> ExperienceSource[Any]:
        """The source of experience."""

    @property
    def learner(self) -> Learner[Any, Any]:
        """The learner."""

    @property
    def publisher(self) -> WeightPublisher[Any]:
        """The publisher of weights."""

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Prepare for the first batch, after the run directory was created."""

    def save_policy(self) -> bytes | Callable[[Path], object]:
        """The policy for a checkpoint: the bytes of a file, or a function that writes a directory."""

    def load_policy(self, path: Path) -> None:
        """Load the weights of a checkpoint."""

    def warm_start(self, checkpoint: TrainingCheckpoint) -> None:
        """Load the weights of another run's checkpoint; counters and optimiser start anew."""

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Raise if the run cannot continue from a checkpoint, before anything is loaded."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of an evaluation on held-out episodes."""

    def is_evaluation_due(self) -> bool:
        """Whether to evaluate after this update, apart from `eval_every`."""

    def notices(self) -> Sequence[tuple[str, str]]:
        """Messages at the start of the run: level and text."""

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """Warnings since the last update; may add metrics."""

    def about(self) -> dict[str, Any]:
        """Further facts for the section `about` of a checkpoint."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run."""

    run: RunDirectory
    steps: int
    final: dict[str, float]
    checkpoint: Path
    interrupted: bool


def train(
    config: RunConfig | ScreenRunConfig,
    build: Callable[[ExitStack], RunComponents],
    *,
    root: Path,
    run_id: str,
    given: str = "",
    argv: Sequence[str] = (),
    resume: RunDirectory | None = None,
    checkpoint: Path | None = None,
    into: Attempt | None = None,
    warm_start: Path | None = None,
    callback: RunCallback | None = None,
    progress_line: TextIO | None = None,
) -> TrainingResult:
    """Run a configuration: in a new run, as another attempt (`resume`), or `into` a prepared attempt.

    `checkpoint`: where a resume continues, by default the run's newest. `warm_start`: a checkpoint of which only the
    weights are loaded. `build` creates the components; the stack releases their resources. `progress_line`: shows
    progress as one line on this stream, if the configuration asks for progress at all.
    """
    check_telemetry(config.telemetry)
    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(config.trainer.rank_timeout))
        components = ranks.run(lambda: build(stack))

        def load_weights(path: Path) -> None:
            with wrap_checkpoint_errors(path):
                components.warm_start(load_checkpoint(path, kind=components.kind))

        if warm_start is not None:
            ranks.run(partial(load_weights, warm_start))

        def load(path: Path) -> bool:
            assert resume is not None
            with wrap_checkpoint_errors(path):
                loaded = load_checkpoint(path, kind=components.kind)
                components.check_resume(loaded, resume)
                return restore(components, loaded)

        exact = resume is None or ranks.run(partial(resume.load_checkpoint, load, checkpoint))
        exact = not ranks.any(not exact)
        resolved, schedule = config.to_json(), components.schedule
        where: dict[str, Any] = {
            "root": root,
            "run_id": run_id,
            "given": given,
            "argv": argv,
            "resume": resume,
            "into": into,
        }
        # Only the first process writes files.
        started = ranks.run(lambda: start_attempt(resolved, **where) if ranks.is_first else None)
        run, attempt = cast(tuple[RunDirectory, Attempt], ranks.broadcast(started))
        paths, length = (run.path, run.run_id, schedule.total, resolved, attempt.journal), schedule.unit
        telemetry = stack.enter_context(
            open_telemetry(config.telemetry, *paths, unit=length, line=progress_line) if ranks.is_first else Telemetry()
        )
        telemetry.emit(PhaseChanged("running", "resumed" if resume else "started"))
        for level, text in components.notices():
            telemetry.emit(LogLine(level, text))
        if not exact:
            text = "The environments could not be restored and start new episodes."
            telemetry.emit(LogLine("warning", text))
        return _Run(components, resolved, run, attempt, telemetry, ranks, callback).execute()


@contextmanager
def wrap_checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert errors about the contents of a checkpoint to `CheckpointError`."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        reason = f"a part of it cannot be used ({type(error).__name__}: {error})"
        raise CheckpointError("checkpoint", str(path), reason, "Use another checkpoint") from error


def restore(parts: RunComponents | Any, checkpoint: TrainingCheckpoint) -> bool:
    """Continue from a checkpoint; returns whether the environments were restored exactly."""
    parts.load_policy(checkpoint.policy)
    parts.learner.load_state(checkpoint.learner)
    parts.source.progress.load(checkpoint.progress)
    return bool(parts.source.load_state(checkpoint.source))


class _Run:
    """Runs the updates with telemetry, evaluations, checkpoints and signal handling."""

    def __init__(
        self,
        components: RunComponents,
        resolved: dict[str, Any],
        run: RunDirectory,
        attempt: Attempt,
        telemetry: Telemetry,
        ranks: Ranks,
        callback: RunCallback | None,
    ) -> None:
        self._ranks, self._callback, self._ended_by_callback = ranks, callback, False
        self._components, self._schedule, self._progress = components, components.schedule, components.source.progress
        self._resolved, self._run, self._attempt, self._telemetry = resolved, run, attempt, telemetry
        self._interruption = _Interruption()
        self._final: dict[str, float] = {}
        self._best = -float("inf")
        self._best_path: Path | None = None
        self._saved: Path | None = None
        self._saved_at = 0.0

    def execute(self) -> TrainingResult:
        """Train until the end or an interruption."""
        components, stop = self._components, self._interruption
        try:
            with stop.watch(self._warn):
                self._save(None)
                components.open(self._attempt, self._telemetry, lambda: stop.requested)
                try:
                    self._evaluate_first()
                    parts = (components.source, components.learner, components.publisher)
                    for update in run_updates(*parts, self._is_complete, self._ranks):
                        self._after_update(update)
                finally:
                    components.source.close()
                    components.publisher.close()
                checkpoint = self._save(self._score(self._final))
        except BaseException as error:
            if isinstance(error, NonFiniteError | CollectorFailed | ExperienceError):
                # The learner has restored the weights from before the failed update.
                self._save_after_failure()
            self._telemetry.emit(PhaseChanged("failed", self._run.add_resume_hint(error, self._saved)))
            raise
        reason = "interrupted" if stop.requested else "ended by a callback" if self._ended_by_callback else ""
        self._telemetry.emit(PhaseChanged("stopped", reason) if reason else PhaseChanged("succeeded", "done"))
        return TrainingResult(self._run, self._progress.steps, self._final, checkpoint, stop.requested)

    def _is_complete(self) -> bool:
        done = self._progress.steps if self._schedule.unit == "steps" else self._progress.updates
        # A signal reaches the processes at different times.
        self._interruption.requested = self._ranks.any(self._interruption.requested)
        self._ended_by_callback = self._ranks.any(self._ended_by_callback)
        return self._interruption.requested or self._ended_by_callback or done >= self._schedule.total

    def _evaluate_first(self) -> None:
        if self._schedule.evaluate_first and self._progress.updates == 0:
            self._final = self._evaluate()
            self._telemetry.emit(TrainingStep(0, self._progress.steps, self._final))

    def _evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation in the first process; nothing in the others, which wait for it."""
        return self._ranks.run(lambda: self._components.evaluate() if self._ranks.is_first else {})

    def _after_update(self, update: Update) -> None:
        every, metrics, number = self._schedule.every, update.metrics, self._progress.updates
        evaluates = _is_due(every.eval_every, number) or self._components.is_evaluation_due()
        if evaluates:
            metrics |= self._evaluate()
        self._final = metrics
        for text in self._components.warnings(metrics):
            self._warn(text)
        first = self._progress.episodes - len(update.batch.episodes) + 1
        self._telemetry.emit_many(
            EpisodeSummary(e.env_step, first + i, e.env_index, e.episode_return, e.length)
            for i, e in enumerate(update.batch.episodes)
        )
        if evaluates or _is_due(self._schedule.log_interval, number):
            self._telemetry.emit(TrainingStep(number, self._progress.steps, metrics))
        overdue = time.monotonic() - self._saved_at > every.checkpoint_seconds
        overdue = self._ranks.any(overdue and self._ranks.is_first)
        if overdue or evaluates or _is_due(every.checkpoint_every, number):
            self._save(self._score(metrics))
        if self._callback is not None and self._ranks.is_first:
            facts = {"update": float(number), "env_step": float(self._progress.steps)}
            self._ended_by_callback = self._callback(metrics | facts) is False

    def _warn(self, text: str) -> None:
        self._telemetry.emit(LogLine("warning", text))

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        # A run with evaluations is scored by them alone: results with and without exploration are not comparable.
        return metrics.get(self._schedule.score_metric)

    def _save(self, score: float | None) -> Path:
        """Save a checkpoint of this update, once, and mark it as the best if its score is."""
        components, number = self._components, self._progress.updates
        path = self._attempt.checkpoints / f"update_{number:08d}"
        if path != self._saved:
            # In all processes: each may have a part of the state.
            contents: dict[str, Any] = {
                "policy": components.save_policy(),
                "learner": components.learner.state(),
                "source": components.source.state(),
            }
            if not self._ranks.is_first:
                self._saved = path
                return path
            sha256 = save_checkpoint(
                path,
                kind=components.kind,
                progress=self._progress.facts(),
                about={**components.about(), "config": self._resolved, "run_id": self._run.run_id, "score": score},
                **contents,
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
            # torchrun sends SIGTERM to the processes that are left.
            with self._interruption.watch(self._warn):
                self._save(None)
        except (OSError, CheckpointError, RankFailed) as error:
            # Report the original error; the previous checkpoint still exists.
            self._warn(f"No checkpoint could be written: {error}")

    def _remove_old(self) -> None:
        checkpoints = list_checkpoints(self._attempt.checkpoints)
        for path in checkpoints[int(self._schedule.keep_first) : -self._schedule.every.keep_checkpoints]:
            if path != self._best_path:
                shutil.rmtree(path)


class _Interruption:
    """Handles SIGINT, SIGTERM and SIGHUP: finish the update, save and stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watch(self, report: Callable[[str], None]) -> Iterator[None]:
        """Handle the signals inside the block; a second signal has its default effect."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals
            return

        def first(number: int, frame: FrameType | None) -> None:
            self.requested = True
            for each in caught:
                signal.signal(each, signal.SIG_DFL)
            report("Stopping after this update is finished and saved. Press Ctrl-C again to exit immediately.")

        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # An ignored signal (nohup, a background job) stays ignored.
        caught = [each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, first) for each in caught}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _is_due(every: int | None, update: int) -> bool:
    return every is not None and update % every == 0
