"""The recorded screen episodes of a run over HTTP: summaries, turns and pictures, and no other file."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from tests.experience.episodes import HEIGHT, SCREEN, SHA, WIDTH, episode, png, turn

from palaestra.errors import ConfigError, UnknownRun
from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryArchive

FAILED = {"outcome": Outcome.FAILURE}


@pytest.fixture
def run(served):
    return served.home.run(served.done())


def _add(directory, *episodes):
    archive = TrajectoryArchive(directory)
    return [archive.append(one).file for one in episodes]


def test_episodes_are_listed_newest_first_with_filters_and_pages(served, run):
    names = _add(
        run.attempt(1).trajectories,
        *(episode(episode_id=f"e{n}", started_at=float(n), **(FAILED if n % 2 else {})) for n in range(1, 6)),
    )
    list_ = served.trainer.trajectories
    summaries = list_(run.run_id)
    assert [one.episode_id for one in summaries] == ["e5", "e4", "e3", "e2", "e1"]
    newest = summaries[0]
    assert (newest.file, newest.attempt, newest.kind, newest.evaluation) == (
        f"attempt_1/trajectories/{names[-1]}",
        1,
        "training",
        "",
    )
    assert (newest.task, newest.outcome, newest.steps, newest.versions) == (
        "click_target/one",
        Outcome.FAILURE,
        1,
        (4, 4),
    )
    assert [one.episode_id for one in list_(run.run_id, outcome="success")] == ["e4", "e2"]
    assert list_(run.run_id, task="click_target/two") == []
    first = list_(run.run_id, limit=2)
    assert [one.episode_id for one in list_(run.run_id, before=first[-1].file, limit=2)] == ["e3", "e2"]
    assert [one.episode_id for one in list_(run.run_id, outcome="success", before=first[-1].file)] == ["e2"]


def test_an_episode_that_a_resumed_attempt_repeats_counts_once_unless_its_attempt_is_given(served, run):
    _add(run.attempt(1).trajectories, episode(episode_id="a"), episode(episode_id="b", **FAILED))
    _add(run.attempt(2).trajectories, episode(episode_id="b"), episode(episode_id="c"))
    outcomes = {one.episode_id: (one.attempt, one.outcome) for one in served.trainer.trajectories(run.run_id)}
    assert outcomes == {"a": (1, "success"), "b": (2, "success"), "c": (2, "success")}
    first = served.trainer.trajectories(run.run_id, attempt=1)
    assert sorted((one.episode_id, one.outcome) for one in first) == [("a", "success"), ("b", "failure")]


def test_the_episodes_of_evaluations_are_listed_by_their_name(served, run):
    _add(run.attempt(1).trajectories, episode(episode_id="trained"))
    evaluations = run.attempt(1).path / "evaluations"
    _add(evaluations / "update_00000010-20261116-100312" / "trajectories", episode(episode_id="early"))
    _add(evaluations / "update_00000020-20261116-100512" / "trajectories", episode(episode_id="late"))
    list_ = served.trainer.trajectories
    assert sorted(one.episode_id for one in list_(run.run_id)) == ["early", "late", "trained"]
    assert [one.episode_id for one in list_(run.run_id, kind="training")] == ["trained"]
    assert sorted(one.evaluation for one in list_(run.run_id, kind="evaluation")) == [
        "update_00000010-20261116-100312",
        "update_00000020-20261116-100512",
    ]
    (late,) = list_(run.run_id, evaluation="update_00000020-20261116-100512")
    assert served.trainer.trajectory(run.run_id, late.file).summary == late


def test_the_turns_of_an_episode_have_tokens_probabilities_actions_and_sizes_of_screens(served, run):
    last = png(shade=90)
    sha = hashlib.sha256(last).hexdigest()
    turns = (
        turn((5, 6), log_probs=[-0.5, -float("inf")], image_sizes=((80, 60),)),
        turn((7,), action={"kind": "drag", "path": [[1, 2], [3, 4]], "button": "left"}, reward=1.0),
        turn((8,), unreadable="no action in it"),
    )
    (name,) = _add(
        run.attempt(1).trajectories,
        episode(*turns, group="g7", pictures={SHA: SCREEN, sha: last}, last_picture=sha, detail={"score": 2}),
    )
    document = served.trainer.trajectory(run.run_id, f"attempt_1/trajectories/{name}")
    assert (document.screen, document.step_limit, document.last_picture) == ((WIDTH, HEIGHT), 10, sha)
    assert (document.summary.instruction, document.summary.group) == ("Click the blue box.", "g7")
    assert document.detail == {"score": 2}
    first, second, third = document.turns
    assert (first.prompt_ids, first.token_ids) == ((1, 2, 2, 2, 3), (5, 6))
    assert first.log_probs == (-0.5, -float("inf"))
    assert first.versions == (4, 4)
    (picture,) = first.pictures
    assert (picture.sha256, picture.width, picture.height) == (SHA, WIDTH, HEIGHT)
    assert (picture.prompt_width, picture.prompt_height) == (80, 60)
    assert (first.action, first.point) == ({"kind": "click", "at": [60, 35]}, (60, 35))
    assert (second.point, second.reward) == ((1, 2), 1.0)
    assert (third.action, third.point, third.unreadable) == (None, None, "no action in it")
    file = document.summary.file
    assert served.trainer.trajectory_picture(run.run_id, file, sha) == last
    answer = served.ask("GET", f"/runs/{run.run_id}/trajectories/{file}/pictures/{SHA}")
    assert (answer.headers["Content-Type"], answer.body) == ("image/png", SCREEN)


@pytest.mark.parametrize(
    "file",
    [
        "attempt_1/stdout.log",
        "attempt_1/trajectories/index.jsonl",
        "attempt_1/trajectories/00000009_none.safetensors",
        "../../service/token",
        "attempt_1/trajectories/../../../../service/token",
        "attempt_1/trajectories/00000001_link.safetensors",
        "nothing",
    ],
)
def test_nothing_else_is_read_under_the_name_of_a_trajectory(served, run, file):
    run.attempt(1).trajectories.mkdir()
    (run.attempt(1).trajectories / "00000001_link.safetensors").symlink_to(served.home.token)
    with pytest.raises(UnknownRun):
        served.trainer.trajectory(run.run_id, file)
    with pytest.raises(UnknownRun):
        served.trainer.trajectory_picture(run.run_id, file, SHA)


def test_a_damaged_file_is_named_and_the_others_are_listed(served, run):
    good, bad = _add(run.attempt(1).trajectories, episode(episode_id="good"), episode(episode_id="bad"))
    path = run.attempt(1).trajectories / bad
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="its digest differs"):
        served.trainer.trajectory(run.run_id, f"attempt_1/trajectories/{bad}")
    path.write_bytes(data[:100])
    assert [one.episode_id for one in served.trainer.trajectories(run.run_id)] == ["good"]
    assert served.trainer.trajectory(run.run_id, f"attempt_1/trajectories/{good}").turns


@pytest.mark.parametrize(
    ("query", "place"),
    [("outcome=won", "outcome"), ("kind=played", "kind"), ("limit=0", "limit"), ("attempt=0", "attempt")],
)
def test_bad_filters_are_refused_by_name(served, run, query, place):
    answer = served.ask("GET", f"/runs/{run.run_id}/trajectories?{query}")
    assert (answer.status, answer.json["error"]["place"]) == (422, place)


def test_a_page_after_an_episode_that_is_gone_is_refused(served, run):
    answer = served.ask("GET", f"/runs/{run.run_id}/trajectories?before=attempt_1/trajectories/x")
    assert (answer.status, answer.json["error"]["place"]) == (404, "before")
    assert served.ask("GET", f"/runs/{run.run_id}/trajectories/{'x' * 600}").status == 422
    assert served.ask("GET", f"/runs/{run.run_id}/trajectories/a/pictures/{'z' * 64}").status == 422


def test_a_run_without_screens_has_no_episodes(served, run):
    assert served.trainer.trajectories(run.run_id) == []


CODE = """
import json, sys
from palaestra.files.run_directory import RunDirectory
from pathlib import Path
from palaestra.runs.trajectories import list_trajectories, read_trajectory
run = RunDirectory(Path(sys.argv[1]))
file = list_trajectories(run)[0].file
print(json.dumps([len(read_trajectory(run, file).turns), [m for m in ("torch", "tensordict") if m in sys.modules]]))
"""


def test_episodes_are_read_without_torch(run):
    _add(run.attempt(1).trajectories, episode())
    done = subprocess.run(
        [sys.executable, "-c", CODE, os.fspath(run.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, []]
