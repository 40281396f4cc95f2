"""The modules that stand in for gym, d4rl and wandb inside a CORL script."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.runs.runners.corl_data import DATASET, EPISODES, STEPS

from palaestra.experience.datasets import find_dataset
from palaestra.runs.runners.corl.offline_data import load_offline_data
from palaestra.runs.runners.corl.runner import SHIMS
from palaestra.runs.spec import RunSpec


@pytest.fixture
def run_code(corl_home, tmp_path):
    """Runs a program as a CORL script would run, and returns the JSON values that it prints."""

    def run(code, *, pythonpath=(), metrics_every=1, wandb=False, **changes):
        data = load_offline_data(RunSpec(runner="corl", config={"dataset": DATASET}))
        settings = json.loads(data.build_settings(total_updates=10, metrics_every=metrics_every, wandb=wandb))
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join([str(SHIMS), *map(str, pythonpath)]),
            "PALAESTRA_OFFLINE": json.dumps({**settings, **changes}),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line.removeprefix("@palaestra ")) for line in done.stdout.splitlines()]

    return run


def test_the_arrays_are_those_of_the_dataset_with_actions_from_minus_one_to_one(run_code, corl_home):
    code = """
import json, d4rl, gym
env = gym.make("Pendulum-v1")
data = d4rl.qlearning_dataset(env)
data["rewards"] *= 0.0   # scripts change the arrays in place
again = d4rl.qlearning_dataset(env)
ended = d4rl.qlearning_dataset(env, terminate_on_end=True)
whole = env.get_dataset()
print(json.dumps({name: values.tolist() for name, values in again.items()}))
print(json.dumps([ended["terminals"].nonzero()[0].tolist(), whole["timeouts"].nonzero()[0].tolist()]))
print(json.dumps([env.action_space.low.tolist(), env.action_space.high.tolist(), env._max_episode_steps]))
"""
    arrays, (ends, timeouts), facts = run_code(code)

    stored = find_dataset(DATASET, corl_home.datasets).load_transitions()
    assert len(arrays["rewards"]) == EPISODES * STEPS
    np.testing.assert_allclose(arrays["observations"], stored.observation, rtol=1e-6)
    np.testing.assert_allclose(arrays["next_observations"], stored.next_observation, rtol=1e-6)
    np.testing.assert_allclose(arrays["rewards"], stored.reward, rtol=1e-6)
    np.testing.assert_allclose(np.array(arrays["actions"]) * 2.0, stored.action, rtol=1e-5, atol=1e-6)
    assert np.array(arrays["terminals"]).tolist() == stored.terminated.tolist()
    assert timeouts == [99, 199]
    assert ends == [49, 99, 149, 199]
    assert facts == [[-1.0], [1.0], 200]


def test_an_environment_has_the_old_interface_and_scales_actions(run_code):
    code = """
import json, gym, gymnasium
new = gymnasium.make("Pendulum-v1")
old = gym.wrappers.TransformReward(gym.wrappers.TransformObservation(gym.make("Pendulum-v1"), lambda o: 3 * o + 1),
                                   lambda r: 10 * r)
old.seed(7)
first, (expected, _) = old.reset(), new.reset(seed=7)
print(json.dumps([first.tolist(), (3 * expected + 1).tolist()]))
observation, reward, done, info = old.step([0.25])
expected, expected_reward, *_ = new.step([0.5])
print(json.dumps([observation.tolist(), (3 * expected + 1).tolist(), reward, 10 * float(expected_reward), done]))
second, (expected, _) = old.reset(), new.reset()
print(json.dumps([second.tolist(), (3 * expected + 1).tolist()]))
print(json.dumps([old.get_normalized_score(-250.0), old.ref_min_score, old.ref_max_score]))
with open("observations.json") as file:
    print(file.read())
"""
    first, step, second, scores, transform = run_code(code)

    assert first[0] == pytest.approx(first[1], rel=1e-6)
    assert step[0] == pytest.approx(step[1], rel=1e-6)
    assert step[2] == pytest.approx(step[3])
    assert step[4] is False
    assert second[0] == pytest.approx(second[1], rel=1e-6)
    assert scores == [0.75, -1000.0, 0.0]
    assert transform == {"scale": [3.0, 3.0, 3.0], "offset": [1.0, 1.0, 1.0]}


def test_the_environment_has_the_time_limit_and_the_arguments_of_the_dataset(run_code):
    code = """
import json, gym
env = gym.make("Pendulum-v1")
env.reset()
dones = [env.step([0.0])[2] for _ in range(30)]
print(json.dumps([dones.index(True), env._max_episode_steps, env._env.unwrapped.g]))
"""
    assert run_code(code, max_episode_steps=30, env_kwargs={"g": 2.0}) == [[29, 30, 2.0]]


def test_an_episode_that_ends_without_a_flag_is_a_timeout(run_code, tmp_path):
    code = """
import json, gym, h5py
with h5py.File("episodes.hdf5", "w") as file:
    for number, terminations in enumerate(([0, 0], [0, 1])):
        arrays = {"observations": [[0.0]] * 3, "actions": [[0.0]] * 2, "rewards": [0.0] * 2}
        for name, values in {**arrays, "terminations": terminations, "truncations": [0, 0]}.items():
            file[f"episode_{number}/{name}"] = values
arrays = gym.make("Pendulum-v1").get_dataset()
print(json.dumps([arrays["terminals"].tolist(), arrays["timeouts"].tolist()]))
"""
    (flags,) = run_code(code, path=str(tmp_path), data="episodes.hdf5", files={})

    assert flags == [[False, False, False, True], [False, True, False, False]]


def test_without_reference_scores_a_normalised_score_is_not_a_number(run_code):
    code = """
import json, d4rl, numpy
scores = [d4rl.get_normalized_score("x", 1.0), d4rl.get_normalized_score("x", numpy.array([1.0, 2.0]))]
print(json.dumps([bool(numpy.isnan(score).all()) for score in scores]))
"""
    assert run_code(code, expert_score=None) == [[True, True]]


def test_losses_are_averaged_and_evaluations_are_written_at_once(run_code):
    code = """
import numpy, wandb
wandb.init(config={})
for step in range(1, 9):
    wandb.log({"loss": numpy.array([step]), "text": "x", "image": numpy.zeros((2, 2))}, step=step)
    if step == 6:
        wandb.log({"eval_score": float("nan")}, step=step)
wandb.log({"loss": float("inf")}, step=9)
"""
    events = run_code(code, metrics_every=4)

    assert [(event["env_step"], event["metrics"]) for event in events] == [
        (4, {"loss": 2.5}),
        (6, {"loss": 5.5}),
        (6, {"eval_score": "NaN"}),
        (8, {"loss": 7.5}),
        (9, {"loss": "Infinity"}),
    ]


def test_rows_without_a_step_are_at_the_iteration_of_their_phase_and_evaluations_at_the_row_before(run_code):
    # As finetune/rebrac logs them: losses at times, evaluations also at the end of the offline phase.
    code = """
import wandb
wandb.init(config={"num_offline_updates": 2001, "num_online_updates": 1000})
for i in range(3001):
    if i % 1000 == 0:
        wandb.log({("offline_iter" if i < 2001 else "online_iter"): i % 2001, "loss": float(i)})
    if i in (0, 2000, 3000):
        wandb.log({"eval/return_mean": float(i)})
"""
    events = run_code(code)

    losses = [(event["env_step"], event["metrics"]["loss"]) for event in events if "loss" in event["metrics"]]
    scores = [
        (event["env_step"], event["metrics"]["eval_score"]) for event in events if "eval_score" in event["metrics"]
    ]
    assert losses == [(1, 0.0), (1001, 1000.0), (2001, 2000.0), (3001, 3000.0)]
    assert scores == [(1, 0.0), (2001, 2000.0), (3001, 3000.0)]


def test_with_tracking_every_row_reaches_the_real_package_as_well(run_code, tmp_path):
    package = tmp_path / "site" / "wandb"
    package.mkdir(parents=True)
    # Version 0.31 replaces `log` when a run begins, and its `save` needs a file name.
    (package / "__init__.py").write_text(
        """
import json

rows = []
run = None


class Run:
    def save(self, glob_str):
        raise AssertionError("a file name is missing")

    def log(self, data, step=None):
        rows.append([data, step])


def init(**facts):
    global run, log
    run = Run()
    log = run.log
    return run


def log(*_):
    raise AssertionError("no run")


def finish():
    print(json.dumps(rows))
"""
    )
    code = """
import wandb
wandb.init(config={"checkpoints_path": None})
wandb.run.save()
wandb.log({"loss": 1.0}, step=1)
wandb.log({"eval_score": 2.0}, step=1)
wandb.finish()
"""
    loss, evaluation, rows = run_code(code, pythonpath=[tmp_path / "site"], wandb=True)

    assert rows == [[{"loss": 1.0}, 1], [{"eval_score": 2.0}, 1]]
    assert (loss["metrics"], evaluation["metrics"]) == ({"loss": 1.0}, {"eval_score": 2.0})
