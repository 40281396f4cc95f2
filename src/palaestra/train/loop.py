"""One training run, wired: the only file that knows both ends. It reads as the picture in the README.

Everything that can be refused is refused before the run directory exists. After that, every update is in the journal,
checkpoints appear on time, and an interruption or a number that stops being one leaves the last good state on disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from palaestra.actor.evaluation import Evaluation, evaluate
from palaestra.env.catalogue import EnvConfig, make_env
from palaestra.env.vector import VectorEnv
from palaestra.errors import CheckpointError, CollectorFailed, ConfigError, NonFiniteError
from palaestra.files.atomic import write_json
from palaestra.files.checkpoint import checkpoints_in
from palaestra.files.run_directory import Attempt, RunDirectory, begin_attempt
from palaestra.learner.algorithm import build_algorithm
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.learner.trainer import Trainer
from palaestra.policy.build import build_policy
from palaestra.policy.compiled import why_never_compiled
from palaestra.policy.device import Device, choose_device
from palaestra.policy.storage import load_weights
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, Telemetry, TrainingStep, open_telemetry
from palaestra.telemetry.event import LogLine, PhaseChanged
from palaestra.telemetry.sinks import check_telemetry
from palaestra.train.config import RunConfig, config_from
from palaestra.train.interruption import Interruption

__all__ = ["Outcome", "build_trainer", "evaluate_checkpoint", "train"]

EVAL_SEED = 1_000_003
"""Added to the run's seed for evaluation, so that it never plays the episodes it trained on."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunDirectory
    steps: int
    final: dict[str, float]
    checkpoint: Path
    interrupted: bool


def build_trainer(config: RunConfig, *, pretrained: bool = True) -> Trainer:
    """Environment, policy, algorithm and trainer of a configuration; `pretrained` as in `build_policy`."""
    algorithm = build_algorithm(
        config.algorithm["name"], {key: value for key, value in config.algorithm.items() if key != "name"}
    )
    device = choose_device(config.trainer.device, place="trainer.device")
    env = make_env(config.env)
    try:
        policy = _policy_for(config, env, device, pretrained=pretrained)
        return Trainer(
            policy,
            env,
            algorithm,
            seed=config.trainer.seed,
            normalize_reward=config.env.normalize_reward,
            compiled=config.trainer.compiled,
            torch_threads=config.trainer.torch_threads,
            buffer_size=config.trainer.buffer_size,
            asynchronous=config.asynchronous,
            env_config=config.env,
        )
    except BaseException:
        env.close()
        raise


def _policy_for(config: RunConfig, env: VectorEnv, device: torch.device, *, pretrained: bool) -> nn.Module:
    return build_policy(
        config.policy,
        env.observation_space,
        env.action_space,
        normalize_observation=config.env.normalize_observation,
        seed=config.trainer.seed,
        pretrained=pretrained,
        device=device,
    )


def device_notices(trainer: Trainer) -> list[str]:
    """What a person should know about the device a trainer uses; nothing about the CPU."""
    device = trainer.device
    if device.type == "cpu":
        return []
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    notices = [f"The policy acts and learns on {device}{name}."]
    if why_never_compiled(trainer.policy) is None:
        notices.append(
            "The compiled kernels run on the CPU only and are not used. For a network this small trainer.device=cpu is "
            "faster."
        )
    return notices


def train(
    config: RunConfig,
    *,
    root: Path,
    run_id: str,
    given: str = "",
    argv: Sequence[str] = (),
    resume: RunDirectory | None = None,
    checkpoint: Path | None = None,
    into: Attempt | None = None,
    warm_start: Path | None = None,
) -> Outcome:
    """Train to the end of the configuration: in a new run, as another attempt of one, or `into` a prepared attempt.

    `checkpoint` is what a resume goes on from, by default the run's newest. `warm_start` is a checkpoint whose weights,
    and nothing else, it begins with.
    """
    check_telemetry(config.telemetry)
    # A checkpoint brings every weight itself, so its run goes on where the pretrained file is gone.
    trainer = build_trainer(config, pretrained=resume is None)
    try:
        trainer.check_memory(config.rollout_length, config.trainer.buffer_size)
        exact = True
        if warm_start is not None:
            load_weights(trainer.policy, load_checkpoint(warm_start, kind="vector").policy)
        if resume is not None:
            exact = resume.load_checkpoint(trainer.load_checkpoint, checkpoint)
            if trainer.total_timesteps >= config.total_timesteps:
                raise ConfigError(
                    "trainer.total_timesteps", config.total_timesteps,
                    f"run {resume.run_id} has taken {trainer.total_timesteps} steps already",
                    "Raise it to train on, for example trainer.total_timesteps="
                    f"{2 * trainer.total_timesteps}",
                )  # fmt: skip
        resolved = config.resolved()
        run, attempt = begin_attempt(
            resolved, root=root, run_id=run_id, given=given, argv=argv, resume=resume, into=into
        )
        with open_telemetry(
            config.telemetry, run.path, run.run_id, config.total_timesteps, resolved, attempt.journal
        ) as telemetry:
            telemetry.emit(PhaseChanged("running", "resumed" if resume else "started"))
            for text in [*device_notices(trainer), *getattr(trainer.policy, "notices", ())]:
                telemetry.emit(LogLine("warning", text))
            if not exact:
                text = "The environments could not be brought back to where they stood: they start fresh episodes."
                telemetry.emit(LogLine("warning", text))
            return _Run(config, trainer, run, attempt, telemetry).go()
    finally:
        trainer.env.close()


class _Run:
    """What happens around each update: telemetry, evaluation, checkpoints, interruption."""

    def __init__(
        self, config: RunConfig, trainer: Trainer, run: RunDirectory, attempt: Attempt, telemetry: Telemetry
    ) -> None:
        self._config, self._trainer, self._run = config, trainer, run
        self._attempt, self._telemetry = attempt, telemetry
        self._interruption = Interruption()
        self._saved_at = time.monotonic()
        self._last: dict[str, float] = {}
        self._best = -float("inf")
        self._best_path: Path | None = None
        self._saved: Path | None = None
        self._failures_told = 0

    def go(self) -> Outcome:
        c, telemetry = self._config, self._telemetry
        try:
            with self._interruption.watching(lambda text: telemetry.emit(LogLine("warning", text))):
                self._save(None)
                self._trainer.train(c.total_timesteps, c.rollout_length, 1, self._after_update)
                checkpoint = self._save(self._score(self._last))
        except (NonFiniteError, CollectorFailed) as error:
            # The trainer has put the weights back to what they were before the update that broke.
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
        return Outcome(self._run, self._trainer.total_timesteps, self._last, checkpoint, stopped)

    def _after_update(self, trainer: Trainer, metrics: dict[str, float]) -> bool:
        c = self._config.trainer
        if c.eval_every is not None and trainer.n_updates % c.eval_every == 0:
            found = self._evaluation()
            metrics |= {"eval_return": found.mean_return, "eval_return_std": found.std_return}
            metrics["eval_length"] = sum(found.lengths) / len(found.lengths)
            if found.success_rate is not None:
                metrics["eval_success_rate"] = found.success_rate
        self._last = metrics
        for text in trainer.collector_failures[self._failures_told :]:
            self._telemetry.emit(LogLine("warning", f"A collector was replaced: {text}"))
        self._failures_told = len(trainer.collector_failures)
        self._tell(metrics)
        due = c.checkpoint_every is not None and trainer.n_updates % c.checkpoint_every == 0
        if due or "eval_return" in metrics or time.monotonic() - self._saved_at > c.checkpoint_seconds:
            self._save(self._score(metrics))
        return not self._interruption.asked

    def _score(self, metrics: dict[str, float]) -> float | None:
        # Returns with and without exploration noise are not compared: a run that evaluates is judged by that alone.
        return metrics.get("eval_return" if self._config.trainer.eval_every else "episode_return")

    def _tell(self, metrics: dict[str, float]) -> None:
        trainer = self._trainer
        before = trainer.num_episodes - len(trainer.last_episodes)
        self._telemetry.emit_many(
            EpisodeSummary(e.env_step, before + i + 1, e.env_index, e.episode_return, e.length)
            for i, e in enumerate(trainer.last_episodes)
        )
        if trainer.n_updates % self._config.trainer.log_interval == 0:
            self._telemetry.emit(TrainingStep(trainer.n_updates, trainer.total_timesteps, metrics))

    def _evaluation(self) -> Evaluation:
        c = self._config
        env = make_env(_evaluation_env(c, c.trainer.eval_episodes))
        try:
            seed = c.trainer.seed + EVAL_SEED
            return evaluate(self._trainer.policy, env, episodes=c.trainer.eval_episodes, seed=seed)
        finally:
            env.close()

    def _save(self, score: float | None) -> Path:
        """A checkpoint of this moment (once), remembered as the best if its score says so."""
        trainer = self._trainer
        path = self._attempt.checkpoints / f"update_{trainer.n_updates:08d}"
        if path != self._saved:
            about = {"config": self._config.resolved(), "run_id": self._run.run_id, "score": score}
            sha256 = trainer.save_checkpoint(path, about=about)
            best = score is not None and score >= self._best
            if best:
                assert score is not None
                self._best = score
                self._best_path = path
                write_json(self._attempt.best, {"checkpoint": path.name, "score": score})
            event = CheckpointSaved(trainer.n_updates, trainer.total_timesteps, str(path), sha256, best, score)
            self._telemetry.emit(event)
            self._saved = path
            self._forget_old()
        self._saved_at = time.monotonic()
        return path

    def _forget_old(self) -> None:
        directory = self._attempt.checkpoints
        for path in checkpoints_in(directory)[: -self._config.trainer.keep_checkpoints]:
            if path != self._best_path:
                shutil.rmtree(path)


def _evaluation_env(config: RunConfig, episodes: int) -> EnvConfig:
    return config.env.model_copy(update={"num_envs": min(episodes, 10), "vectorization": "in_process"})


def evaluate_checkpoint(
    path: Path,
    *,
    episodes: int,
    seed: int | None,
    deterministic: bool = True,
    make: Callable[[EnvConfig], VectorEnv] = make_env,
    device: Device = "cpu",
) -> Evaluation:
    """Play a checkpoint's policy in the environment it was trained for, as `make` makes it.

    `device` is where the policy acts here, whatever it was trained on.
    """
    here = choose_device(device)
    checkpoint = load_checkpoint(path, kind="vector")
    config = config_from(checkpoint.about["config"])
    env = make(_evaluation_env(config, episodes))
    try:
        policy = _policy_for(config, env, here, pretrained=False)
        load_weights(policy, checkpoint.policy)
        chosen = seed if seed is not None else config.trainer.seed + EVAL_SEED
        return evaluate(policy, env, episodes=episodes, seed=chosen, deterministic=deterministic)
    finally:
        env.close()
