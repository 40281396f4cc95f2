"""Files and directories that appear whole or not at all, and what is on the disk."""

import os

import pytest

from palaestra.files.atomic import (
    append_line,
    atomic_directory,
    atomic_file,
    read_json,
    remove_stale_files,
    sync_files,
    sync_tree,
    write_bytes,
    write_json,
    write_text,
)


@pytest.fixture
def sync_calls(monkeypatch):
    """The names that were sync_calls one by one."""
    found = []
    real = os.fsync

    def fsync(descriptor):
        found.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def _files(directory, count):
    directory.mkdir()
    paths = [directory / f"{number}.pts" for number in range(count)]
    for path in paths:
        path.write_bytes(b"x")
    return paths


def test_a_few_files_are_synced_one_by_one_and_their_directory_last(tmp_path, sync_calls):
    sync_files([*_files(tmp_path / "d", 2), tmp_path / "d" / "gone"], tmp_path / "d")
    assert sync_calls == ["0.pts", "1.pts", "d"]


def test_many_files_are_synced_with_one_call(tmp_path, sync_calls):
    sync_files(_files(tmp_path / "d", 100), tmp_path / "d")
    assert sync_calls == []


def test_where_the_file_system_cannot_be_asked_they_are_synced_one_by_one(tmp_path, sync_calls, monkeypatch):
    monkeypatch.setattr("palaestra.files.atomic._sync_file_system", lambda _: False)
    sync_files(_files(tmp_path / "d", 100), tmp_path / "d")
    assert len(sync_calls) == 101


def test_everything_below_a_directory_is_synced_but_links_and_pipes_are_left_alone(tmp_path, sync_calls):
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "outside").write_text("x")
    (tmp_path / "d" / "inner" / "a").write_text("x")
    (tmp_path / "d" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    os.mkfifo(tmp_path / "d" / "pipe")
    sync_tree(tmp_path / "d")
    assert sorted(sync_calls) == ["a", "d", "inner"]


def test_a_file_is_replaced_with_its_bytes_on_the_disk_and_its_name_in_the_directory(tmp_path, sync_calls):
    (tmp_path / "f").write_bytes(b"old")
    write_bytes(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert sync_calls == [f".f.{os.getpid()}.tmp", tmp_path.name]
    write_text(tmp_path / "f", "newer", durable=False)
    assert len(sync_calls) == 2


def test_a_mode_is_kept(tmp_path):
    write_text(tmp_path / "secret", "x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def _fail(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, step):
    (tmp_path / "f").write_text("old")
    monkeypatch.setattr(os, step, _fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "f", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"


def test_a_file_whose_writer_raises_leaves_the_old_one(tmp_path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(TypeError), atomic_file(tmp_path / "f") as file:
        file.writelines([b"half", None])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]


def test_a_directory_appears_when_it_is_whole(tmp_path):
    with atomic_directory(tmp_path / "parent" / "d") as making:
        (making / "a").write_text("x")
        assert not (tmp_path / "parent" / "d").exists()
    assert [path.name for path in (tmp_path / "parent" / "d").iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["d"]


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_directory_that_cannot_be_written_is_not_there_at_all(tmp_path, monkeypatch, step):
    monkeypatch.setattr(os, step, _fail)
    with pytest.raises(OSError, match="No space left"), atomic_directory(tmp_path / "d") as making:
        (making / "a").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    for name in (".f.999999999.tmp", f".g.{os.getpid()}.tmp", ".h.tmp", "i.999999999.tmp"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".d.999999999.tmp" / "inner").mkdir(parents=True)
    remove_stale_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".g.{os.getpid()}.tmp", ".h.tmp", "i.999999999.tmp"]


def test_a_document_is_strict_json_and_comes_back_or_is_none(tmp_path):
    write_json(tmp_path / "d.json", {"loss": float("nan"), "path": tmp_path})
    assert read_json(tmp_path / "d.json") == {"loss": "NaN", "path": str(tmp_path)}
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert [read_json(tmp_path / name) for name in ("list.json", "half.json", "none.json", "deep.json")] == [None] * 4


def test_a_line_is_appended_behind_one_that_was_torn(tmp_path):
    (tmp_path / "l").write_bytes(b'{"a"')
    append_line(tmp_path / "l", {"b": 1}, durable=True)
    append_line(tmp_path / "l", {"c": 2})
    assert (tmp_path / "l").read_bytes() == b'{"a"\n{"b":1}\n{"c":2}\n'
