"""Training on transitions: online with a replay buffer, offline on a dataset, or one after the other.

`TransitionTraining` holds environments, policy, source and learner. `train_transitions` runs a configuration on the
loop of `palaestra.train.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from palaestra.actor.compatibility import check_spaces, is_same_shape
from palaestra.actor.replay_source import ReplaySource
from palaestra.env.make import base_env_id
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError, DatasetError
from palaestra.experience.columns import map_column
from palaestra.experience.datasets import Dataset, find_dataset
from palaestra.experience.datasets.spaces import nest
from palaestra.experience.replay import Arrays
from palaestra.files.checkpoint import Kind
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.learner.checkpoint import TrainingCheckpoint
from palaestra.learner.transitions.learner import TransitionLearner
from palaestra.policy.compiled import device_notices
from palaestra.policy.off_policy import TransitionPolicy
from palaestra.policy.storage import load_weights, policy_bytes
from palaestra.policy.tabular import TabularPolicy
from palaestra.processes.threads import limit_threads
from palaestra.telemetry import Telemetry
from palaestra.train.config import RunConfig, make_algorithm
from palaestra.train.evaluation import evaluate_during_training, make_env_and_policy
from palaestra.train.run import RunComponents, RunSchedule, TrainingResult, raise_if_complete
from palaestra.train.run import train as run
from palaestra.train.tabular import TabularTraining
from palaestra.transport.dataset_source import DatasetSource
from palaestra.transport.weights import SharedWeights

SMALL_NETWORK = 2_000_000
"""Number of parameters below which a second torch thread does not pay off at the usual batch sizes."""


class TransitionTraining:
    """The components of a run on transitions."""

    kind: Kind = "vector"

    def __init__(self, config: RunConfig, policy: nn.Module, env: VectorEnv, dataset: Dataset | None = None) -> None:
        self.config, self.env, self.dataset = config, env, dataset
        self.policy: Any = policy
        check_spaces(policy, env)
        algorithm, t = make_algorithm(config.algorithm, "transitions"), config.trainer
        reason = algorithm.why_not_compiled(policy) if t.compiled == "on" else None
        if reason is not None:
            remedy = "Use 'auto' to learn through autograd"
            raise ConfigError("trainer.compiled", "on", f"this policy cannot learn compiled: {reason}", remedy)
        if algorithm.config.precision != "float32":
            why = "trainer.compiled is off" if t.compiled == "off" else algorithm.why_not_compiled(policy)
            if why is not None:
                reason = f"updates through autograd are in float32 ({why})"
                raise ConfigError("algorithm.precision", algorithm.config.precision, reason, "Leave it out")
        self.publisher = SharedWeights()
        self.learner = TransitionLearner(
            policy, algorithm, seed=t.seed, compiled=t.compiled != "off", progress=self._progress
        )
        self._notices: list[tuple[str, str]] = []
        self.source: ReplaySource | DatasetSource
        data = None
        if dataset is not None and config.dataset is not None:
            columns = load_columns(dataset, policy)
            if config.env.normalize_observation:
                policy.fit_normalizer(map_column(columns["observation"], torch.from_numpy))  # type: ignore[operator]
                self.learner.sync_buffers()
            data = DatasetSource(
                columns,
                batch_size=algorithm.config.batch_size,
                steps_per_batch=config.dataset.steps_per_update,
                total=config.total_timesteps if config.is_offline else None,
                seed=t.seed,
            )
        if data is not None and config.is_offline:
            self.source = data
        else:
            self.source = self._replay_source(algorithm, data)
        self._is_fine_tuning = not config.is_offline and dataset is not None
        collected_with = dataset.about.get("env_kwargs") or {} if dataset is not None else config.env.kwargs
        if collected_with != config.env.kwargs:
            text = f"The dataset was collected with env.kwargs={collected_with}, evaluations use {config.env.kwargs}: "
            self._notices.append(("warning", f"{text}the reference scores may not apply."))
        score = "eval_return" if t.eval_every or self._is_fine_tuning else "episode_return"
        self.schedule = RunSchedule(t, config.total_timesteps, "steps", score, log_interval=t.log_interval)

    def _replay_source(self, algorithm: Any, data: DatasetSource | None) -> ReplaySource:
        settings = self.config.dataset
        source = ReplaySource(
            self.env,
            self.policy,
            algorithm,
            seed=self.config.trainer.seed,
            total_timesteps=self.config.total_timesteps,
            save_replay=self.config.trainer.save_replay,
            compiled=self.config.trainer.compiled,
            dataset=data,
            offline_updates=settings.offline_updates if settings else 0,
            mix=settings.mix if settings else 0.0,
        )
        if data is not None and settings is not None and settings.prefill:
            steps, capacity = len(data.columns["reward"]), source.buffer.capacity
            if steps > capacity:
                text = f"dataset.prefill: the dataset has {steps:,} steps, and algorithm.buffer_size is {capacity:,}: "
                self._notices.append(("warning", f"{text}only the newest {capacity:,} steps are in the replay buffer."))
            columns = {name: map_column(column, lambda part: part[-capacity:]) for name, column in data.columns.items()}
            source.buffer.add(**columns)
        return source

    def is_complete(self) -> bool:
        """Whether the planned number of steps was taken."""
        return self.source.progress.steps >= self.schedule.total

    def _progress(self, gradient_steps: int) -> float:
        """Share of the training before an update. The source has counted its batch: offline, the gradient steps."""
        done = self.source.progress.steps - (gradient_steps if self.config.is_offline else 0)
        return min(1.0, max(0, done) / self.schedule.total)

    def limit_threads(self) -> AbstractContextManager[None]:
        """Limit the threads of torch inside the block, if the policy is small."""
        wanted = self.config.trainer.torch_threads
        if wanted is None and sum(p.numel() for p in self.policy.parameters()) < SMALL_NETWORK:
            wanted = 1
        return limit_threads(wanted)

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Let the source notice that the run was asked to stop."""
        if isinstance(self.source, ReplaySource):
            self.source.stop = stop

    def save_policy(self) -> bytes:
        """The bytes of a file with the weights."""
        return policy_bytes(self.policy)

    def load_policy(self, path: Path) -> None:
        """Load the weights of a file."""
        load_weights(self.policy, path)
        self.learner.sync_buffers()

    def warm_start(self, checkpoint: TrainingCheckpoint) -> None:
        """Load policy, critics and target networks of another run's checkpoint, and evaluate them first."""
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))
        self.load_policy(checkpoint.policy)
        self.learner.load_target(checkpoint.learner)
        if isinstance(self.source, ReplaySource):
            self._is_fine_tuning = self.source.is_pretrained = True
            self.schedule = replace(self.schedule, evaluate_first=True, score_metric="eval_return")

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Raise if the run is already complete, or if the checkpoint belongs to another algorithm or policy."""
        steps = int(checkpoint.progress["steps"])
        key, unit = ("updates", "gradient steps") if self.config.is_offline else ("total_timesteps", "steps")
        raise_if_complete(run, key=key, total=self.schedule.total, done=steps, unit=unit)
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))
        self._check_dataset(checkpoint)
        if isinstance(self.source, ReplaySource) and "replay" not in checkpoint.source.facts:
            text = (
                "The checkpoint has no replay buffer (trainer.save_replay=false): earlier steps are not learned from."
            )
            self._notices.append(("warning", text))

    def _check_dataset(self, checkpoint: TrainingCheckpoint) -> None:
        """Raise if the dataset has changed since the checkpoint was written."""
        recorded = str(checkpoint.about.get("dataset", {}).get("sha256", ""))
        if self.dataset is not None and recorded and recorded != self.dataset.sha256:
            reason = f"its digest is {self.dataset.sha256[:12]}, and the checkpoint learned from {recorded[:12]}"
            remedy = "Restore the dataset, or start a new run with --warm-start"
            raise DatasetError("dataset.id", self.dataset.dataset_id, reason, remedy)

    def evaluate(self) -> dict[str, float]:
        """Return and length of held-out episodes, and the normalised score if the dataset has reference scores."""
        metrics = evaluate_during_training(self.config, self.policy)
        score = self.dataset.normalized_score(metrics["eval_return"]) if self.dataset is not None else None
        return metrics if score is None else {**metrics, "eval_normalized_score": score}

    def is_evaluation_due(self) -> bool:
        """Before the first step in the environment, and at the end of fine-tuning."""
        source, steps = self.source, self.source.progress.steps
        ended_offline = isinstance(source, ReplaySource) and source.offline_updates > 0 and not source.is_offline
        return (ended_offline and steps == 0) or (self._is_fine_tuning and steps >= self.schedule.total)

    def notices(self) -> Sequence[tuple[str, str]]:
        """Notices about the device, from the policy, about the dataset and about the resume."""
        texts = [*device_notices(self.policy), *getattr(self.policy, "notices", ())]
        return [*(("warning", text) for text in texts), *self._notices]

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """None."""
        return []

    def about(self) -> dict[str, Any]:
        """The dataset and its reference scores."""
        return {} if self.dataset is None else {"dataset": describe_dataset(self.dataset)}


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """The identity of a dataset, for checkpoints."""
    return {
        "dataset_id": dataset.dataset_id,
        "env_id": dataset.env_id,
        "env_kwargs": dict(dataset.about.get("env_kwargs") or {}),
        "sha256": dataset.sha256,
        "random_score": dataset.random_score,
        "expert_score": dataset.expert_score,
    }


def open_dataset(config: RunConfig, env: VectorEnv) -> Dataset | None:
    """The dataset of a configuration; `DatasetError` if it is not of this environment."""
    if config.dataset is None:
        return None
    dataset = find_dataset(config.dataset.id, Home.default().datasets)
    if dataset.env_id and dataset.env_id != base_env_id(config.env.id):
        reason = f"was collected in {dataset.env_id}, and env.id is {config.env.id}"
        raise DatasetError("dataset.id", dataset.dataset_id, reason, "Leave env.id out, or use another dataset")
    for name in ("observation_space", "action_space"):
        theirs, ours = getattr(dataset, name), getattr(env, name)
        # Environments here have flat keys such as "camera/rgb", files have nested groups.
        if not is_same_shape(nest(theirs), nest(ours)):
            reason = f"its {name} is {theirs}, that of {config.env.id} is {ours}"
            raise DatasetError("dataset.id", dataset.dataset_id, reason, "Use the env.kwargs it was collected with")
    return dataset


def load_columns(dataset: Dataset, policy: Any) -> Arrays:
    """The transitions of a dataset, with actions in the form in which the policy stores them."""
    arrays = dataset.load_transitions()
    distribution = policy.distribution
    action = distribution.from_env(arrays.action).reshape(-1, *distribution.action_shape)
    return {
        "observation": arrays.observation,
        "action": action.astype(distribution.action_dtype),
        "reward": arrays.reward,
        "next_observation": arrays.next_observation,
        "terminated": arrays.terminated,
    }


def build_transition_training(config: RunConfig) -> TransitionTraining | TabularTraining:
    """The components of a configuration; the caller closes `env`."""
    env, policy = make_env_and_policy(config)
    try:
        _check_policy(policy)
        if isinstance(policy, TabularPolicy):
            return TabularTraining(config, make_algorithm(config.algorithm, "transitions"), policy, env)
        return TransitionTraining(config, policy, env, open_dataset(config, env))
    except BaseException:
        env.close()
        raise


def _check_policy(policy: nn.Module) -> None:
    if not isinstance(policy, TransitionPolicy):
        reason = "is not a policy for transitions"
        remedy = "Derive it from palaestra.policy.off_policy.TransitionPolicy"
        raise ConfigError("policy.name", type(policy).__name__, reason, remedy)


def train_transitions(config: RunConfig, **where: Any) -> TrainingResult:
    """Train on transitions. Arguments as in `palaestra.train.run.train`."""

    def build(stack: ExitStack) -> RunComponents:
        training = build_transition_training(config)
        stack.callback(training.env.close)
        stack.enter_context(training.limit_threads())
        return training

    return run(config, build, **where)
