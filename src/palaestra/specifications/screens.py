"""Training on screens with the names of the specifications: a model, a trainer and an actor pool.

This is a thin layer over `train_screens` for existing scripts; new scripts write a configuration and call
`train_screens`. docs/coming-from.md lists the differences. The pool and the trainer find each other through the model
they share: `ActorPool.start` registers the pool with the model, and `Trainer.train` runs both as one training run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from palaestra.config import parse_section
from palaestra.config.file import read_config_file
from palaestra.errors import ConfigError
from palaestra.experience.trajectory import Trajectory
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory, new_run_id
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.learner.registry import ALGORITHMS
from palaestra.learner.trajectories import RejectionSampling, TrajectoryAlgorithm
from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.config import ModelConfig
from palaestra.sessions.clients.provider import find_sessions
from palaestra.train.held_out import play_held_out
from palaestra.train.run import TrainingResult
from palaestra.train.screen_config import ScreenRunConfig, screen_config_from
from palaestra.train.screens import train_screens

simple_data_entry_pod_manifest = "simple_data_entry"
"""Session type of these pods. The gateway has the manifest of each type."""

TASK = "data_entry/form"


class Config:
    """Configurations of runs on screens."""

    @staticmethod
    def from_yaml(path: str | Path) -> ScreenRunConfig:
        """Read a configuration file."""
        return screen_config_from(read_config_file(Path(path)))


class VLMWrapper:
    """A vision-language model by name, its last checkpoint, and its actor pool. Loaded when needed."""

    def __init__(self, model_name: str = "tiny", **settings: Any) -> None:
        """`settings`: keys of the section `model`, such as `use_lora`, `lora_target_option` and `lora_rank`."""
        self.config = parse_section(ModelConfig, {"name": model_name, **settings}, place="model")
        self.checkpoint: Path | None = None
        self.actors: ScreenActorPool | None = None

    @cached_property
    def policy(self) -> VLMPolicy:
        """The model with the latest weights."""
        policy = VLMPolicy.from_config(self.config)
        if self.checkpoint is not None:
            policy.load(load_checkpoint(self.checkpoint, kind="screens").policy)
        return policy

    def use_checkpoint(self, checkpoint: Path) -> None:
        """Use the weights of a checkpoint."""
        self.checkpoint = checkpoint
        self.__dict__.pop("policy", None)


class ScreenActorPool:
    """Number, location and task of concurrent episodes."""

    def __init__(
        self, *, target_concurrent_actors: int, model: VLMWrapper, trajectory_queue: object = None, **where: Any
    ) -> None:
        """`where`: as for `TaskRunner`. `trajectory_queue` is ignored: a run has its own queue."""
        self._model, pool = model, {"target_concurrent_actors": target_concurrent_actors}
        self.sections = {**_sections(**where), "actor_pool": pool}

    def start(self) -> None:
        """Play for the trainer of the same model while it trains."""
        self._model.actors = self

    def stop(self) -> None:
        """Stop playing."""
        self._model.actors = None


class ScreenTrainer:
    """Trains a model with the episodes of its actor pool."""

    def __init__(
        self, *, model: VLMWrapper, algorithm: TrajectoryAlgorithm, trajectory_queue: object = None, **settings: Any
    ) -> None:
        """`settings`: keys of the section `trainer`, such as `batch_size`. `trajectory_queue`: as for the pool."""
        self.model, self.algorithm, self._settings = model, algorithm, settings
        self._updates = 0
        self._run: RunDirectory | None = None

    def train(self, num_steps: int, save_every: int | None = None) -> TrainingResult:
        """Run `num_steps` updates; a further call continues the same run. The model then uses the new weights."""
        if self.model.actors is None:
            reason = "no started ActorPool plays with this model"
            raise ConfigError("Trainer.train(num_steps)", num_steps, reason, "Call start() on one that has it")
        total = self._updates + num_steps
        trainer = {**self._settings, "num_training_steps": total, "save_every": save_every}
        config = _config(self.model, self.algorithm, {**self.model.actors.sections, "trainer": trainer})
        outcome = _train(config, self.model, Home.default().runs, resume=self._run)
        self._updates, self._run = total, outcome.run
        return outcome


class ScreenTaskRunner:
    """Plays one episode per call in a new session, without learning."""

    def __init__(self, *, model: VLMWrapper, **where: Any) -> None:
        """`where`: `cluster_host`, `pod_manifest_fn`, `namespace`, `task`, and keys of `actor` (`task_prompt`, …)."""
        self._model, self._config = model, _config(model, RejectionSampling(), _sections(**where))
        self._episodes = 0

    def run_episode(self) -> Trajectory:
        """Play the next held-out seed."""
        with ExitStack() as stack:
            c = self._config
            address = find_sessions(
                c.environment,
                stack,
                actors=c.actor_pool.target_concurrent_actors,
                session_type=c.actor.session_type,
            )
            played = play_held_out(self._config, self._model.policy, address, episodes=1, first=self._episodes)
        self._episodes += 1
        return played[0]


def train_with_orchestration(
    *,
    model: VLMWrapper,
    ui_env_url: str,
    task_prompt: str,
    algorithm: TrajectoryAlgorithm,
    checkpoint_dir: Path | None = None,
    data_dir: Path | None = None,
    task: str = TASK,
    **trainer: Any,
) -> TrainingResult:
    """Train on the session server at a URL, in a run under `checkpoint_dir`; copies its episodes to `data_dir`.

    `trainer`: keys of the section `trainer`, such as `num_training_steps` and `batch_size`.
    """
    sections = {
        "tasks": [{"task": task}],
        "environment": {"session_servers": [ui_env_url]},
        "actor": {"task_prompt": task_prompt},
        "trainer": trainer,
    }
    outcome = _train(_config(model, algorithm, sections), model, checkpoint_dir or Home.default().runs)
    if data_dir is not None:
        shutil.copytree(outcome.run.attempts()[-1].trajectories, data_dir, dirs_exist_ok=True)
    return outcome


def _sections(
    *, cluster_host: str, pod_manifest_fn: object, namespace: str = "default", task: str = TASK, **actor: Any
) -> dict[str, Any]:
    if not isinstance(pod_manifest_fn, str):
        reason = "the gateway owns the manifests, and checks them before a pod is made"
        remedy = "Write the pod as YAML, name it in gateway.kubernetes.manifests, and give its session type here"
        raise ConfigError("pod_manifest_fn", pod_manifest_fn, reason, remedy)
    return {
        "tasks": [{"task": task}],
        "environment": {"cluster_host": cluster_host, "namespace": namespace},
        "actor": {"session_type": pod_manifest_fn, **actor},
    }


def _config(model: VLMWrapper, algorithm: TrajectoryAlgorithm, sections: Mapping[str, Any]) -> ScreenRunConfig:
    cls: Any = type(algorithm)
    built_in = [name for name, known in ALGORITHMS["trajectories"].items() if known is cls]
    settings: Any = getattr(algorithm, "config", None)
    chosen = {"name": built_in[0] if built_in else f"{cls.__module__}:{cls.__qualname__}"}
    chosen |= {} if settings is None else settings.model_dump(mode="json")
    described = {"model": model.config.model_dump(mode="json"), "algorithm": chosen}
    return screen_config_from({**described, "telemetry": {"progress": False}, **sections})


def _train(
    config: ScreenRunConfig, model: VLMWrapper, root: Path, *, resume: RunDirectory | None = None
) -> TrainingResult:
    start = model.checkpoint if resume is None else None
    outcome = train_screens(config, root=root, run_id=new_run_id("script"), resume=resume, warm_start=start)
    model.use_checkpoint(outcome.checkpoint)
    return outcome


# The names of the specification.
ActorPool, TaskRunner, Trainer = ScreenActorPool, ScreenTaskRunner, ScreenTrainer
