"""One training run of ours, or a loop over the environments alone, for `benchmarks.two_cores`; prints a line of JSON.

`--mode alone` steps the environments with actions drawn beforehand, on one core. `--mode synchronous` alternates
collecting and learning. `--mode asynchronous` collects in another process. Speed and processor time count from the end
of the first update; the score is the mean return of the last hundred training episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_DRAWN = 512


@dataclass(frozen=True)
class Task:
    """An environment and the settings with which it is learned; the same for every mode."""

    env_id: str
    steps: int
    num_envs: int = 16
    rollout: int = 64
    algorithm: dict[str, Any] = field(default_factory=dict)
    normalize: bool = False
    our_env_id: str = ""
    """Where ours differs on purpose: the same task, compiled."""


_ZOO = {"value_clip": None, "value_coef": 1.0}
TASKS = {
    "cartpole": Task(
        "CartPole-v1", 400_000, algorithm={"n_epochs": 4, "batch_size": 256, "learning_rate": 5e-4}
    ),
    "pendulum": Task(
        "Pendulum-v1", 200_000, rollout=128,
        algorithm={
            "n_epochs": 10, "batch_size": 256, "learning_rate": 2e-3, "gamma": 0.9, "entropy_coef": 0.0, **_ZOO,
        },
    ),
    "acrobot": Task(
        "Acrobot-v1", 150_000, algorithm={"n_epochs": 4, "batch_size": 128, "learning_rate": 5e-4}
    ),
    "lunarlander": Task(
        "LunarLander-v3", 300_000, rollout=256,
        algorithm={
            "n_epochs": 4, "batch_size": 64, "learning_rate": 3e-4, "gamma": 0.999, "gae_lambda": 0.98, **_ZOO,
        },
    ),
    "halfcheetah": Task(
        "HalfCheetah-v5", 200_000, rollout=128, normalize=True,
        algorithm={"n_epochs": 10, "batch_size": 64, "learning_rate": 3e-4, "entropy_coef": 0.0},
    ),
    "compiled": Task(
        "CartPole-v1", 800_000, num_envs=8, rollout=128, our_env_id="compiled/CartPole-v1",
        algorithm={"n_epochs": 4, "batch_size": 256, "learning_rate": 2.5e-4},
    ),
}  # fmt: skip


def _processor_seconds() -> float:
    """Processor time of this process and its children that run."""
    from palaestra.processes.procfs import list_descendants

    total = 0.0
    for pid in (os.getpid(), *list_descendants(os.getpid())):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) * _TICK_S
    return total


def _alone(task: Task, seconds: float) -> dict[str, Any]:
    """Steps and resets, nothing else."""
    from benchmarks.synthetic import make

    envs = [make(task.env_id) for _ in range(task.num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    actions = [envs[0].action_space.sample() for _ in range(_DRAWN)]
    drawn = count = 0
    wall, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        for _ in range(64):
            for env in envs:
                drawn = (drawn + 1) % _DRAWN
                _, _, terminated, truncated, _ = env.step(actions[drawn])
                if terminated or truncated:
                    env.reset()
        count += 64 * task.num_envs
    return {
        "steps_per_second": count / (time.perf_counter() - wall),
        "processor_us_per_step": (time.process_time() - processor) / count * 1e6,
    }


def _train(task: Task, mode: str, seed: int, scale: float) -> dict[str, Any]:
    import numpy as np
    import torch

    from palaestra.actor.asynchronous import AsyncConfig
    from palaestra.env.make import EnvConfig, make_env
    from palaestra.learner.ppo import PPO
    from palaestra.policy.actor_critic import ActorCritic
    from palaestra.policy.config import PolicyConfig
    from palaestra.train.trainer import Trainer

    torch.set_num_threads(1)
    config = EnvConfig(id=task.our_env_id or task.env_id, num_envs=task.num_envs, vectorization="in_process")
    env = make_env(config)
    policy = ActorCritic(
        env.observation_space,
        env.action_space,
        PolicyConfig(hidden=(64, 64)),
        seed=seed,
        normalize_observation=task.normalize,
    )
    asynchronous = AsyncConfig(collector="process") if mode == "asynchronous" else None
    trainer = Trainer(
        policy,
        env,
        PPO(**task.algorithm),
        seed=seed,
        normalize_reward=task.normalize,
        asynchronous=asynchronous,
        env_config=config,
    )
    marks: list[tuple[float, float, int]] = []
    metrics: list[dict[str, float]] = []

    def mark(trainer: Trainer, update: dict[str, float]) -> None:
        is_last = trainer.total_timesteps >= total
        processor = _processor_seconds() if not marks or is_last else 0.0
        marks.append((time.perf_counter(), processor, trainer.total_timesteps))
        metrics.append(update)

    total = max(3 * task.rollout * task.num_envs, round(task.steps * scale))
    trainer.train(total, task.rollout, callback=mark)
    env.close()
    (began, processor, before), (ended, processor_end, after) = marks[0], marks[-1]
    steps = after - before
    wall = ended - began
    result = {
        "steps_per_second": steps / wall,
        "processor_us_per_step": (processor_end - processor) / steps * 1e6,
        "score": float(np.mean(trainer.episode_rewards)),
        "staleness": float(np.mean([one["staleness"] for one in metrics])),
        # What each side could do if it never had to wait for the other.
        "collect_us_per_step": float(np.median([one["collect_seconds"] for one in metrics[1:]])),
        "learn_us_per_step": float(np.median([one["learn_seconds"] for one in metrics[1:]])),
    }
    for key in ("collect_us_per_step", "learn_us_per_step"):
        result[key] *= 1e6 / (task.rollout * task.num_envs)
    return result


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(prog="two_cores")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--mode", choices=("alone", "synchronous", "asynchronous"), required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the task's steps")
    options = parser.parse_args()
    task = TASKS[options.task]
    if options.mode == "alone":
        result = _alone(task, options.seconds)
    else:
        result = _train(task, options.mode, options.seed, options.scale)
    print(json.dumps({"task": options.task, "mode": options.mode, "seed": options.seed, **result}), flush=True)


if __name__ == "__main__":
    main()
