"""The `palaestra` command, called in the process of the test and in an empty directory."""

import contextlib
import json
import sys
from functools import partial
from typing import NamedTuple

import pytest
from tests.runs.serving import service_thread

from palaestra.cli import main
from palaestra.errors import PalaestraError
from palaestra.files.home import Home
from palaestra.runs import TrainerService


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def palaestra(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PALAESTRA_HOME", raising=False)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["palaestra", *(str(word) for word in words)])
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return call


@pytest.fixture
def config(tmp_path):
    """A run of four quick updates."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "env: {id: CartPole-v1, num_envs: 2}\n"
        "algorithm: {name: ppo, learning_rate: 3e-4, n_epochs: 2, batch_size: 32}\n"
        "trainer: {total_timesteps: 256, rollout_length: 32, checkpoint_every: 1}\n"
    )
    return path


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path.resolve() / "var" / "training")


@pytest.fixture
def runs(palaestra, home):
    """`palaestra runs …` with a service in the same process; running runs are stopped at the end."""
    with service_thread(home):
        yield lambda *words: palaestra("runs", *words)
        trainer = TrainerService(home)
        for record in trainer.runs():
            if not record.phase.has_ended:
                with contextlib.suppress(PalaestraError):
                    trainer.stop_run(record.run_id, grace_s=0)


@pytest.fixture
def started(runs, home):
    """Starts an echo run with these arguments and waits for its end by default; returns its id."""
    return partial(start_echo, runs, home)


def start_echo(runs, home, *words, wait=True):
    result = runs("start", "--runner", "echo", "--json", *words)
    assert result.code == 0, result
    run_id = json.loads(result.out)["run_id"]
    if wait:
        TrainerService(home).wait(run_id, timeout_s=60)
    return run_id
