import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.checkpoints import evil
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.errors import CheckpointError
from palaestra.files.atomic import write_json
from palaestra.runs.checkpoints import deploy as deploy_module
from palaestra.runs.checkpoints.catalogue import find_checkpoints, get_checkpoint
from palaestra.runs.checkpoints.deploy import deploy, find_deployed_paths, get_deployment, list_deployments, withdraw
from palaestra.runs.checkpoints.files import verify
from palaestra.runs.checkpoints.import_checkpoint import (
    Provenance,
    copy_out_of_run,
    detach_from_runs,
    import_checkpoint,
)
from palaestra.runs.phase import Phase
from palaestra.runs.process.probe import environment
from palaestra.runs.record import RunRecord
from palaestra.runs.store.rebuild import list_imported

CARTPOLE = environment("CartPole-v1")["signature"]
RUN = RunRecord(run_id="r", runner="palaestra", agent_id="palaestra/ppo", env_id="CartPole-v1", phase=Phase.SUCCEEDED)


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
    assert get_deployment(home, "CartPole-v1") == one
    assert get_deployment(home, "Pendulum-v1") is None

    two = deploy(home, second, CARTPOLE, clock=lambda: 20.0)

    assert one.previous is None
    assert one.evaluation["episodes"] == 1
    assert two.previous["checkpoint_id"] == first.checkpoint_id
    assert get_deployment(home, "CartPole-v1") == two
    assert withdraw(home, "CartPole-v1") == one
    assert get_deployment(home, "CartPole-v1") == one
    assert withdraw(home, "CartPole-v1") is None
    assert get_deployment(home, "CartPole-v1") is None


def test_a_policy_of_a_dataset_with_other_arguments_is_not_deployed(home, tmp_path):
    dataset = {"dataset_id": "cartpole/rewards-v0", "env_id": "CartPole-v1", "sha256": "0" * 64}
    ours = taken_in(home, tmp_path / "a", dataset={**dataset, "env_kwargs": {}}, seed=1)
    other = taken_in(home, tmp_path / "b", dataset={**dataset, "env_kwargs": {"sutton_barto_reward": True}}, seed=2)
    earlier = taken_in(home, tmp_path / "c", dataset=dataset, seed=3)

    with pytest.raises(CheckpointError, match=r"_reward = True, this is .*_reward = False.* its default arguments"):
        deploy(home, other, CARTPOLE)
    assert deploy(home, ours, CARTPOLE).checkpoint_id == ours.checkpoint_id
    assert deploy(home, earlier, CARTPOLE).checkpoint_id == earlier.checkpoint_id


def in_a_run(home, seed):
    """A checkpoint where a trainer left it."""
    path = home.run("r").attempt(1).path / "checkpoints" / f"update_{seed}"
    own_checkpoint(path, env_step=100 * seed, seed=seed)
    return next(row for row in find_checkpoints(RUN, home.run("r").attempt(1)) if row.path == str(path))


def test_what_is_deployed_and_what_was_before_outlive_their_run(home):
    first, second = in_a_run(home, 1), in_a_run(home, 2)
    (home.path / "deployed").mkdir()
    old = {"path": first.path, "sha256": first.sha256, "agent_id": "palaestra/ppo", "env_id": "CartPole-v1"}
    note = {"schema": 1, **old, "checkpoint_id": first.checkpoint_id, "deployed": 1.0, "command": ["x"]}
    write_json(home.path / "deployed" / "CartPole-v1.json", note)
    assert list(find_deployed_paths(home)) == [Path(first.path)]

    now = deploy(home, second, CARTPOLE)
    again = deploy(home, second, CARTPOLE)
    home.run("r").path.joinpath("resolved.json").write_text('{"env": {"id": "CartPole-v1"}}')
    assert get_checkpoint(home, second.checkpoint_id).path == second.path
    shutil.rmtree(home.run("r").path)

    store = home.path / "checkpoints"
    assert again.previous == now.previous
    assert [Path(one).is_relative_to(store) for one in (now.path, now.previous["path"], now.command[-1])] == [True] * 3
    assert sorted(find_deployed_paths(home)) == sorted([Path(now.path), Path(now.previous["path"])])
    assert {(row.checkpoint_id, row.env_step, row.profile, verify(row).fits) for row in list_imported(home)} == {
        (first.checkpoint_id, 100, "managed", True),
        (second.checkpoint_id, 200, "managed", True),
    }
    assert list_deployments(home) == [again]
    assert withdraw(home, "CartPole-v1").sha256 == first.sha256


def write_in_place(path):
    with open(path, "r+b") as file:
        file.write(b"overwritten")


def test_writing_into_the_run_changes_nothing_of_what_is_deployed(home):
    record = in_a_run(home, 1)

    now = deploy(home, record, CARTPOLE)
    write_in_place(Path(record.path) / "policy.safetensors")

    (kept,) = list_imported(home)
    assert (kept.path, verify(kept).fits, verify(record).fits) == (now.path, True, False)


@pytest.mark.parametrize("when", ["when a service starts", "when it is deployed again"])
def test_files_that_an_earlier_version_linked_become_copies(home, when):
    record = in_a_run(home, 1)
    copy = copy_out_of_run(home, Path(record.path), record.sha256, Provenance())
    for file in Path(copy.path).iterdir():
        file.unlink()
        file.hardlink_to(Path(record.path) / file.name)

    if when == "when a service starts":
        assert detach_from_runs(home) == [record.checkpoint_id]
        assert detach_from_runs(home) == []
    else:
        assert copy_out_of_run(home, Path(record.path), record.sha256, Provenance()) == copy
    write_in_place(Path(record.path) / "policy.safetensors")

    (kept,) = list_imported(home)
    assert verify(kept).fits
    assert sorted(file.name for file in Path(kept.path).iterdir()) == sorted(
        file.name for file in Path(record.path).iterdir()
    )


def test_going_back_to_what_is_gone_changes_nothing(home, tmp_path):
    now = taken_in(home, tmp_path / "now")
    facts = {
        "env_id": "CartPole-v1",
        "agent_id": "a",
        "deployed": 1.0,
        "command": [],
        "checkpoint_id": "x",
        "schema": 1,
    }
    gone = {**facts, "path": str(tmp_path / "gone"), "sha256": "0" * 64}
    (home.path / "deployed").mkdir()
    note = {**facts, "path": now.path, "sha256": now.sha256, "previous": gone}
    write_json(home.path / "deployed" / "CartPole-v1.json", note)

    with pytest.raises(CheckpointError, match="cannot be copied"):
        withdraw(home, "CartPole-v1")
    assert get_deployment(home, "CartPole-v1").path == now.path
    with pytest.raises(CheckpointError, match="nothing is deployed there"):
        withdraw(home, "Pendulum-v1")


def test_one_that_cannot_be_played_or_plays_for_ever_changes_nothing(home, tmp_path, monkeypatch):
    record = taken_in(home, tmp_path / "c")

    with pytest.raises(CheckpointError, match=r"no episode within 0 s"):
        deploy(home, record, CARTPOLE, timeout_s=0.05)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match=r"could not be played \(exit code 1"):
        deploy(home, record, CARTPOLE)

    assert sys.executable == "/bin/false"
    assert get_deployment(home, "CartPole-v1") is None


def test_names_of_environments_never_become_paths(home):
    names = ["../../x/y-v1", "..", "/etc/passwd", "ALE/Pong-v5", "ALE_Pong-v5", "a" * 80, ""]

    notes = [deploy_module._deployment_file(home, name) for name in names]

    assert {note.parent for note in notes} == {home.path / "deployed"}
    assert len(set(notes)) == len(names)
    assert not any(note.name.startswith(".") for note in notes)
