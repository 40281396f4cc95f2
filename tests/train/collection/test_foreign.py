"""Checkpoints of other trainers collect data, in a process of their own and without the run service."""

import json
from pathlib import Path

import pytest
import stable_baselines3 as sb3

from palaestra.errors import CheckpointError, ConfigError, ConsentRequired
from palaestra.files.home import Home
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.runner import PolicyPlan, RunnerCapabilities
from palaestra.train.collection import foreign
from palaestra.train.collection.collect import Amount
from palaestra.train.collection.create import CollectionPlan, collect_dataset
from palaestra.train.collection.foreign import find_policy


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path.resolve() / "var" / "training")


@pytest.fixture
def model(home, tmp_path):
    """An untrained policy of Stable-Baselines3, imported as a checkpoint."""
    ppo = sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu", seed=1, policy_kwargs={"net_arch": [8]})
    ppo.save(tmp_path / "a.zip")
    record = import_checkpoint(home, tmp_path / "a.zip", Provenance(env_id="CartPole-v1", agent_id="sb3/ppo"))
    return ppo, record


def plan(checkpoint, **changes):
    settings = {"dataset_id": "sb3/cartpole-v0", "amount": Amount(steps=60), "score_episodes": 0}
    return CollectionPlan(checkpoint=checkpoint, **(settings | changes))


def test_the_actions_are_those_that_the_library_itself_would_take(home, model):
    ppo, record = model
    dataset = collect_dataset(home, plan(find_policy(record.checkpoint_id, home)))
    arrays = dataset.load_transitions()
    expected, _ = ppo.predict(arrays.observation, deterministic=True)
    assert arrays.action.tolist() == expected.tolist()
    assert (dataset.total_steps, dataset.env_id) == (60, "CartPole-v1")
    assert dataset.about["algorithm"] == "sb3/ppo"
    assert dataset.about["checkpoint_sha256"] == record.sha256
    assert dataset.about["num_envs"] == 1


def test_a_name_that_is_neither_run_nor_checkpoint_is_refused(home):
    with pytest.raises(ConfigError, match="no such run"):
        find_policy("nothing", home)


def test_a_checkpoint_of_another_environment_is_refused(home, model):
    with pytest.raises(CheckpointError, match=r"CartPole-v1"):
        collect_dataset(home, plan(model[1], env_id="Acrobot-v1"))
    assert not home.datasets.exists()


def test_a_policy_of_a_dataset_collects_with_the_arguments_of_that_dataset(home, model):
    record = Path(model[1].path).with_name("record.json")
    learned = {"dataset_id": "cartpole/rewards-v0", "env_id": "CartPole-v1", "sha256": "0" * 64}
    learned |= {"env_kwargs": {"sutton_barto_reward": True}}
    record.write_text(json.dumps(json.loads(record.read_text()) | {"offline_dataset": learned}))
    policy = find_policy(model[1].checkpoint_id, home)

    with pytest.raises(CheckpointError, match="sutton_barto_reward = True, this is CartPole-v1"):
        collect_dataset(home, plan(policy, env_kwargs={}))
    assert collect_dataset(home, plan(policy)).about["env_kwargs"] == learned["env_kwargs"]


class Prepared:
    """A runner whose policy is a program of the test."""

    name = "sb3"
    capabilities = RunnerCapabilities(title="Prepared", offline_inference=True)

    def __init__(self, program, foreign_code=""):
        self._plan = PolicyPlan(argv=("/bin/sh", "-c", program), foreign_code=foreign_code)

    def plan_policy(self, request, machine):
        return self._plan


def use(monkeypatch, runner):
    async def load(name):
        return runner

    monkeypatch.setattr(foreign, "_load_runner", load)


def test_code_of_others_runs_only_with_consent(home, model, monkeypatch):
    use(monkeypatch, Prepared("exit 3", foreign_code="a class of yours"))
    with pytest.raises(ConsentRequired, match=r"a class of yours. Agree with --trust"):
        collect_dataset(home, plan(model[1]))
    with pytest.raises(CheckpointError, match="ended with exit code 3"):
        collect_dataset(home, plan(model[1], trust=True))


def test_a_process_that_dies_is_an_error_and_leaves_nothing(home, model, monkeypatch):
    use(monkeypatch, Prepared("kill -9 $$"))
    with pytest.raises(CheckpointError, match="was ended by signal 9"):
        collect_dataset(home, plan(model[1]))
    assert not home.datasets.exists()
