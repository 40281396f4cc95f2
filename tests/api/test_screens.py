"""The Python API for tasks on screens, with the built-in model and sessions without a browser."""

import asyncio

import numpy as np
import pytest
from PIL import Image
from tests.train.test_session_servers import server_process

import palaestra as pal
from palaestra.errors import ConfigError
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.experience.turn_credit import read_credits


@pytest.fixture(scope="module")
def server():
    with server_process("--fake") as url:
        yield url


def configuration(server):
    return {
        "experiment_name": "buttons",
        "model": {"name": "tiny", "max_new_tokens": 12, "history": 0, "lora_rank": 4},
        "tasks": [{"task": "fake/button"}],
        "algorithm": {"name": "ppo"},
        "trainer": {"batch_size": 4, "num_training_steps": 2, "learning_rate": 1e-3},
        "actor": {"max_steps_per_episode": 2},
        "actor_pool": {"target_concurrent_actors": 2},
        "environment": {"session_servers": server},
    }


def test_a_model_is_trained_evaluated_and_asked_inside_a_running_event_loop_as_in_a_notebook(server):
    async def cells():
        run = pal.train(configuration(server), steps=1)
        report = pal.evaluate(run, episodes=2)
        reply = run.policy.predict(Image.new("RGB", (160, 210), "white"), "Click the button.")
        return run, report, reply

    run, report, reply = asyncio.run(cells())
    assert run.on_screens
    assert (run.steps, run.task) == (4, "fake/button")
    assert run.run_id.startswith("buttons-")
    assert repr(run).startswith(f"<TrainedRun {run.run_id}: fake/button with ppo, success ")
    assert report.episodes == 2
    assert 0.0 <= report.ci95[0] <= report.success_rate <= report.ci95[1] <= 1.0
    assert report.page.is_file()
    assert report.viewer.is_file()
    assert len(report.screenshots()) == 2
    archive = run.directory.attempts()[0].trajectories
    credits, played = read_credits(archive), TrajectoryArchive(archive).entries()
    assert {entry.episode_id: entry.steps for entry in played} == {
        name: len(credit.advantages) for name, credit in credits.items()
    }
    assert all(value is not None for credit in credits.values() for value in credit.values)  # PPO has a value head
    assert (reply.action is None) == bool(reply.unreadable)
    assert reply.text


def test_two_checkpoints_of_a_run_are_compared_before_and_after(server):
    run = pal.train(configuration(server), steps=1)
    before = run.directory.attempts()[0].checkpoints / "update_00000000"
    report = pal.evaluate(run, episodes=2, against=before)
    assert report.document["comparison"]["pairs"] == 2
    assert "success rate" in repr(report)


def test_a_saved_model_is_evaluated_beside_its_copy_and_refuses_what_it_cannot_see(server, tmp_path):
    run = pal.load(pal.train(configuration(server), steps=1).save(tmp_path / "kept" / "buttons"))
    report = pal.evaluate(run, episodes=1, tasks="fake/button")
    assert report.page.parents[1] == tmp_path / "kept" / "evaluations"
    with pytest.raises(ConfigError, match=r"Image\.fromarray"):
        run.policy.predict(np.zeros((210, 160, 3), np.uint8), "Click the button.")
    with pytest.raises(ConfigError, match="is not text"):
        run.policy.predict(Image.new("RGB", (160, 210)), None)
    with pytest.raises(ConfigError, match=r"evaluate\(env\)"):
        pal.evaluate(run, "CartPole-v1")
