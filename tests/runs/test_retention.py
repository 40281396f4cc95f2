"""What may go, and that it can come back."""

import json
import os
import shutil
import socket
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import write_json
from palaestra.runs.archive.retention import RetentionPolicy, plan_checkpoint_pruning, plan_retention
from palaestra.runs.archive.run_archive import (
    find_purgeable,
    list_trash,
    move_to_trash,
    pack_run,
    restore_from_trash,
    shorten_log,
    surplus_bytes,
    unpack_run,
)
from palaestra.runs.phase import Phase
from palaestra.runs.record import CheckpointRecord, RunEvent, RunRecord
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import rebuild
from palaestra.runs.store.registry import Registry

DAY = 86_400.0
NOW = 100 * DAY


def _run(run_id, days_ago, *, phase=Phase.SUCCEEDED, gb=0.0, **more):
    size = int(gb * (1 << 30))
    return RunRecord(
        run_id=run_id,
        runner="e",
        agent_id="e",
        env_id="",
        phase=phase,
        ended=NOW - days_ago * DAY,
        bytes_on_disk=size,
        **more,
    )


RUNS = [
    _run("new", 1, gb=1),
    _run("mid", 10, gb=2),
    _run("old", 50, gb=4),
    _run("packed", 60, archived=True),
    _run("live", 90, phase=Phase.RUNNING, gb=9),
    _run("alone", 90, supervised=False, gb=9),
]


def _planned(**policy):
    return [(action.run_id, action.action) for action in plan_retention(RUNS, RetentionPolicy(**policy), NOW)]


def test_by_default_nothing_goes():
    assert _planned() == []


def test_by_age_oldest_first():
    assert _planned(archive_after_days=10) == [("old", "archive"), ("mid", "archive")]
    assert _planned(delete_archived_after_days=60) == [("packed", "delete")]
    assert _planned(delete_archived_after_days=61) == []


def test_by_number_and_by_size():
    assert _planned(keep_last=1) == [("old", "archive"), ("mid", "archive")]
    assert _planned(keep_last=0) == [("old", "archive"), ("mid", "archive"), ("new", "archive")]
    assert _planned(max_total_gb=3.5) == [("old", "archive")]
    assert _planned(max_total_gb=2.0) == [("old", "archive"), ("mid", "archive")]
    assert _planned(max_total_gb=2.0, archive_after_days=10) == [("old", "archive"), ("mid", "archive")]


def test_a_run_that_goes_on_or_is_not_ours_never_goes():
    everything = _planned(archive_after_days=0, keep_last=0, max_total_gb=1e-9, delete_archived_after_days=0)
    assert {run_id for run_id, _ in everything} == {"new", "mid", "old", "packed"}


def _planned_ids(policy, protected=()):
    return [action.run_id for action in plan_retention(RUNS, policy, NOW, protected)]


def test_a_protected_run_counts_and_stays():
    assert _planned_ids(RetentionPolicy(max_total_gb=6.0)) == ["old"]
    assert _planned_ids(RetentionPolicy(max_total_gb=6.0), {"old"}) == ["mid"]
    policy = RetentionPolicy(archive_after_days=0, keep_last=0, delete_archived_after_days=0)
    assert _planned_ids(policy, {"old", "packed"}) == ["mid", "new"]


def test_every_doom_says_why():
    (action,) = plan_retention(RUNS, RetentionPolicy(archive_after_days=30), NOW)
    assert (action.why, action.bytes) == ("ended 50 days ago; runs are kept open 30", 4 << 30)


@pytest.fixture
def ended(home):
    run = home.run("e-1")
    run.attempt(1).work.mkdir(parents=True)
    write_json(run.spec, {"schema_version": 1, "runner": "echo", "tags": ["t"]})
    RunEventLog(run).append(RunEvent(0, 1.0, 1, "succeeded", Phase.SUCCEEDED, "done", "exit"))
    (run.attempt(1).work / "weights").write_bytes(b"\0\1" * 5000)
    return RunRecord(run_id="e-1", runner="echo", agent_id="echo", env_id="", phase=Phase.SUCCEEDED, tags=("t",))


def test_a_packed_run_comes_back_byte_for_byte(home, ended):
    before = {path.relative_to(home.runs): path.read_bytes() for path in home.runs.rglob("*") if path.is_file()}
    packed = pack_run(home, ended, NOW)
    assert packed.archived
    assert list(home.runs.iterdir()) == []
    assert packed.bytes_on_disk == (home.path / "archive" / "e-1.tar.gz").stat().st_size
    assert unpack_run(home, packed).archived is False
    after = {path.relative_to(home.runs): path.read_bytes() for path in home.runs.rglob("*") if path.is_file()}
    assert after == before
    assert list((home.path / "archive").iterdir()) == []


def test_a_packed_run_is_known_to_a_rebuilt_registry(home, ended):
    packed = pack_run(home, ended, NOW)
    registry = Registry.open(home.registry)
    rebuild(home, registry)
    assert registry.runs(archived=True) == [packed]
    registry.close()


def test_a_run_that_was_packed_wrongly_is_left_as_it_is(home, ended, monkeypatch):
    whole = tarfile.TarFile.addfile

    def torn(self, member, file=None):
        member.size //= 2
        whole(self, member, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", torn)
    with pytest.raises(ConfigError, match=r"was packed wrongly\. The run was not changed"):
        pack_run(home, ended, NOW)
    assert home.run("e-1").spec.exists()
    assert list((home.path / "archive").iterdir()) == []


def test_a_damaged_archive_is_refused_and_kept(home, ended):
    packed = pack_run(home, ended, NOW)
    package = home.path / "archive" / "e-1.tar.gz"
    package.write_bytes(package.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be restored"):
        unpack_run(home, packed)
    assert package.exists()
    assert list(home.runs.iterdir()) == []


def test_an_archive_cannot_write_outside(home, ended):
    packed = pack_run(home, ended, NOW)
    package = home.path / "archive" / "e-1.tar.gz"
    with tarfile.open(package, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../../escaped"))
    with pytest.raises(ConfigError, match="cannot be restored"):
        unpack_run(home, packed)
    assert not list(home.base.rglob("escaped"))


def test_a_deleted_run_comes_back_until_it_is_purged(home, ended):
    move_to_trash(home, ended, NOW)
    assert not home.run("e-1").path.exists()
    back = restore_from_trash(home, "e-1")
    assert (back.run_id, back.phase) == ("e-1", Phase.SUCCEEDED)
    bin_ = move_to_trash(home, ended, NOW)
    assert list(find_purgeable(home, 7, NOW + 6.9 * DAY)) == []
    assert list(find_purgeable(home, 7, NOW + 8 * DAY)) == [("e-1", bin_, 8.0)]
    assert list_trash(home) == {"e-1": bin_}
    shutil.rmtree(bin_)
    with pytest.raises(UnknownRun):
        restore_from_trash(home, "e-1")


def test_who_is_interrupted_while_throwing_away_a_packed_run_finds_its_links_again(home, ended, monkeypatch):
    link = home.run("e-1").attempt(1).work / "abs"
    link.symlink_to("/etc/passwd")
    packed = pack_run(home, ended, NOW)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            move_to_trash(home, packed, NOW)
    assert list_trash(home) == {}
    unpack_run(home, packed)
    assert os.readlink(link) == "/etc/passwd"


def test_of_several_that_were_thrown_away_the_last_comes_back(home, ended):
    for number in range(12):
        write_json(home.run("e-1").spec, {"schema_version": 1, "runner": "echo", "seed": number})
        move_to_trash(home, ended, NOW)
        home.run("e-1").path.mkdir()
        RunEventLog(home.run("e-1")).append(RunEvent(0, 1.0, 1, "succeeded", Phase.SUCCEEDED, "done", "exit"))
    shutil.rmtree(home.run("e-1").path)
    assert [restore_from_trash(home, "e-1").seed, len(list((home.path / "trash").iterdir()))] == [11, 11]


def test_a_packed_run_that_was_thrown_away_comes_back_unpacked(home, ended):
    for note_is_lost in (False, True):
        packed = pack_run(home, ended, NOW)
        bin_ = move_to_trash(home, packed, NOW)
        if note_is_lost:
            (bin_ / "e-1.json").unlink()
        back = restore_from_trash(home, "e-1")
        assert (back.run_id, back.phase, back.archived, back.tags) == ("e-1", Phase.SUCCEEDED, False, ("t",))
        assert back.bytes_on_disk > 10_000
        assert (home.run("e-1").attempt(1).work / "weights").read_bytes() == b"\0\1" * 5000
        assert list((home.path / "trash").iterdir()) == list((home.path / "archive").iterdir()) == []


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_in_the_way_of_a_thrown_away_run_is_named_and_nothing_is_moved(home, ended, packed):
    move_to_trash(home, pack_run(home, ended, NOW) if packed else ended, NOW)
    trash = sorted((home.path / "trash").rglob("*"))
    home.run("e-1").path.mkdir()
    with pytest.raises(ConfigError, match=r"exists and is not the run to restore.*Move it elsewhere and restore again"):
        restore_from_trash(home, "e-1")
    assert sorted((home.path / "trash").rglob("*")) == trash
    home.run("e-1").path.rmdir()
    assert restore_from_trash(home, "e-1").phase is Phase.SUCCEEDED


def _something_else(run):
    run.path.mkdir()
    (run.path / "foo").write_text("hi")


def _all_but_one_byte(run):
    shutil.copytree(run.path.with_name("copy"), run.path)
    (run.attempt(1).work / "weights").write_bytes(b"\0\1" * 4999 + b"\0\2")


def _all_but_a_link(run):
    shutil.copytree(run.path.with_name("copy"), run.path, symlinks=True)
    (run.attempt(1).work / "link").unlink()


@pytest.mark.parametrize("made", [lambda run: run.path.mkdir(), _something_else, _all_but_one_byte, _all_but_a_link])
def test_a_directory_that_is_not_the_packed_run_keeps_it_from_being_unpacked_and_the_package_stays(home, ended, made):
    (home.run("e-1").attempt(1).work / "link").symlink_to("weights")
    shutil.copytree(home.run("e-1").path, home.runs / "copy", symlinks=True)
    packed = pack_run(home, ended, NOW)
    archive = {path: path.read_bytes() for path in (home.path / "archive").iterdir()}
    made(home.run("e-1"))
    with pytest.raises(ConfigError, match=r"runs/e-1 exists"):
        unpack_run(home, packed)
    assert {path: path.read_bytes() for path in (home.path / "archive").iterdir()} == archive
    shutil.rmtree(home.run("e-1").path)
    assert unpack_run(home, packed).archived is False
    assert (home.run("e-1").attempt(1).work / "weights").read_bytes() == b"\0\1" * 5000


def test_links_come_back_as_they_were_and_are_never_followed(home, ended, tmp_path):
    work = home.run("e-1").attempt(1).work
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "huge").write_text("not packed")
    links = {
        "abs": "/etc/passwd",
        "out": "../../../../../../x",
        "in": "weights",
        "dir": str(tmp_path / "data"),
        "no": "n",
    }
    for name, target in links.items():
        (work / name).symlink_to(target)
    os.link(work / "weights", work / "again")
    packed = pack_run(home, ended, NOW)
    with tarfile.open(home.path / "archive" / "e-1.tar.gz") as tar:
        assert not [name for name in tar.getnames() if "huge" in name]
    unpack_run(home, packed)
    assert {name: os.readlink(work / name) for name in links} == links
    assert (work / "again").read_bytes() == (work / "weights").read_bytes() == b"\0\1" * 5000
    assert (tmp_path / "data" / "huge").read_text() == "not packed"


def test_pipes_and_sockets_are_left_out_by_name(home, ended):
    work = home.run("e-1").attempt(1).work
    os.mkfifo(work / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        # The name of a socket must be short, wherever the test's directory is.
        where = os.open(work, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{where}/socket")
        os.close(where)
    packed = pack_run(home, ended, NOW)
    note = json.loads((home.path / "archive" / "e-1.json").read_text())
    assert note["left_out"] == ["attempt_1/work/pipe", "attempt_1/work/socket"]
    unpack_run(home, packed)
    assert sorted(path.name for path in work.iterdir()) == ["weights"]


def test_a_package_that_holds_links_out_of_the_run_can_be_unpacked(home, ended):
    work = home.run("e-1").attempt(1).work
    (work / "abs").symlink_to("/etc/passwd")
    packed = replace(ended, archived=True)
    (home.path / "archive").mkdir()
    with tarfile.open(home.path / "archive" / "e-1.tar.gz", "w:gz") as tar:
        tar.add(home.run("e-1").path, arcname="e-1")
    shutil.rmtree(home.run("e-1").path)
    unpack_run(home, packed)
    assert os.readlink(work / "abs") == "/etc/passwd"


def test_a_note_cannot_have_links_made_elsewhere(home, ended, tmp_path):
    packed = pack_run(home, ended, NOW)
    note = home.path / "archive" / "e-1.json"
    for links in ({"../../../x": "y"}, {str(tmp_path / "x"): "y"}, {"a": str(tmp_path), "a/x": "y"}):
        write_json(note, {**json.loads(note.read_text()), "links": links})
        with pytest.raises(ConfigError, match="cannot be restored"):
            unpack_run(home, packed)
        assert not os.path.lexists(tmp_path / "x")
        assert list(home.runs.iterdir()) == []


def test_a_directory_that_holds_no_run_is_not_packed(home, ended):
    missing = replace(ended, run_id="e-2")
    with pytest.raises(ConfigError, match="holds no run"):
        pack_run(home, missing, NOW)
    (home.runs / "e-2").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        pack_run(home, missing, NOW)
    assert (home.runs / "e-2").is_dir()


def test_an_older_package_with_more_in_it_goes_to_the_trash_when_the_run_is_packed_again(home, ended):
    pack_run(home, ended, NOW)
    older = (home.path / "archive" / "e-1.tar.gz").read_bytes()
    write_json(_made(home.run("e-1").path) / "spec.json", {"schema_version": 1, "runner": "echo"})
    pack_run(home, ended, NOW)
    assert (home.path / "trash" / f"e-1.{int(NOW)}" / "e-1.tar.gz").read_bytes() == older


def _made(directory):
    directory.mkdir()
    return directory


def test_who_is_interrupted_while_unpacking_goes_on(home, ended):
    packed = pack_run(home, ended, NOW)
    package = home.path / "archive" / "e-1.tar.gz"
    saved = package.read_bytes(), package.with_name("e-1.json").read_bytes()
    unpack_run(home, packed)
    package.write_bytes(saved[0])
    package.with_name("e-1.json").write_bytes(saved[1])

    registry = Registry.open(home.registry)
    rebuild(home, registry)
    assert [run.archived for run in [*registry.runs(), *registry.runs(archived=True)]] == [False]
    registry.close()
    assert unpack_run(home, packed).archived is False
    assert list((home.path / "archive").iterdir()) == []


def _checkpoint(run_id, step, *, best=False, size=10):
    return CheckpointRecord(
        checkpoint_id=f"{step:016x}",
        run_id=run_id,
        agent_id="e",
        env_id="",
        attempt=1,
        env_step=step,
        path=f"/{run_id}/{step}",
        sha256="",
        size_bytes=size,
        format="palaestra",
        created=float(step),
        best=best,
    )


def test_the_newest_checkpoints_and_the_best_are_kept():
    rows = [_checkpoint("new", step, best=step == 20) for step in (10, 20, 30, 40, 50)]
    rows += [_checkpoint("live", step) for step in (1, 2, 3)] + [_checkpoint("old", 1)]
    (action,) = plan_checkpoint_pruning(RUNS, rows, keep=2)
    assert (action.run_id, action.action, action.bytes) == ("new", "prune", 20)
    assert action.paths == ("/new/30", "/new/10")
    (action,) = plan_checkpoint_pruning(RUNS, rows, keep=2, protected={"/new/30"})
    assert action.paths == ("/new/10",)


def test_of_a_long_output_the_middle_goes(tmp_path):
    log = tmp_path / "stdout.log"
    log.write_bytes(b"a" * (6 << 20) + b"b" * (6 << 20) + b"z")
    assert (surplus_bytes(log, 13), shorten_log(log, 13)) == (0, 0)
    assert surplus_bytes(log, 11) == (2 << 20) + 1
    assert shorten_log(log, 11) == (2 << 20) + 1
    text = log.read_bytes()
    assert text.startswith(b"a" * (5 << 20) + b"\n[... 2097153 bytes were removed by the retention policy ...]\n")
    assert text.endswith(b"b" * 100 + b"z")
