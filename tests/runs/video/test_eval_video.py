"""`palaestra eval … --video` as a person types it."""

import json

import pytest
import typer
from tests.runs.checkpoints.own import own_checkpoint
from typer.testing import CliRunner

from palaestra.cli.eval import eval_command
from palaestra.errors import ConfigError


def evaluated(*words):
    app = typer.Typer()
    app.command()(eval_command)
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False).stdout


def test_the_first_episode_of_an_evaluation_is_filmed(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    own_checkpoint(tmp_path / "update_00000001")
    clip = tmp_path / "clip.webm"

    report = json.loads(evaluated(tmp_path / "update_00000001", "--episodes", 3, "--video", clip, "--json"))

    film = report["video"]
    # Every step and the beginning are a frame; CartPole pays one for each step.
    assert film["frames"] == min(200, film["episode_return"] + 1)
    assert film["seconds"] == film["frames"] / 50
    assert clip.stat().st_size > 0
    assert json.loads((tmp_path / "clip.webm.json").read_text())["frames"] == film["frames"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.webm", "clip.webm.json", "update_00000001"]


def test_what_cannot_be_filmed_is_refused_and_leaves_nothing(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    own_checkpoint(tmp_path / "update_00000001")

    for words, reason in (
        (("--video", tmp_path / "clip.avi"), "neither .webm nor .mp4"),
        (("--video", tmp_path / "clip.webm", "--frames", 201), "Add --long"),
        (("--video", tmp_path / "none" / "clip.webm"), "directory does not exist"),
    ):
        with pytest.raises(ConfigError, match=reason):
            evaluated(tmp_path / "update_00000001", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["update_00000001"]


def test_an_environment_that_draws_nothing_is_told(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    own_checkpoint(tmp_path / "update_00000001", config={"env": {"id": "compiled/CartPole-v1", "num_envs": 1}})

    with pytest.raises(ConfigError, match="cannot render images"):
        evaluated(tmp_path / "update_00000001", "--episodes", 1, "--video", tmp_path / "clip.webm")
    assert [path.name for path in tmp_path.iterdir()] == ["update_00000001"]
