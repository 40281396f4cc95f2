"""Training against session servers that run already, by URL and without a gateway."""

import contextlib
import json
import subprocess
import sys
import urllib.request

import pytest

from palaestra.errors import ConfigError
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.train.ui_config import ui_config_from
from palaestra.train.ui_loop import train_ui


@contextlib.contextmanager
def server_process(*arguments):
    """The URL of a real session server process."""
    command = [sys.executable, "-m", "palaestra.sessions.server", "--port", "0", "--until-eof", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def config(environment, **more):
    return ui_config_from(
        {
            "experiment_name": "t", "model": {"name": "tiny", "max_new_tokens": 12, "history": 1, "lora_rank": 4},
            "tasks": [{"task": "fake/button"}], "algorithm": {"name": "ppo"},
            "trainer": {"batch_size": 4, "num_training_steps": 1, "learning_rate": 1e-3},
            "actor": {"max_steps_per_episode": 2}, "actor_pool": {"target_concurrent_actors": 2},
            "environment": environment, "telemetry": {"progress": False}, **more,
        }
    )  # fmt: skip


def sessions_open(url):
    with urllib.request.urlopen(f"{url}/sessions", timeout=30) as answer:
        return json.load(answer)["sessions"]


def test_a_run_trains_against_bare_session_servers_and_leaves_no_session_open(tmp_path):
    with server_process("--fake") as one, server_process("--fake") as other:
        outcome = train_ui(config({"session_servers": [one, other + "/"]}), root=tmp_path, run_id="bare")
        assert (sessions_open(one), sessions_open(other)) == ([], [])
    assert outcome.final["trajectories_learned"] == 4
    archive = TrajectoryArchive(outcome.run.attempts()[0].path / "trajectories")
    assert [trajectory.task["task"] for trajectory in archive.load()] == ["fake/button"] * 4


def test_a_session_server_that_does_not_answer_is_named_before_a_run_directory_exists(tmp_path):
    place = r"environment.session_servers = 'http://127.0.0.1:9': cannot be reached .*palaestra.sessions.server"
    with pytest.raises(ConfigError, match=place):
        train_ui(config({"session_servers": "http://127.0.0.1:9"}), root=tmp_path, run_id="no")
    assert list(tmp_path.iterdir()) == []
