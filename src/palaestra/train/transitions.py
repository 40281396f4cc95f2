"""Training on transitions: online with a replay buffer, offline on a dataset, or one after the other.

`TransitionTraining` holds environments, policy, source and learner. `train_transitions` runs a configuration on the
loop of `palaestra.train.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from palaestra.actor.replay_source import ReplaySource
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError
from palaestra.files.checkpoint import Kind
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.learner.checkpoint import TrainingCheckpoint
from palaestra.learner.transitions.learner import TransitionLearner
from palaestra.policy.compiled import device_notices
from palaestra.policy.storage import load_weights, policy_bytes
from palaestra.processes.threads import limit_threads
from palaestra.telemetry import Telemetry
from palaestra.train.config import RunConfig, make_algorithm
from palaestra.train.evaluation import evaluate_during_training, make_env_and_policy
from palaestra.train.run import RunComponents, RunSchedule, TrainingResult
from palaestra.train.run import train as run
from palaestra.transport.weights import SharedWeights

SMALL_NETWORK = 2_000_000
"""Number of parameters below which a second torch thread does not pay off at the usual batch sizes."""


class TransitionTraining:
    """The components of a run on transitions."""

    kind: Kind = "vector"

    def __init__(self, config: RunConfig, policy: nn.Module, env: VectorEnv) -> None:
        self.config, self.policy, self.env = config, policy, env
        algorithm, t = make_algorithm(config.algorithm, "transitions"), config.trainer
        self.publisher = SharedWeights()
        self.learner = TransitionLearner(
            policy, algorithm, seed=t.seed, compiled=t.compiled != "off", progress=self._progress
        )
        self.source = ReplaySource(
            env,
            policy,
            algorithm,
            seed=t.seed,
            total_timesteps=config.total_timesteps,
            save_replay=t.save_replay,
        )
        score = "eval_return" if t.eval_every else "episode_return"
        self.schedule = RunSchedule(t, config.total_timesteps, "steps", score, log_interval=t.log_interval)
        self._notices: list[tuple[str, str]] = []

    def _progress(self) -> float:
        return min(1.0, self.source.progress.steps / self.schedule.total)

    def limit_threads(self) -> AbstractContextManager[None]:
        """Limit the threads of torch inside the block, if the policy is small."""
        wanted = self.config.trainer.torch_threads
        if wanted is None and sum(p.numel() for p in self.policy.parameters()) < SMALL_NETWORK:
            wanted = 1
        return limit_threads(wanted)

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Let the source notice that the run was asked to stop."""
        self.source.stop = stop

    def save_policy(self) -> bytes:
        """The bytes of a file with the weights."""
        return policy_bytes(self.policy)

    def load_policy(self, path: Path) -> None:
        """Load the weights of a file."""
        load_weights(self.policy, path)
        self.learner.sync_buffers()

    def warm_start(self, checkpoint: TrainingCheckpoint) -> None:
        """Load policy, critics and target networks of another run's checkpoint."""
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))
        self.load_policy(checkpoint.policy)
        self.learner.load_target(checkpoint.learner)

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Raise if the run is already complete, or if the checkpoint belongs to another algorithm or policy."""
        steps, total = int(checkpoint.progress["steps"]), self.schedule.total
        if steps >= total:
            key, unit = ("updates", "gradient steps") if self.config.is_offline else ("total_timesteps", "steps")
            raise ConfigError(
                f"trainer.{key}",
                total,
                f"run {run.run_id} has taken {steps} {unit} already",
                f"Raise it to train on, for example trainer.{key}={2 * steps}",
            )
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))
        if "replay" not in checkpoint.source.facts:
            text = "The checkpoint has no replay buffer (trainer.save_replay=false): the run starts with an empty one."
            self._notices.append(("warning", text))

    def evaluate(self) -> dict[str, float]:
        """Return and length of held-out episodes."""
        return evaluate_during_training(self.config, self.policy)

    def is_evaluation_due(self) -> bool:
        """Only `eval_every` asks for evaluations."""
        return False

    def notices(self) -> Sequence[tuple[str, str]]:
        """Notices about the device, from the policy, and about the resume."""
        texts = [*device_notices(self.policy), *getattr(self.policy, "notices", ())]
        return [*(("warning", text) for text in texts), *self._notices]

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """None."""
        return []


def build_transition_training(config: RunConfig) -> TransitionTraining:
    """The components of a configuration; the caller closes `env`."""
    env, policy = make_env_and_policy(config)
    try:
        return TransitionTraining(config, policy, env)
    except BaseException:
        env.close()
        raise


def train_transitions(config: RunConfig, **where: Any) -> TrainingResult:
    """Train on transitions. Arguments as in `palaestra.train.run.train`."""

    def build(stack: ExitStack) -> RunComponents:
        training = build_transition_training(config)
        stack.callback(training.env.close)
        stack.enter_context(training.limit_threads())
        return training

    return run(config, build, **where)
