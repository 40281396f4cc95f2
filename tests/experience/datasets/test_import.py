"""Files of others become datasets only if every step in them can be trusted."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
from gymnasium import spaces
from tests.experience.datasets.samples import BOX, CHOICES, count_up, make_dataset

from palaestra.errors import ConfigError, DatasetError
from palaestra.experience.datasets import DatasetFacts, find_dataset, list_datasets
from palaestra.experience.datasets.import_data import import_d4rl, import_minari, split_episodes
from palaestra.experience.datasets.scores import MissingScores

FACTS = DatasetFacts(dataset_id="d4rl/line-v0", env_id="Line-v0", observation_space=BOX, action_space=CHOICES)


def steps(total=6, terminals=(2,), timeouts=(5,), **changes):
    """Six steps along a line; the first episode terminates after three, the second runs out of time after three."""
    numbers = np.arange(total, dtype=np.float32)
    arrays = {
        "observations": np.stack([numbers, numbers], axis=1),
        "actions": np.arange(total) % 3,
        "rewards": numbers * 10,
        "terminals": np.isin(np.arange(total), terminals),
        "timeouts": np.isin(np.arange(total), timeouts),
    }
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def write(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    return path


def test_episodes_end_at_terminals_and_timeouts_and_an_unknown_last_step_is_dropped(tmp_path):
    report = import_d4rl(tmp_path, write(tmp_path / "line.hdf5", steps()), FACTS)
    arrays = report.dataset.load_transitions()
    assert (report.steps_read, report.steps_dropped) == (6, 1)
    assert arrays.observation[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert arrays.next_observation[:, 0].tolist() == [1, 2, 2, 4, 5]  # after the terminal step: repeated, never used
    assert arrays.terminated.tolist() == [False, False, True, False, False]
    assert arrays.truncated.tolist() == [False, False, False, False, True]
    assert arrays.reward.tolist() == [0, 10, 20, 30, 40]
    assert report.dataset.about["next_observations"] == "reconstructed"
    assert report.dataset.about["steps_dropped"] == 1


def test_with_next_observations_no_step_is_lost(tmp_path):
    arrays = steps()
    following = arrays["observations"] + 1
    following[2] = 99
    report = import_d4rl(tmp_path, write(tmp_path / "a.hdf5", {**arrays, "next_observations": following}), FACTS)
    loaded = report.dataset.load_transitions()
    assert report.steps_dropped == 0
    assert loaded.next_observation[:, 0].tolist() == [1, 2, 99, 4, 5, 6]


def test_a_jump_that_no_flag_explains_ends_the_episode():
    arrays = steps(total=4, terminals=(), timeouts=(3,))
    following = arrays["observations"] + 1
    following[1] = 50
    first, second = split_episodes({**arrays, "next_observations": following})
    assert first.observations[""][:, 0].tolist() == [0, 1, 50]
    assert (first.truncated.tolist(), first.terminated.tolist()) == ([False, True], [False, False])
    assert second.observations[""][:, 0].tolist() == [2, 3, 4]


def test_without_timeouts_the_limit_of_the_environment_ends_episodes():
    arrays = steps(total=7, terminals=(1,), timeouts=None)
    lengths = [len(episode) for episode in split_episodes({**arrays, "timeouts": arrays["terminals"] * 0}, None)]
    assert lengths == [2, 4]  # one episode of five, whose last step is dropped
    del arrays["timeouts"]
    assert [len(episode) for episode in split_episodes(arrays, 3)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.full(6, np.nan, np.float32)}, r"episode 0.rewards row 0 = nan: is NaN"),
        ({"observations": np.zeros((6, 3), np.float32)}, r"episode 0.observations.*Give \[4, 2\]"),
        ({"actions": np.arange(5)}, r"actions = \[5\]: has 5 rows, but observations has 6"),
        ({"actions": np.array([0, 1, 7, 0, 0, 9])}, r"episode 0.actions row 2 = 7: is outside Discrete\(3\)"),
        ({"actions": np.array([0, 1, 2, 0, 0.7, 1])}, r"episode 1.actions row 1 = 0.7: is not an integer"),
        ({"observations": np.full((6, 2), 1e300)}, r"episode 0.observations row 0 = 1e\+300: is too large for float32"),
        ({"rewards": np.array([0, 0, 0, 0, 1e39, 0])}, r"episode 1.rewards row 1 = 1e\+39: is too large"),
        ({"terminals": np.array([0, 0, 0.5, 0, 0, 0])}, "terminals row 2 = 0.5: is neither 0 nor 1"),
        ({"terminals": np.array([0, 0, 1, np.nan, 0, 0])}, "terminals row 3 = nan: is NaN"),
        ({"timeouts": np.array([0, 0, 0, 0, 2, 0])}, "timeouts row 4 = 2: is neither 0 nor 1"),
        ({"terminals": None}, "has no array 'terminals'.*layout needs observations, actions, rewards, terminals"),
        ({"rewards": np.zeros((6, 2))}, "is not one number per step"),
        ({"next_observations": np.zeros((6, 5))}, "has another shape than observations"),
        ({"actions": np.array([b"left"] * 6)}, "not an array of numbers"),
        ({"observations": np.zeros((0, 2))}, "has no steps|rows"),
    ],
)
def test_a_file_whose_arrays_disagree_is_refused_and_leaves_nothing(tmp_path, changes, message):
    arrays = {name: array for name, array in (steps() | changes).items() if array is not None}
    path = write(tmp_path / "bad.hdf5", arrays)
    with pytest.raises(DatasetError, match=message):
        import_d4rl(tmp_path / "root", path, FACTS)
    assert not (tmp_path / "root").exists()


TORQUE = replace(FACTS, action_space=spaces.Box(-2.0, 2.0, (1,), np.float32))


def test_a_continuous_action_outside_the_bounds_is_refused_with_its_value_and_row(tmp_path):
    actions = np.zeros((6, 1))
    actions[4] = 9
    path = write(tmp_path / "line.hdf5", steps(actions=actions))
    with pytest.raises(DatasetError, match=r"episode 1.actions row 1 = 9.0: is outside Box\(-2.0, 2.0"):
        import_d4rl(tmp_path / "root", path, TORQUE)
    assert not (tmp_path / "root").exists()


def test_rounding_errors_of_actions_and_observations_outside_their_box_are_accepted(tmp_path):
    far = steps()["observations"] + 50  # the space ends at 10
    path = write(tmp_path / "line.hdf5", steps(actions=np.full((6, 1), 2.00003), observations=far))
    arrays = import_d4rl(tmp_path / "root", path, TORQUE).dataset.load_transitions()
    assert arrays.observation[0, 0] == 50
    half = replace(FACTS, action_space=spaces.Box(0.0, np.inf, (1,), np.float32), dataset_id="half-v0")
    import_d4rl(tmp_path / "root", path, half)


def test_an_image_with_values_that_a_byte_cannot_hold_is_refused(tmp_path):
    images = replace(FACTS, observation_space=spaces.Box(0, 255, (2,), np.uint8))
    for value in (300.0, -1.0, 0.5):
        path = write(tmp_path / "line.hdf5", steps(observations=np.full((6, 2), value)))
        with pytest.raises(DatasetError, match=f"observations row 0 = {value}: is not an integer from 0 to 255"):
            import_d4rl(tmp_path / "root", path, images)
    path = write(tmp_path / "line.hdf5", steps(observations=np.full((6, 2), 255.0)))
    assert import_d4rl(tmp_path / "root", path, images).dataset.load_transitions().observation.dtype == np.uint8


def test_a_column_of_one_number_is_accepted(tmp_path):
    arrays = steps()
    arrays["rewards"], arrays["terminals"] = arrays["rewards"][:, None], arrays["terminals"][:, None]
    report = import_d4rl(tmp_path, write(tmp_path / "column.hdf5", arrays), FACTS)
    assert report.dataset.load_transitions().reward.tolist() == [0, 10, 20, 30, 40]


def _external_link(file, secret):
    file["rewards"] = h5py.ExternalLink(str(secret), "rewards")


def _soft_link(file, secret):
    file["rewards"] = h5py.SoftLink("/terminals")


def _virtual(file, secret):
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "rewards", (6,))
    file.create_virtual_dataset("rewards", layout)


def _external_storage(file, secret):
    file.create_dataset("rewards", (6,), "f4", external=[(str(secret), 0, 24)])


@pytest.mark.parametrize("attack", [_external_link, _soft_link, _virtual, _external_storage])
def test_a_file_that_would_read_another_file_is_refused_before_it_does(tmp_path, attack):
    secret = write(tmp_path / "secret.hdf5", {"rewards": np.ones(6, np.float32)})
    path = write(tmp_path / "attack.hdf5", steps(rewards=None))
    with h5py.File(path, "a") as file:
        attack(file, secret)
    with pytest.raises(DatasetError, match=r"is a link|lies in other files"):
        import_d4rl(tmp_path / "root", path, FACTS)


def test_an_array_larger_than_memory_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path / "huge.hdf5", steps(rewards=None))
    with h5py.File(path, "a") as file:
        file.create_dataset("rewards", (10**14,), "f8", chunks=(1024,))  # nothing is stored
    with pytest.raises(DatasetError, match=r"has 800.0 TB, more than the memory"):
        import_d4rl(tmp_path / "root", path, FACTS)


@pytest.mark.parametrize("content", [b"", b"not HDF5", b"\x89HDF\r\n\x1a\n" + b"\0" * 100])
def test_a_file_that_is_no_hdf5_is_refused(tmp_path, content):
    path = tmp_path / "file.hdf5"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="is not an HDF5 file that can be read"):
        import_d4rl(tmp_path / "root", path, FACTS)


def test_a_dict_of_observations_needs_another_format(tmp_path):
    facts = DatasetFacts(
        dataset_id="a-v0", env_id="A-v0", observation_space=spaces.Dict({"a": BOX}), action_space=CHOICES
    )
    with pytest.raises(DatasetError, match="not a Dict"):
        import_d4rl(tmp_path, write(tmp_path / "line.hdf5", steps()), facts)


@pytest.fixture(params=["disk", "limit"])
def full(request, monkeypatch):
    """A disk without free space, or a limit that is reached; the words of the refusal."""
    if request.param == "limit":
        monkeypatch.setenv("PALAESTRA_DATASETS_MAX_SIZE", "1kB")
        return r"more than PALAESTRA_DATASETS_MAX_SIZE allows \(1.0 kB\)"
    usage = shutil._ntuple_diskusage(1, 1, 0)
    monkeypatch.setattr("palaestra.experience.datasets.disk_space.shutil.disk_usage", lambda path: usage)
    return r"needs about .* on the disk of .*, but 0 B are free.*datasets prune"


def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, full):
    path = write(tmp_path / "line.hdf5", steps(total=200, terminals=(2,), timeouts=(199,)))
    with pytest.raises(DatasetError, match=full):
        import_d4rl(tmp_path / "root", path, FACTS)
    assert not (tmp_path / "root").exists()


def test_a_directory_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, theirs, full):
    with pytest.raises(DatasetError, match=full):
        import_minari(tmp_path / "root", theirs)
    assert not (tmp_path / "root").exists()


def test_a_directory_inside_the_root_is_adopted_although_the_disk_is_full(tmp_path, theirs, full):
    assert import_minari(tmp_path / "elsewhere", theirs).path == theirs


@pytest.fixture
def theirs(tmp_path):
    """A dataset as Minari leaves it: without manifest and index."""
    dataset = make_dataset(tmp_path / "elsewhere")
    (dataset.path / "manifest.json").unlink()
    (dataset.path / "index.npy").unlink()
    return dataset.path


def test_a_directory_of_minari_is_copied_and_verified_from_then_on(tmp_path, theirs):
    dataset = import_minari(tmp_path / "root", theirs)
    assert dataset.load_transitions().observation[:, 0].tolist() == [0, 1, 2, 5, 6]
    assert [row.state for row in list_datasets(tmp_path / "root")] == ["verified"]
    assert (theirs / "data" / "main_data.hdf5").exists()
    assert not (theirs / "manifest.json").exists()


def test_a_directory_of_minari_inside_the_root_is_adopted_where_it_is(tmp_path, theirs):
    before = (theirs / "data" / "main_data.hdf5").stat().st_ino
    dataset = import_minari(tmp_path / "elsewhere", theirs)
    assert dataset.path == theirs
    assert (theirs / "data" / "main_data.hdf5").stat().st_ino == before
    with pytest.raises(DatasetError, match="has a manifest already"):
        import_minari(tmp_path / "elsewhere", theirs)


def test_a_dataset_of_another_machine_keeps_its_digest(tmp_path):
    dataset = make_dataset(tmp_path / "elsewhere")
    assert import_minari(tmp_path / "root", dataset.path).sha256 == dataset.sha256
    shutil.rmtree(tmp_path / "root")
    main = dataset.path / "data" / "main_data.hdf5"
    main.write_bytes(main.read_bytes()[:-1] + b"x")
    with pytest.raises(DatasetError, match="was changed after it was written"):
        import_minari(tmp_path / "root", dataset.path)
    assert not (tmp_path / "root").exists()


def test_another_id_than_that_of_the_metadata_is_refused(tmp_path, theirs):
    with pytest.raises(DatasetError, match=r"its metadata says count/up-v0.*Use count/up-v0"):
        import_minari(tmp_path / "root", theirs, "count/other-v0")


def test_episodes_that_do_not_add_up_to_the_metadata_are_refused(tmp_path, theirs):
    metadata = theirs / "data" / "metadata.json"
    original = json.loads(metadata.read_text())
    for change in ({"total_steps": 4}, {"total_steps": 6}, {"total_episodes": 1}, {"total_episodes": 3}):
        metadata.write_text(json.dumps(original | change))
        with pytest.raises(DatasetError, match=r"other numbers of steps|has no episode_2"):
            import_minari(tmp_path / "root", theirs)
    assert not (tmp_path / "root").exists()


def test_an_episode_with_nan_or_a_link_is_refused(tmp_path, theirs):
    with h5py.File(theirs / "data" / "main_data.hdf5", "a") as file:
        file["episode_1/rewards"][0] = np.nan
    with pytest.raises(DatasetError, match=r"episode 1.rewards row 0 = nan: is NaN"):
        import_minari(tmp_path / "root", theirs)
    with h5py.File(theirs / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1"]
        file["episode_1"] = h5py.SoftLink("/episode_0")
    with pytest.raises(DatasetError, match="episode_1 is a link"):
        import_minari(tmp_path / "root", theirs)


def test_a_directory_of_minari_with_impossible_actions_or_flags_is_refused(tmp_path):
    torque = spaces.Box(-2.0, 2.0, (1,), np.float32)
    episodes = [replace(count_up(3), actions=np.zeros((3, 1)))]
    main = make_dataset(tmp_path / "elsewhere", episodes=episodes, action_space=torque).path / "data" / "main_data.hdf5"
    for name in ("manifest.json", "index.npy"):
        (main.parent.parent / name).unlink()
    with h5py.File(main, "a") as file:
        file["episode_0/actions"][1] = 55
    with pytest.raises(DatasetError, match=r"episode 0.actions row 1 = 55.0: is outside Box"):
        import_minari(tmp_path / "root", main.parent.parent)
    with h5py.File(main, "a") as file:
        file["episode_0/actions"][1] = 0
        del file["episode_0/terminations"]
        file["episode_0/terminations"] = np.array([0, 0.5, 1])
    with pytest.raises(DatasetError, match=r"episode 0.terminations row 1 = 0.5: is neither 0 nor 1"):
        import_minari(tmp_path / "root", main.parent.parent)
    assert not (tmp_path / "root").exists()


def test_a_file_that_does_not_belong_there_is_refused(tmp_path, theirs):
    (theirs / "data" / "setup.py").write_text("")
    with pytest.raises(DatasetError, match=r"data/setup.py does not belong to a dataset"):
        import_minari(tmp_path / "root", theirs)


def test_a_name_that_is_taken_is_refused_before_copying(tmp_path, theirs):
    make_dataset(tmp_path / "root")
    with pytest.raises(DatasetError, match="exists already"):
        import_minari(tmp_path / "root", theirs)
    assert find_dataset("count/up-v0", tmp_path / "root").about == {"policy": "test"}


def test_a_directory_without_reference_scores_gets_those_that_are_given(tmp_path, theirs):
    dataset = import_minari(tmp_path / "root", theirs, scores=MissingScores(random=1.0, expert=5.0))
    assert (dataset.random_score, dataset.expert_score, dataset.normalized_score(3.0)) == (1.0, 5.0, 50.0)
    assert "ref_max_score" not in json.loads((theirs / "data" / "metadata.json").read_text())
    inside = import_minari(tmp_path / "elsewhere", theirs, scores=MissingScores(expert=5.0))
    assert (inside.path, inside.random_score, inside.expert_score) == (theirs, None, 5.0)


def test_the_random_score_is_measured_in_the_environment_of_the_metadata(tmp_path, theirs):
    metadata = theirs / "data" / "metadata.json"
    spec = json.dumps({"id": "Count-v0", "kwargs": {"size": 3}, "max_episode_steps": 7})
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"env_spec": spec}))
    calls = []

    def measure(env_id, settings):
        calls.append((env_id, settings))
        return -2.5

    dataset = import_minari(tmp_path / "root", theirs, scores=MissingScores(measure_random=measure))
    assert dataset.random_score == -2.5
    assert calls == [("Count-v0", {"env_kwargs": {"size": 3}, "max_episode_steps": 7})]
    given = MissingScores(random=0.0, measure_random=measure)
    assert import_minari(tmp_path / "other", theirs, scores=given).random_score == 0.0
    assert len(calls) == 1


def test_a_score_that_the_metadata_has_or_that_is_no_number_is_refused(tmp_path):
    scored = make_dataset(tmp_path / "elsewhere", random_score=1.0, expert_score=2.0).path
    with pytest.raises(ConfigError, match=r"--expert-score = 5.0: the metadata of the dataset says 2"):
        import_minari(tmp_path / "root", scored, scores=MissingScores(expert=5.0))
    with pytest.raises(ConfigError, match=r"--random-score = nan: is not a finite number"):
        import_minari(tmp_path / "root", scored, scores=MissingScores(random=float("nan")))
    unnamed = make_dataset(tmp_path / "unnamed", env_id="").path
    with pytest.raises(ConfigError, match="names no environment"):
        import_minari(tmp_path / "root", unnamed, scores=MissingScores(measure_random=lambda *words: 0.0))
    assert not (tmp_path / "root").exists()


def test_a_dataset_of_another_machine_gets_a_score_and_keeps_how_it_was_made(tmp_path):
    dataset = make_dataset(tmp_path / "elsewhere")
    scored = import_minari(tmp_path / "root", dataset.path, scores=MissingScores(expert=5.0))
    assert (scored.expert_score, scored.about) == (5.0, dataset.about)
    assert scored.load_transitions().reward.tolist() == dataset.load_transitions().reward.tolist()


def _with_metadata(path, **changes):
    metadata = path / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ref_max_score": float("nan")}, r"ref_max_score = nan: is not a finite number. Correct or remove it"),
        ({"ref_min_score": "low"}, r"ref_min_score = 'low': is not a finite number"),
        ({"ref_min_score": True}, r"ref_min_score = True: is not a finite number"),
        ({"ref_min_score": 5.0, "ref_max_score": 4.0}, r"ref_max_score = 4.0: .*above the random score, which is 5"),
    ],
)
def test_reference_scores_of_the_metadata_that_make_no_sense_are_refused(tmp_path, theirs, changes, message):
    _with_metadata(theirs, **changes)
    with pytest.raises(DatasetError, match=message):
        import_minari(tmp_path / "root", theirs)
    assert not (tmp_path / "root").exists()


def test_an_expert_score_that_is_not_above_the_random_score_is_refused_with_both(tmp_path, theirs):
    message = r"--expert-score = 1.0: .*above the random score, which is 1\."
    with pytest.raises(ConfigError, match=message):
        import_minari(tmp_path / "root", theirs, scores=MissingScores(random=1.0, expert=1.0))
    measured = MissingScores(expert=1.0, measure_random=lambda *words: 1.0)
    _with_metadata(theirs, env_spec=json.dumps({"id": "Count-v0"}))
    with pytest.raises(ConfigError, match=message):
        import_minari(tmp_path / "root", theirs, scores=measured)
    _with_metadata(theirs, ref_min_score=1.0)
    with pytest.raises(ConfigError, match=message):
        import_minari(tmp_path / "root", theirs, scores=MissingScores(expert=1.0))
    assert not (tmp_path / "root").exists()


def test_a_null_score_is_unknown(tmp_path, theirs):
    _with_metadata(theirs, ref_min_score=None, ref_max_score=4.0)
    dataset = import_minari(tmp_path / "root", theirs)
    assert (dataset.random_score, dataset.expert_score) == (None, 4.0)


def test_an_existing_dataset_whose_scores_make_no_sense_is_used_without_normalised_scores(tmp_path):
    dataset = make_dataset(tmp_path / "elsewhere", random_score=5.0, expert_score=4.0)
    assert import_minari(tmp_path / "root", dataset.path).normalized_score(4.5) is None
    odd = make_dataset(tmp_path / "odd", random_score=1.0, expert_score=float("nan"))
    assert (odd.expert_score, odd.normalized_score(4.5)) == (None, None)
