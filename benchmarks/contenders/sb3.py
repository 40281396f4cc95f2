"""Stable-Baselines3's PPO through its public interface: `learn()` with a callback that marks the phases.

Its advantages are computed before `on_rollout_end`, so they count as collection here and as learning in ours.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.meter import Meter, run_contender
from benchmarks.synthetic import make
from benchmarks.workloads import Workload


def phases(w: Workload, meter: Meter) -> Any:
    """A callback that tells the meter where collection and learning begin."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Phases(BaseCallback):
        begun = stop = False

        def _on_rollout_start(self) -> None:
            self.stop = self.begun and meter.done(w.batch)
            self.begun = True
            meter.begin("collect")

        def _on_step(self) -> bool:
            return not self.stop

        def _on_rollout_end(self) -> None:
            meter.begin("learn")

    return Phases()


def vector_env(w: Workload) -> Any:
    """What the documentation recommends for cheap environments, less Gymnasium's checker."""
    from stable_baselines3.common.env_util import make_vec_env

    return make_vec_env(lambda: make(w.env_id), n_envs=w.num_envs, seed=1)


def settings(w: Workload) -> dict[str, Any]:
    """The workload in SB3's words. Its value loss is the whole squared error, so the coefficient is halved."""
    return {
        "n_steps": w.num_steps, "batch_size": w.minibatch, "n_epochs": w.epochs, "learning_rate": w.learning_rate,
        "gamma": w.gamma, "gae_lambda": w.gae_lambda, "clip_range": w.clip, "ent_coef": w.entropy_coef,
        "vf_coef": 0.5 * w.value_coef, "max_grad_norm": w.max_grad_norm, "seed": 1, "verbose": 0,
    }  # fmt: skip


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(arguments.threads)
    towers = {} if w.kind == "cnn" else {"net_arch": {"pi": list(w.hidden), "vf": list(w.hidden)}}
    model = PPO(
        "CnnPolicy" if w.kind == "cnn" else "MlpPolicy", vector_env(w), policy_kwargs=towers,
        clip_range_vf=w.value_clip, device="cpu", **settings(w),
    )  # fmt: skip
    meter.facts["parameters"] = sum(p.numel() for p in model.policy.parameters())
    model.learn(meter.iterations_left * w.batch, callback=phases(w, meter))


if __name__ == "__main__":
    run_contender("sb3", train, ("stable-baselines3", "torch", "numpy", "gymnasium"))
