"""Trains one RLlib algorithm and prints one `@palaestra` line per event. A program; imports nothing of Palaestra.

`python program.py '{"algorithm": "PPO", "env_id": "CartPole-v1", "total_timesteps": 20000, ...}'`
"""

import contextlib
import importlib
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import ray
from ray.rllib.callbacks.callbacks import RLlibCallback

SETTINGS = json.loads(sys.argv[1])
EPISODES = []
"""Return and length of the episodes that have ended since the last report."""


class EpisodeCollector(RLlibCallback):
    """Collects the episodes; the environments are in this process."""

    def on_episode_end(self, *, episode, **_):
        EPISODES.append((float(episode.get_return()), len(episode)))


def report(kind, **fields):
    """Print an event."""
    print("@palaestra", json.dumps({"kind": kind, **fields}), flush=True)


def read_metrics(result):
    """The numbers of an iteration: those of the learner, and of the episodes."""
    learner = dict(result.get("learners", {}).get("default_policy", {}))
    # Known in the first iteration only, and NaN afterwards, which would raise an alarm.
    learner.pop("num_trainable_parameters", None)
    numbers = {
        **learner,
        **{key: result["env_runners"].get(key) for key in ("episode_return_mean", "episode_len_mean")},
    }
    metrics = {}
    for name, value in numbers.items():
        with contextlib.suppress(TypeError, ValueError):  # not a number
            metrics[name] = float(value)
    return metrics


def train(directory):
    """Train until the steps are reached, then save a checkpoint."""
    name = SETTINGS["algorithm"]
    # Not through the registry of RLlib, which imports all algorithms and what they need.
    module = importlib.import_module(f"ray.rllib.algorithms.{name.lower()}")
    config = (
        getattr(module, f"{name}Config")()
        .environment(SETTINGS["env_id"], env_config=SETTINGS["env_kwargs"])
        .env_runners(num_env_runners=0, num_envs_per_env_runner=SETTINGS["num_envs"])
        .learners(num_learners=0)
        .callbacks(EpisodeCollector)
        .training(**SETTINGS["training"])
        .debugging(seed=SETTINGS["seed"])
    )
    algorithm = config.build_algo()
    steps = update = 0
    while steps < SETTINGS["total_timesteps"]:
        result = algorithm.train()
        steps, update = int(result["env_runners"]["num_env_steps_sampled_lifetime"]), update + 1
        for episode_return, length in EPISODES:
            report("EpisodeSummary", env_step=steps, episode_return=episode_return, length=length)
        EPISODES.clear()
        report("TrainingStep", update=update, env_step=steps, metrics=read_metrics(result))
    path = Path(directory) / "checkpoints" / f"step_{steps}"
    path.mkdir(parents=True)
    algorithm.save_to_path(str(path))
    report("CheckpointSaved", env_step=steps, path=str(path))
    algorithm.stop()


def main():
    """Train with a Ray instance of its own, which ends with it."""
    # SIGTERM is the request to stop: leave through `finally`, so that Ray ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # The directory of a run is too long for the sockets of Ray.
    sockets = tempfile.mkdtemp(prefix="rllib-", dir="/tmp")
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sockets)
        train(SETTINGS["directory"])
    finally:
        ray.shutdown()
        shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main()
