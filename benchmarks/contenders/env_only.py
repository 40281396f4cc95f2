"""The environment alone, with actions drawn beforehand: the speed no on-policy learner on this machine can exceed.

`--variant raw` is a Python loop over the environments as Gymnasium makes them; `--variant sync` is Gymnasium's own
`SyncVectorEnv`.
"""

from __future__ import annotations

import argparse

from benchmarks.meter import Meter, run_contender
from benchmarks.synthetic import make
from benchmarks.workloads import Workload

_DRAWN = 512


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    """Steps and resets, nothing else."""
    (_sync if arguments.variant == "sync" else _raw)(w, meter)


def _raw(w: Workload, meter: Meter) -> None:
    envs = [make(w.env_id) for _ in range(w.num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    actions = [envs[0].action_space.sample() for _ in range(_DRAWN)]
    drawn = 0
    while True:
        meter.begin("collect")
        for _ in range(w.num_steps):
            for env in envs:
                drawn = (drawn + 1) % _DRAWN
                _, _, terminated, truncated, _ = env.step(actions[drawn])
                if terminated or truncated:
                    env.reset()
        if meter.done(w.batch):
            return


def _sync(w: Workload, meter: Meter) -> None:
    import gymnasium

    env = gymnasium.vector.SyncVectorEnv([lambda: make(w.env_id)] * w.num_envs)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(_DRAWN)]
    while True:
        meter.begin("collect")
        for t in range(w.num_steps):
            env.step(actions[t % _DRAWN])
        if meter.done(w.batch):
            return


if __name__ == "__main__":
    run_contender("env_only", train, ("gymnasium", "numpy"))
