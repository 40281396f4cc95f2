import hashlib
import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from tests.runs.checkpoints import evil
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.errors import CheckpointError
from palaestra.runs.checkpoints.files import digest_path, verify
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.store.rebuild import list_imported, open_registry


def left_behind(home):
    directory = home.path / "checkpoints"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize("name", sorted(evil.pickles("x")))
def test_nothing_of_an_evil_checkpoint_is_kept_or_run(name, home, tmp_path):
    canary = tmp_path / "canary"
    content = evil.pickles(canary)[name]
    source = evil.rewritten(
        evil.torch_zip(tmp_path / "evil.pt"), lambda members: evil.swapped(members, "data.pkl", content)
    )
    before = source.read_bytes()

    with pytest.raises(CheckpointError, match="cannot be trusted"):
        import_checkpoint(home, source)

    assert left_behind(home) == []
    assert not canary.exists()
    assert source.read_bytes() == before


def test_weights_are_copied_hashed_and_on_record(home, tmp_path):
    source = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(4)}, source)
    known = Provenance(agent_id="mine/dqn", env_id="CartPole-v1", env_step=1000)

    record = import_checkpoint(home, source, known, clock=lambda: 50.0)

    assert source.exists()
    assert record.path == str(home.path / "checkpoints" / record.checkpoint_id / "weights.safetensors")
    assert (record.sha256, record.size_bytes) == (digest_path(source).sha256, source.stat().st_size)
    assert record.checkpoint_id == record.sha256[:16]
    assert (record.agent_id, record.env_id, record.env_step) == ("mine/dqn", "CartPole-v1", 1000)
    assert (record.run_id, record.profile, record.format, record.verified) == ("", "managed", "safetensors", 50.0)
    assert verify(record).fits
    assert list_imported(home) == [record]


def test_importing_twice_gives_the_one_that_is_there(home, tmp_path):
    first = import_checkpoint(home, evil.torch_zip(tmp_path / "a.pt"), clock=lambda: 1.0)
    os.rename(tmp_path / "a.pt", tmp_path / "b.pt")

    again = import_checkpoint(home, tmp_path / "b.pt", clock=lambda: 2.0)

    assert again == first
    assert left_behind(home) == [first.checkpoint_id]


def test_of_a_stable_baselines3_zip_only_weights_and_plain_json_are_kept(home, tmp_path):
    record = import_checkpoint(home, evil.sb3_zip(tmp_path / "best.zip", tmp_path / "canary"))

    assert record.format == "sb3_zip"
    assert left_behind(home) == [record.checkpoint_id]
    kept = sorted(os.listdir(home.path / "checkpoints" / record.checkpoint_id))
    assert kept == ["best.zip", "record.json"]
    with zipfile.ZipFile(record.path) as archive:
        # The optimizer is no file of torch, and the variables are a hostile pickle.
        assert archive.namelist() == ["data", "policy.pth"]
        assert archive.read("data") == b'{"policy_class": {}}'
        assert sorted(torch.load(archive.open("policy.pth"), weights_only=True)) == ["bias", "weight"]
    assert not (tmp_path / "canary").exists()
    assert verify(record).fits


def test_a_stable_baselines3_zip_without_readable_json_is_refused(home, tmp_path):
    source = evil.sb3_zip(tmp_path / "best.zip", tmp_path / "canary")
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(source, "w") as archive:
        for name, content in {**members, "data": b"{"}.items():
            archive.writestr(name, content)

    with pytest.raises(CheckpointError, match="it is not a zip of Stable-Baselines3"):
        import_checkpoint(home, source)
    assert left_behind(home) == []


def test_our_own_checkpoint_tells_what_it_is(home, tmp_path):
    sha256 = own_checkpoint(tmp_path / "update_00000007", env_step=4096)

    record = import_checkpoint(home, tmp_path / "update_00000007")

    assert (record.sha256, record.format, record.agent_id) == (sha256, "palaestra", "palaestra/ppo")
    assert (record.env_id, record.env_step, record.metric) == ("CartPole-v1", 4096, 30.0)
    assert record.metrics_digest == {"last": 20.0, "best": 30.0, "mean_100": 20.0}
    assert record.env_signature["action_space"] == {"type": "Discrete", "n": 2, "start": 0}
    assert verify(record).fits


def test_a_checkpoint_of_ours_with_a_changed_file_is_refused(home, tmp_path):
    own_checkpoint(tmp_path / "c")
    with open(tmp_path / "c" / "policy.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")

    with pytest.raises(CheckpointError, match=r"policy\.safetensors is truncated or damaged"):
        import_checkpoint(home, tmp_path / "c")
    assert left_behind(home) == []


def test_a_manifest_cannot_reach_outside_or_bring_a_pickle(home, tmp_path):
    for number, (name, content) in enumerate(
        [("../secret", b"x"), ("/etc/hostname", b"x"), ("x.pkl", evil.pickles("x")["eval"])]
    ):
        path = tmp_path / f"c{number}"
        own_checkpoint(path)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))
        if not name.startswith("/"):
            (path / name).write_bytes(content)

        with pytest.raises(CheckpointError, match=r"not a file of the checkpoint|bare pickle"):
            import_checkpoint(home, path)
    assert left_behind(home) == []


def test_a_configuration_that_names_code_needs_trust(home, tmp_path):
    """`os:system` with keywords would be a command, run by whoever evaluates the checkpoint."""
    evil_env = {"env": {"id": "os:system", "kwargs": {"command": "touch canary"}}}
    own_checkpoint(tmp_path / "c", config=evil_env)

    with pytest.raises(CheckpointError, match=r"would import os:system.*--trust"):
        import_checkpoint(home, tmp_path / "c")

    assert left_behind(home) == []
    assert import_checkpoint(home, tmp_path / "c", trusted=True).env_id == "os:system"


def test_pipes_devices_missing_files_and_strange_names_are_handled(home, tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "empty").mkdir()
    for source, reason in (
        (tmp_path / "pipe.pt", "not a regular file"),
        (tmp_path / "none.pt", "No such file"),
        (tmp_path / "empty", "without a manifest"),
        (tmp_path / "pipe.pt" / "x", "Not a directory"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            import_checkpoint(home, source)
    odd = evil.torch_zip(tmp_path / "-rf $(x) ü.pt")

    assert import_checkpoint(home, odd).path.endswith("/weights.pt")
    assert len(left_behind(home)) == 1


def test_what_is_no_checkpoint_at_all_is_told_in_plain_words(home, tmp_path):
    (tmp_path / "empty.pt").touch()
    (tmp_path / "letter.txt").write_text("Dear Sir,\n")
    (tmp_path / "letter.pt").symlink_to(tmp_path / "letter.txt")
    (tmp_path / "half.pt").write_bytes(b"\x80\x04\x95")
    for name, reason in (
        ("empty.pt", "is empty. Supported are safetensors"),
        ("letter.pt", "is not a known checkpoint format. Supported are"),
        ("half.pt", "is a bare pickle, damaged or truncated. Save"),
        ("none.pt", "No such file or directory. Check the path."),
    ):
        with pytest.raises(CheckpointError) as refused:
            import_checkpoint(home, tmp_path / name)
        assert f"{name}': {reason}" in str(refused.value)


def test_a_record_that_cannot_be_stored_is_named_and_keeps_no_registry_from_opening(home, tmp_path, caplog):
    record = import_checkpoint(home, evil.torch_zip(tmp_path / "a.pt"))
    note = home.path / "checkpoints" / record.checkpoint_id / "record.json"
    told = json.loads(note.read_text())
    for number, odd in enumerate([{"env_step": 10**23}, {"metric": [1]}, {"created": None}]):
        copy = home.path / "checkpoints" / f"odd{number}"
        copy.mkdir()
        (copy / "record.json").write_text(json.dumps({**told, **odd, "path": str(copy / "a.pt")}))

    registry = open_registry(home)

    assert {row.env_step for row in registry.checkpoints()} == {None, 2**63 - 1}
    assert {"odd1", "odd2"} == {path.rpartition("/")[2].split(":")[0] for path in caplog.messages}
    registry.close()


def test_a_registry_that_is_lost_finds_imported_checkpoints_again(home, tmp_path):
    record = import_checkpoint(home, evil.torch_zip(tmp_path / "a.pt"))

    registry = open_registry(home)

    assert registry.checkpoints() == [record]
    registry.close()


def test_a_full_disk_leaves_nothing_behind(home, tmp_path, monkeypatch):
    source = evil.torch_zip(tmp_path / "a.pt")

    def full(*_):
        raise OSError(28, "No space left on device", str(source))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(CheckpointError, match="No space left"):
        import_checkpoint(home, source)
    assert left_behind(home) == []
