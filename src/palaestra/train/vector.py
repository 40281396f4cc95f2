"""Training in vector environments: builds environments, policy, source, learner and publisher.

`VectorTraining` holds the components, for runs and for `Trainer`. Synchronous and asynchronous collection use different
sources and publishers. `train` runs a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from palaestra.actor.asynchronous import AsyncConfig, AsynchronousSource
from palaestra.actor.cluster.env_share import RemoteEnvs, shares_one_generator
from palaestra.actor.cluster.rollout_source import ClusterSource
from palaestra.actor.collector import Collector
from palaestra.actor.compatibility import check_memory, check_spaces, rollout_spec
from palaestra.actor.policy_actor import Compiled
from palaestra.actor.synchronous import SynchronousSource
from palaestra.env.make import EnvConfig
from palaestra.env.vector import VectorEnv
from palaestra.files.checkpoint import Kind
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.checkpoint import TrainingCheckpoint
from palaestra.learner.rollout_learner import RolloutLearner
from palaestra.policy.compiled import device_notices
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.storage import load_weights, policy_bytes
from palaestra.processes.threads import limit_threads
from palaestra.telemetry import Telemetry
from palaestra.train.config import RunConfig, make_algorithm
from palaestra.train.distributed import check_rollout_ranks, collector_seed, rank_notices, refuse_transitions
from palaestra.train.evaluation import evaluate_during_training, make_env_and_policy
from palaestra.train.run import RunComponents, RunSchedule, TrainingResult, raise_if_complete, restore
from palaestra.train.run import train as run
from palaestra.train.transitions import train_transitions
from palaestra.transport.object_store import ObjectStorePublisher
from palaestra.transport.ranks import ALONE, Ranks, current_ranks
from palaestra.transport.ray_cluster import RayCluster
from palaestra.transport.weights import BoardPublisher, SharedWeights

SHARED_GENERATOR = (
    "The copies of this environment draw from one generator (env.vectorization), so that several actors play other "
    "episodes than one. For the same numbers as on one machine set env.vectorization=in_process."
)
SMALL_NETWORK = 200_000
"""Number of parameters below which a second torch thread does not pay off."""


class VectorTraining:
    """The components that train one policy in one vector environment."""

    kind: Kind = "vector"

    def __init__(
        self,
        policy: nn.Module,
        env: VectorEnv,
        algorithm: RolloutAlgorithm,
        *,
        seed: int,
        normalize_reward: bool = False,
        compiled: Compiled = "auto",
        torch_threads: int | None = None,
        asynchronous: AsyncConfig | None = None,
        env_config: EnvConfig | None = None,
        ranks: Ranks = ALONE,
        cluster: RayCluster | None = None,
    ) -> None:
        """`asynchronous`: settings of asynchronous collection, None: synchronous. Other arguments as in `Trainer`.

        `ranks`: the processes that train together; `env` is this process's share of the environments. `cluster`: where
        actors run, None: on this machine.
        """
        check_spaces(policy, env)
        # Before acting: the memory layout of the weights affects the last digits.
        FlatParameters.refresh(policy)
        self.policy, self.env, self.planned_timesteps = policy, env, 0
        self._torch_threads, self._ranks = torch_threads, ranks
        discount = algorithm.config.gamma if normalize_reward else None
        self.source: SynchronousSource | AsynchronousSource | ClusterSource
        self.publisher: SharedWeights | BoardPublisher | ObjectStorePublisher
        if cluster is not None:
            assert env_config is not None
            self.source = ClusterSource(
                cluster,
                asynchronous,
                policy,
                env,
                seed=seed,
                compiled=compiled,
                discount=discount,
                env_config=env_config,
                torch_threads=torch_threads or 1,
            )
            self.publisher = self.source.publisher
        elif asynchronous is None:
            share = ranks.share(env.num_envs * ranks.size)
            collector = Collector(env, policy, seed=seed, compiled=compiled, discount=discount, share=share)
            self.source, self.publisher = SynchronousSource(collector, ranks=ranks), SharedWeights()
        else:
            self.source = AsynchronousSource(
                asynchronous,
                policy,
                env,
                seed=collector_seed(seed, ranks, asynchronous),
                compiled=compiled,
                discount=discount,
                env_config=env_config,
                torch_threads=torch_threads or 1,
                ranks=ranks,
            )
            self.publisher = self.source.publisher
        self.learner = RolloutLearner(
            policy,
            algorithm,
            rollout_spec(env, policy),
            seed=seed,
            compiled=compiled != "off",
            scaled_rewards=normalize_reward,
            progress=self._progress,
            ranks=ranks,
            has_spare_core=getattr(self.source, "has_spare_core", lambda: True),
        )

    def start(self, total_timesteps: int, rollout_length: int, ring: int | None = None) -> None:
        """Prepare for batches of `rollout_length` steps per environment; `ring`: capacity of the ring in steps."""
        self.planned_timesteps = total_timesteps
        if isinstance(self.source, SynchronousSource):
            self.source.start(self.learner.version, rollout_length)
            return
        left = total_timesteps - self.source.progress.steps
        segments = -(-left // (rollout_length * self.env.num_envs * self._ranks.size))
        self.source.start(self.learner.version, rollout_length, segments, buffer_size=ring)

    def is_complete(self) -> bool:
        """Whether the planned number of steps was collected."""
        return self.source.progress.steps >= self.planned_timesteps

    def check_memory(self, length: int, ring: int | None = None, *, num_envs: int | None = None) -> None:
        """Raise `ConfigError` if rollouts of `length` steps (`ring` in all) and the policy do not fit in memory."""
        usual = None if isinstance(self.source, SynchronousSource) else self.source.default_segments
        segments = usual and (ring // length if ring else usual)
        epochs = self.learner.algorithm.config.n_epochs
        check_memory(self.policy, self.env, length, n_epochs=epochs, ring_segments=segments, num_envs=num_envs)

    def limit_threads(self) -> AbstractContextManager[None]:
        """Limit the threads of torch inside the block, if the policy is small."""
        wanted = self._torch_threads
        if wanted is None and sum(p.numel() for p in self.policy.parameters()) < SMALL_NETWORK:
            wanted = 1
        return limit_threads(wanted)

    def save_policy(self) -> bytes:
        """The bytes of a file with the weights."""
        return policy_bytes(self.policy)

    def load_policy(self, path: Path) -> None:
        """Load the weights of a file."""
        load_weights(self.policy, path)

    def load(self, checkpoint: TrainingCheckpoint) -> bool:
        """Continue from a checkpoint; returns whether the environments were restored exactly."""
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))
        self.planned_timesteps = int(checkpoint.progress.get("planned_timesteps", 0))
        return restore(self, checkpoint)

    def progress_facts(self) -> dict[str, Any]:
        """Counters for a checkpoint."""
        return self.source.progress.facts() | {"planned_timesteps": self.planned_timesteps}

    def _progress(self, samples: int) -> float:
        if not self.planned_timesteps:
            return 0.0
        return min(1.0, max(0.0, (self.source.progress.steps - samples) / self.planned_timesteps))


class _VectorRun(VectorTraining):
    """The components of a run."""

    def __init__(
        self, config: RunConfig, policy: nn.Module, env: VectorEnv, ranks: Ranks, cluster: RayCluster | None
    ) -> None:
        settings = training_settings(config) | {"ranks": ranks, "cluster": cluster}
        if ranks.size > 1:
            settings["env_config"] = config.env.model_copy(update={"num_envs": env.num_envs})
        super().__init__(policy, env, make_algorithm(config.algorithm, "rollouts"), **settings)
        t, self._config, self._failures_reported = config.trainer, config, 0
        score = "eval_return" if t.eval_every else "episode_return"
        self.schedule = RunSchedule(t, config.total_timesteps, "steps", score, log_interval=t.log_interval)

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Prepare for the first batch."""
        self.learner.sync_ranks()
        self.start(self.schedule.total, self._config.rollout_length, self._config.trainer.buffer_size)

    def warm_start(self, checkpoint: TrainingCheckpoint) -> None:
        """Load the weights of another run's checkpoint."""
        self.load_policy(checkpoint.policy)

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Raise if the run is already complete, or if the checkpoint belongs to another policy."""
        steps = int(checkpoint.progress["steps"])
        raise_if_complete(run, key="total_timesteps", total=self.schedule.total, done=steps)
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))

    def evaluate(self) -> dict[str, float]:
        """Return and length of held-out episodes."""
        return evaluate_during_training(self._config, self.policy)

    def about(self) -> dict[str, Any]:
        """Nothing beyond the configuration."""
        return {}

    def is_evaluation_due(self) -> bool:
        """Only `eval_every` asks for evaluations."""
        return False

    def notices(self) -> Sequence[tuple[str, str]]:
        """Notices about the device and from the policy."""
        texts = [*device_notices(self.policy), *getattr(self.policy, "notices", ())]
        if isinstance(self.source, ClusterSource) and shares_one_generator(self._config.env, self.source.num_shares):
            texts.append(SHARED_GENERATOR)
        ranks = [("info", text) for text in rank_notices(self._config, self._ranks)]
        return [*ranks, *(("warning", text) for text in texts)]

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """Warnings about replaced collectors."""
        failures = getattr(self.source, "failures", ())[self._failures_reported :]
        self._failures_reported += len(failures)
        return [f"A collector was replaced: {text}" for text in failures]


def train(config: RunConfig, *, resume: RunDirectory | None = None, **where: Any) -> TrainingResult:
    """Train as a configuration says. Arguments as in `palaestra.train.run.train`."""
    if config.experience == "transitions":
        refuse_transitions(config)
        return train_transitions(config, resume=resume, **where)

    def build(stack: ExitStack) -> RunComponents:
        # A checkpoint has all weights, so a resume does not need the pretrained file.
        ranks, cluster = current_ranks(), None
        check_rollout_ranks(config, ranks)
        if config.actors.backend == "ray":
            # First, so that an unusable environment is refused before anything is started.
            first, policy = make_env_and_policy(_with_one_copy(config), pretrained=resume is None)
            stack.callback(first.close)
            env: VectorEnv = RemoteEnvs(first, config.env.num_envs)
            num_actors = min(config.actors.num_actors, config.env.num_envs)
            actors = config.actors.model_copy(update={"num_actors": num_actors})
            cluster = stack.enter_context(RayCluster.connect(actors))
        else:
            share = ranks.share(config.env.num_envs)
            env, policy = make_env_and_policy(config, pretrained=resume is None, share=share)
            stack.callback(env.close)
        training = _VectorRun(config, policy, env, ranks, cluster)
        training.check_memory(config.rollout_length, config.trainer.buffer_size)
        stack.enter_context(training.limit_threads())
        return training

    return run(config, build, resume=resume, **where)


def _with_one_copy(config: RunConfig) -> RunConfig:
    """The configuration with one environment in this process, which is enough for its spaces."""
    update: dict[str, Any] = {"num_envs": 1}
    if config.env.backend == "gymnasium" and config.env.vectorization != "native":
        update["vectorization"] = "in_process"
    return config.model_copy(update={"env": config.env.model_copy(update=update)})


def training_settings(config: RunConfig) -> dict[str, Any]:
    """Keyword arguments of `VectorTraining` from a configuration."""
    return {
        "seed": config.trainer.seed,
        "normalize_reward": config.env.normalize_reward,
        "compiled": config.trainer.compiled,
        "torch_threads": config.trainer.torch_threads,
        "asynchronous": config.asynchronous,
        "env_config": config.env,
    }
