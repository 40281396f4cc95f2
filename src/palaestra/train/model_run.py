"""`ModelRun`: what runs that train a vision-language model share, whatever their experience is.

It builds the learner of a configuration, and saves, loads and checks the weights of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from palaestra.actor.cluster.episode_workers import ClusterEpisodes
from palaestra.errors import ConfigError
from palaestra.evaluation.screens import ScreenEvaluation
from palaestra.experience.demonstrations import Demonstrations, DemonstrationSampler
from palaestra.experience.trajectory import Trajectory
from palaestra.files.checkpoint import Kind
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import TrainingCheckpoint
from palaestra.learner.trajectories.learner import DemonstrationMix, TrajectoryLearner
from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.sampler import ProcessSampler
from palaestra.policy.vlm.serving.server_sampler import ServerSampler
from palaestra.train.config import make_algorithm
from palaestra.train.distributed import is_divided
from palaestra.train.run import RunSchedule
from palaestra.train.screen_config import ScreenRunConfig
from palaestra.transport.ranks import current_ranks
from palaestra.transport.weights import WeightPublisher


class SamplerPublisher(WeightPublisher[Mapping[str, Tensor]]):
    """Publishes weights to the acting copy in this process, and to a sampler elsewhere."""

    def __init__(self, policy: Any, remote: ProcessSampler | ServerSampler | ClusterEpisodes | None) -> None:
        self._policy, self._remote = policy, remote
        self._published: int | None = None

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use the weights from the next batch of replies on."""
        if self._published is not None and version <= self._published:
            return
        if self._remote is not None:
            # Engines may refuse a version; then nothing acts with it.
            self._remote.publish(version, weights)
        self._published = version
        self._policy.publish(version)

    def close(self) -> None:
        """Stop the sampler process, or unload the adapters of the engines."""
        if self._remote is not None:
            self._remote.close()


class ModelRun:
    """The learner and the weights of a run."""

    kind: Kind = "screens"

    def __init__(self, config: ScreenRunConfig, policy: Any) -> None:
        t = config.trainer
        algorithm = make_algorithm(config.algorithm, "trajectories")
        if algorithm.needs_reference and not config.model.use_lora:
            policy.keep_reference()
        self._config, self._policy, self._ranks = config, policy, current_ranks()
        self.learner = TrajectoryLearner(
            policy,
            algorithm,
            t,
            lora=config.model.use_lora,
            proof=config.proof.loosen_for_engines() if config.inference.backend == "server" else config.proof,
            replay=config.replay,
            reward=config.reward,
            demonstrations=_mix_demonstrations(config, policy),
            temperature=config.actor.temperature,
            # Weights of earlier versions are not kept by parts.
            kept_versions=0 if is_divided(config, self._ranks) else config.staleness,
            version=policy.version,
            seed=t.seed,
            ranks=self._ranks,
        )
        score = "eval_success_rate" if t.eval_every else "success_rate"
        self.schedule = RunSchedule(t, t.num_training_steps, "updates", score, keep_first=True)

    def save_policy(self) -> Callable[[Path], object]:
        """A function that writes the directory of the model."""
        if is_divided(self._config, self._ranks):
            gathered: Callable[[Path], object] = self._policy.gather_for_save()
            return gathered
        save: Callable[[Path], object] = self._policy.save
        return save

    def load_policy(self, path: Path) -> None:
        """Load the weights of a directory."""
        self._policy.load(path)
        self.learner.reset_version(self._policy.version)

    def warm_start(self, checkpoint: TrainingCheckpoint) -> None:
        """Load the weights of another run's checkpoint."""
        self.load_policy(checkpoint.policy)

    def check_resume(self, checkpoint: TrainingCheckpoint, run: RunDirectory) -> None:
        """Raise if the run has already made its updates. The components check the rest when they load."""
        updates, total = int(checkpoint.progress["updates"]), self.schedule.total
        if updates >= total:
            raise ConfigError(
                "trainer.num_training_steps",
                total,
                f"run {run.run_id} has made {updates} updates already",
                f"Raise it to train on, for example trainer.num_training_steps={2 * updates}",
            )

    def about(self) -> dict[str, Any]:
        """Nothing beyond the configuration."""
        return {}

    def is_evaluation_due(self) -> bool:
        """Only `eval_every` asks for evaluations."""
        return False


def evaluation_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Success rate and return of held-out episodes; empty if every session failed."""
    scores = ScreenEvaluation.from_episodes(played).overall
    if scores.success_rate is None or scores.mean_return is None:
        return {}
    return {"eval_success_rate": scores.success_rate, "eval_return": scores.mean_return}


def demonstration_format(config: ScreenRunConfig, policy: VLMPolicy) -> dict[str, Any]:
    """What determines the tokens of a demonstration for the model of a configuration."""
    return {**policy.prompt_format(), "task_prompt": config.actor.task_prompt}


def open_demonstrations(config: ScreenRunConfig, policy: Any) -> DemonstrationSampler:
    """The demonstrations of a configuration; `ConfigError` if they were made for another model."""
    assert config.demonstrations.path is not None
    demonstrations = Demonstrations(config.demonstrations.path, tasks=config.demonstrations.tasks)
    if not isinstance(policy, VLMPolicy):
        reason = f"a {type(policy).__name__} has no prompt format to compare with"
        raise ConfigError("demonstrations.path", str(demonstrations.path), reason, "Use the model of a configuration")
    demonstrations.check_format(demonstration_format(config, policy))
    return DemonstrationSampler(demonstrations, seed=config.trainer.seed)


def damage_notices(demonstrations: Demonstrations) -> list[tuple[str, str]]:
    """A warning about each file of a directory that cannot be read."""
    return [("warning", f"{file} is skipped: {reason}") for file, reason in demonstrations.damaged.items()]


def _mix_demonstrations(config: ScreenRunConfig, policy: Any) -> DemonstrationMix | None:
    """The demonstrations beside the episodes of a run; None if there are none or they are all it learns from."""
    algorithm = make_algorithm(config.algorithm, "trajectories")
    count = config.demonstrations.count_per_update(config.trainer.batch_size)
    has_effect = algorithm.supervised or config.demonstrations.weight > 0
    if not count or not has_effect or algorithm.from_demonstrations:
        return None
    return DemonstrationMix(open_demonstrations(config, policy), count, config.demonstrations.weight)
