"""Storage rules of spaces: what is kept, what is flattened, what is refused."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.env.spaces import (
    ActionLayout,
    ObservationLayout,
    allocate_row,
    copy_observation,
    random_actions,
    same_observation,
    write_observation,
)
from palaestra.errors import ConfigError

_shapes = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
_leaves = st.one_of(
    st.builds(lambda s: spaces.Box(-1.0, 1.0, s, np.float64), _shapes),
    st.builds(lambda s: spaces.Box(0, 255, s, np.uint8), _shapes),
    st.builds(lambda s: spaces.Box(-5, 5, s, np.int16), _shapes),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
)
_dicts = st.dictionaries(st.sampled_from("abcd"), _leaves, min_size=1, max_size=3).map(spaces.Dict)
_nested = st.dictionaries(st.sampled_from("wxyz"), st.one_of(_leaves, _dicts), min_size=1, max_size=3).map(spaces.Dict)


def _leaf_values(value, prefix=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaf_values(inner, f"{prefix}/{key}" if prefix else key)
    else:
        yield prefix, value


@given(space=st.one_of(_leaves, _nested), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_what_is_written_at_an_index_is_what_the_environment_showed_and_nothing_else_changes(space, seed):
    space.seed(seed)
    value = space.sample()
    layout = ObservationLayout(space)
    out = layout.empty((3,))
    layout.write(out, 1, value)
    parts = out if isinstance(out, dict) else {"": out}
    for name, leaf in _leaf_values(value):
        np.testing.assert_array_equal(parts[name][1], np.asarray(leaf).astype(parts[name].dtype))
        assert not parts[name][0].any()
        assert not parts[name][2].any()
    assert same_observation(layout.single(value), copy_observation(out, 1))
    assert layout.from_arrays(layout.arrays(out)) is out or isinstance(out, dict)


def test_a_missing_key_is_named_with_its_place_and_the_expected_keys():
    inner = spaces.Dict({"day": spaces.Discrete(2), "night": spaces.Discrete(2)})
    layout = ObservationLayout(spaces.Dict({"time": inner}))
    with pytest.raises(
        ValueError, match=r"^observation\['time'\] lacks 'night'; the expected keys are 'day', 'night'$"
    ):
        layout.single({"time": {"day": 0}})
    with pytest.raises(ValueError, match=r"^the observation has type tuple, expected a dict with the keys 'time'$"):
        layout.single((0, 1))


@given(space=st.one_of(_leaves, _nested))
@settings(max_examples=60, deadline=None)
def test_flattening_twice_is_flattening_once(space):
    flat = ObservationLayout(space).space
    assert ObservationLayout(flat).space == flat
    if isinstance(flat, spaces.Dict):
        assert not any(isinstance(inner, spaces.Dict) for inner in flat.values())


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (spaces.Box(-1.0, 1.0, (2, 3), np.float64), np.float32, (2, 3)),
        (spaces.Box(0, 255, (4, 4, 1), np.uint8), np.uint8, (4, 4, 1)),
        (spaces.Box(-9, 9, (2,), np.int32), np.float32, (2,)),
        (spaces.Discrete(4, start=2), np.int64, ()),
        (spaces.MultiDiscrete([2, 3]), np.int64, (2,)),
        (spaces.MultiBinary(3), np.float32, (3,)),
    ],
)
def test_each_space_has_one_stored_dtype_and_shape(space, dtype, shape):
    stored = ObservationLayout(space).empty((5, 2))
    assert stored.dtype == dtype
    assert stored.shape == (5, 2, *shape)


def test_float64_bounds_beyond_float32_become_infinite_without_a_warning():
    flat = ObservationLayout(spaces.Box(-1e300, 1e300, (1,), np.float64)).space
    assert flat.dtype == np.float32
    assert flat.high.tolist() == [np.inf]


def test_nested_keys_are_joined_by_a_slash():
    space = spaces.Dict({"body": spaces.Dict({"arm": spaces.Dict({"x": spaces.Discrete(2)})})})
    assert list(ObservationLayout(space).space) == ["body/arm/x"]


def test_two_entries_that_flatten_to_one_key_are_refused():
    space = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(ConfigError, match="'a/b'"):
        ObservationLayout(space)


@pytest.mark.parametrize(
    "space", [spaces.Tuple([spaces.Discrete(2)]), spaces.Text(3), spaces.Dict({}), spaces.Dict({"t": spaces.Text(3)})]
)
def test_observation_spaces_we_cannot_store_are_refused_by_name(space):
    with pytest.raises(ConfigError, match=r"env\.observation_space"):
        ObservationLayout(space)


@pytest.mark.parametrize("space", [spaces.Tuple([spaces.Discrete(2)]), spaces.Box(0, 5, (2,), np.int64)])
def test_action_spaces_nobody_can_act_in_are_refused_with_the_supported_ones(space):
    with pytest.raises(ConfigError, match="MultiDiscrete, MultiBinary or a float Box"):
        ActionLayout(space)


def test_a_wrong_shape_is_never_broadcast_into_the_row():
    layout = ObservationLayout(spaces.Box(-1.0, 1.0, (4,), np.float32))
    out = layout.empty((2,))
    with pytest.raises(ValueError, match=r"\(1,\).*\(4,\)"):
        layout.write(out, 0, np.ones(1, np.float32))
    with pytest.raises(ValueError, match="for 2 environments"):
        layout.write_batch(out, np.ones((1, 4), np.float32))


def test_actions_are_split_into_what_each_environment_expects():
    assert ActionLayout(spaces.Discrete(3)).splitter()(np.array([2, 0])) == [2, 0]
    rows = ActionLayout(spaces.Box(-1.0, 1.0, (2,), np.float64)).splitter()(np.ones((3, 2), np.float32))
    assert [(row.shape, row.dtype) for row in rows] == [((2,), np.float64)] * 3


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_random_actions_lie_in_the_space_and_respect_the_mask(seed):
    rng = np.random.default_rng(seed)
    offset = spaces.Discrete(3, start=5)
    assert all(offset.contains(int(a)) for a in random_actions(offset, 4, rng))
    only_last = np.array([[False, False, True]] * 4)
    assert random_actions(offset, 4, rng, only_last).tolist() == [7, 7, 7, 7]
    pair = spaces.MultiDiscrete([2, 3])
    mask = np.array([[False, True, True, False, False]])
    assert random_actions(pair, 1, rng, mask).tolist() == [[1, 0]]
    for space in (pair, spaces.MultiBinary(3), spaces.Box(-2.0, 3.0, (2,)), spaces.Box(-np.inf, np.inf, (2,))):
        action = random_actions(space, 2, rng)
        assert all(space.contains(a.astype(space.dtype)) for a in action)


def test_masks_of_multidiscrete_may_come_flat_or_one_per_choice():
    layout = ActionLayout(spaces.MultiDiscrete([2, 3]))
    parts = (np.array([1, 0]), np.array([0, 1, 1]))
    assert layout.read_mask(parts).tolist() == [True, False, False, True, True]
    assert layout.read_mask(np.concatenate(parts)).tolist() == [True, False, False, True, True]
    with pytest.raises(ValueError, match=r"4 entries.*5 choices"):
        layout.read_mask(np.ones(4))


def test_a_row_has_masks_only_when_the_environment_has():
    space = spaces.Box(0.0, 1.0, (2,), np.float32)
    assert allocate_row(space, 3).action_mask is None
    assert allocate_row(space, 3, 4).action_mask.shape == (3, 4)


def test_an_ended_observation_is_copied_into_any_row():
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0.0, 1.0, (2,), np.float32)})
    out = ObservationLayout(space).empty((2,))
    write_observation(out, 1, {"a": np.int64(2), "b": np.ones(2, np.float32)})
    assert out["a"].tolist() == [0, 2]
    assert out["b"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(TypeError, match="dict of arrays"):
        write_observation(out, 1, np.ones(2))


def test_same_observation_compares_bits():
    assert same_observation(np.array([np.nan]), np.array([np.nan]))
    assert not same_observation(np.array([0.0]), np.array([-0.0]))
    assert not same_observation({"a": np.zeros(1)}, np.zeros(1))


def test_the_public_names_are_exactly_those_declared():
    import inspect

    import palaestra.env as package

    visible = {n for n, v in vars(package).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert set(package.__all__) == visible
    assert len(package.__all__) <= 10


def test_a_number_that_is_not_finite_is_found_in_nested_observations_and_in_scalars():
    space = spaces.Dict({"arm": spaces.Dict({"speed": spaces.Box(-1, 1, (3,))}), "room": spaces.Discrete(4)})
    layout = ObservationLayout(space)
    finite = {"arm": {"speed": [0.0, 0.5, 1.0]}, "room": 2}
    assert layout.find_non_finite(finite) is None
    assert layout.find_non_finite(finite | {"arm": {"speed": [0.0, 0.5, np.inf]}}) == ("['arm']['speed'][2]", np.inf)
    assert layout.find_non_finite(finite | {"room": -np.inf}) == ("['room']", -np.inf)
