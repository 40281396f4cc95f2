"""Any episodes of any supported spaces come back as they were written: by index, through HDF5, and through Minari."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.errors import DatasetError
from palaestra.experience.datasets import DatasetFacts, Episode, create_dataset, find_dataset
from palaestra.experience.datasets.dataset import read_dataset
from palaestra.experience.datasets.spaces import nest, observation_leaves, space_from_json, space_to_json

_shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
_boxes = st.builds(
    lambda shape, dtype: spaces.Box(0, 100, shape, dtype), _shapes, st.sampled_from(["f4", "f8", "u1", "i4"])
)
_choices = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.integers(1, 4).map(spaces.MultiBinary),
)
_names = st.sampled_from(["camera", "arm", "goal", "état", "a.b"])
_leaves = st.one_of(_boxes, _choices)
_observations = st.recursive(
    _leaves, lambda inner: st.dictionaries(_names, inner, min_size=1, max_size=3).map(spaces.Dict), max_leaves=4
)
_actions = st.one_of(_choices, st.builds(lambda shape: spaces.Box(-1, 1, shape, np.float32), _shapes))


def _flatten(space, value, name=""):
    if isinstance(space, spaces.Dict):
        prefix = f"{name}/" if name else ""
        return {k: v for key in space.spaces for k, v in _flatten(space[key], value[key], prefix + key).items()}
    return {name: np.asarray(value)}


def _sample_episode(rng, observation_space, action_space, length):
    observation_space.seed(int(rng.integers(2**31)))
    action_space.seed(int(rng.integers(2**31)))
    rows = [_flatten(observation_space, observation_space.sample()) for _ in range(length + 1)]
    terminated = np.arange(length) == length - 1 if rng.random() < 0.5 else np.zeros(length, bool)
    return Episode(
        {name: np.stack([row[name] for row in rows]) for name in rows[0]},
        np.stack([np.asarray(action_space.sample()) for _ in range(length)]),
        rng.standard_normal(length).astype(np.float32),
        terminated,
        ~terminated & (np.arange(length) == length - 1),
    )


def _check(arrays, episodes, leaves):
    now = arrays.observation if isinstance(arrays.observation, dict) else {"": arrays.observation}
    after = arrays.next_observation if isinstance(arrays.next_observation, dict) else {"": arrays.next_observation}
    for leaf in leaves:
        rows = [episode.observations[leaf.name].astype(leaf.dtype) for episode in episodes]
        np.testing.assert_array_equal(now[leaf.name], np.concatenate([row[:-1] for row in rows]))
        np.testing.assert_array_equal(after[leaf.name], np.concatenate([row[1:] for row in rows]))
        assert now[leaf.name].dtype == leaf.dtype
    np.testing.assert_array_equal(arrays.action, np.concatenate([episode.actions for episode in episodes]))
    for name, column in (("rewards", "reward"), ("terminated", "terminated"), ("truncated", "truncated")):
        expected = np.concatenate([getattr(episode, name) for episode in episodes])
        np.testing.assert_array_equal(getattr(arrays, column), expected)


@settings(max_examples=25, deadline=None)
@given(_observations, _actions, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_back(observation_space, action_space, lengths, seed):
    minari = pytest.importorskip("minari")
    rng = np.random.default_rng(seed)
    episodes = [_sample_episode(rng, observation_space, action_space, length) for length in lengths]
    facts = DatasetFacts(
        dataset_id="any/thing-v0", env_id="", observation_space=observation_space, action_space=action_space
    )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with create_dataset(root, facts) as writer:
            for episode in episodes:
                writer.add(episode)
        dataset = find_dataset("any/thing-v0", root)
        leaves = observation_leaves(observation_space)
        assert (dataset.observation_space, dataset.action_space) == (observation_space, action_space)
        _check(dataset.load_transitions(), episodes, leaves)
        _check(read_dataset(dataset.path, None).load_transitions(), episodes, leaves)
        theirs = minari.MinariDataset(str(dataset.path / "data"))
        for episode, loaded in zip(episodes, theirs.iterate_episodes(), strict=True):
            np.testing.assert_array_equal(loaded.actions, episode.actions)
            for name, array in _flatten(observation_space, loaded.observations).items():
                np.testing.assert_array_equal(array, episode.observations[name].astype(array.dtype))


@given(_observations)
def test_a_space_survives_json(space):
    assert space_from_json(space_to_json(space), "space") == space


def test_flattened_names_become_nested_groups_again():
    flat = spaces.Dict(
        {"camera/left": spaces.Discrete(2), "camera/right": spaces.Discrete(3), "arm": spaces.Discrete(4)}
    )
    nested = nest(flat)
    assert nested["camera"]["right"] == spaces.Discrete(3)
    assert {leaf.name for leaf in observation_leaves(nested)} == {"camera/left", "camera/right", "arm"}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Dict({"a": spaces.Text(5)}),
        spaces.Dict({}),
        spaces.Dict({"": spaces.Discrete(2)}),
        spaces.Dict({".": spaces.Discrete(2)}),
    ],
)
def test_other_spaces_are_refused_with_the_supported_ones(tmp_path, space):
    facts = DatasetFacts(dataset_id="a-v0", env_id="", observation_space=space, action_space=spaces.Discrete(2))

    def write():
        with create_dataset(tmp_path, facts):
            pass

    with pytest.raises(DatasetError, match=r"not supported|is empty|cannot be the name"):
        write()
    assert os.listdir(tmp_path) == []


def test_an_action_of_several_parts_is_refused(tmp_path):
    facts = DatasetFacts(
        dataset_id="a-v0",
        env_id="",
        observation_space=spaces.Discrete(2),
        action_space=spaces.Dict({"a": spaces.Discrete(2)}),
    )
    with pytest.raises(DatasetError, match="Dict is not supported"), create_dataset(tmp_path, facts):
        pass
