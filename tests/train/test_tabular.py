"""Runs of Q-learning and SARSA: they continue bit for bit, are evaluated and played, and refuse what does not fit."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.runs.play.protocol import Message, MessageBuffer
from palaestra.train import config_from, evaluate_checkpoint, load_config, train
from palaestra.train.play.own_policy import load_policy, serve
from palaestra.train.transitions import build_transition_training

ROOT = Path(__file__).parents[2]
RUN = {
    "env": {"id": "FrozenLake-v1"},
    "algorithm": {"name": "q_learning", "train_freq": 16},
    "trainer": {"total_timesteps": 1_600, "checkpoint_every": 10, "keep_checkpoints": 100},
    "telemetry": {"progress": False},
}


def make_config(**sections):
    data = json.loads(json.dumps(RUN))
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return config_from(data)


def tensors(path):
    names = [file.name for file in path.glob("*.safetensors")]
    return {(name, key): tensor for name in names for key, tensor in load_file(path / name).items()}


@pytest.mark.parametrize("name", ["q_learning", "sarsa"])
@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_run_that_was_interrupted_ends_with_the_table_of_one_that_was_not(tmp_path, name, compiled):
    config = make_config(algorithm={"name": name}, trainer={"compiled": compiled})
    whole = train(config, root=tmp_path, run_id="whole")
    middle = sorted((tmp_path / "whole").rglob("update_00000050"))[0]
    directory = RunDirectory.find("whole", tmp_path)
    resumed = train(config, root=tmp_path, run_id="whole", resume=directory, checkpoint=middle)
    expected, actual = tensors(whole.checkpoint), tensors(resumed.checkpoint)
    assert whole.checkpoint != resumed.checkpoint
    table = expected["policy.safetensors", "table"]
    assert table.abs().sum() > 0
    assert torch.equal(table, actual["policy.safetensors", "table"])
    sources = [load_checkpoint(path).source.facts for path in (whole.checkpoint, resumed.checkpoint)]
    assert sources[0] == sources[1]


def test_a_table_is_evaluated_and_warm_starts_the_other_algorithm(tmp_path):
    config = load_config(ROOT / "configs" / "tabular" / "cliffwalking.yaml", ["telemetry.progress=false"])
    result = train(config, root=tmp_path, run_id="cliff")
    assert evaluate_checkpoint(result.checkpoint, episodes=2, seed=0).returns == (-13.0, -13.0)
    sarsa = make_config(
        env={"id": "CliffWalking-v1", "max_episode_steps": 200},
        algorithm={"name": "sarsa", "learning_rate": 1e-9, "exploration_initial": 0.0, "exploration_final": 0.0},
    )
    warm = train(sarsa, root=tmp_path, run_id="warm", warm_start=result.checkpoint)
    assert evaluate_checkpoint(warm.checkpoint, episodes=1, seed=0).returns == (-13.0,)


def test_masks_are_ignored_in_training_and_kept_in_evaluation(tmp_path):
    config = load_config(
        ROOT / "configs" / "tabular" / "taxi.yaml", ["telemetry.progress=false", "trainer.total_timesteps=300_000"]
    )
    result = train(config, root=tmp_path, run_id="taxi")
    assert evaluate_checkpoint(result.checkpoint, episodes=50, seed=0).mean_return > 7.0
    assert "Action masks are ignored" in (tmp_path / "taxi" / "attempt_1" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tabular").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_configs_can_be_trained(path):
    training = build_transition_training(load_config(path))
    try:
        assert training.source.table is not None
        assert training.source.next_batch().steps == 64
    finally:
        training.env.close()


@pytest.mark.parametrize("name", ["q_learning", "sarsa"])
@pytest.mark.parametrize(
    ("key", "value"), [("hidden", [3]), ("distribution", "gaussian"), ("log_std_init", -1.0), ("image_features", 8)]
)
def test_settings_of_networks_are_refused_for_a_table(name, key, value):
    with pytest.raises(ConfigError, match=rf"policy\.{key} = .* has no effect: {name} learns a table"):
        make_config(algorithm={"name": name}, policy={key: value})


def test_a_stored_configuration_of_a_table_is_accepted():
    config = make_config()
    assert config_from(config.to_json()) == config
    assert make_config(policy={"hidden": [64, 64]}).policy.name == "q_table"


def test_environments_without_numbered_states_are_refused():
    with pytest.raises(ConfigError, match="row for each state"):
        build_transition_training(make_config(env={"id": "CartPole-v1"}))
    with pytest.raises(ConfigError, match=r"env\.num_envs"):
        build_transition_training(make_config(env={"num_envs": 4}))


def test_compiled_steps_are_refused_where_there_is_no_transition_table():
    config = make_config(env={"id": "Taxi-v4", "kwargs": {"fickle_passenger": True}}, trainer={"compiled": "on"})
    with pytest.raises(ConfigError, match="no transition table"):
        build_transition_training(config)
    training = build_transition_training(make_config(trainer={"compiled": "off"}))
    assert training.source.table is None
    training.env.close()


def test_a_dataset_is_refused():
    with pytest.raises(ConfigError, match="learns from its own steps"):
        build_transition_training(make_config(dataset={"id": "lake/random-v0"}, trainer={"total_timesteps": 100}))


def test_a_finished_run_and_a_checkpoint_of_another_algorithm_are_refused(tmp_path):
    config = make_config()
    done = train(config, root=tmp_path, run_id="run")
    with pytest.raises(ConfigError, match="has taken 1600 steps already"):
        train(config, root=tmp_path, run_id="run", resume=RunDirectory.find("run", tmp_path))
    ppo = {**RUN, "algorithm": {"name": "ppo", "batch_size": 64}, "env": {"id": "FrozenLake-v1", "num_envs": 1}}
    ppo["trainer"] = {"total_timesteps": 64, "rollout_length": 64}
    with pytest.raises(CheckpointError):
        train(config_from(ppo), root=tmp_path, run_id="ppo", warm_start=done.checkpoint)


def test_the_policy_process_of_a_table_announces_it_and_reports_the_values_of_the_state(tmp_path):
    result = train(make_config(), root=tmp_path, run_id="run")
    table = load_file(result.checkpoint / "policy.safetensors")["table"].numpy()
    policy = load_policy(result.checkpoint, deterministic=True)
    assert np.array_equal(policy.describe()["q_table"], table)
    state = int(np.abs(table).sum(1).argmax())
    header = {"type": "act", "arrays": [{"name": "", "dtype": "<i8", "shape": []}]}
    answer = policy.act(Message(header, np.int64(state).tobytes()))
    assert answer["outputs"]["q_values"] == table[state].tolist()
    assert answer["action"] == table[state].argmax()
    assert answer["outputs"]["value"] == table[state].max()
    json.dumps(answer)


def test_the_policy_process_sends_the_table_with_its_first_message(tmp_path):
    result = train(make_config(), root=tmp_path, run_id="run")
    target = io.BytesIO()
    with open("/dev/null", "rb") as nothing:
        assert serve(result.checkpoint, deterministic=True, source=nothing, target=target) == 0
    (ready,) = MessageBuffer().add(target.getvalue())
    assert ready.type == "ready"
    assert np.array(ready.header["q_table"]).shape == (16, 4)
