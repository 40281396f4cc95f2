"""PureJaxRL's PPO on CartPole, at the settings of our task `compiled`; runs in an environment that has JAX.

`--source` is the folder of PureJaxRL with `ppo.py` and `wrappers.py`; nothing of it is part of this repository. Needed
are jax, flax, optax, distrax and gymnax below 1.0. Its wrappers import brax and navix for other environments; where
those are missing, empty modules take their place. Time counts after compilation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from pathlib import Path
from typing import Any


def _stand_in(name: str, **names: Any) -> None:
    try:
        __import__(name)
    except ImportError:
        module = types.ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module


def _load(source: Path) -> Any:
    sys.path.insert(0, str(source))
    _stand_in("brax", envs=None)
    _stand_in("brax.envs")
    _stand_in("brax.envs.wrappers")
    _stand_in("brax.envs.wrappers.training", EpisodeWrapper=object, AutoResetWrapper=object)
    _stand_in("navix")
    import ppo

    return ppo.make_train


def main() -> None:
    """Compile, train, print a line of JSON."""
    parser = argparse.ArgumentParser(prog="purejaxrl")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="trainings after one compilation")
    options = parser.parse_args()
    make_train = _load(options.source)
    import jax

    config = {
        "LR": 2.5e-4, "NUM_ENVS": 8, "NUM_STEPS": 128, "TOTAL_TIMESTEPS": options.steps, "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": False, "DEBUG": False,
    }  # fmt: skip
    train = jax.jit(make_train(config)).lower(jax.random.PRNGKey(options.seed)).compile()
    steps = options.steps // 1024 * 1024
    for repeat in range(options.repeats):
        wall, processor = time.perf_counter(), time.process_time()
        output = jax.block_until_ready(train(jax.random.PRNGKey(options.seed + repeat)))
        seconds, processor = time.perf_counter() - wall, time.process_time() - processor
        returns = output["metrics"]["returned_episode_returns"]
        line = {
            "task": "compiled",
            "mode": "purejaxrl",
            "seed": options.seed + repeat,
            "steps_per_second": steps / seconds,
            "processor_us_per_step": processor / steps * 1e6,
            "score": float(returns[-1].mean()),
            "jax": jax.__version__,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
