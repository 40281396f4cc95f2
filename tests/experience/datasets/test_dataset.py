"""Datasets are written as Minari writes them, read back exactly, and refused when a byte differs."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from tests.experience.datasets.samples import BOX, CHOICES, count_up, make_dataset

from palaestra.errors import DatasetError
from palaestra.experience.datasets import (
    DatasetFacts,
    Episode,
    create_dataset,
    delete_dataset,
    find_dataset,
    list_datasets,
)


def test_transitions_pair_each_observation_with_the_next_one_of_its_own_episode(tmp_path):
    arrays = make_dataset(tmp_path).load_transitions()
    assert arrays.observation.tolist() == [[0, 0], [1, -1], [2, -2], [5, -5], [6, -6]]
    assert arrays.next_observation.tolist() == [[1, -1], [2, -2], [3, -3], [6, -6], [7, -7]]
    assert arrays.action.tolist() == [0, 1, 2, 0, 1]
    assert arrays.reward.tolist() == [0, 1, 2, 0, 1]
    assert arrays.terminated.tolist() == [False, False, True, False, False]
    assert arrays.truncated.tolist() == [False, False, False, False, True]
    assert (arrays.observation.dtype, arrays.action.dtype, arrays.reward.dtype) == (np.float32, np.int64, np.float32)


def test_a_dataset_says_what_it_holds(tmp_path):
    dataset = make_dataset(tmp_path, random_score=10.0, expert_score=30.0)
    assert (dataset.total_steps, dataset.total_episodes, dataset.env_id) == (5, 2, "Count-v0")
    assert (dataset.observation_space, dataset.action_space) == (BOX, CHOICES)
    assert dataset.about == {"policy": "test"}
    assert dataset.normalized_score(10.0) == 0.0
    assert dataset.normalized_score(25.0) == 75.0


def test_a_score_without_references_is_not_normalised(tmp_path):
    assert make_dataset(tmp_path, random_score=10.0).normalized_score(10.0) is None
    assert make_dataset(tmp_path, "a-v1", random_score=5.0, expert_score=5.0).normalized_score(5.0) is None


def test_the_same_data_has_the_same_digest_in_another_directory(tmp_path):
    one, other = make_dataset(tmp_path / "one"), make_dataset(tmp_path / "other")
    assert one.sha256 == other.sha256
    changed = make_dataset(tmp_path / "changed", episodes=[count_up(3), count_up(2, first=6, terminated=False)])
    assert changed.sha256 != one.sha256


def test_minari_itself_loads_what_is_written_here(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    make_dataset(tmp_path, random_score=1.5, expert_score=9.5)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    assert list(minari.list_local_datasets()) == ["count/up-v0"]
    dataset = minari.load_dataset("count/up-v0")
    first, second = dataset.iterate_episodes()
    assert first.observations.tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    assert second.actions.tolist() == [0, 1]
    assert second.truncations.tolist() == [False, True]
    assert dataset.total_steps == 5
    assert minari.get_normalized_score(dataset, np.array([5.5])).tolist() == [0.5]


@pytest.mark.filterwarnings("ignore::UserWarning")  # it misses an author, a permalink and an environment
def test_what_minari_wrote_is_read_here(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    space = spaces.Box(-10.0, 10.0, (2,), np.float64)
    buffer = [
        EpisodeBuffer(
            observations=np.arange(6.0).reshape(3, 2),
            actions=np.array([2, 0]),
            rewards=np.array([0.5, 1.5]),
            terminations=np.array([False, False]),
            truncations=np.array([False, True]),
        )
    ]
    minari.create_dataset_from_buffers(
        "theirs-v0", buffer, observation_space=space, action_space=CHOICES, data_format="hdf5"
    )
    from palaestra.experience.datasets.dataset import read_dataset

    arrays = read_dataset(tmp_path / "theirs-v0", None).load_transitions()
    assert arrays.observation.tolist() == [[0, 1], [2, 3]]
    assert arrays.next_observation.tolist() == [[2, 3], [4, 5]]
    assert arrays.observation.dtype == np.float32
    assert arrays.action.tolist() == [2, 0]
    assert arrays.truncated.tolist() == [False, True]


def test_a_directory_without_a_manifest_is_listed_as_unverified_and_not_used(tmp_path):
    (make_dataset(tmp_path).path / "manifest.json").unlink()
    (row,) = list_datasets(tmp_path)
    assert (row.state, row.total_steps) == ("unverified", 5)
    with pytest.raises(DatasetError, match=r"no manifest.*palaestra datasets import"):
        find_dataset("count/up-v0", tmp_path)


def test_a_flipped_byte_anywhere_is_refused(tmp_path):
    dataset = make_dataset(tmp_path)
    for name in ("data/main_data.hdf5", "data/metadata.json", "index.npy"):
        path = dataset.path / name
        intact = path.read_bytes()
        for place in (0, len(intact) // 2, len(intact) - 1):
            damaged = bytearray(intact)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(DatasetError, match=f"{name} was changed after it was written"):
                find_dataset("count/up-v0", tmp_path)
        path.write_bytes(intact)
    assert find_dataset("count/up-v0", tmp_path).sha256 == dataset.sha256


def test_a_truncated_missing_or_extra_file_is_named(tmp_path):
    path = make_dataset(tmp_path).path
    main = path / "data" / "main_data.hdf5"
    intact = main.read_bytes()
    main.write_bytes(intact[:-10])
    with pytest.raises(DatasetError, match=r"main_data.hdf5 is truncated"):
        find_dataset("count/up-v0", tmp_path)
    main.write_bytes(intact + b"x")
    with pytest.raises(DatasetError, match=r"main_data.hdf5 is too long"):
        find_dataset("count/up-v0", tmp_path)
    main.unlink()
    with pytest.raises(DatasetError, match=r"main_data.hdf5 is missing"):
        find_dataset("count/up-v0", tmp_path)
    main.write_bytes(intact)
    (path / "data" / "more.hdf5").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"data/more.hdf5 is not in its manifest. Remove it with: rm /") as refusal:
        find_dataset("count/up-v0", tmp_path)
    subprocess.run(refusal.value.remedy.removeprefix("Remove it with: "), shell=True, check=True)
    assert find_dataset("count/up-v0", tmp_path).total_steps == 5
    (path / "data" / "linked").symlink_to("/etc/hostname")
    with pytest.raises(DatasetError, match=r"data/linked is a symbolic link"):
        find_dataset("count/up-v0", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2; this version reads up to 1.*Upgrade palaestra"),
        ({"schema": 0}, "damaged"),
        ({"files": {}}, "damaged"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": "0"}}}, "damaged"),
    ],
)
def test_a_manifest_of_another_version_or_with_foreign_files_is_refused(tmp_path, change, message):
    path = make_dataset(tmp_path).path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DatasetError, match=message):
        find_dataset("count/up-v0", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minari_version": "9.0.0"}, "minari_version = '9.0.0'.*version unknown here"),
        ({"data_format": "arrow"}, "data_format = 'arrow'.*not stored as HDF5"),
        ({"action_space": json.dumps({"type": "Text", "max_length": 3})}, "Text is not supported.*Supported are Box"),
        ({"observation_space": json.dumps({"type": "Box"})}, "observation_space.*is not a space"),
        ({"observation_space": "{"}, "observation_space.*is not a space"),
        ({"total_steps": -1}, "metadata.json cannot be read"),
    ],
)
def test_metadata_that_cannot_be_read_is_refused_with_its_value(tmp_path, change, message):
    from palaestra.experience.datasets.dataset import read_dataset

    path = make_dataset(tmp_path).path
    metadata = path / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    with pytest.raises(DatasetError, match=message):
        read_dataset(path, None)


def test_listing_remembers_a_verification_until_the_file_is_touched(tmp_path):
    dataset = make_dataset(tmp_path)
    assert [row.state for row in list_datasets(tmp_path)] == ["verified"]
    main = dataset.path / "data" / "main_data.hdf5"
    os.utime(main, ns=(1, 1))
    assert [row.state for row in list_datasets(tmp_path)] == ["unchecked"]
    find_dataset("count/up-v0", tmp_path)
    assert [row.state for row in list_datasets(tmp_path)] == ["verified"]
    main.write_bytes(b"")
    (row,) = list_datasets(tmp_path)
    assert row.state == "damaged"
    assert "truncated" in row.problem


def test_only_use_for_learning_counts_as_use(tmp_path):
    dataset = make_dataset(tmp_path)
    for path in (dataset.path / "manifest.json", dataset.path / "data" / "main_data.hdf5"):
        os.utime(path, (1000.0, 1000.0))
    find_dataset("count/up-v0", tmp_path, mark_used=False)
    assert list_datasets(tmp_path)[0].last_used == 1000.0
    find_dataset("count/up-v0", tmp_path)
    assert list_datasets(tmp_path)[0].last_used > 1000.0


def test_an_unknown_name_suggests_the_closest(tmp_path):
    make_dataset(tmp_path)
    with pytest.raises(DatasetError, match=r"Did you mean 'count/up-v0'\?"):
        find_dataset("count/ap-v0", tmp_path)


@pytest.mark.parametrize(
    "dataset_id",
    [
        *("", "up", "../up-v0", "/up-v0", "count//up-v0", "count/../up-v0", "a b-v0", "ü-v0", "count/data/up-v0"),
        *("data/a-v0", "up-v", "up-v1234567", ".hidden/up-v0", "up-v0/", "up-v0\n", "x" * 130 + "-v0"),
    ],
)
def test_an_id_that_is_no_safe_path_is_refused(tmp_path, dataset_id):
    with pytest.raises(DatasetError):
        make_dataset(tmp_path / "root", dataset_id)
    assert not (tmp_path / "root").exists()


def test_a_dataset_is_never_overwritten_and_never_inside_another(tmp_path):
    before = make_dataset(tmp_path)
    with pytest.raises(DatasetError, match="exists already"):
        make_dataset(tmp_path)
    with pytest.raises(DatasetError, match="count/up-v0 is not a namespace"):
        make_dataset(tmp_path, "count/up-v0/inner-v0")
    assert find_dataset("count/up-v0", tmp_path).sha256 == before.sha256


def test_the_slower_of_two_writers_is_refused_at_the_end(tmp_path):
    facts = DatasetFacts(dataset_id="count/up-v0", env_id="", observation_space=BOX, action_space=CHOICES)

    def write_slowly():
        with create_dataset(tmp_path, facts) as writer:
            writer.add(count_up(2))
            os.rename(make_dataset(tmp_path / "faster").path, tmp_path / "count" / "up-v0")

    with pytest.raises(DatasetError, match="exists already and is never overwritten"):
        write_slowly()
    assert find_dataset("count/up-v0", tmp_path).total_steps == 5
    assert [path.name for path in (tmp_path / "count").iterdir()] == ["up-v0"]


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    root = tmp_path / "datasets"
    root.mkdir()
    facts = DatasetFacts(dataset_id="a/b/c-v0", env_id="", observation_space=BOX, action_space=CHOICES)

    def begin():
        with create_dataset(root, facts) as writer:
            writer.add(count_up(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert list(root.iterdir()) == []


def test_an_interrupt_inside_hdf5_is_not_swallowed(tmp_path, monkeypatch):
    """HDF5 ignores exceptions of the file that it writes to, so that Ctrl-C would be lost there."""
    from palaestra.experience.datasets import storage

    class Interrupted(storage._GuardedFile):
        def write(self, data):
            os.kill(os.getpid(), signal.SIGINT)
            return super().write(data)

    monkeypatch.setattr(storage, "_GuardedFile", Interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            make_dataset(tmp_path, episodes=[count_up(50_000)])
    finally:
        signal.signal(signal.SIGINT, previous)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_dataset_is_refused(tmp_path):
    facts = DatasetFacts(dataset_id="c-v0", env_id="", observation_space=BOX, action_space=CHOICES)
    with pytest.raises(DatasetError, match="would have no steps"), create_dataset(tmp_path, facts):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [0.0, np.nan, 0.0]}, r"episode 0.rewards row 1 = nan: is NaN"),
        ({"actions": [0, 1, 3]}, r"episode 0.actions row 2 = 3: is outside Discrete\(3\)"),
        ({"actions": [0, 1]}, r"episode 0.actions = \[2\].*Give \[3\]"),
        ({"actions": [0, 1, object()]}, "not an array of numbers"),
        ({"observations": {"": np.zeros((3, 2))}}, r"episode 0.observations = \[3, 2\].*Give \[4, 2\]"),
        ({"observations": {}}, "episode 0.observations = None: is missing"),
    ],
)
def test_an_episode_that_does_not_fit_the_spaces_is_refused_with_its_place(tmp_path, change, message):
    good = count_up(3)
    fields = {name: getattr(good, name) for name in ("observations", "actions", "rewards", "terminated", "truncated")}
    with pytest.raises(DatasetError, match=message):
        make_dataset(tmp_path, episodes=[Episode(**(fields | change))])


def test_deleting_removes_the_empty_namespace_too(tmp_path):
    make_dataset(tmp_path)
    make_dataset(tmp_path, "other-v0")
    delete_dataset(tmp_path, "count/up-v0")
    assert [row.dataset_id for row in list_datasets(tmp_path)] == ["other-v0"]
    assert not (tmp_path / "count").exists()


def test_a_dataset_that_does_not_fit_into_memory_is_refused_with_the_numbers(tmp_path, monkeypatch):
    dataset = make_dataset(tmp_path)
    monkeypatch.setattr("palaestra.processes.memory.memory_limit", lambda: 100)
    monkeypatch.setattr("palaestra.processes.memory._ALWAYS_FITS", 0)
    with pytest.raises(Exception, match=r"needs about 150 B of memory.*100 B is available"):
        dataset.load_transitions()


def test_a_renamed_directory_is_refused_under_its_new_name(tmp_path):
    os.rename(make_dataset(tmp_path).path, tmp_path / "other-v0")
    with pytest.raises(DatasetError, match="was renamed: its manifest says count/up-v0"):
        find_dataset("other-v0", tmp_path)
    (row,) = list_datasets(tmp_path)
    assert (row.dataset_id, row.state) == ("other-v0", "damaged")


def test_a_copy_of_the_directory_can_be_opened_by_its_path(tmp_path):
    dataset = make_dataset(tmp_path / "here")
    shutil.copytree(dataset.path, tmp_path / "copy")
    assert find_dataset(str(tmp_path / "copy"), tmp_path / "here").sha256 == dataset.sha256


def test_listing_and_finding_import_no_torch_and_listing_no_h5py(tmp_path):
    make_dataset(tmp_path)
    program = (
        "import sys; from pathlib import Path; from palaestra.experience.datasets import find_dataset, list_datasets\n"
        f"root = Path({str(tmp_path)!r}); print(list_datasets(root)[0].state)\n"
        "assert not {'torch', 'h5py', 'minari'} & set(sys.modules), 'heavy imports'\n"
        "find_dataset('count/up-v0', root).load_transitions()\n"
        "assert not {'torch', 'tensordict', 'minari'} & set(sys.modules), 'heavy imports'"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout.strip()) == (0, "verified"), finished.stderr


def test_a_missing_extra_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(Exception, match=r"pip install 'palaestra\[offline\]'"):
        make_dataset(tmp_path)
    assert list(tmp_path.iterdir()) == []
