"""A word names a file, a packaged configuration or an environment."""

import os

import pytest

from palaestra.config.packaged import CONFIGS, configs_for, describe_config, packaged_configs, read_config
from palaestra.config.packaged import read_runner_config as read_for
from palaestra.errors import ConfigError
from palaestra.train import load_config


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("word", ["cartpole", "ppo/cartpole"])
def test_a_packaged_configuration_is_found_by_its_name_in_any_directory(word):
    source = read_config(word)
    assert source.path == CONFIGS / "ppo" / "cartpole.yaml"
    assert source.data["env"]["id"] == "CartPole-v1"
    assert source.text == source.path.read_text()


@pytest.mark.parametrize("word", ["CartPole-v1", "compiled/CartPole-v1", "ALE/Pong-v5", "my_package.tasks:Maze"])
def test_an_environment_id_trains_with_default_settings(word):
    source = read_config(word)
    assert (source.data, source.text, source.path) == ({"env": {"id": word}}, "", None)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ([], 256),
        (["algorithm.learning_rate=1e-3"], 256),
        (["trainer.rollout_length=64"], 64),
        (["trainer.buffer_size=512"], 512),
        (["algorithm.name=dqn"], 2048),  # the default of the key, which dqn does not use
    ],
)
def test_an_environment_id_has_short_rollouts_unless_they_are_given(overrides, length):
    assert load_config("CartPole-v1", overrides).rollout_length == length


def test_the_defaults_of_a_file_are_those_of_the_keys(tmp_path):
    (tmp_path / "mine.yaml").write_text("env: {id: CartPole-v1}\n")
    assert load_config("mine.yaml").rollout_length == 2048


def test_a_file_takes_precedence_over_a_packaged_name(tmp_path):
    (tmp_path / "cartpole").write_text("env: {id: Acrobot-v1}\n")
    assert read_config("cartpole").data == {"env": {"id": "Acrobot-v1"}}


def test_a_directory_does_not_hide_a_packaged_name(tmp_path):
    (tmp_path / "cartpole").mkdir()
    (tmp_path / "mine").mkdir()
    assert read_config("cartpole").path == CONFIGS / "ppo" / "cartpole.yaml"
    with pytest.raises(ConfigError, match="Is a directory"):
        read_config("mine")


def test_a_configuration_may_come_from_a_pipe():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        pipe.write("env: {id: Acrobot-v1}")
    assert read_config(f"/dev/fd/{reading}").data == {"env": {"id": "Acrobot-v1"}}
    os.close(reading)


def test_a_mistyped_name_suggests_the_closest_and_a_strange_one_the_list():
    with pytest.raises(ConfigError, match="is not a file, a packaged configuration or an environment id") as error:
        read_config("cartpol")
    assert error.value.remedy == "Did you mean 'cartpole'?"
    with pytest.raises(ConfigError, match="palaestra train --list"):
        read_config("qqqqqq")
    with pytest.raises(ConfigError, match="No such file"):
        read_config("cartpole.yaml")
    with pytest.raises(ConfigError, match="is not a file or a packaged name"):
        read_config("CartPole-v1", allow_environment=False)


def test_packaged_names_belong_to_our_own_trainer(tmp_path):
    assert read_for("cartpole", "palaestra").data["env"]["id"] == "CartPole-v1"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_for("cartpole", "sb3")


def test_weights_beside_a_packaged_configuration_are_found():
    config = load_config("table_reach")
    assert config.policy.vla_config.model_path == str(CONFIGS / "vla" / "small_vla_reach.safetensors")


def test_configurations_are_listed_with_those_of_ppo_first_and_a_sentence_each():
    names = packaged_configs()
    assert next(iter(names)) == "acrobot"
    assert {"cartpole", "click_target", "taxi"} <= set(names)
    assert describe_config(names["taxi"]) == "Q-learning on Taxi: a mean return of about 7.9, the best possible"
    assert all(describe_config(path) for path in names.values())
    assert configs_for("CartPole-v1") == ["cartpole", "dqn_cartpole"]
    assert configs_for("Maze-v0") == []
