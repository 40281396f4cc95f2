"""The training process of `benchmarks.load`: 32 actors and a learner, with a ledger of every episode.

    PALAESTRA_GATEWAY_TOKEN=… python -m benchmarks.load_training URL LEDGER [--actors 32] [--max-staleness 1] [--seed 0]

Prints a line after its first update, runs until SIGTERM and then writes LEDGER (JSON). Actors, queue, staleness bound,
sampler and learner are those of `palaestra train` with asynchronous collection. The ledger has every episode that was
scheduled, and what became of it, counted at both ends: where it was scheduled, where its actor ended, and where the
learner received it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulated_pages import is_hit
from palaestra.actor.episode_source import AsynchronousPlayer, EpisodeScheduler, EpisodeSource
from palaestra.actor.inference import RolloutWorkers, start_rollout_workers
from palaestra.actor.task_runner import EpisodeRequest
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.learner.trajectories.learner import TrajectoryLearner
from palaestra.policy.vlm.sampler import LocalSampler
from palaestra.sessions.clients.provider import check_gateway, open_provider
from palaestra.sessions.task_sampler import TaskSampler
from palaestra.train.config import make_algorithm
from palaestra.train.held_out import build_policy
from palaestra.train.run import run_updates
from palaestra.train.screen_config import ScreenRunConfig, screen_config_from
from palaestra.train.screens import SamplerPublisher

REAL_SHARE = 1 / 8
"""Share of episodes in real browsers."""


@dataclass
class Ledger:
    """What became of every episode."""

    scheduled: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Episodes that ran when the run was stopped."""
    crashed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Episodes that their actor delivered."""
    received: dict[str, str] = field(default_factory=dict)
    """Outcome of every episode that arrived at the learner's end."""
    received_twice: list[str] = field(default_factory=list)
    failed_attempts: Counter[str] = field(default_factory=Counter)
    """Attempts whose session failed and that were repeated, by reason."""
    unexplained_rewards: list[str] = field(default_factory=list)
    """Episodes whose reward does not follow from their actions."""
    learned_from_failure: list[str] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    """Episodes learned from, by the number of updates since they began."""
    dropped_stale: int = 0
    environment_failed: int = 0
    updates: int = 0
    learned: int = 0
    seconds: list[float] = field(default_factory=list)
    """Duration of every episode that was received."""

    def receive(self, number: int, trajectory: Trajectory) -> None:
        name = trajectory.episode_id
        if name in self.received:
            self.received_twice.append(name)
        self.received[name] = trajectory.outcome.value
        self.seconds.append(trajectory.seconds)
        if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
            self.environment_failed += 1
        elif str(trajectory.task["task"]).startswith("fake/") and trajectory.total_reward() != expected_reward(
            trajectory
        ):
            self.unexplained_rewards.append(name)

    def to_json(self) -> dict[str, Any]:
        document = {key: dict(value) if isinstance(value, Counter) else value for key, value in vars(self).items()}
        unread = set(self.ended) - set(self.received)
        document["unread"] = sorted(unread)
        document["unaccounted"] = sorted(
            set(self.scheduled) - set(self.received) - set(self.cancelled) - set(self.crashed) - unread
        )
        return document


def expected_reward(trajectory: Trajectory) -> float:
    """What `fake/button` pays for these actions: 1 if the first click hits the square, else nothing."""
    clicks = [turn.action for turn in trajectory.turns if turn.action is not None and turn.action["kind"] == "click"]
    at = clicks[0].get("at") if clicks else None
    return 1.0 if at is not None and is_hit(int(trajectory.task["seed"]), *at) else 0.0


class _CountingScheduler(EpisodeScheduler):
    def __init__(self, ledger: Ledger, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._ledger = ledger

    def next(self) -> EpisodeRequest:
        request = super().next()
        self._ledger.scheduled.append(request.episode_id)
        return request


def build_config(url: str, *, actors: int, max_staleness: int, seed: int) -> ScreenRunConfig:
    """Small batches of short episodes, mostly on simulated pages."""
    return screen_config_from({
        "experiment_name": "load",
        "model": {"name": "tiny", "max_new_tokens": 24, "history": 0},
        "tasks": [
            {"task": "fake/button", "params": {"step_limit": 2}, "weight": 1 - REAL_SHARE},
            {"task": "click_target/button", "params": {"step_limit": 2, "difficulty": 2}, "weight": REAL_SHARE},
        ],
        "algorithm": {"name": "ppo"},
        "trainer": {
            "batch_size": actors, "num_training_steps": 1_000_000, "learning_rate": 1e-4, "epochs": 1,
            "minibatches": 1, "microbatch_turns": 64, "collection": "asynchronous", "max_staleness": max_staleness,
            "seed": seed,
        },
        "actor_pool": {"target_concurrent_actors": actors},
        "environment": {"gateway": url, "session_timeout": 60.0},
    })  # fmt: skip


def start_player(
    config: ScreenRunConfig, policy: Any, scheduler: EpisodeScheduler, ledger: Ledger
) -> AsynchronousPlayer:
    """Actors that record how each of their episodes ends."""
    address = check_gateway(config.environment.gateway or "", None)
    sampler = LocalSampler(policy, threads=1)

    @contextlib.asynccontextmanager
    async def start_workers(on_failed_attempt: Callable[[Trajectory], None]) -> AsyncIterator[RolloutWorkers]:
        def record_failure(trajectory: Trajectory) -> None:
            ledger.failed_attempts[re.split("[:']", trajectory.reason)[0].strip()] += 1
            on_failed_attempt(trajectory)

        async with start_rollout_workers(
            open_provider(config.environment, address, session_type="browser"), sampler, policy.grammar, config.actor,
            max_batch=config.inference.max_batch, lockstep=False, on_failed_attempt=record_failure,
        ) as workers:  # fmt: skip

            async def play(request: EpisodeRequest) -> Trajectory:
                book = ledger.cancelled
                try:
                    trajectory = await workers.play(request)
                    book = ledger.ended
                except Exception:
                    book = ledger.crashed
                    raise
                finally:
                    book.append(request.episode_id)
                return trajectory

            yield RolloutWorkers(play, workers.inference)

    return AsynchronousPlayer(
        start_workers, scheduler, concurrent=config.actor_pool.target_concurrent_actors,
        batch_size=config.trainer.batch_size, max_staleness=config.trainer.max_staleness,
    )  # fmt: skip


def run_training(config: ScreenRunConfig, ledger: Ledger, stop: Callable[[], bool]) -> None:
    """Train until `stop`."""
    torch.set_num_threads(1)
    policy = build_policy(config)
    algorithm = make_algorithm(config.algorithm, "trajectories")
    learner = TrajectoryLearner(
        policy, algorithm, config.trainer, lora=config.model.use_lora, proof=config.proof, replay=config.replay,
        reward=config.reward, temperature=config.actor.temperature, kept_versions=config.staleness,
        version=policy.version, seed=config.trainer.seed,
    )  # fmt: skip
    sampler = TaskSampler(config.tasks, config.sampler, seed=config.trainer.seed)
    scheduler = _CountingScheduler(ledger, sampler, group_size=algorithm.group_size, seed=config.trainer.seed)
    source = EpisodeSource(
        scheduler, learner.admit, batch_size=config.trainer.batch_size, max_refills=0, max_staleness=config.staleness
    )
    publisher = SamplerPublisher(policy, None)
    publisher.publish(learner.version, learner.weights())
    source.open(
        start_player(config, policy, scheduler, ledger), version=learner.version, stop=stop, finished=ledger.receive
    )
    try:
        version = learner.version
        for update in run_updates(source, learner, publisher, stop):
            ledger.updates += 1
            if ledger.updates == 1:
                print("learning", flush=True)
            ledger.dropped_stale += int(update.metrics["dropped_stale"])
            ledger.learned += int(update.metrics["trajectories_learned"])
            for trajectory in update.batch.experience:
                ledger.staleness[version - trajectory.versions[0]] += 1
                if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
                    ledger.learned_from_failure.append(trajectory.episode_id)
            version = learner.version
    finally:
        source.close()
        publisher.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--actors", type=int, default=32)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stop, ledger = threading.Event(), Ledger()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = build_config(options.url, actors=options.actors, max_staleness=options.max_staleness, seed=options.seed)
    began, failure = time.monotonic(), ""
    try:
        run_training(config, ledger, stop.is_set)
    except Exception as error:
        failure = repr(error)
        raise
    finally:
        document = {"took_s": round(time.monotonic() - began, 1), "failure": failure, **ledger.to_json()}
        options.ledger.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
