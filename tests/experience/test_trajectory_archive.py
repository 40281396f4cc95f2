"""An archive loses nothing that was appended, whatever becomes of its index, and touches nothing else."""

import json
import multiprocessing
import os
import shutil
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.experience.episodes import episode, turn

from palaestra.errors import ConfigError
from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import INDEX, LOCK, TrajectoryArchive, TrajectoryEntry

OUTCOMES = list(Outcome)


def _filled(directory, n=6):
    archive = TrajectoryArchive(directory)
    for i in range(n):
        archive.append(
            episode(
                turn(versions=[i, i + 1], reward=float(i)), episode_id=f"e{i}", outcome=OUTCOMES[i % 5],
                task={"task": f"suite/t{i % 2}", "seed": i, "params": {"size": 3}},
            )
        )  # fmt: skip
    return archive


def _ids(directory):
    return [entry.episode_id for entry in TrajectoryArchive(directory).entries()]


def test_what_was_appended_is_listed_in_order_and_comes_back(tmp_path):
    archive = _filled(tmp_path)
    assert _ids(tmp_path) == ["e0", "e1", "e2", "e3", "e4", "e5"]
    assert [t.total_reward() for t in archive.load()] == [0, 1, 2, 3, 4, 5]
    size = archive.size()
    assert size.trajectories == len(archive) == 6
    assert size.bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))


def test_an_entry_says_what_the_trajectory_says(tmp_path):
    made = episode(
        turn(reward=0.5), turn(action=None, unreadable="no call"), outcome=Outcome.UNREADABLE, reason="twice",
        task={"task": "a/b", "seed": 3, "params": {"n": 2}, "instruction": "Click it"}, seconds=2.5, group="g",
    )  # fmt: skip
    entry = TrajectoryArchive(tmp_path).append(made)
    assert (entry.task, entry.seed, entry.params, entry.instruction) == ("a/b", 3, {"n": 2}, "Click it")
    assert (entry.steps, entry.unreadable_turns, entry.reward, entry.versions) == (2, 1, 0.5, (4, 4))
    assert not entry.success
    assert entry.spec == ("a/b", '{"n": 2}', 3)
    assert TrajectoryEntry.from_facts(json.loads(json.dumps(entry.facts()))) == entry
    assert TrajectoryArchive(tmp_path).entries() == [entry]


def test_filters_choose_by_task_outcome_and_version(tmp_path):
    archive = _filled(tmp_path)
    assert [e.episode_id for e in archive.entries(task="suite/t1")] == ["e1", "e3", "e5"]
    assert [e.episode_id for e in archive.entries(outcome=Outcome.SUCCESS)] == ["e0", "e5"]
    assert [e.episode_id for e in archive.entries(version=2)] == ["e1", "e2"]
    assert [t.episode_id for t in archive.load(archive.entries(task="suite/t0", version=2))] == ["e2"]


def test_loading_is_lazy(tmp_path):
    archive = _filled(tmp_path, 3)
    loading = archive.load()
    assert next(loading).episode_id == "e0"
    for file in tmp_path.glob("0000000[23]*"):
        file.unlink()
    assert list(loading) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), junk=st.binary(max_size=20))
def test_an_index_cut_anywhere_with_junk_behind_it_loses_nothing(tmp_path_factory, cut, junk):
    directory = tmp_path_factory.mktemp("archive")
    _filled(directory, 4)
    index = directory / INDEX
    whole = index.read_bytes()
    index.write_bytes(whole[: round(cut * len(whole))] + junk)

    assert _ids(directory) == ["e0", "e1", "e2", "e3"]  # a reader sees everything and writes nothing
    TrajectoryArchive(directory).append(episode(episode_id="new"))
    assert _ids(directory) == ["e0", "e1", "e2", "e3", "new"]
    assert index.read_bytes().startswith(whole[: round(cut * len(whole))])  # appended to, never rewritten
    listed = {json.loads(line)["file"] for line in index.read_bytes().splitlines() if _is_entry(line)}
    assert len(listed) == 5  # and every file has its line again


def _is_entry(line):
    try:
        TrajectoryEntry.from_facts(json.loads(line))
    except (ValueError, TypeError, KeyError):
        return False
    return True


def test_an_archive_without_an_index_is_read_from_its_files(tmp_path):
    _filled(tmp_path, 3)
    (tmp_path / INDEX).unlink()
    assert _ids(tmp_path) == ["e0", "e1", "e2"]


def test_a_file_that_is_gone_is_not_listed(tmp_path):
    _filled(tmp_path, 3)
    next(tmp_path.glob("00000002_*")).unlink()
    assert _ids(tmp_path) == ["e0", "e2"]
    assert TrajectoryArchive(tmp_path).append(episode(episode_id="new")).file.startswith("00000004_")


def test_a_torn_file_is_named_and_left_where_it_is(tmp_path):
    _filled(tmp_path, 3)
    torn = next(tmp_path.glob("00000002_*"))
    torn.write_bytes(torn.read_bytes()[:-3])
    archive = TrajectoryArchive(tmp_path)
    assert [entry.episode_id for entry in archive.entries()] == ["e0", "e2"]
    assert list(archive.damaged) == [torn.name]
    archive.append(episode(episode_id="new"))
    assert torn.exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"[]", b"\x02\0\0\0\0\0\0\0{}"])
def test_bytes_that_were_never_a_trajectory_are_damage_and_no_crash(tmp_path, content):
    (tmp_path / "00000007_x.safetensors").write_bytes(content)
    archive = TrajectoryArchive(tmp_path)
    assert archive.entries() == []
    assert len(archive.damaged) == 1
    assert archive.append(episode()).file.startswith("00000008_")


def test_foreign_files_are_neither_listed_nor_touched(tmp_path):
    foreign = ["notes.txt", "weights.safetensors", "1_x.safetensors", ".hidden", "12345678_x.safetensors.bak"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    (tmp_path / "00000001_folder").mkdir()
    archive = _filled(tmp_path, 2)
    archive.keep(0)
    assert archive.entries() == []
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
    assert (tmp_path / "00000001_folder").is_dir()


def test_an_index_cannot_lead_out_of_its_directory(tmp_path):
    outside = tmp_path / "00000001_secret.safetensors"
    outside.write_text("mine")
    inside = tmp_path / "archive"
    inside.mkdir()
    lines = [{"removed": f"../{outside.name}"}, {**TrajectoryEntry.of(episode()).facts(), "file": f"../{outside.name}"}]
    (inside / INDEX).write_text("".join(json.dumps(line) + "\n" for line in lines))
    archive = TrajectoryArchive(inside)
    assert archive.entries() == []
    archive.append(episode())
    archive.keep(0)
    assert outside.read_text() == "mine"


def test_an_episode_id_can_be_anything(tmp_path):
    archive = TrajectoryArchive(tmp_path)
    for name in ("../../etc/passwd", "", "ä" * 300, "a/b c", "con\0"):
        archive.append(episode(episode_id=name))
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert _ids(tmp_path) == ["../../etc/passwd", "", "ä" * 300, "a/b c", "con\0"]


def test_retention_keeps_the_newest_two_and_the_newest_older_success(tmp_path):
    archive = TrajectoryArchive(tmp_path)
    for i, solved in enumerate([True, True, False, False, True, False]):
        archive.append(episode(episode_id=f"e{i}", outcome=Outcome.SUCCESS if solved else Outcome.FAILURE))
    removed = archive.keep(2, successes=1)
    assert removed.trajectories == 3
    assert removed.bytes > 0
    assert [e.episode_id for e in archive.entries()] == _ids(tmp_path) == ["e1", "e4", "e5"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_retention_of_more_than_there_is_removes_nothing(tmp_path):
    archive = _filled(tmp_path, 3)
    assert archive.keep(10).trajectories == 0
    assert TrajectoryArchive(tmp_path / "nowhere").keep(1).trajectories == 0
    with pytest.raises(ConfigError, match="negative"):
        archive.keep(-1)


def test_a_file_that_outlived_its_removal_is_not_mistaken_for_a_new_one(tmp_path):
    archive = _filled(tmp_path, 2)
    first = next(tmp_path.glob("00000001_*"))
    copy = shutil.copy(first, tmp_path / "copy")
    archive.keep(1)
    shutil.move(copy, first)  # as if the machine had stopped between the line and the removal
    assert _ids(tmp_path) == ["e1"]
    TrajectoryArchive(tmp_path).append(episode(episode_id="new"))
    assert not first.exists()
    assert _ids(tmp_path) == ["e1", "new"]


def test_numbers_are_never_used_again(tmp_path):
    archive = _filled(tmp_path, 2)
    archive.keep(0)
    assert TrajectoryArchive(tmp_path).append(episode()).file.startswith("00000003_")


def test_what_a_writer_left_behind_is_found_by_the_next_even_if_that_one_was_open_before(tmp_path):
    survivor, victim = _filled(tmp_path, 1), TrajectoryArchive(tmp_path)
    victim.append(episode(episode_id="e1"))
    # The victim saved its next trajectory and died before the index line; half of another was being written.
    episode(episode_id="orphan").save(tmp_path / "00000003_orphan.safetensors")
    (tmp_path / ".00000004_half.safetensors.99.tmp").write_bytes(b"half")
    (tmp_path / LOCK).write_bytes(b"writing\n")
    assert survivor.append(episode(episode_id="new")).file.startswith("00000004_")
    assert _ids(tmp_path) == ["e0", "e1", "orphan", "new"]
    assert not list(tmp_path.glob(".*.tmp"))
    assert (tmp_path / LOCK).read_bytes() == b""


def test_threads_and_processes_append_together_and_nothing_is_lost(tmp_path):
    def write(name):
        archive = TrajectoryArchive(tmp_path)
        for i in range(10):
            archive.append(episode(episode_id=f"{name}-{i}"))

    children = [multiprocessing.get_context("fork").Process(target=write, args=(f"p{n}",)) for n in range(2)]
    for child in children:
        child.start()
    shared = TrajectoryArchive(tmp_path)
    threads = [
        threading.Thread(target=lambda n=n: [shared.append(episode(episode_id=f"t{n}-{i}")) for i in range(10)])
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for each in (*threads, *children):
        each.join()
    assert sorted(_ids(tmp_path)) == sorted(f"{kind}{n}-{i}" for kind in "pt" for n in range(2) for i in range(10))
    assert [child.exitcode for child in children] == [0, 0]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        TrajectoryArchive(tmp_path / "file" / "archive").append(episode())
    assert TrajectoryArchive(tmp_path / "file").entries() == []


def test_appending_does_not_look_at_every_file_again(tmp_path, monkeypatch):
    archive = _filled(tmp_path, 3)
    looks = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda *given: looks.append(given) or real(*given))
    archive.append(episode())
    assert looks == []
