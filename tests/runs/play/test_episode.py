"""Recorded episodes: every step is kept through a kill, and a changed byte is found before anything learns from it."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.home import Home
from palaestra.runs.play.episode import (
    EpisodeReader,
    EpisodeWriter,
    delete_episode,
    list_episodes,
    new_episode_directory,
    open_episode,
)
from palaestra.runs.play.state import EpisodeRecord, StepReport

JPEG = b"\xff\xd8\xff\xe0 a picture"


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "var" / "training")


def record(episode_id="cartpole-1", **changes):
    return EpisodeRecord(
        **{"episode_id": episode_id, "play_id": "p", "env_id": "CartPole-v1", "kind": "gymnasium"} | changes
    )


def write_episode(home, episode_id="cartpole-1", steps=3, **changes):
    """Rewards 1, 2, 3, …; the observation of step k is [k, 2k]; the human acts in odd steps."""
    writer = EpisodeWriter(new_episode_directory(home, episode_id), record(episode_id, **changes))
    for k in range(steps + 1):
        report = StepReport(
            episode=1,
            step=k,
            action=None if k == 0 else k % 2,
            actor=None if k == 0 else ("human" if k % 2 else "agent"),
            reward=float(k),
            episode_return=k * (k + 1) / 2,
            terminated=k == steps,
        )
        writer.add(report, JPEG + bytes([k]), {"": np.array([k, 2 * k], np.float32)})
    return writer


def test_an_episode_is_read_as_it_was_played(home):
    finished = write_episode(home).finish("terminated", 12.0)

    episode = open_episode(home, "cartpole-1")

    assert episode.record == finished
    assert (finished.steps, finished.human_steps, finished.agent_steps) == (3, 2, 1)
    assert finished.episode_return == 6.0
    steps = episode.steps()
    assert [step.report.reward for step in steps] == [0.0, 1.0, 2.0, 3.0]
    assert [episode.picture(step)[-1] for step in steps] == [0, 1, 2, 3]
    assert [step.report.step for step in episode.steps(first=1, count=2)] == [1, 2]


def test_a_demonstration_has_one_more_observation_than_actions(home):
    write_episode(home).finish("terminated", 12.0)

    demonstration = open_episode(home, "cart").demonstration()

    assert demonstration.observations[""].tolist() == [[0, 0], [1, 2], [2, 4], [3, 6]]
    assert demonstration.actions.tolist() == [1, 0, 1]
    assert demonstration.rewards.tolist() == [1.0, 2.0, 3.0]
    assert demonstration.terminated.tolist() == [False, False, True]
    assert demonstration.by_human.tolist() == [True, False, True]


def test_named_observations_keep_their_names(home):
    writer = EpisodeWriter(new_episode_directory(home, "e"), record("e"))
    arrays = {"image": np.full((2, 2), 7, np.uint8), "speed/x": np.array(1.5)}
    for k in range(2):
        writer.add(StepReport(episode=1, step=k, action=0), b"", arrays)
    writer.finish("truncated", 1.0)

    demonstration = open_episode(home, "e").demonstration()

    assert demonstration.observations["image"].shape == (2, 2, 2)
    assert demonstration.observations["speed/x"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("name", ["steps.jsonl", "pictures.bin", "observations.bin"])
def test_a_flipped_byte_is_refused_as_a_demonstration(home, name):
    write_episode(home).finish("terminated", 12.0)
    path = home.episodes / "cartpole-1" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(ConfigError, match=f"{name} was changed"):
        open_episode(home, "cartpole-1").demonstration()


def test_a_killed_recording_keeps_every_step_and_is_called_interrupted(home):
    script = """
import os, sys
from tests.runs.play.test_episode import write_episode
from palaestra.files.home import Home
from pathlib import Path
writer = write_episode(Home(Path(sys.argv[1])), steps=5)
os.write(writer._files["steps.jsonl"].fileno(), b'{"episode": 1, "st')
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script, str(home.path)], check=False, env={**os.environ, "PYTHONPATH": "."})

    episode = open_episode(home, "cartpole-1")

    assert episode.record.outcome == "interrupted"
    assert (episode.record.steps, episode.record.episode_return) == (5, 15.0)
    assert len(episode.steps()) == 6
    with pytest.raises(ConfigError, match="never finished"):
        episode.demonstration()


def test_an_episode_that_is_being_written_is_playing_and_cannot_be_deleted(home):
    writer = write_episode(home)

    assert list_episodes(home)[0].outcome == "playing"
    with pytest.raises(ConfigError, match="is being played"):
        delete_episode(home, "cartpole-1")
    writer.finish("stopped", 2.0)
    delete_episode(home, "cartpole-1")
    assert list_episodes(home) == []


def test_episodes_are_listed_newest_first_and_a_damaged_one_says_why(home):
    write_episode(home, "a-1", started=1.0).finish("terminated", 2.0)
    write_episode(home, "b-1", started=3.0, env_id="Taxi-v4").finish("terminated", 4.0)
    (home.episodes / "c-1").mkdir()
    (home.episodes / "c-1" / "episode.json").write_text("{")

    records = list_episodes(home)

    assert [one.episode_id for one in records] == ["b-1", "a-1", "c-1"]
    assert records[2].problem == "episode.json cannot be read"
    assert [one.episode_id for one in list_episodes(home, env_id="Taxi-v4")] == ["b-1"]
    delete_episode(home, "c-1")


def test_a_picture_outside_the_file_is_reported_as_damage(home):
    write_episode(home).finish("terminated", 1.0)
    (home.episodes / "cartpole-1" / "pictures.bin").write_bytes(b"")
    episode = open_episode(home, "cartpole-1")

    with pytest.raises(ConfigError, match="the picture of step 2 is not one"):
        episode.picture(episode.steps()[2])


def test_an_unreadable_line_is_named(home):
    write_episode(home).finish("terminated", 1.0)
    path = home.episodes / "cartpole-1" / "steps.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"[1]\n" + lines[2])

    with pytest.raises(ConfigError, match=r"line 2 of steps\.jsonl"):
        EpisodeReader(home.episodes / "cartpole-1").steps()


def test_an_unknown_id_and_an_ambiguous_prefix_are_refused(home):
    write_episode(home, "cart-1").finish("terminated", 1.0)
    write_episode(home, "cart-2").finish("terminated", 1.0)
    with pytest.raises(UnknownRun, match="2 episodes begin with it"):
        open_episode(home, "cart")
    with pytest.raises(UnknownRun, match="no such episode"):
        open_episode(home, "taxi")
    with pytest.raises(UnknownRun, match="is not the id"):
        open_episode(home, "../cart-1")


def test_observations_that_change_their_shape_are_no_demonstration(home):
    writer = EpisodeWriter(new_episode_directory(home, "e"), record("e"))
    for k, text in enumerate(["go", "go to", "go to the red door"]):
        writer.add(StepReport(episode=1, step=k, action=0), JPEG, {"mission": np.frombuffer(text.encode(), np.uint8)})
    writer.finish("terminated", 1.0)

    episode = open_episode(home, "e")

    assert len(episode.steps()) == 3
    with pytest.raises(ConfigError, match="holds no observations"):
        episode.demonstration()


def test_a_copied_episode_has_the_name_of_its_directory(home):
    write_episode(home).finish("terminated", 1.0)
    shutil.copytree(home.episodes / "cartpole-1", home.episodes / "copy-1")

    assert sorted(one.episode_id for one in list_episodes(home)) == ["cartpole-1", "copy-1"]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "damage",
    [
        {"started": 1e300},
        {"started": -1.0},
        {"ended": float("nan")},
        {"mode": "x"},
        {"policy": None},
        {"policy": 5},
        {"outcome": 7},
        {"bytes": 10**400},
        {"bytes": True},
        {"fps": 0},
        {"parameters": []},
        {"play_id": ["p"]},
        {"sha256": [1]},
    ],
    ids=str,
)
def test_a_record_with_a_wrong_value_is_listed_with_its_problem_beside_the_others(home, damage):
    for name in ("cartpole-1", "cartpole-2"):
        write_episode(home, name).finish("terminated", 12.0)
    path = home.episodes / "cartpole-1" / "episode.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))

    problems = {record.episode_id: record.problem for record in list_episodes(home)}

    assert not problems["cartpole-2"]
    assert next(iter(damage)) in problems["cartpole-1"] or "sha256" in damage


def test_a_record_that_is_nested_too_deeply_is_listed_with_its_problem(home):
    write_episode(home).finish("terminated", 12.0)
    (home.episodes / "cartpole-1" / "episode.json").write_text(DEEP)

    assert list_episodes(home)[0].problem


@pytest.mark.parametrize("pid", [1e300, float("inf"), 10**4000, "x"], ids=lambda pid: str(pid)[:10])
def test_an_unfinished_record_whose_writer_is_no_process_is_interrupted(home, pid):
    write_episode(home).close()
    path = home.episodes / "cartpole-1" / "episode.json"
    document = json.loads(path.read_text())
    document["writer"]["pid"] = pid
    path.write_text(json.dumps(document))

    assert open_episode(home, "cartpole-1").record.outcome == "interrupted"


@pytest.mark.parametrize(
    "damage",
    [
        {"outputs": [1]},
        {"actor": ["a"]},
        {"reward": "much"},
        {"step": 10**400},
        {"time": 1e300},
        {"picture": [1]},
        {"picture": [-1, 3]},
        {"picture": [10**30, 3]},
    ],
    ids=str,
)
def test_a_step_with_a_wrong_value_is_named(home, damage):
    write_episode(home).finish("terminated", 12.0)
    path = home.episodes / "cartpole-1" / "steps.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | damage) + "\n" + "".join(others))

    with pytest.raises(ConfigError, match=r"line 1 of steps\.jsonl"):
        open_episode(home, "cartpole-1").steps()


def test_a_step_that_is_nested_too_deeply_is_named(home):
    write_episode(home).finish("terminated", 12.0)
    (home.episodes / "cartpole-1" / "steps.jsonl").write_text(f"{DEEP}\n")

    with pytest.raises(ConfigError, match=r"line 1 of steps\.jsonl"):
        open_episode(home, "cartpole-1").steps()


@pytest.mark.parametrize(
    "change", [{"dtype": "O"}, {"dtype": "(("}, {"shape": [0]}, {"shape": ["a"]}, {"shape": 10**30}], ids=str
)
def test_arrays_that_are_described_wrongly_are_refused_as_a_demonstration(home, change):
    write_episode(home).finish("terminated", 12.0)
    path = home.episodes / "cartpole-1" / "episode.json"
    document = json.loads(path.read_text())
    document["arrays"][0] |= change
    path.write_text(json.dumps(document))

    with pytest.raises(ConfigError, match="does not describe the observations"):
        open_episode(home, "cartpole-1").demonstration()
