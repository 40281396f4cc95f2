"""Training in an attempt that the run service prepared, and looking before anything is trained."""

import json

import pytest
import torch

from palaestra.cli.train import check_config
from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.telemetry import JournalReader
from palaestra.telemetry.event import PhaseChanged
from palaestra.train import config_from, train

DATA = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"n_epochs": 1, "batch_size": 32},
    "trainer": {"total_timesteps": 128, "rollout_length": 16},
    "telemetry": {"progress": False},
}


def _prepared(tmp_path, number):
    path = tmp_path / "runs" / "prepared" / f"attempt_{number}"
    path.mkdir(parents=True)
    (path / "command.json").write_text('{"argv": ["as", "the", "service", "wrote", "it"]}')
    return Attempt(path)


def _trained(attempt, **settings):
    return train(config_from(DATA), root=attempt.path, run_id="never-used", into=attempt, **settings)


def _weights(path):
    from safetensors.torch import load_file

    return load_file(load_checkpoint(path).policy)


def test_a_prepared_attempt_is_filled_and_nothing_is_made_beside_it(tmp_path):
    attempt = _prepared(tmp_path, 1)

    outcome = _trained(attempt)

    assert outcome.run == RunDirectory(attempt.path.parent)
    assert outcome.checkpoint.parent == attempt.checkpoints
    assert json.loads((attempt.path / "command.json").read_text())["argv"][-1] == "it"
    assert json.loads((outcome.run.path / "resolved.json").read_text())["trainer"]["total_timesteps"] == 128
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["prepared"]
    assert [a.number for a in outcome.run.attempts()] == [1]


def test_a_second_prepared_attempt_goes_on_from_the_newest_checkpoint_of_the_first(tmp_path):
    first = _trained(_prepared(tmp_path, 1))
    second = _prepared(tmp_path, 2)
    longer = config_from({**DATA, "trainer": {"total_timesteps": 256, "rollout_length": 16}})

    outcome = train(longer, root=tmp_path, run_id="x", resume=RunDirectory(second.path.parent), into=second)

    phases = [r.event for r in JournalReader(second.journal).read() if isinstance(r.event, PhaseChanged)]
    assert (first.steps, outcome.steps) == (128, 256)
    assert phases[0] == PhaseChanged("running", "resumed")
    assert outcome.checkpoint.parent == second.checkpoints


def test_an_attempt_that_nobody_prepared_is_refused(tmp_path):
    attempt = Attempt(tmp_path / "runs" / "prepared" / "attempt_3")

    with pytest.raises(ConfigError, match="no such attempt of this run"):
        _trained(attempt)
    assert not attempt.path.exists()


def test_a_warm_start_begins_with_the_weights_and_counts_from_nothing(tmp_path):
    first = _trained(_prepared(tmp_path, 1))
    second = _prepared(tmp_path / "other", 1)

    outcome = _trained(second, warm_start=first.checkpoint)

    begun = _weights(second.checkpoints / "update_00000000")
    assert outcome.steps == 128
    assert all(torch.equal(begun[name], weights) for name, weights in _weights(first.checkpoint).items())


def test_a_check_tells_what_would_be_trained_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    found = check_config({**DATA, "env": {"id": "CartPole-v1", "num_envs": 512, "vectorization": "workers"}}, seed=7)

    assert (found["env_id"], found["algorithm"], found["total_steps"]) == ("CartPole-v1", "ppo", 128)
    assert found["resolved"]["trainer"]["seed"] == 7
    assert found["resolved"]["env"]["num_envs"] == 512
    assert found["env_signature"]["action_space"] == {"type": "Discrete", "n": 2, "start": 0}
    assert found["env_signature"]["observation_space"]["shape"] == [4]
    assert found["env_signature"]["max_episode_steps"] == 500
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"env": {"id": "CartPole-v7"}}, "env.id"),
        ({"policy": {"name": "actor_critc"}}, "policy.name"),
        ({"algorithm": {"batch_size": 48}}, "algorithm.batch_size"),
        ({"trainer": 3}, "trainer"),
        ({"env": None}, "env.id"),
    ],
)
def test_a_check_refuses_what_training_would_refuse(change, place):
    with pytest.raises(ConfigError) as refused:
        check_config({**DATA, **change})
    assert refused.value.place == place


def test_a_check_of_screens_names_the_task(tmp_path):
    pytest.importorskip("transformers")

    found = check_config({"model": {"name": "tiny"}, "tasks": [{"task": "data_entry/form"}]})

    assert (found["env_id"], found["total_steps"]) == ("data_entry/form", None)
