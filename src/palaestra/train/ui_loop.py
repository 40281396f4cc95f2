"""One run on screens, wired: a model, a gateway, actors, a learner and an algorithm.

Everything that can be refused is refused before the run directory exists. Played episodes are archived with their
pictures; every update is in the journal; a checkpoint holds what was learned, what waits to be learned from and every
random stream, and an interruption leaves one behind.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from palaestra.actor.capacity import Capacity
from palaestra.actor.episodes import EpisodeOrders, EpisodesInBackground, EpisodesInTurn, Played
from palaestra.actor.inference import Sampler
from palaestra.actor.task_sampler import TaskSampler
from palaestra.actor.ui_evaluation import UiEvaluation
from palaestra.errors import CheckpointError, CollectorFailed, ExperienceError, NonFiniteError
from palaestra.experience.trajectory import Outcome as Ending
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.files.atomic import write_json
from palaestra.files.checkpoint import checkpoints_in
from palaestra.files.run_directory import Attempt, RunDirectory, begin_attempt
from palaestra.learner.checkpoint import State, load_checkpoint, save_checkpoint
from palaestra.learner.trajectories.algorithm import build_trajectory_algorithm
from palaestra.learner.trajectories.groups import Groups, whole_groups
from palaestra.learner.trajectories.proof import Reason
from palaestra.learner.trajectories.trainer import TrajectoryTrainer
from palaestra.policy.vlm import VLMPolicy
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, Telemetry, TrainingStep, open_telemetry
from palaestra.telemetry.event import LogLine, PhaseChanged
from palaestra.telemetry.sinks import check_telemetry
from palaestra.train.interruption import Interruption
from palaestra.train.loop import Outcome
from palaestra.train.sampler_process import ProcessSampler
from palaestra.train.session_source import SessionAddress, find_sessions
from palaestra.train.ui_config import UiRunConfig
from palaestra.train.ui_evaluation import play_held_out
from palaestra.train.ui_hall import LocalSampler, UiHall, grammar_of, open_ui_hall
from palaestra.train.ui_policy import LearningPolicy
from palaestra.train.ui_task_check import check_tasks

__all__ = ["train_ui"]

SCREENLESS_BATCHES = 3
"""So many batches in a row in which every screen broke end a run: it would play them all and learn nothing."""


def train_ui(
    config: UiRunConfig, *, root: Path, run_id: str, given: str = "", argv: Sequence[str] = (),
    resume: RunDirectory | None = None, checkpoint: Path | None = None, into: Attempt | None = None,
    warm_start: Path | None = None,
) -> Outcome:  # fmt: skip
    """Train to the end of the configuration, where and from what `train` says for environments."""
    check_telemetry(config.telemetry)
    torch.set_num_threads(config.trainer.torch_threads)
    with ExitStack() as stack:
        policy = VLMPolicy.from_config(config.model, seed=config.trainer.seed)
        learning = _Learning(config, policy)
        if warm_start is not None:
            policy.load(load_checkpoint(warm_start, kind="screens").policy)
            learning.acting.version = policy.version
        if resume is not None:
            resume.load_checkpoint(learning.load, checkpoint)
        address = find_sessions(config, stack)
        warnings = check_tasks(config, address)
        resolved = config.resolved()
        run, attempt = begin_attempt(
            resolved, root=root, run_id=run_id, given=given, argv=argv, resume=resume, into=into
        )
        total = config.trainer.num_training_steps
        telemetry = stack.enter_context(
            open_telemetry(config.telemetry, run.path, run.run_id, total, resolved, attempt.journal, unit="updates")
        )
        telemetry.emit(PhaseChanged("running", "resumed" if resume else "started"))
        telemetry.emit(LogLine("info", f"{learning.trainer.rate.reason}.".capitalize()))
        for text in warnings:
            telemetry.emit(LogLine("warning", text))
        return _UiRun(config, learning, address, run, attempt, telemetry).go()


class _Learning:
    """What learns, and everything it takes to go on exactly where it stands."""

    def __init__(self, config: UiRunConfig, policy: VLMPolicy) -> None:
        settings = {key: value for key, value in config.algorithm.items() if key != "name"}
        algorithm = build_trajectory_algorithm(config.algorithm["name"], settings)
        if algorithm.needs_reference and not config.model.use_lora:
            policy.keep_reference()
        self.policy = policy
        self.acting = LearningPolicy(policy, grammar=grammar_of(config, policy), kept_versions=config.staleness)
        self.trainer = TrajectoryTrainer(
            self.acting, algorithm, config.trainer, lora=config.model.use_lora, proof=config.proof,
            replay=config.replay, reward=config.reward, temperature=config.actor.temperature, seed=config.trainer.seed,
        )  # fmt: skip
        self.sampler = TaskSampler(config.tasks, config.sampler, seed=config.trainer.seed)
        self.orders = EpisodeOrders(self.sampler, group_size=algorithm.group_size, seed=config.trainer.seed)
        self.groups = Groups(algorithm.group_size)
        self.ready: list[Trajectory] = []
        """Admitted and not yet learned from."""
        self.episodes, self.turns, self.rounds = 0, 0, 0
        """Episodes and turns played, batches looked at; the last also counts those that taught nothing."""

    def save(self, path: Path, about: Mapping[str, object]) -> str:
        """A checkpoint of this moment."""
        waiting = {
            f"{number:06d}": torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.uint8)
            for number, one in enumerate([*self.ready, *self.groups.waiting()])
        }
        return save_checkpoint(
            path,
            kind="screens",
            policy=self.policy.save,
            learner=State(*self.trainer.state()),
            source=State(waiting, {"orders": self.orders.state(), "ready": len(self.ready)}),
            progress={"updates": self.rounds, "steps": self.episodes, "turns": self.turns},
            about=about,
        )

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        checkpoint = load_checkpoint(path, kind="screens")
        (held, facts), progress = checkpoint.source, checkpoint.progress
        waiting = [
            Trajectory.from_bytes(data.numpy().tobytes(), place=f"{path}/{name}") for name, data in sorted(held.items())
        ]
        self.policy.load(checkpoint.policy)
        self.trainer.load_state(*checkpoint.learner)
        self.orders.load_state(facts["orders"])
        self.episodes, self.turns, self.rounds = (int(progress[key]) for key in ("steps", "turns", "updates"))
        ready = int(facts["ready"])
        self.ready = waiting[:ready]
        for trajectory in waiting[ready:]:
            self.groups.add(trajectory)
        # Whoever was still playing died with the process: the rest of each group is all there will be.
        for group in self.groups.drain():
            self.ready += self.trainer.admit(group)


@dataclass
class _Tally:
    """What came of the episodes since the last update."""

    began: float
    played: list[Played]
    broken: int = 0
    dropped_stale: int = 0

    def metrics(self, *, busy_s: float) -> dict[str, float]:
        over = [one.trajectory for one in self.played if one.trajectory.outcome is not Ending.ENVIRONMENT_FAILED]
        turns = [turn for one in over for turn in one.turns]
        seconds = max(time.perf_counter() - self.began, 1e-9)
        found = {
            "episodes_per_second": len(self.played) / seconds, "collect_seconds": seconds,
            "environment_failures": float(self.broken + len(self.played) - len(over)),
            "inference_utilisation": busy_s / seconds, "dropped_stale": float(self.dropped_stale),
        }  # fmt: skip
        if over:
            found |= {
                "success_rate": sum(one.success for one in over) / len(over),
                "episode_return": sum(one.total_reward() for one in over) / len(over),
                "episode_length": len(turns) / len(over),
                "unreadable_share": sum(turn.action is None for turn in turns) / max(1, len(turns)),
                "truncated_share": sum(one.outcome is Ending.TRUNCATED for one in over) / len(over),
            }
        for key in sorted({one.order.key for one in self.played}):
            own = [
                one.trajectory.success for one in self.played
                if one.order.key == key and one.trajectory.outcome is not Ending.ENVIRONMENT_FAILED
            ]  # fmt: skip
            if own:
                found[f"success_rate/{key}"] = sum(own) / len(own)
        return found


def _why_nothing(trainer: TrajectoryTrainer, metrics: Mapping[str, float]) -> str:
    """Why a batch taught nothing."""
    if trainer.last_refusal:
        return trainer.last_refusal.rstrip(".")
    refused = {reason.value: int(metrics[f"refused_{reason.value}"]) for reason in Reason}
    if any(count for reason, count in refused.items() if reason != Reason.ENVIRONMENT):
        counts = ", ".join(f"{reason} {count}" for reason, count in refused.items() if count)
        return (
            f"{metrics['trajectories_offered']:.0f} episodes were offered and refused by reason: {counts} (see the log)"
        )
    return "every group succeeded or failed as a whole, or nothing was accepted"


class _UiRun:
    """What happens around each update."""

    def __init__(
        self, config: UiRunConfig, learning: _Learning, address: SessionAddress, run: RunDirectory, attempt: Attempt,
        telemetry: Telemetry,
    ) -> None:  # fmt: skip
        self._config, self._learning, self._address = config, learning, address
        self._run, self._attempt, self._telemetry = run, attempt, telemetry
        self._interruption = Interruption()
        self._archive = TrajectoryArchive(attempt.trajectories) if config.trajectories_kept else None
        self._last: dict[str, float] = {}
        self._best = -math.inf
        self._best_path: Path | None = None
        self._saved: Path | None = None
        self._saved_at = time.monotonic()
        self._screenless = 0
        """Batches in a row without an episode whose screen held."""
        self._sampler_failures: list[str] | None = None
        """Why sampler processes were replaced; None when there is none."""
        self._source: EpisodesInTurn | EpisodesInBackground | None = None
        self._undo = ExitStack()

    def go(self) -> Outcome:
        """Train to the end, or until somebody asks to stop."""
        telemetry = self._telemetry
        try:
            with self._interruption.watching(lambda text: telemetry.emit(LogLine("warning", text))):
                self._save(None)
                self._source = self._opened()
                try:
                    while not self._over():
                        self._update()
                finally:
                    self._source.close()
                    self._undo.close()
                checkpoint = self._save(self._score())
        except (NonFiniteError, CollectorFailed, ExperienceError) as error:
            try:
                self._save(None)
            except (OSError, CheckpointError) as unsaved:
                # What ended the run matters more, and the checkpoint before is still there.
                telemetry.emit(LogLine("warning", f"No checkpoint could be written: {unsaved}"))
            telemetry.emit(PhaseChanged("failed", self._run.add_resume_hint(error, self._saved)))
            raise
        except BaseException as error:
            telemetry.emit(PhaseChanged("failed", self._run.add_resume_hint(error, self._saved)))
            raise
        stopped = self._interruption.asked
        telemetry.emit(PhaseChanged("stopped" if stopped else "succeeded", "interrupted" if stopped else "done"))
        return Outcome(self._run, self._learning.episodes, self._last, checkpoint, stopped)

    def _over(self) -> bool:
        return self._interruption.asked or self._learning.rounds >= self._config.trainer.num_training_steps

    def _opened(self) -> EpisodesInTurn | EpisodesInBackground:
        c, policy = self._config, self._learning.policy
        asynchronous = c.trainer.collection == "asynchronous"
        sampler = self._sampler()
        grammar = grammar_of(c, policy)

        def open_hall(failed: Callable[[Trajectory], None]) -> AbstractAsyncContextManager[UiHall]:
            return open_ui_hall(c, self._address, sampler, grammar, lockstep=not asynchronous, failed=failed)

        concurrent = c.actor_pool.target_concurrent_actors
        if not asynchronous:
            return EpisodesInTurn(open_hall, self._learning.orders, concurrent=concurrent)
        capacity = Capacity(concurrent, c.trainer.batch_size, c.trainer.max_staleness)
        return EpisodesInBackground(open_hall, self._learning.orders, capacity, version=policy.version)

    def _sampler(self) -> Sampler:
        c, learning = self._config, self._learning
        if c.inference.backend == "thread":
            return LocalSampler(learning.policy, threads=c.inference.torch_threads)
        process = ProcessSampler(
            c.model, seed=c.trainer.seed, threads=c.inference.torch_threads, restarts=c.inference.restarts
        )
        self._undo.callback(process.close)
        self._sampler_failures = process.failures

        def published(version: int) -> None:
            process.publish(version, learning.policy.trainable_state())

        published(learning.policy.version)
        learning.acting.published = published
        return process

    def _update(self) -> None:
        """Gather a batch, learn from it, and tell."""
        learning, tally = self._learning, _Tally(time.perf_counter(), [])
        assert self._source is not None
        busy = self._source.statistics.busy_s
        batch = self._gathered(tally)
        if self._interruption.asked and len(batch) < self._config.trainer.batch_size:
            learning.ready = batch + learning.ready
            return
        self._refuse_to_go_on_without_screens(tally)
        metrics = tally.metrics(busy_s=self._source.statistics.busy_s - busy)
        metrics |= learning.trainer.learn(batch)
        learning.rounds += 1
        if not metrics["trajectories_learned"]:
            self._telemetry.emit(
                LogLine("warning", f"Nothing was learned from this batch: {_why_nothing(learning.trainer, metrics)}.")
            )
            # No new version makes room for more episodes, so those that taught nothing have to.
            self._source.rejected(len(batch) if self._refills else len(tally.played))
        self._source.advanced(learning.policy.version)
        metrics["episodes"] = float(learning.episodes)
        if self._sampler_failures is not None:
            metrics["sampler_restarts"] = float(len(self._sampler_failures))
            for reason in self._sampler_failures[int(self._last.get("sampler_restarts", 0)) :]:
                self._telemetry.emit(LogLine("warning", f"A sampler process was replaced: {reason}."))
        for one in tally.played:
            if one.trajectory.outcome is not Ending.ENVIRONMENT_FAILED:
                learning.sampler.report(one.order.key, one.trajectory.success)
        self._after(metrics)

    def _refuse_to_go_on_without_screens(self, tally: _Tally) -> None:
        broken = [one.trajectory for one in tally.played if one.trajectory.outcome is Ending.ENVIRONMENT_FAILED]
        self._screenless = self._screenless + 1 if broken and len(broken) == len(tally.played) else 0
        if self._screenless >= SCREENLESS_BATCHES:
            raise CollectorFailed(
                f"in {self._screenless} batches in a row every screen broke, {len(broken)} in the last one "
                f"({broken[-1].reason.rstrip('.')}). {self._address.description} may be gone, or the browsers there."
            )

    @property
    def _refills(self) -> int:
        given = self._config.trainer.max_refills
        return (3 if self._learning.groups.size > 1 else 0) if given is None else given

    def _gathered(self, tally: _Tally) -> list[Trajectory]:
        """Enough to learn from: a batch of episodes, what teaches nothing replaced a bounded number of times."""
        learning, size, refills = self._learning, self._config.trainer.batch_size, self._refills
        limit = size * (1 + refills)
        counted = len(learning.ready)
        """Episodes that count towards the batch: admitted ones when what is dropped is replaced, else all."""
        while counted < size and len(tally.played) < limit and not self._interruption.asked:
            assert self._source is not None
            came = self._source.gather(min(size - counted, limit - len(tally.played)), stop=self._stopping)
            for one in came:
                counted += self._taken(one, tally, replaced=refills > 0)
            self._broken(tally)
        batch, learning.ready = whole_groups(learning.ready, size)
        return batch

    def _taken(self, one: Played, tally: _Tally, *, replaced: bool) -> int:
        """Take in an episode; how many more count towards the batch."""
        learning, trajectory = self._learning, one.trajectory
        assert self._source is not None
        learning.episodes += 1
        learning.turns += len(trajectory)
        tally.played.append(one)
        self._telemetry.emit(
            EpisodeSummary(learning.episodes, learning.episodes, 0, trajectory.total_reward(), len(trajectory))
        )
        if self._archive is not None:
            self._archive.append(trajectory)
        stale = trajectory.learnable and learning.policy.version - trajectory.versions[0] > self._config.staleness
        tally.dropped_stale += stale
        lost = stale or not trajectory.learnable
        group = learning.groups.lose(trajectory.group) if lost else learning.groups.add(trajectory)
        kept = learning.trainer.admit(group) if group else []
        learning.ready += kept
        if not replaced:
            return 1
        # Each lost one at once: of a group that is lost as a whole nothing is ever handed over.
        self._source.rejected(lost + len(group) - len(kept))
        return len(kept)

    def _broken(self, tally: _Tally) -> None:
        assert self._source is not None
        while self._source.broken:
            tally.broken += 1
            broken = self._source.broken.pop(0)
            if self._archive is not None:
                self._archive.append(broken)

    def _stopping(self) -> bool:
        return self._interruption.asked

    def _after(self, metrics: dict[str, float]) -> None:
        c, rounds = self._config.trainer, self._learning.rounds
        if c.eval_every is not None and rounds % c.eval_every == 0:
            metrics |= self._evaluated()
        self._last = metrics
        self._telemetry.emit(TrainingStep(rounds, self._learning.episodes, metrics))
        if self._archive is not None and rounds % 20 == 0:
            self._archive.keep(self._config.trajectories_kept)
        due = c.checkpoint_every is not None and rounds % c.checkpoint_every == 0
        if due or "eval_success_rate" in metrics or time.monotonic() - self._saved_at > c.checkpoint_seconds:
            self._save(self._score())

    def _evaluated(self) -> dict[str, float]:
        played = play_held_out(
            self._config, self._learning.policy, self._address, episodes=self._config.evaluation.episodes
        )
        found = UiEvaluation.of(played).overall
        rate, mean = found.success_rate, found.mean_return
        return {} if rate is None or mean is None else {"eval_success_rate": rate, "eval_return": mean}

    def _score(self) -> float | None:
        return self._last.get("eval_success_rate" if self._config.trainer.eval_every else "success_rate")

    def _save(self, score: float | None) -> Path:
        """A checkpoint of this moment (once), remembered as the best if its score says so."""
        updates = self._learning.rounds
        path: Path = self._attempt.checkpoints / f"update_{updates:08d}"
        if path != self._saved:
            about = {"config": self._config.resolved(), "run_id": self._run.run_id, "score": score}
            sha256 = self._learning.save(path, about)
            best = score is not None and score >= self._best
            if best and score is not None:
                self._best, self._best_path = score, path
                write_json(self._attempt.best, {"checkpoint": path.name, "score": score})
            self._telemetry.emit(CheckpointSaved(updates, self._learning.episodes, str(path), sha256, best, score))
            self._saved = path
            self._forget_old()
        self._saved_at = time.monotonic()
        return path

    def _forget_old(self) -> None:
        kept = checkpoints_in(self._attempt.checkpoints)
        # The first one stays: it is what everything later is compared with.
        for path in kept[1 : -self._config.trainer.keep_checkpoints]:
            if path != self._best_path:
                shutil.rmtree(path)
