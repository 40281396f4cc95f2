"""Training a table of action values, on the loop of `palaestra.train.run`: environment, policy, source and learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from palaestra.actor.tabular_source import TabularSource
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError
from palaestra.files.checkpoint import Kind
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.learner.checkpoint import TrainingCheckpoint
from palaestra.learner.transitions.tabular import TabularAlgorithm, TabularLearner
from palaestra.policy.storage import load_weights, policy_bytes
from palaestra.policy.tabular import TabularPolicy
from palaestra.processes.threads import limit_threads
from palaestra.telemetry import Telemetry
from palaestra.train.config import RunConfig
from palaestra.train.evaluation import evaluate_during_training
from palaestra.train.run import RunSchedule, raise_if_complete
from palaestra.transport.weights import SharedWeights


class TabularTraining:
    """The components of a run of Q-learning or SARSA."""

    kind: Kind = "vector"

    def __init__(self, config: RunConfig, algorithm: TabularAlgorithm, policy: TabularPolicy, env: VectorEnv) -> None:
        name, t = config.algorithm["name"], config.trainer
        if config.dataset is not None:
            reason = f"{name} learns from its own steps"
            raise ConfigError("dataset", config.dataset.id, reason, "Leave it out, or use an offline algorithm")
        self.config, self.policy, self.env = config, policy, env
        self.publisher = SharedWeights()
        self.source = TabularSource(
            env,
            policy,
            algorithm,
            seed=t.seed,
            total_timesteps=config.total_timesteps,
            compiled=t.compiled != "off",
        )
        if t.compiled == "on" and self.source.table is None:
            reason = f"{config.env.id} has no transition table that can be read"
            raise ConfigError("trainer.compiled", "on", reason, "Use trainer.compiled=auto")
        self.learner = TabularLearner(policy, algorithm, progress=self._progress)
        score = "eval_return" if t.eval_every else "episode_return"
        self.schedule = RunSchedule(t, config.total_timesteps, "steps", score, log_interval=t.log_interval)

    def _progress(self) -> float:
        return min(1.0, self.source.progress.steps / self.schedule.total)

    def limit_threads(self) -> AbstractContextManager[None]:
        """Limit the threads of torch inside the block: a table needs one."""
        return limit_threads(self.config.trainer.torch_threads or 1)

    def open(self, attempt: Attempt, telemetry: Telemetry, stop: Callable[[], bool]) -> None:
        """Let the source notice that the run was asked to stop."""
        self.source.stop = stop

    def save_policy(self) -> bytes:
        """The bytes of a file with the table."""
        return policy_bytes(self.policy)

    def load_policy(self, path: Path) -> None:
        """Load the table of a file."""
        load_weights(self.policy, path)

    def warm_start(self, checkpoint: TrainingCheckpoint) -> None:
        """Start from the table of another run."""
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))
        self.load_policy(checkpoint.policy)

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Raise if the run is already complete, or if the checkpoint holds no table."""
        steps = int(checkpoint.progress["steps"])
        raise_if_complete(run, key="total_timesteps", total=self.schedule.total, done=steps)
        self.learner.check_state(checkpoint.learner, place=str(checkpoint.path))

    def evaluate(self) -> dict[str, float]:
        """Return and length of held-out episodes."""
        return evaluate_during_training(self.config, self.policy)

    def is_evaluation_due(self) -> bool:
        """Only `eval_every` asks for evaluations."""
        return False

    def notices(self) -> Sequence[tuple[str, str]]:
        """How the environment is stepped, and that its action masks are not used."""
        notices = []
        if self.source.table is not None:
            text = (
                f"Walking through the transition table of {self.config.env.id}, with the states its steps would visit."
            )
            notices.append(("info", text))
        if self.env.mask_size:
            notices.append(
                ("info", "Action masks are ignored in training: the table learns what forbidden actions cost.")
            )
        return notices

    def about(self) -> dict[str, Any]:
        """No further facts for a checkpoint."""
        return {}

    def warnings(self, metrics: dict[str, float]) -> Sequence[str]:
        """None."""
        return []
