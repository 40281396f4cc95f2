"""SBX: Stable-Baselines3's loop with the policy and the update compiled by JAX."""

from __future__ import annotations

import argparse

from benchmarks.contenders.sb3 import phases, settings, vector_env
from benchmarks.meter import Meter, run_contender
from benchmarks.workloads import Workload


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    """As SB3; SBX knows no value clipping."""
    from sbx import PPO

    model = PPO("MlpPolicy", vector_env(w), policy_kwargs={"net_arch": list(w.hidden)}, **settings(w))
    model.learn(meter.iterations_left * w.batch, callback=phases(w, meter))


if __name__ == "__main__":
    run_contender("sbx", train, ("sbx-rl", "jax", "stable-baselines3", "numpy", "gymnasium"))
