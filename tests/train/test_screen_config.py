"""Configurations of runs on screens: the specification's own file loads, mistakes are named."""

from pathlib import Path

import pytest
import yaml

from palaestra.config.file import is_ui_config, read_config_file
from palaestra.errors import ConfigError
from palaestra.train.screen_config import screen_config_from

SPECIFICATION = """
experiment_name: "my_experiment"

model:
  name: "Qwen/Qwen2.5-VL-3B-Instruct"
  use_lora: true
  lora_target_option: "attention+mlp"  # Recommended
  lora_rank: 32

trainer:
  batch_size: 4
  learning_rate: null  # Auto-detect
  num_training_steps: 100

actor:
  max_steps_per_episode: 50
  task_prompt: "Complete the data entry task"
  session_type: "simple_data_entry"  # Maps to pod manifest function

actor_pool:
  target_concurrent_actors: 2

environment:
  cluster_host: "your-proxy-server-ip"  # Kubernetes proxy server
  namespace: "default"
  session_timeout: 300
"""


def config(**more):
    return screen_config_from({"model": {"name": "tiny"}, **more})


def test_the_file_of_the_specification_loads_as_it_is_written():
    data = yaml.safe_load(SPECIFICATION)
    assert is_ui_config(data)
    read = screen_config_from(data)
    assert (read.name, read.model.lora_rank, read.trainer.batch_size) == ("my_experiment", 32, 4)
    assert (read.trainer.learning_rate, read.trainer.num_training_steps) == (None, 100)
    assert (read.actor.session_type, read.actor_pool.target_concurrent_actors) == ("simple_data_entry", 2)
    assert read.environment.url == "http://your-proxy-server-ip:8700"
    assert read.algorithm["name"] == "rejection_sampling"


def test_the_query_dialect_has_one_task_which_need_not_be_named():
    environment = {"dialect": "query", "cluster_host": "10.0.0.7"}
    read = config(environment=environment, actor={"session_type": "simple_data_entry"})
    assert [choice.task for choice in read.tasks] == ["simple_data_entry/rows"]
    assert screen_config_from(read.to_json()) == read


def test_everything_that_was_read_can_be_read_again():
    read = config(algorithm={"name": "grpo", "group_size": 8}, tasks=[{"task": "miniwob/click-test"}])
    assert screen_config_from(read.to_json()) == read


@pytest.mark.parametrize("path", sorted(Path("configs/ui").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_that_ships_is_accepted(path):
    assert screen_config_from(read_config_file(path)).tasks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer": {"num_trainings_steps": 3}}, "Did you mean 'num_training_steps'"),
        ({"actor": {"max_step_per_episode": 3}}, "Did you mean 'max_steps_per_episode'"),
        ({"algorithm": {"name": "grop"}}, "Did you mean 'grpo'"),
        ({"algorithm": {"name": "grpo", "group_sizes": 8}}, "Did you mean 'group_size'"),
        (
            {"algorithm": {"name": "grpo", "group_size": 8}, "trainer": {"batch_size": 20}},
            "Nearest that are: 16 and 24",
        ),
        ({"algorithm": {"name": "grpo", "group_size": 8}, "trainer": {"batch_size": 4}}, "Nearest that are: 8"),
        ({"environment": {"gateway": "http://a", "cluster_host": "b"}}, "Give one of them"),
        ({"environment": {"gateway": "http://a", "session_servers": ["http://b"]}}, "Give one of them"),
        ({"environment": {"session_servers": "127.0.0.1:8000"}}, "is not a URL such as"),
        (
            {"environment": {"session_servers": "http://me:planted123@host"}},
            r"me:\*\*\*@host.* holds a user or password",
        ),
        ({"environment": {"session_servers": ["http://a", "http://a/"]}}, "names a server twice"),
        ({"environment": {"session_server": "http://a"}}, "Did you mean 'session_servers'"),
        ({"environment": {"dialect": "query"}}, "Set environment.session_servers, or environment.gateway"),
        ({"environment": {"dialect": "query", "session_servers": ["http://a"]}}, "Set environment.reuse_screens=true"),
        (
            {"environment": {"dialect": "query", "session_servers": ["http://a"], "reuse_screens": True}},
            "target_concurrent_actors = 2: is more than the 1 servers",
        ),
        (
            {
                "environment": {"dialect": "query", "session_servers": ["http://a"], "reuse_screens": True},
                "algorithm": {"name": "grpo"},
            },
            "must begin on the same screen",
        ),
        ({"environment": {"reuse_screens": True}}, "Leave it out"),
        ({"environment": {"dialect": "post"}}, "environment.dialect"),
        ({"inference": {"backend": "process"}}, "collection=asynchronous"),
        ({"tasks": [{"task": "no-slash"}]}, "tasks.0.task"),
        ({"tasks": [{"task": "a/b", "params": {"x": ["\ud800"]}}]}, "half of a surrogate pair"),
        ({"actor": {"task_prompt": "Do \ud800"}}, r"'Do \\ud800': has half of a surrogate pair"),
        ({"model": {"name": "tiny", "lora_target_option": "atention"}}, "model.lora_target_option"),
    ],
)
def test_a_mistake_is_named_with_its_place(given, message):
    with pytest.raises(ConfigError, match=message):
        config(**given)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, None),
        ({"gateway": "http://127.0.0.1:8700/"}, "http://127.0.0.1:8700"),
        ({"cluster_host": "10.0.0.7:9000"}, "http://10.0.0.7:9000"),
        ({"cluster_host": "https://gateway.example"}, "https://gateway.example"),
    ],
)
def test_where_the_gateway_is(given, url):
    assert config(environment=given).environment.url == url


def test_only_asynchronous_runs_are_ever_stale():
    assert config(trainer={"max_staleness": 3}).staleness == 0
    assert config(trainer={"max_staleness": 3, "collection": "asynchronous"}).staleness == 3


def test_the_price_of_an_unreadable_reply_is_read_where_older_checkpoints_have_it():
    old = screen_config_from({"model": {"name": "tiny"}, "actor": {"unreadable_reward": -0.3}})
    assert old.reward.unreadable_reply == -0.3
    assert "unreadable_reward" not in old.to_json()["actor"]


@pytest.mark.parametrize("given", [[1, -1], [0, 0]])
def test_an_assumed_range_of_rewards_has_to_be_one(given):
    with pytest.raises(ConfigError, match=r"reward.assumed_range = .*is not a range"):
        screen_config_from({"model": {"name": "tiny"}, "reward": {"assumed_range": given}})


def test_not_finishing_cannot_be_rewarded():
    with pytest.raises(ConfigError, match=r"reward.truncated = 0.5"):
        screen_config_from({"model": {"name": "tiny"}, "reward": {"truncated": 0.5}})
