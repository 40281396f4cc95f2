"""How much resident memory a rollout holds, against the bytes of the numbers in it.

Collects a 2048 x 16 CartPole rollout several times, keeping each, so that one-time costs and the allocator's
granularity do not decide. `--variant sb3` does the same with Stable-Baselines3's rollout buffer.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from benchmarks.synthetic import make

_STEPS, _ENVS, _KEPT = 2048, 16, 8


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _ours() -> tuple[int, int]:
    from palaestra.env.make import EnvConfig, make_env
    from palaestra.policy.actor_critic import ActorCritic
    from palaestra.train.trainer import Trainer

    env = make_env(EnvConfig(id="CartPole-v1", num_envs=_ENVS))
    trainer = Trainer(ActorCritic(env.observation_space, env.action_space), env, seed=1)
    trainer.collect_rollouts(_STEPS)
    before = _resident_bytes()
    kept: list[Any] = [trainer.collect_rollouts(_STEPS) for _ in range(_KEPT)]
    grown = _resident_bytes() - before
    numbers = sum(_bytes(kept[0].get(key)) for key in _REAL)
    return grown // _KEPT, numbers


_REAL = ("observation", "action", "log_prob", "value", "next_value", "reward", "terminated", "truncated")


def _bytes(entry: Any) -> int:
    return int(entry.numel() * entry.element_size())


def _sb3() -> tuple[int, int]:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    env = make_vec_env(lambda: make("CartPole-v1"), n_envs=_ENVS, seed=1)
    model = PPO("MlpPolicy", env, n_steps=_STEPS, device="cpu", seed=1)
    _, callback = model._setup_learn(10**9)
    arguments = (model.env, callback)
    model.collect_rollouts(*arguments, model.rollout_buffer, n_rollout_steps=_STEPS)
    before = _resident_bytes()
    kept = []
    for _ in range(_KEPT):
        buffer = type(model.rollout_buffer)(
            _STEPS, model.observation_space, model.action_space, device="cpu", n_envs=_ENVS
        )
        model.collect_rollouts(*arguments, buffer, n_rollout_steps=_STEPS)
        kept.append(buffer)
    grown = _resident_bytes() - before
    names = ("observations", "actions", "log_probs", "values", "rewards", "episode_starts")
    return grown // _KEPT, sum(getattr(kept[0], name).nbytes for name in names)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="ours", choices=("ours", "sb3"))
    variant = parser.parse_args().variant
    grown, numbers = _sb3() if variant == "sb3" else _ours()
    line = {
        "contender": variant,
        "rollout": f"{_STEPS} x {_ENVS}",
        "resident_bytes": grown,
        "number_bytes": numbers,
        "overhead": round(grown / numbers, 3),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
