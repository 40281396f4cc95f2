"""Training on screens: builds model, sessions, actors, learner and publisher, and runs a configuration.

Episodes are archived with their pictures. Synchronous and asynchronous collection use different players; a sampler in
this process and one in another process use different publishers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any, cast

import torch

from palaestra.actor.cluster.episode_workers import ClusterEpisodes, EpisodeSetup, SamplerSetup, check_sessions
from palaestra.actor.episode_source import (
    AsynchronousPlayer,
    EpisodeScheduler,
    EpisodeSource,
    Player,
    StartWorkers,
    SynchronousPlayer,
)
from palaestra.actor.inference import RolloutWorkers, start_rollout_workers
from palaestra.errors import ConfigError
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.experience.turn_credit import append_credits, keep_credits
from palaestra.files.run_directory import Attempt
from palaestra.learner.trajectories.proof import Reason
from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.module_policy import as_vlm_policy
from palaestra.policy.vlm.sampler import LocalSampler, ProcessSampler, ReplySampler
from palaestra.policy.vlm.serving.server_sampler import ServerSampler
from palaestra.sessions.clients.provider import SessionAddress, find_sessions, open_provider
from palaestra.sessions.task_sampler import TaskSampler
from palaestra.telemetry import EpisodeSummary, Telemetry
from palaestra.train.config import make_algorithm
from palaestra.train.distributed import FirstRankEpisodes, divide_model, is_divided, place_sampler, screen_rank_notices
from palaestra.train.held_out import build_policy, check_tasks, play_held_out
from palaestra.train.model_run import ModelRun, SamplerPublisher, damage_notices, evaluation_metrics
from palaestra.train.run import RunComponents, TrainingResult
from palaestra.train.run import train as run
from palaestra.train.screen_config import ScreenRunConfig
from palaestra.train.supervised import ImitationRun
from palaestra.transport.ranks import current_ranks
from palaestra.transport.ray_cluster import RayCluster

ARCHIVE_TRIM_INTERVAL = 20
"""Updates between two removals of old trajectories."""


class _ScreenRun(ModelRun):
    """The components of a run that plays episodes."""

    def __init__(
        self,
        config: ScreenRunConfig,
        policy: Any,
        address: SessionAddress,
        warnings: Sequence[str],
        server: ServerSampler | None = None,
        cluster: RayCluster | None = None,
    ) -> None:
        super().__init__(config, policy)
        t = config.trainer
        self._address, self._warnings = address, warnings
        sampler = TaskSampler(config.tasks, config.sampler, seed=t.seed)
        self._scheduler = EpisodeScheduler(sampler, group_size=self.learner.algorithm.group_size, seed=t.seed)
        self.source: EpisodeSource | FirstRankEpisodes = EpisodeSource(
            self._scheduler,
            self.learner.admit,
            batch_size=t.batch_size,
            max_refills=t.max_refills,
            max_staleness=config.staleness,
            sessions=address.description,
        )
        if self._ranks.size > 1:
            self.source = FirstRankEpisodes(self.source, self._ranks)
        self._process: ProcessSampler | None = None
        self._server = server
        self._episodes = None if cluster is None else self._prepare_cluster(cluster)
        self.publisher = SamplerPublisher(policy, server)
        self._failures_reported = 0
        self._archive: TrajectoryArchive | None = None

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Start the sampler. The player opens sessions with the first batch."""
        weights = self.learner.weights()  # in all processes, if they are divided
        if not self._ranks.is_first:
            self.publisher.publish(self.learner.version, weights)
            return
        if self._config.trajectories_kept:
            self._archive = TrajectoryArchive(attempt.trajectories)

        def report(number: int, trajectory: Trajectory) -> None:
            telemetry.emit(EpisodeSummary(number, number, 0, trajectory.total_reward(), len(trajectory)))

        start_workers: StartWorkers
        if self._episodes is not None:
            self.publisher, start_workers = SamplerPublisher(self._policy, self._episodes), self._episodes.start_workers
        else:
            start_workers = self._local_workers(self._start_sampler())
        self.publisher.publish(self.learner.version, weights)
        self.source.open(
            self._start_player(start_workers),
            version=self.learner.version,
            stop=stop,
            record=self._record,
            finished=report,
        )

    def _start_sampler(self) -> ReplySampler:
        c = self._config
        if self._server is not None:
            return self._server
        if c.inference.backend == "thread":
            return LocalSampler(self._policy, threads=c.inference.torch_threads)
        device = c.model.device if c.inference.device is None else c.inference.device
        self._process = ProcessSampler(
            c.model.model_copy(update={"device": device}),
            seed=c.trainer.seed,
            threads=c.inference.torch_threads,
            restarts=c.inference.restarts,
            preprocessor=self._policy.preprocessor,
        )
        self.publisher = SamplerPublisher(self._policy, self._process)
        return self._process

    def _prepare_cluster(self, cluster: RayCluster) -> ClusterEpisodes:
        c = self._config
        settings = (c.model, c.trainer.seed, c.inference.torch_threads, c.actor.temperature, c.inference.max_batch)
        return ClusterEpisodes(
            cluster,
            SamplerSetup(*settings, lockstep=c.trainer.collection == "synchronous"),
            EpisodeSetup(c.environment, self._address, self._policy.grammar, c.actor),
            c.actor_pool.target_concurrent_actors,
        )

    def _local_workers(self, sampler: ReplySampler) -> StartWorkers:
        c = self._config

        def start_workers(
            on_failed_attempt: Callable[[Trajectory], None],
        ) -> AbstractAsyncContextManager[RolloutWorkers]:
            return start_rollout_workers(
                open_provider(c.environment, self._address, session_type=c.actor.session_type),
                sampler,
                self._policy.grammar,
                c.actor,
                max_batch=c.inference.max_batch,
                lockstep=c.trainer.collection == "synchronous",
                on_failed_attempt=on_failed_attempt,
            )

        return start_workers

    def _start_player(self, start_workers: StartWorkers) -> Player:
        c = self._config
        concurrent = c.actor_pool.target_concurrent_actors
        if c.trainer.collection == "synchronous":
            return SynchronousPlayer(start_workers, self._scheduler, concurrent=concurrent)
        return AsynchronousPlayer(
            start_workers,
            self._scheduler,
            concurrent=concurrent,
            batch_size=c.trainer.batch_size,
            max_staleness=c.trainer.max_staleness,
            version=self.learner.version,
        )

    def _record(self, trajectory: Trajectory) -> None:
        if self._archive is not None:
            self._archive.append(trajectory)

    def evaluate(self) -> dict[str, float]:
        """Success rate and return on held-out seeds."""
        episodes = self._config.evaluation.episodes
        return evaluation_metrics(
            play_held_out(self._config, self._policy, self._address, episodes=episodes, sampler=self._server)
        )

    def notices(self) -> Sequence[tuple[str, str]]:
        """The learning rate and its reason, and warnings about damaged demonstrations and the tasks."""
        notices = [("info", f"{self.learner.rate.reason}.".capitalize())]
        if self.learner.demonstrations is not None:
            notices += damage_notices(self.learner.demonstrations.sampler.demonstrations)
        notices += screen_rank_notices(self._config, self._ranks)
        return notices + [("warning", text) for text in self._warnings]

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """Warnings about batches that were not learned from, and about replaced sampler processes."""
        texts = []
        if not metrics["trajectories_learned"] and not metrics.get("demonstration_turns"):
            texts.append(f"Nothing was learned from this batch: {self._explain_no_learning(metrics)}.")
        if self._process is not None:
            failures = self._process.failures
            metrics["sampler_restarts"] = float(len(failures))
            texts += [f"A sampler process was replaced: {text}." for text in failures[self._failures_reported :]]
            self._failures_reported = len(failures)
        if self._server is not None:
            metrics |= self._server.counts.metrics()
            notices = self._server.notices
            texts += [f"{text[0].upper()}{text[1:]}." for text in notices[self._failures_reported :]]
            self._failures_reported = len(notices)
        if self._episodes is not None:
            metrics |= {name: float(count) for name, count in self._episodes.counts.items()}
            failures = self._episodes.failures
            texts += [f"An actor was replaced: {text}." for text in failures[self._failures_reported :]]
            self._failures_reported = len(failures)
        if self._archive is not None:
            append_credits(self._archive.directory, self.learner.last_credits)
            if self.source.progress.updates % ARCHIVE_TRIM_INTERVAL == 0:
                self._archive.keep(self._config.trajectories_kept)
                keep_credits(self._archive.directory, (entry.episode_id for entry in self._archive.entries()))
        return texts

    def _explain_no_learning(self, metrics: Mapping[str, float]) -> str:
        if self.learner.last_refusal:
            return self.learner.last_refusal.rstrip(".")
        refused = {reason.value: int(metrics[f"refused_{reason.value}"]) for reason in Reason}
        if any(count for reason, count in refused.items() if reason != Reason.ENVIRONMENT):
            counts = ", ".join(f"{reason} {count}" for reason, count in refused.items() if count)
            offered = metrics["trajectories_offered"]
            return f"{offered:.0f} episodes were offered and refused by reason: {counts} (see the log)"
        return "every group succeeded or failed as a whole, or nothing was accepted"


def _open_engines(config: ScreenRunConfig, policy: VLMPolicy, stack: ExitStack) -> ServerSampler:
    """Connect to the inference engines and check them; `ConfigError` about the first that cannot be used."""
    server = ServerSampler(
        policy, config.inference, temperature=config.actor.temperature, max_new_tokens=config.model.max_new_tokens
    )
    stack.callback(server.close)
    server.check(policy.trainable_state())
    return server


def train_screens(config: ScreenRunConfig, *, policy: Any = None, **where: Any) -> TrainingResult:
    """Train a model on the tasks of a configuration. The other arguments are those of `palaestra.train.run.train`.

    `policy` replaces the model of the configuration: a `VLMPolicy`, or an `nn.Module` with `sample` and `log_probs`
    (docs/vlm.md).
    """

    def build(stack: ExitStack) -> RunComponents:
        torch.set_num_threads(config.trainer.torch_threads)
        model = build_policy(config) if policy is None else as_vlm_policy(policy, codec=config.actor.codec)
        backend = config.inference.backend
        if policy is not None and (backend == "process" or (backend == "server" and not isinstance(model, VLMPolicy))):
            reason = "a sampler outside of this process needs the model of the configuration, and a policy was given"
            raise ConfigError("inference.backend", backend, reason, "Use inference.backend=thread")
        if policy is not None and config.actors.backend == "ray":
            reason = "the sampler of the cluster builds its model from the configuration, and a policy was given"
            raise ConfigError("actors.backend", "ray", reason, "Use actors.backend=local")
        ranks = current_ranks()
        if make_algorithm(config.algorithm, "trajectories").from_demonstrations:
            divide_model(config, model, ranks)
            return ImitationRun(config, model)
        if backend == "server" and is_divided(config, ranks):
            reason = "the probe of an adapter needs the whole model in the first process, and fsdp divides it"
            raise ConfigError("inference.backend", "server", reason, "Use trainer.sharding=ddp")
        place_sampler(config, model, ranks)
        divide_model(config, model, ranks)
        server: ServerSampler | None = None
        cluster: RayCluster | None = None

        def connect() -> tuple[SessionAddress, list[str]] | None:
            nonlocal server, cluster
            if not ranks.is_first:
                return None
            if config.actors.backend == "ray":
                num_actors = min(config.actors.num_actors, config.actor_pool.target_concurrent_actors)
                actors = config.actors.model_copy(update={"num_actors": num_actors})
                cluster = stack.enter_context(RayCluster.connect(actors, extra_actors=1))
                check_sessions(cluster, config.environment)
            address = find_sessions(
                config.environment,
                stack,
                actors=config.actor_pool.target_concurrent_actors,
                session_type=config.actor.session_type,
            )
            if backend == "server":
                server = _open_engines(config, model, stack)
            return address, check_tasks(config, address)

        address, warnings = cast(tuple[SessionAddress, list[str]], ranks.broadcast(ranks.run(connect)))
        return _ScreenRun(config, model, address, warnings, server, cluster)

    return run(config, build, **where)
