import sys
from dataclasses import replace

import pytest
from tests.runs.checkpoints import evil
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.errors import CheckpointError
from palaestra.runs.checkpoints import deploying
from palaestra.runs.checkpoints.deploying import deploy, deployed, withdraw
from palaestra.runs.checkpoints.importing import import_checkpoint
from palaestra.runs.runners.programs.probe import environment

CARTPOLE = environment("CartPole-v1")["signature"]


def taken_in(home, directory, **about):
    own_checkpoint(directory, **about)
    return import_checkpoint(home, directory)


def test_one_acts_once_it_has_played_what_is_refused_changes_nothing_and_it_can_be_taken_back(home, tmp_path):
    first, second = (taken_in(home, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    foreign = import_checkpoint(home, evil.torch_zip(tmp_path / "a.pt"))

    one = deploy(home, first, CARTPOLE, clock=lambda: 10.0)
    with pytest.raises(CheckpointError, match=r"trained in CartPole-v1, this is Pendulum-v1.*Switch to CartPole-v1"):
        deploy(home, second, environment("Pendulum-v1")["signature"])
    with pytest.raises(CheckpointError, match="is of the format torch_zip"):
        deploy(home, foreign, CARTPOLE)
    with pytest.raises(CheckpointError, match="its SHA-256 differs"):
        deploy(home, replace(second, sha256="0" * 64), CARTPOLE)
    assert deployed(home, "CartPole-v1") == one
    assert deployed(home, "Pendulum-v1") is None

    two = deploy(home, second, CARTPOLE, clock=lambda: 20.0)

    assert one.previous is None
    assert one.evaluation["episodes"] == 1
    assert two.previous["checkpoint_id"] == first.checkpoint_id
    assert deployed(home, "CartPole-v1") == two
    assert withdraw(home, "CartPole-v1") == one
    assert deployed(home, "CartPole-v1") == one
    assert withdraw(home, "CartPole-v1") is None
    assert deployed(home, "CartPole-v1") is None


def test_one_that_cannot_be_played_or_plays_for_ever_changes_nothing(home, tmp_path, monkeypatch):
    record = taken_in(home, tmp_path / "c")

    with pytest.raises(CheckpointError, match=r"no episode within 0 s"):
        deploy(home, record, CARTPOLE, limit_s=0.05)
    monkeypatch.setattr(deploying.sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match=r"could not be played \(exit code 1"):
        deploy(home, record, CARTPOLE)

    assert sys.executable == "/bin/false"
    assert deployed(home, "CartPole-v1") is None


def test_names_of_environments_never_become_paths(home):
    names = ["../../x/y-v1", "..", "/etc/passwd", "ALE/Pong-v5", "ALE_Pong-v5", "a" * 80, ""]

    notes = [deploying._note(home, name) for name in names]

    assert {note.parent for note in notes} == {home.path / "deployed"}
    assert len(set(notes)) == len(names)
    assert not any(note.name.startswith(".") for note in notes)
