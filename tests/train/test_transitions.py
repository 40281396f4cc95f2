"""Runs on transitions: they continue bit for bit, record the right next observation, and refuse what does not fit."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from palaestra.actor.replay_source import ReplaySource
from palaestra.env import EnvConfig, make_env
from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.learner.transitions import DQN
from palaestra.policy.off_policy import QNetwork
from palaestra.train import config_from, evaluate_checkpoint, load_config, train
from palaestra.train.evaluation import evaluation_env
from palaestra.train.transitions import build_transition_training
from palaestra.transport.conformance import check_source

ROOT = Path(__file__).parents[2]
DQN_RUN = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "policy": {"hidden": [16]},
    "algorithm": {"name": "dqn", "batch_size": 8, "learning_starts": 20, "train_freq": 4, "gradient_steps": 3},
    "trainer": {"device": "cpu", "total_timesteps": 400, "checkpoint_every": 10, "keep_checkpoints": 100},
    "telemetry": {"progress": False},
}


def _config(**sections):
    data = json.loads(json.dumps(DQN_RUN))
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return config_from(data)


def _tensors(path):
    from safetensors.torch import load_file

    names = ("policy.safetensors", "learner.safetensors", "source.safetensors")
    return {(name, key): tensor for name in names for key, tensor in load_file(path / name).items()}


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"prioritized": True, "double": True}),
        ("Pendulum-v1", {"name": "sac"}),
        ("Pendulum-v1", {"name": "sac", "precision": "bfloat16"}),
    ],
    ids=["dqn", "dqn-prioritized", "sac", "sac-bfloat16"],
)
def test_a_run_that_was_interrupted_ends_with_the_weights_of_one_that_was_not(tmp_path, env, settings):
    config = _config(env={"id": env}, algorithm=settings, policy={"hidden": [64, 64]})
    whole = train(config, root=tmp_path, run_id="whole")
    middle = sorted((tmp_path / "whole").rglob("update_00000020"))[0]
    resumed = train(
        config, root=tmp_path, run_id="whole", resume=RunDirectory.find("whole", tmp_path), checkpoint=middle
    )

    expected, actual = _tensors(whole.checkpoint), _tensors(resumed.checkpoint)
    assert whole.checkpoint != resumed.checkpoint
    assert expected.keys() == actual.keys()
    different = [key for key, tensor in expected.items() if not torch.equal(tensor, actual[key])]
    assert not different
    states = [load_checkpoint(path).learner.facts for path in (whole.checkpoint, resumed.checkpoint)]
    assert states[0] == states[1]


def test_a_collection_that_was_interrupted_goes_on_where_it_stopped():
    whole, first, second = (build_transition_training(_config()) for _ in range(3))
    for _ in range(3):
        whole.source.next_batch()
    first.source.next_batch()
    answers = iter([False, False, True])
    first.source.stop = lambda: next(answers)
    assert first.source.next_batch() is None  # after two of four steps in two environments
    second.source.load_state(first.source.state())
    second.source.progress.add(first.source.progress.steps)
    batch = second.source.next_batch()
    second.source.next_batch()

    assert batch.steps == 8
    assert second.source.progress.steps == whole.source.progress.steps
    ours, theirs = second.source.buffer.state()[0], whole.source.buffer.state()[0]
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    for training in (whole, first, second):
        training.env.close()


def test_episodes_that_end_before_an_interruption_are_reported_after_it():
    first, second = (build_transition_training(_config(algorithm={"train_freq": 200})) for _ in range(2))
    steps = iter(range(1000))
    first.source.stop = lambda: next(steps) >= 150
    assert first.source.next_batch() is None
    ended = first.source.progress.episodes
    second.source.load_state(first.source.state())
    assert ended > 0
    assert len(second.source.next_batch().episodes) == ended + second.source.progress.episodes
    for training in (first, second):
        training.env.close()


def test_a_checkpoint_holds_only_the_filled_part_of_the_buffer(tmp_path):
    result = train(_config(), root=tmp_path, run_id="run")
    source = load_checkpoint(result.checkpoint).source
    assert result.steps == 404
    assert source.tensors["replay/reward"].shape == (404,)
    assert source.facts["replay"] == {"next": 404, "size": 404, "capacity": 1_000_000}


def test_without_the_buffer_a_resume_says_that_earlier_steps_are_lost(tmp_path):
    config = _config(trainer={"save_replay": False})
    result = train(config, root=tmp_path, run_id="run")
    assert not [name for name in load_checkpoint(result.checkpoint).source.tensors if name.startswith("replay")]
    longer = _config(trainer={"save_replay": False, "total_timesteps": 800})
    resumed = train(longer, root=tmp_path, run_id="run", resume=RunDirectory.find("run", tmp_path))
    journal = (tmp_path / "run" / "attempt_2" / "metrics.jsonl").read_text()
    assert "earlier steps are not learned from" in journal
    assert resumed.steps >= 800


def test_a_checkpoint_can_be_evaluated(tmp_path):
    result = train(_config(trainer={"eval_every": 20, "eval_episodes": 2}), root=tmp_path, run_id="run")
    evaluation = evaluate_checkpoint(result.checkpoint, episodes=3, seed=None)
    assert len(evaluation.returns) == 3
    assert '"eval_return"' in (tmp_path / "run" / "attempt_1" / "metrics.jsonl").read_text()


def test_a_warm_start_takes_policy_and_target_network_but_not_the_counters(tmp_path):
    first = train(_config(algorithm={"target_interval": 7}), root=tmp_path, run_id="first")
    short = _config(algorithm={"target_interval": 7}, trainer={"total_timesteps": 20})
    second = train(short, root=tmp_path, run_id="second", warm_start=first.checkpoint)
    start = sorted((tmp_path / "second").rglob("update_00000000"))[0]

    expected, actual = _tensors(first.checkpoint), _tensors(start)
    for key in [("learner.safetensors", "target"), ("policy.safetensors", "critic.0.weight")]:
        assert torch.equal(expected[key], actual[key]), key
    assert not torch.equal(expected["learner.safetensors", "adam.first"], actual["learner.safetensors", "adam.first"])
    assert second.steps < first.steps


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "off_policy").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_configs_can_be_trained(path):
    training = build_transition_training(load_config(path, ["algorithm.learning_starts=70", "algorithm.train_freq=1"]))
    try:
        batch = training.source.next_batch()
        assert batch.steps == 70
        assert all(np.isfinite(number) for number in training.learner.update(batch.experience).values())
    finally:
        training.env.close()


# ---------------------------------------------------------------------- what is recorded


class Ramp(gymnasium.Env):
    """Counts 0, 1, 2, …; terminates at 2 after action 1, and Gymnasium cuts it off after three steps."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = 0
        return np.array([0.0], np.float32), {}

    def step(self, action):
        self._at += 1
        return np.array([self._at], np.float32), 10.0 * self._at, bool(action == 1 and self._at == 2), False, {}


def _source(**settings):
    env = make_env(EnvConfig(id=f"{__name__}:Ramp", num_envs=2, max_episode_steps=3))
    policy = QNetwork(env.observation_space, env.action_space, seed=1)
    rules = DQN(**{"batch_size": 4, "learning_starts": 24, "buffer_size": 24, **settings})
    return ReplaySource(env, policy, rules, seed=3, total_timesteps=1000)


def test_the_last_step_of_an_episode_keeps_its_final_observation():
    source = _source()
    source.next_batch()
    columns = source.buffer.read(np.arange(24))

    at, following = columns["observation"][:, 0], columns["next_observation"][:, 0]
    assert set(at) == {0.0, 1.0, 2.0}
    assert (following == at + 1).all()  # never the 0 that the next episode begins with
    assert (columns["reward"] == 10.0 * following).all()
    assert (following[columns["terminated"]] == 2.0).all()
    assert columns["terminated"].any()
    # Steps that reach 3 were cut off: they are not terminated, so their future counts.
    assert not columns["terminated"][following == 3.0].any()
    assert (following == 3.0).any()


@pytest.mark.parametrize("prioritized", [False, True])
def test_the_source_keeps_its_promises(prioritized):
    check_source(lambda: _source(prioritized=prioritized))


def test_gradient_steps_of_minus_one_are_as_many_as_environment_steps():
    batch = _source(train_freq=5, gradient_steps=-1).next_batch()
    assert batch.experience.shape == (10, 4)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"trainer": {"rollout_length": 16}}, "trainer.rollout_length"),
        ({"trainer": {"iterations": 3, "total_timesteps": None}}, "trainer.iterations"),
        ({"trainer": {"collection": "asynchronous"}}, "trainer.collection"),
        ({"trainer": {"updates": 5}}, "trainer.updates"),
        ({"env": {"normalize_observation": True}}, "env.normalize_observation"),
        ({"env": {"normalize_reward": True}}, "env.normalize_reward"),
        ({"policy": {"name": "actor_critic"}}, "policy.name"),
        ({"algorithm": {"n_epochs": 3}}, "algorithm.n_epochs"),
    ],
)
def test_settings_of_rollouts_are_refused(sections, place):
    with pytest.raises(ConfigError) as caught:
        _config(**sections)
    assert caught.value.place == place


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"buffer_size": 7}, r"buffer_size = 7: is smaller than algorithm\.batch_size \(8\)"),
        ({"buffer_size": 19}, r"buffer_size = 19: is smaller than algorithm\.learning_starts \(20\)"),
        ({"buffer_size": 1, "batch_size": 1, "learning_starts": 0}, r"buffer_size = 1: is smaller than env\.num_envs"),
        ({"learning_starts": 401}, r"learning_starts = 401: the run ends after 400 steps, before the first update"),
        ({"gradient_steps": 0}, r"gradient_steps = 0: an update would learn nothing"),
    ],
)
def test_settings_with_which_nothing_would_be_learned_are_refused(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        _config(algorithm=algorithm)


def test_half_precision_is_refused_where_updates_go_through_autograd():
    config = _config(
        env={"id": "Pendulum-v1"},
        algorithm={"name": "sac", "precision": "bfloat16"},
        trainer={"compiled": "off"},
    )
    with pytest.raises(
        ConfigError, match=r"algorithm\.precision = 'bfloat16': .* float32 \(trainer\.compiled is off\)"
    ):
        build_transition_training(config)


def test_an_evaluation_ends_in_an_environment_without_a_time_limit(monkeypatch):
    monkeypatch.setattr("palaestra.env.make.EPISODE_LIMIT", 30)
    sections = {"env": {"id": "CliffWalking-v1"}, "trainer": {"eval_episodes": 2}}
    training = build_transition_training(_config(**sections))
    for parameter in training.policy.parameters():
        torch.nn.init.zeros_(parameter)  # Every value is 0, so it walks up into the wall forever.
    try:
        assert training.evaluate()["eval_length"] == 30
    finally:
        training.env.close()


@pytest.mark.parametrize(
    ("env", "limit"),
    [({"id": "CliffWalking-v1", "max_episode_steps": 7}, 7), ({"id": "CartPole-v1"}, None)],
)
def test_an_evaluation_keeps_the_time_limit_of_the_environment(env, limit):
    assert evaluation_env(_config(env=env), 3).max_episode_steps == limit


@pytest.mark.parametrize("env", [{"env": {"id": "CartPole-v1"}}, {}])
def test_rollouts_take_no_dataset(env):
    with pytest.raises(ConfigError, match="ppo learns from rollouts"):
        config_from({**env, "dataset": {"id": "cartpole/random-v0"}})


def test_masked_actions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"env action space = 'Discrete.*masked"):
        train(_config(env={"id": "palaestra.env.toy:MaskedChoice"}), root=tmp_path, run_id="run")


def test_a_checkpoint_of_ppo_does_not_warm_start_dqn(tmp_path):
    ppo = config_from(
        {
            "env": {"id": "CartPole-v1", "num_envs": 2},
            "algorithm": {"batch_size": 16},
            "trainer": {"device": "cpu", "rollout_length": 16, "iterations": 1},
            "telemetry": {"progress": False},
        }
    )
    checkpoint = train(ppo, root=tmp_path, run_id="ppo").checkpoint
    with pytest.raises(CheckpointError, match="was trained by PPO, this run trains by DQN"):
        train(_config(), root=tmp_path, run_id="dqn", warm_start=checkpoint)
    assert not (tmp_path / "dqn").exists()
