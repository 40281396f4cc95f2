"""Supervised fine-tuning on demonstrations: the same loop, checkpoints and evaluations as a run that plays episodes.

Batches come from a directory of demonstrations. Sessions are opened only to evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from palaestra.experience.demonstrations import DemonstrationSampler
from palaestra.experience.trajectory import Trajectory
from palaestra.files.run_directory import Attempt
from palaestra.sessions.clients.provider import SessionAddress, find_sessions
from palaestra.telemetry import Telemetry
from palaestra.train.distributed import FirstRankEpisodes, screen_rank_notices
from palaestra.train.held_out import check_tasks, play_held_out
from palaestra.train.model_run import (
    ModelRun,
    SamplerPublisher,
    damage_notices,
    evaluation_metrics,
    open_demonstrations,
)
from palaestra.train.screen_config import ScreenRunConfig
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress


class DemonstrationSource(ExperienceSource[list[Trajectory]]):
    """Batches of demonstrations, in epochs over a seeded shuffle."""

    def __init__(self, sampler: DemonstrationSampler, *, batch_size: int) -> None:
        self.sampler, self._size = sampler, batch_size
        self._stop: Callable[[], bool] = lambda: False
        self.progress = TrainingProgress()

    def open(self, stop: Callable[[], bool]) -> None:
        """Return no batch after `stop`."""
        self._stop = stop

    def next_batch(self) -> Batch[list[Trajectory]] | None:
        """The next demonstrations; None if stopped."""
        if self._stop():
            return None
        position = self.sampler.state()
        drawn = self.sampler.draw(self._size)
        return Batch(drawn, steps=len(drawn), origin=position)

    def release(self, batch: Batch[list[Trajectory]], version: int) -> None:
        """Count the update."""
        self.progress.updates += 1
        self.progress.add(batch.steps)

    def requeue(self, batch: Batch[list[Trajectory]]) -> None:
        """Return the same demonstrations next."""
        self.sampler.load_state(batch.origin)

    def metrics(self, batch: Batch[list[Trajectory]], timing: Timing) -> dict[str, float]:
        """Passes over the demonstrations."""
        return {"demonstration_epochs": self.sampler.epochs}

    def state(self) -> SavedState:
        """The position in the present epoch."""
        return SavedState({}, self.sampler.state())

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`."""
        self.sampler.load_state(state.facts)
        return True


class ImitationRun(ModelRun):
    """The components of a run that learns from demonstrations alone."""

    def __init__(self, config: ScreenRunConfig, policy: Any) -> None:
        super().__init__(config, policy)
        self._demonstrations = DemonstrationSource(
            open_demonstrations(config, policy), batch_size=config.trainer.batch_size
        )
        self.source: DemonstrationSource | FirstRankEpisodes = self._demonstrations
        if self._ranks.size > 1:
            self.source = FirstRankEpisodes(self._demonstrations, self._ranks)
        self.publisher = SamplerPublisher(policy, None)
        if config.trainer.eval_every:
            # A task that cannot be loaded would otherwise end the run at its first evaluation.
            self._ranks.run(self._check_tasks)

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Publish the first weights, for evaluations."""
        self.publisher.publish(self.learner.version, self.learner.weights())
        self._demonstrations.open(stop)

    def evaluate(self) -> dict[str, float]:
        """Success rate and return on held-out seeds, in sessions that are opened for this evaluation."""
        config = self._config
        with ExitStack() as stack:
            address = self._find_sessions(stack)
            check_tasks(config, address)
            return evaluation_metrics(play_held_out(config, self._policy, address, episodes=config.evaluation.episodes))

    def _check_tasks(self) -> None:
        if self._ranks.is_first:
            with ExitStack() as stack:
                check_tasks(self._config, self._find_sessions(stack))

    def _find_sessions(self, stack: ExitStack) -> SessionAddress:
        return find_sessions(
            self._config.environment,
            stack,
            actors=self._config.actor_pool.target_concurrent_actors,
            session_type=self._config.actor.session_type,
        )

    def notices(self) -> Sequence[tuple[str, str]]:
        """The learning rate and its reason, and the demonstrations."""
        demonstrations = self._demonstrations.sampler.demonstrations
        tasks = ", ".join(f"{name} {count}" for name, count in demonstrations.count_tasks().items())
        counts = ("info", f"{len(demonstrations)} demonstrations in {demonstrations.path}: {tasks}.")
        rate = ("info", f"{self.learner.rate.reason}.".capitalize())
        return [rate, counts, *damage_notices(demonstrations), *screen_rank_notices(self._config, self._ranks)]

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """A warning about a batch that was not learned from."""
        if metrics["trajectories_learned"]:
            return []
        return [f"Nothing was learned from this batch: {self.learner.last_refusal.rstrip('.')}."]
