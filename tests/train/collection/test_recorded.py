"""Recorded episodes of plays become demonstrations to learn from, with every byte checked."""

import gymnasium
import numpy as np
import pytest
from tests.runs.play.test_episode import record

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.home import Home
from palaestra.runs.play.episode import EpisodeWriter, new_episode_directory
from palaestra.runs.play.state import StepReport
from palaestra.train.collection.collect import Amount
from palaestra.train.collection.create import CollectionPlan, collect_dataset
from palaestra.train.collection.recorded import find_recordings


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path.resolve() / "var" / "training")


def play(home, episode_id, *, seed=0, steps=100, outcome="terminated", finish=True, **changes):
    """Play CartPole, always to the right, and record it as a play does; returns observations and actions."""
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    writer = EpisodeWriter(new_episode_directory(home, episode_id), record(episode_id, seed=seed, **changes))
    writer.add(StepReport(episode=1, step=0), b"", {"": observation})
    observations, over, total = [observation], False, 0.0
    while not over and len(observations) <= steps:
        observation, reward, over, _, _ = env.step(1)
        observations.append(observation)
        total += reward
        report = StepReport(
            episode=1,
            step=len(observations) - 1,
            action=1,
            actor="human",
            reward=reward,
            episode_return=total,
            terminated=over,
        )
        writer.add(report, b"", {"": observation})
    writer.finish(outcome, 10.0) if finish else writer.close()
    env.close()
    return np.array(observations)


def collect(home, names, **changes):
    recordings = find_recordings(home, names, changes.pop("env", ""))
    settings = {"dataset_id": "cartpole/human-v0", "score_episodes": 0, "recordings": recordings} | changes
    return collect_dataset(home, CollectionPlan(amount=Amount(episodes=len(recordings.readers)), **settings))


def test_the_dataset_holds_exactly_what_was_recorded(home):
    first, second = play(home, "one", started=1.0), play(home, "two", seed=1, started=2.0)
    dataset = collect(home, ["two", "one"])
    arrays = dataset.load_transitions()
    np.testing.assert_array_equal(arrays.observation, np.concatenate([first[:-1], second[:-1]]))
    np.testing.assert_array_equal(arrays.next_observation, np.concatenate([first[1:], second[1:]]))
    assert set(arrays.action.tolist()) == {1}
    assert np.flatnonzero(arrays.terminated).tolist() == [len(first) - 2, len(first) + len(second) - 3]
    assert not arrays.truncated.any()
    assert dataset.about["episodes"] == ["one", "two"]
    assert dataset.about["human_steps"] == dataset.total_steps
    assert dataset.env_id == "CartPole-v1"


def test_all_finished_episodes_of_an_environment_are_selected(home):
    play(home, "one", started=1.0)
    play(home, "two", started=2.0, env_id="Taxi-v4")
    play(home, "three", started=3.0, finish=False)
    assert collect(home, ["all"], env="CartPole-v1").about["episodes"] == ["one"]
    with pytest.raises(ConfigError, match="no finished episode of Acrobot-v1"):
        find_recordings(home, ["all"], "Acrobot-v1")
    with pytest.raises(ConfigError, match="--env"):
        find_recordings(home, ["all"])


def test_an_episode_that_the_person_reset_is_truncated_there(home):
    play(home, "one", steps=3, outcome="stopped")
    arrays = collect(home, ["one"]).load_transitions()
    assert (arrays.terminated.tolist(), arrays.truncated.tolist()) == ([False] * 3, [False, False, True])


def test_a_changed_recording_is_refused_and_leaves_nothing(home):
    play(home, "one")
    path = home.episodes / "one" / "observations.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"observations.bin was changed after it was recorded"):
        collect(home, ["one"])
    assert not home.datasets.exists()


def test_recordings_that_do_not_go_together_are_refused(home):
    play(home, "one", started=1.0)
    play(home, "light", started=2.0, parameters={"sutton_barto_reward": True})
    play(home, "screen", started=3.0, kind="screen")
    play(home, "open", started=4.0, finish=False)
    with pytest.raises(ConfigError, match="Make one dataset for each"):
        find_recordings(home, ["one", "light"])
    with pytest.raises(ConfigError, match="is of a screen"):
        find_recordings(home, ["screen"])
    with pytest.raises(ConfigError, match="was played in CartPole-v1"):
        find_recordings(home, ["one"], "Taxi-v4")
    with pytest.raises(UnknownRun, match="no such episode"):
        find_recordings(home, ["nothing"])
    with pytest.raises(ConfigError, match="it was never finished"):
        collect(home, ["open"])


def test_recorded_episodes_are_not_mixed_with_noise(home):
    play(home, "one")
    with pytest.raises(ConfigError, match="recorded episodes are not changed"):
        collect(home, ["one"], noise=0.5)


def test_the_arguments_of_recorded_episodes_cannot_be_changed_afterwards(home):
    play(home, "one")
    with pytest.raises(ConfigError, match=r"--env-kwargs.*recorded episodes have the arguments"):
        collect(home, ["one"], env_kwargs={"sutton_barto_reward": True})


def test_an_action_beyond_the_bounds_is_stored_as_it_was_performed(home):
    """A play records the torque that was asked for, and performs it clipped."""
    facts = record("one", env_id="Pendulum-v1")
    writer = EpisodeWriter(new_episode_directory(home, "one"), facts)
    for step, torque in enumerate((None, 1.5, 9.0, -9.0)):
        report = StepReport(episode=1, step=step, action=None if torque is None else [torque], actor="human")
        writer.add(report, b"", {"": np.zeros(3, np.float32)})
    writer.finish("truncated", 10.0)
    assert collect(home, ["one"]).load_transitions().action.tolist() == [[1.5], [2.0], [-2.0]]
