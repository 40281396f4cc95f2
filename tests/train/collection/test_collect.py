"""Collected data is what the environment did: replaying the recorded actions gives the recorded steps."""

import gymnasium
import numpy as np
import pytest

from palaestra.env.make import EnvConfig, make_env
from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.train.collection.behaviours import NoisyBehaviour, RandomBehaviour, ScriptedBehaviour
from palaestra.train.collection.collect import Amount, collect_episodes, collection_config, random_score
from palaestra.train.collection.create import CollectionPlan, collect_dataset


def go_left(observation):
    return 0


def lean(observation):
    """Push CartPole's cart towards the side to which the pole falls."""
    return int(observation[2] + observation[3] > 0)


def too_high(observation):
    return 2


def fail(observation):
    raise RuntimeError("no idea")


def play(env_id, amount, seed=0, policy="random", num_envs=3):
    env = make_env(EnvConfig(id=env_id, num_envs=num_envs))
    try:
        behaviour = RandomBehaviour(env.action_space) if policy == "random" else _scripted(policy, env)
        return list(collect_episodes(env, behaviour, amount, seed=seed))
    finally:
        env.close()


def _scripted(name, env):
    return ScriptedBehaviour(f"tests.train.collection.test_collect:{name}", env.action_space)


def collect(root, wanted):
    return collect_dataset(Home(root), wanted, root=root)


def plan(**changes):
    settings = {"dataset_id": "cartpole/random-v0", "env_id": "CartPole-v1", "policy": "random", "score_episodes": 0}
    return CollectionPlan(**({**settings, "amount": Amount(steps=100)} | changes))


@pytest.mark.parametrize("amount", [Amount(steps=3), Amount(episodes=3)])
def test_fewer_than_one_step_or_episode_per_environment_gives_no_more_than_that(amount):
    episodes = play("CartPole-v1", amount, num_envs=8)
    assert len(episodes) == 3
    assert amount.steps is None or sum(len(episode) for episode in episodes) == 3


def test_each_transition_is_one_that_the_environment_makes():
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    for episode in play("CartPole-v1", Amount(episodes=6)):
        observations = episode.observations[""]
        for step in range(len(episode)):
            env.state = observations[step].astype(np.float64)
            env.steps_beyond_terminated = None
            observation, reward, terminated, _, _ = env.step(int(episode.actions[step]))
            np.testing.assert_allclose(observation, observations[step + 1], atol=1e-6)
            assert (reward, terminated) == (episode.rewards[step], episode.terminated[step])


def test_exactly_the_wanted_steps_are_collected_and_open_episodes_are_truncated():
    episodes = play("Pendulum-v1", Amount(steps=700))  # 234 + 233 + 233 with episodes of 200
    assert sorted(len(episode) for episode in episodes) == [33, 33, 34, 200, 200, 200]
    assert all(episode.truncated[-1] and not episode.truncated[:-1].any() for episode in episodes)
    assert not any(episode.terminated.any() for episode in episodes)


def test_every_environment_plays_the_same_number_of_episodes():
    """Countdown ends after n steps, so that short episodes would win if the first to end were taken."""
    assert len(play("CartPole-v1", Amount(episodes=7))) == 7


def test_an_episode_longer_than_a_block_is_joined_without_a_seam():
    (episode,) = play("MountainCarContinuous-v0", Amount(episodes=1), num_envs=1)
    observations = episode.observations[""]
    assert len(episode) == 999  # two blocks of 512 steps
    np.testing.assert_allclose(observations[1:, 0] - observations[:-1, 0], observations[1:, 1], atol=1e-5)


def test_the_same_seed_gives_the_same_dataset_and_another_seed_another(tmp_path):
    one = collect(tmp_path / "one", plan(score_episodes=2))
    again = collect(tmp_path / "again", plan(score_episodes=2))
    other = collect(tmp_path / "other", plan(score_episodes=2, seed=1))
    assert one.sha256 == again.sha256
    for mine, theirs in zip(one.load_transitions(), again.load_transitions(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(one.load_transitions().observation, other.load_transitions().observation)


def test_a_function_acts_and_is_named_in_the_manifest(tmp_path):
    address = "tests.train.collection.test_collect:go_left"
    dataset = collect(tmp_path, plan(policy=address))
    assert set(dataset.load_transitions().action.tolist()) == {0}
    assert dataset.about["policy"] == address


def test_a_better_policy_collects_longer_episodes():
    random = play("CartPole-v1", Amount(episodes=10))
    leaning = play("CartPole-v1", Amount(episodes=10), policy="lean")
    assert np.mean([len(episode) for episode in leaning]) > 4 * np.mean([len(episode) for episode in random])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("too_high", r"returned 2, which is not in Discrete\(2\)"),
        ("fail", "raised RuntimeError: no idea"),
        ("missing", "cannot be imported"),
    ],
)
def test_a_function_that_cannot_act_is_refused_and_leaves_nothing(tmp_path, policy, message):
    with pytest.raises(ConfigError, match=message):
        collect(tmp_path, plan(policy=f"tests.train.collection.test_collect:{policy}"))
    assert list(tmp_path.iterdir()) == []


def test_noise_replaces_the_share_of_actions_that_was_asked_for():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=4))
    behaviour = NoisyBehaviour(_scripted("go_left", env), env.action_space, 0.5)
    episodes = list(collect_episodes(env, behaviour, Amount(steps=2000), seed=0))
    env.close()
    right = np.mean(np.concatenate([episode.actions for episode in episodes]))
    assert 0.2 < right < 0.3  # half of the half that is random


def test_actions_of_random_behaviour_cover_the_box_evenly():
    actions = np.concatenate([episode.actions for episode in play("Pendulum-v1", Amount(steps=3000))])
    counts, _ = np.histogram(actions, bins=4, range=(-2, 2))
    assert counts.min() > 650
    assert counts.sum() == 3000


def test_the_random_score_is_the_mean_return_of_seeded_episodes():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=4))
    scores = [random_score(env, episodes=20, seed=seed) for seed in (0, 0, 1)]
    env.close()
    assert scores[0] == scores[1] != scores[2]
    assert 15 < scores[0] < 30


def test_the_environment_is_recovered_by_minari_with_its_settings(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    dataset = collect(tmp_path, plan(env_id="Pendulum-v1", env_kwargs={"g": 5.0}))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.load_dataset(dataset.dataset_id).recover_environment()
    assert (env.spec.id, env.unwrapped.g) == ("Pendulum-v1", 5.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": ""}, "give one of --policy, --checkpoint and --recorded"),
        ({"env_id": ""}, "--env = ''"),
        ({"seed": -1}, "--seed = -1"),
        ({"noise": 1.5}, "--noise = 1.5"),
        ({"score_episodes": -1}, "--score-episodes = -1"),
        ({"expert_score": float("nan")}, "--expert-score = nan"),
        ({"env_id": "CartPole-v9"}, "there is no such version"),
        ({"policy": "nothing"}, "neither 'random' nor a function"),
        ({"dataset_id": "../up-v0"}, "is not a dataset id"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        collect(tmp_path / "root", plan(**changes))
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("wrong", [{}, {"steps": 1, "episodes": 1}, {"steps": 0}, {"episodes": -3}])
def test_an_amount_is_either_steps_or_episodes_and_at_least_one(wrong):
    with pytest.raises(ConfigError, match=r"--steps|--num-episodes"):
        Amount(**wrong)


def test_the_file_holds_no_times_which_would_change_its_digest(tmp_path):
    h5py = pytest.importorskip("h5py")
    dataset = collect(tmp_path, plan())
    with h5py.File(dataset.path / "data" / "main_data.hdf5") as file:
        assert h5py.h5g.get_objinfo(file.id, b"episode_0/actions").mtime == 0
        assert h5py.h5g.get_objinfo(file.id, b"episode_0").mtime == 0


def test_a_share_of_the_data_comes_from_a_random_policy(tmp_path):
    address = "tests.train.collection.test_collect:go_left"
    dataset = collect(tmp_path, plan(policy=address, random_share=0.25, amount=Amount(steps=400)))
    actions = dataset.load_transitions().action
    assert (len(actions), actions[100:].any()) == (400, False)
    assert 30 < actions[:100].sum() < 70
    assert dataset.about["random_share"] == 0.25


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        ({"id": "CliffWalking-v1"}, 30_000),
        ({"id": "CliffWalking-v1", "max_episode_steps": 7}, 7),
        ({"id": "CartPole-v1"}, None),
    ],
)
def test_episodes_of_an_environment_without_a_time_limit_are_cut_off(env, limit):
    assert collection_config(EnvConfig(**env), Amount(episodes=2)).max_episode_steps == limit
