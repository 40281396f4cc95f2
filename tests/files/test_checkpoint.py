"""The checkpoint format: every file is in the manifest, anything altered is refused, and schema 1 is read."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from tests.files.old_layout import write_as_schema_1

from palaestra.errors import CheckpointError
from palaestra.files.checkpoint import (
    checkpoint_kind,
    digest_files,
    is_intact,
    list_checkpoints,
    open_checkpoint,
    read_state,
    write_checkpoint,
)
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import SavedState, load_checkpoint, save_checkpoint
from palaestra.runs.checkpoints.files import PalaestraCheckpoint, digest_path, verify
from palaestra.runs.checkpoints.import_checkpoint import import_checkpoint
from palaestra.train import config_from, evaluate_checkpoint, train

OLD = Path(__file__).parent / "schema_1" / "update_00000002"
"""A run of CartPole after 2 of 4 updates, as schema 1 wrote it; beside it the policy that update 4 gave."""
WEIGHTS = save({"w": torch.ones(2)})


def _write_policy(path):
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "adapter.safetensors").write_bytes(WEIGHTS)
    (path / "palaestra.json").write_text(json.dumps({"files": digest_files(path)}))


def _screens(path):
    return save_checkpoint(
        path,
        kind="screens",
        policy=_write_policy,
        learner=SavedState({"moment": torch.arange(3.0)}, {"updates": 2}),
        source=SavedState({"waiting.000000": torch.zeros(4, dtype=torch.uint8)}, {"ready": 1}),
        progress={"updates": 2, "steps": 8, "episodes": 8},
        about={"run_id": "r"},
    )


def test_every_file_is_in_the_manifest_and_comes_back(tmp_path):
    sha256 = _screens(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    assert (manifest["schema"], manifest["kind"]) == (2, "screens")
    assert sorted(manifest["files"]) == [
        "learner.safetensors", "policy/inner/adapter.safetensors", "policy/palaestra.json", "source.safetensors",
        "state.json",
    ]  # fmt: skip
    found = load_checkpoint(tmp_path / "c")
    assert (found.kind, found.sha256, found.policy) == ("screens", sha256, tmp_path / "c" / "policy")
    assert torch.equal(found.learner.tensors["moment"], torch.arange(3.0))
    assert (found.learner.facts, found.source.facts) == ({"updates": 2}, {"ready": 1})
    assert list(found.source.tensors) == ["waiting.000000"]
    assert (found.progress, found.about) == ({"updates": 2, "steps": 8, "episodes": 8}, {"run_id": "r"})
    assert open_checkpoint(tmp_path / "c").read("policy/inner/adapter.safetensors") == WEIGHTS
    assert is_intact(tmp_path / "c")
    assert digest_path(tmp_path / "c").sha256 == sha256


@pytest.mark.parametrize("name", ["policy/inner/adapter.safetensors", "source.safetensors", "state.json"])
def test_a_file_that_was_altered_cut_or_removed_is_refused(tmp_path, name):
    _screens(tmp_path / "c")
    file = tmp_path / "c" / name
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{name} is corrupt \(its SHA-256 differs\). Use an earlier checkpoint"):
        open_checkpoint(tmp_path / "c")
    file.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match=rf"{name} is too long \({len(content) + 1} of {len(content)} bytes\)"):
        open_checkpoint(tmp_path / "c")
    os.truncate(file, 1)
    with pytest.raises(CheckpointError, match=rf"{name} is truncated \(1 of {len(content)} bytes\)"):
        open_checkpoint(tmp_path / "c")
    assert not is_intact(tmp_path / "c")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        open_checkpoint(tmp_path / "c")
    assert not is_intact(tmp_path / "c")


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    _screens(tmp_path / "c")
    (tmp_path / "c" / "state.json").unlink()
    os.mkfifo(tmp_path / "c" / "state.json")
    with pytest.raises(CheckpointError, match="is not a file"):
        open_checkpoint(tmp_path / "c")
    assert not is_intact(tmp_path / "c")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "policy/../../x", "a\\b", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path, name):
    _screens(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="which is not a file of the checkpoint"):
        open_checkpoint(tmp_path / "c")


def test_another_kind_is_refused_by_name(tmp_path):
    _screens(tmp_path / "c")
    with pytest.raises(CheckpointError, match="is of a model that operates screens"):
        load_checkpoint(tmp_path / "c", kind="vector")
    with pytest.raises(CheckpointError, match="is not of a model that operates screens"):
        load_checkpoint(OLD, kind="screens")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "manifest.json").write_text('{"schema": 1, "kind": "spade_bdi", "files": {}}')
    with pytest.raises(CheckpointError, match="was written by 'spade_bdi', not by palaestra"):
        open_checkpoint(tmp_path / "plans")


def test_a_policy_that_cannot_be_written_leaves_nothing(tmp_path):
    def full(path):
        path.mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path / "c", {"policy": full}, kind="screens")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_has_no_kind_and_no_state(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("[]")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "manifest.json").write_text('{"schema": 2, "kind": "robots", "files": {}}')
    for name in ("none", "broken", "odd"):
        assert checkpoint_kind(tmp_path / name) is None
        assert read_state(tmp_path / name) is None
        assert not is_intact(tmp_path / name)
    assert list_checkpoints(tmp_path / "none") == []


# ---------------------------------------------------------------------- schema 1


def test_the_sections_of_a_checkpoint_of_schema_1():
    raw = json.loads((OLD / "state.json").read_bytes())
    tensors = load_file(OLD / "learner.safetensors")
    found = load_checkpoint(OLD)
    assert (found.kind, checkpoint_kind(OLD)) == ("vector", "vector")
    assert sorted(found.learner.tensors) == ["adam.first", "adam.second"]
    assert found.learner.facts == {name: raw[name] for name in ("n_updates", "adam_steps", "shuffle")}
    assert found.progress["planned_timesteps"] == raw["planned_timesteps"]
    assert {f"collector.{name}" for name in found.source.tensors} | set(found.learner.tensors) == set(tensors)
    assert all(torch.equal(tensors[f"collector.{name}"], one) for name, one in found.source.tensors.items())
    assert found.source.facts == raw["collector"]
    assert found.progress["updates"] == 2
    assert found.progress["steps"] == 128
    assert found.progress["episodes"] == 6
    assert found.progress["episode_rewards"] == [11.0, 18.0, 16.0, 29.0, 20.0, 15.0]
    assert found.about == raw["about"]
    assert is_intact(OLD)


def _old_run(tmp_path):
    config = load_checkpoint(OLD).about["config"]
    run = RunDirectory.create(tmp_path, "old", "", config)
    shutil.copytree(OLD, run.new_attempt([], config).checkpoints / OLD.name)
    return config_from(config), run


def test_a_run_goes_on_from_schema_1_as_it_would_have(tmp_path):
    config, run = _old_run(tmp_path)
    outcome = train(config, root=tmp_path, run_id="-", resume=run)
    assert (outcome.steps, outcome.checkpoint.name) == (256, "update_00000004")
    assert "could not be restored" not in run.attempts()[-1].journal.read_text()
    then = load_file(OLD.parent / "policy_of_update_4.safetensors")
    now = load_file(load_checkpoint(outcome.checkpoint).policy)
    # Another processor may round the last digits differently.
    assert all(torch.allclose(now[name], then[name], rtol=1e-4, atol=1e-5) for name in then)
    assert not torch.equal(now["actor.0.weight"], load_file(OLD / "policy.safetensors")["actor.0.weight"])


def test_schema_1_is_evaluated_imported_and_described(tmp_path):
    assert len(evaluate_checkpoint(OLD, episodes=3, seed=0).returns) == 3
    home = Home(tmp_path / "var" / "training")
    record = import_checkpoint(home, OLD)
    assert (record.env_id, record.env_step, record.agent_id) == ("CartPole-v1", 128, "palaestra/ppo")
    own = PalaestraCheckpoint.read(OLD)
    assert own is not None
    assert (own.env_step, own.returns[-1]) == (128, 15.0)


def test_screens_of_schema_1_have_the_same_sections_and_their_policy_is_verified(tmp_path):
    _screens(tmp_path / "new")
    write_as_schema_1(tmp_path / "new", tmp_path / "old")
    new, old = load_checkpoint(tmp_path / "new"), load_checkpoint(tmp_path / "old")
    assert (old.kind, old.progress, old.about, old.learner.facts) == (
        new.kind, new.progress, new.about, new.learner.facts,
    )  # fmt: skip
    assert old.source.facts == {"orders": None, "ready": 1}
    for one, other in ((old.learner, new.learner), (old.source, new.source)):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    own = PalaestraCheckpoint.read(tmp_path / "old")
    assert own is not None
    assert own.env_step == 8
    (tmp_path / "old" / "policy" / "palaestra.json").write_text("{}")
    assert not is_intact(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"policy/palaestra.json is "):
        load_checkpoint(tmp_path / "old")


@pytest.mark.parametrize("schema", [1, 2])
def test_an_imported_checkpoint_of_screens_brings_its_policy(tmp_path, schema):
    _screens(tmp_path / "c")
    if schema == 1:
        write_as_schema_1(tmp_path / "c", tmp_path / "old")
    record = import_checkpoint(Home(tmp_path / "var" / "training"), tmp_path / ("old" if schema == 1 else "c"))
    assert (Path(record.path) / "policy" / "inner" / "adapter.safetensors").read_bytes() == WEIGHTS
    assert load_checkpoint(Path(record.path)).progress["steps"] == 8
    assert verify(record).fits
