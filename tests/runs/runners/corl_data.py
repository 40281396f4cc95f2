"""A dataset of Pendulum made by a seeded random policy, specs of the scripts in `corl_checkout`, and their events."""

from importlib.util import find_spec
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from palaestra.experience.datasets import DatasetFacts, Episode, create_dataset
from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.runners.corl import CorlRunner
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import JournalReader

CHECKOUT = Path(__file__).parent / "corl_checkout"
DATASET = "pendulum/random-v0"
needs_pyrallis = pytest.mark.skipif(find_spec("pyrallis") is None, reason="pyrallis is not installed")

RANDOM_SCORE, EXPERT_SCORE = -1000.0, 0.0
EPISODES, STEPS = 4, 50


def write_dataset(root: Path, dataset_id: str = "pendulum/random-v0", env_id: str = "Pendulum-v1", **facts) -> Path:
    """Write a dataset of `EPISODES` episodes with at most `STEPS` steps each."""
    env = gymnasium.make(env_id)
    described = {
        "dataset_id": dataset_id,
        "env_id": env_id,
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "env_spec": env.spec.to_json(),
        "random_score": RANDOM_SCORE,
        "expert_score": EXPERT_SCORE,
    }
    with create_dataset(root, DatasetFacts(**{**described, **facts})) as writer:
        for number in range(EPISODES):
            writer.add(_record_episode(env, number))
    env.close()
    return root / dataset_id


def _record_episode(env, number):
    env.action_space.seed(number)
    observation, _ = env.reset(seed=number)
    observations, actions, rewards = [observation], [], []
    for _ in range(STEPS):
        actions.append(env.action_space.sample())
        observation, reward, has_ended, *_ = env.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)
        if has_ended:
            break
    # Of Pendulum, which never terminates, the episodes 0 and 2 pretend to.
    ends = np.arange(len(rewards)) == len(rewards) - 1
    terminated = ends & (number % 2 == 0)
    return Episode({"": np.array(observations)}, np.array(actions), np.array(rewards), terminated, ends & ~terminated)


def make_spec(**options):
    config = {"checkout": str(CHECKOUT), "dataset": DATASET, **options.pop("config", {})}
    return RunSpec(**{"runner": "corl", "script": "regression", "config": config, **options})


def make_short_spec(**options):
    config = {"max_timesteps": 100, "eval_freq": 50, **options.pop("config", {})}
    return make_spec(config=config, **options)


def map_findings(spec, machine):
    """The findings of the preflight by the name of their check."""
    return {finding.check: finding for finding in CorlRunner().preflight(spec, machine)}


def find_refusal(spec, machine):
    """The only finding of the preflight that refuses the run."""
    (refused,) = [finding for finding in CorlRunner().preflight(spec, machine) if finding.level == "refused"]
    return refused


def read_events(plan):
    """The events that the service reads from the run."""
    attempt = Attempt(plan.paths.attempt_dir)
    translator = Translator(attempt, plan.sources, 1)
    while translator.pump(10_000):
        pass
    translator.close()
    with JournalReader(attempt.journal) as reader:
        return [record.event for record in reader.read()]
