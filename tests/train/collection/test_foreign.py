"""Checkpoints of other trainers collect data, in a process of their own and without the run service."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from gymnasium import spaces

from palaestra.env.make import EnvConfig
from palaestra.errors import CheckpointError, ConfigError, ConsentRequired
from palaestra.files.atomic import write_json
from palaestra.files.home import Home
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.play.protocol import Message
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
    with pytest.raises(ConfigError, match=r"--checkpoint = 'nothing': there is no such run or checkpoint.*runs list"):
        find_policy("nothing", home)
    with pytest.raises(ConfigError, match=r"--expert-checkpoint = 'nothing'.*palaestra checkpoints list"):
        find_policy("nothing", home, "--expert-checkpoint")


def test_a_file_that_is_not_imported_is_refused_with_the_command_that_imports_it(home, tmp_path):
    (tmp_path / "model.zip").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Import it and give its id: palaestra checkpoints import /.*model.zip"):
        find_policy(str(tmp_path / "model.zip"), home)


def test_a_checkpoint_directory_of_another_trainer_is_known_by_its_path_or_refused(home, model, monkeypatch, tmp_path):
    directory = tmp_path / "agent"
    directory.mkdir()
    write_json(directory / "manifest.json", {"schema": 1, "kind": "spade_bdi", "files": {}}, durable=False)
    with pytest.raises(CheckpointError, match=r"was written by 'spade_bdi'.*palaestra checkpoints list"):
        find_policy(str(directory), home)
    record = replace(model[1], path=str(directory), format="spade_bdi")
    monkeypatch.setattr(foreign, "list_checkpoints", lambda home: [record])
    assert find_policy(str(directory), home) is record


def test_a_checkpoint_of_another_environment_is_refused(home, model):
    with pytest.raises(CheckpointError, match=r"CartPole-v1"):
        collect_dataset(home, plan(model[1], env_id="Acrobot-v1"))
    assert not home.datasets.exists()


KWARGS = {"sutton_barto_reward": True}
"""With them a step of CartPole gives 0 instead of 1."""


def _write_resolved(home, record):
    """As runs of Stable-Baselines3 record them."""
    write_json(home.run("a-1").resolved, {"env_kwargs": KWARGS})
    return replace(record, run_id="a-1", attempt=1)


def _write_command(home, record):
    """As runs of CORL record them."""
    settings = json.dumps({"env_kwargs": KWARGS})
    write_json(home.run("a-1").resolved, {"script": "iql"})
    write_json(home.run("a-1").attempt(2).command, {"environment": {"PALAESTRA_OFFLINE": settings}})
    return replace(record, run_id="a-1", attempt=2)


def _write_agent(home, record):
    """As checkpoints of BDI agents record them."""
    directory = Path(record.path).parent / "agent"
    write_json(directory / "agent.json", {"env_kwargs": KWARGS})
    return replace(record, path=str(directory))


@pytest.mark.parametrize("write", [_write_resolved, _write_command, _write_agent])
def test_the_environment_has_the_arguments_that_the_checkpoint_was_trained_with(home, model, write):
    for path in (home.run("a-1").attempt(2).path, Path(model[1].path).parent / "agent"):
        path.mkdir(parents=True)
    trained = write(home, model[1])
    dataset = collect_dataset(home, plan(trained))
    assert dataset.about["env_kwargs"] == KWARGS
    assert dataset.load_transitions().reward[0] == 0
    other = collect_dataset(home, plan(trained, dataset_id="sb3/other-v0", env_kwargs={}))
    assert other.about["env_kwargs"] == {}
    assert other.load_transitions().reward[0] == 1


def test_arguments_are_used_without_naming_the_environment_again(home, model):
    dataset = collect_dataset(home, plan(model[1], env_kwargs=KWARGS))
    assert dataset.about["env_kwargs"] == KWARGS
    assert dataset.load_transitions().reward[0] == 0


def _leaning(home, ppo):
    """The record of a policy that pushes the cart towards the side to which the pole falls."""
    with torch.no_grad():
        first, last = ppo.policy.mlp_extractor.policy_net[0], ppo.policy.action_net
        for parameter in (first.weight, first.bias, last.weight, last.bias):
            parameter.zero_()
        first.weight[0, 2:] = 1.0
        last.weight[1, 0] = 1.0
    ppo.save(home.path / "leaning.zip")
    return import_checkpoint(home, home.path / "leaning.zip", Provenance(env_id="CartPole-v1", agent_id="sb3/ppo"))


def test_a_checkpoint_of_another_trainer_measures_the_expert_score(home, model):
    """With these arguments an episode of CartPole that ends by a fall has a return of -1, whatever its length."""
    wanted = plan(None, policy="random", env_id="CartPole-v1", env_kwargs=KWARGS, score_episodes=2)
    with pytest.raises(ConfigError, match=r"--expert-checkpoint.*its score -1 is not above the random score -1"):
        collect_dataset(home, replace(wanted, expert_checkpoint=model[1]))
    dataset = collect_dataset(home, replace(wanted, env_kwargs=None, expert_checkpoint=_leaning(home, model[0])))
    assert dataset.expert_score > dataset.random_score > 0
    with pytest.raises(CheckpointError, match="CartPole-v1"):
        collect_dataset(
            home, replace(wanted, dataset_id="b-v0", env_id="Acrobot-v1", env_kwargs=None, expert_checkpoint=model[1])
        )
    assert not (home.datasets / "b-v0").exists()


def test_an_expert_that_cannot_act_is_refused_with_its_option(home, model, monkeypatch):
    use(monkeypatch, Prepared("exit 3"))
    wanted = plan(None, policy="random", env_id="CartPole-v1", score_episodes=1, expert_checkpoint=model[1])
    with pytest.raises(CheckpointError, match=r"--expert-checkpoint.*exit code 3"):
        collect_dataset(home, wanted)
    assert not home.datasets.exists()


def test_the_process_of_the_policy_gets_the_arguments_too(home, model, monkeypatch):
    requests = []

    class Watched(Prepared):
        def plan_policy(self, request, machine):
            requests.append(request)
            return super().plan_policy(request, machine)

    use(monkeypatch, Watched("exit 3"))
    with pytest.raises(CheckpointError, match="exit code 3"):
        collect_dataset(home, plan(model[1], env_kwargs=KWARGS))
    assert [request.parameters for request in requests] == [KWARGS]


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


class Overshooting:
    """The process of a policy that always answers with 9."""

    def __init__(self, command):
        self._answers = [Message({"type": "ready"})]

    def ask(self, observation):
        self._answers.append(Message({"type": "action", "action": [9.0]}))

    def read(self):
        return [self._answers.pop()]


def test_actions_of_another_trainer_are_clipped_to_the_bounds_as_in_a_play(home, model, monkeypatch):
    use(monkeypatch, Prepared("exit 3"))
    monkeypatch.setattr(foreign, "PolicyProcess", Overshooting)
    env, torque = EnvConfig(id="CartPole-v1"), spaces.Box(-2.0, 2.0, (1,), np.float32)
    behaviour = foreign.ForeignBehaviour(model[1], home, env, torque, deterministic=True, trust=False)
    actions = behaviour.act(np.zeros((2, 4), np.float32), None, np.random.default_rng(0))
    assert actions.tolist() == [[2.0], [2.0]]
