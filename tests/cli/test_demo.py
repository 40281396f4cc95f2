"""`palaestra demo`: its plan is a valid configuration of tasks that exist, and it leaves a clip."""

from types import SimpleNamespace

import pytest
from PIL import Image
from tests.evaluation.test_before_after import make_pair

from palaestra.api.screen_evaluation import ScreenReport
from palaestra.cli import demo
from palaestra.errors import ConfigError
from palaestra.evaluation import ScreenEvaluation
from palaestra.evaluation.before_after import PICTURE_NAME, EpisodePair
from palaestra.runs.video import encoder
from palaestra.sessions.suites import make_task
from palaestra.train import config_from
from palaestra.train.screen_config import screen_config_from


def test_the_plan_is_valid_and_imitates_solved_episodes_only():
    config = screen_config_from(demo.SCREENS)
    assert config.trainer.collection == "asynchronous"
    assert config.trainer.num_training_steps == config.trainer.decay_updates == demo.UPDATES
    assert (config.algorithm["name"], config.algorithm["reward_threshold"]) == ("rejection_sampling", 0.9)
    assert config_from(demo.CARTPOLE).env.id == "CartPole-v1"


def test_its_tasks_exist_need_several_steps_and_share_the_evaluation_evenly():
    config = screen_config_from(demo.SCREENS)
    for choice in config.tasks:
        suite, name = choice.task.split("/")
        task = make_task(suite, name, 0, choice.params)
        assert 2 < task.step_limit <= config.actor.max_steps_per_episode
    assert demo.HELD_OUT % len(config.tasks) == 0


def test_the_clip_is_a_video_where_there_is_an_encoder_and_otherwise_a_gif(tmp_path, monkeypatch):
    pair = make_pair()
    video = demo.write_clip(pair, tmp_path)
    assert (video.name, video.read_bytes()[4:8]) == ("before-after.mp4", b"ftyp")

    def refuse():
        raise ConfigError("--video", "", "no ffmpeg is installed")

    monkeypatch.setattr(encoder, "require_encoder", refuse)
    with Image.open(demo.write_clip(pair, tmp_path)) as clip:
        assert clip.format == "GIF"


def test_the_clip_is_a_gif_where_the_encoder_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "require_encoder", lambda: "/bin/false")
    assert demo.write_clip(make_pair(), tmp_path) == tmp_path / "before-after.gif"
    assert [file.name for file in tmp_path.iterdir()] == ["before-after.gif"]


def test_an_interrupted_demo_of_cartpole_is_not_evaluated(monkeypatch, capsys):
    stopped = SimpleNamespace(interrupted=True, run=SimpleNamespace(run_id="demo-1"))
    monkeypatch.setattr("palaestra.train.train", lambda *_, **__: stopped)
    demo.demo("cartpole")
    assert capsys.readouterr().out.endswith("Stopped. Resume with: palaestra train --resume demo-1\n")


@pytest.mark.parametrize("improves", [True, False])
def test_it_says_what_the_picture_shows_and_whether_training_helped(tmp_path, capsys, improves):
    pair = make_pair() if improves else EpisodePair(make_pair().before, make_pair().before)
    document = {"comparison": {"ci95": [0.02, 0.3] if improves else [-0.1, 0.2]}}
    evaluation = ScreenEvaluation.from_episodes([])
    pages = tmp_path / "report.html", tmp_path / "episodes.html"
    report = ScreenReport(evaluation, ["after: 40 %"], document, *pages, (), pair, tmp_path / PICTURE_NAME)
    demo._print_results(report)
    printed = capsys.readouterr().out
    assert ("No episode failed before training" in printed) is not improves
    assert ("does not show that training helped" in printed) is not improves
    assert printed.startswith("after: 40 %\n")
    assert (tmp_path / "before-after.mp4").as_uri() in printed
    assert (tmp_path / "episodes.html").as_uri() in printed
