import gymnasium
import numpy as np
import pytest
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.policy.storage import space_to_json
from palaestra.runs.checkpoints.files import PalaestraCheckpoint
from palaestra.runs.checkpoints.signature import find_dataset_mismatch, find_incompatibilities, normalize_signature
from palaestra.runs.process.probe import environment, space_json

SPACES = gymnasium.spaces.Dict(
    {
        "image": gymnasium.spaces.Box(0, 255, (10, 10, 3), np.uint8),
        "uneven": gymnasium.spaces.Box(np.arange(100.0), np.arange(100.0) + 1, dtype=np.float64),
        "open": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "choice": gymnasium.spaces.Discrete(3, start=1),
        "many": gymnasium.spaces.MultiDiscrete([2, 3]),
        "bits": gymnasium.spaces.MultiBinary(4),
    }
)


def test_a_policy_file_and_the_probe_describe_one_space_alike():
    ours, probed = space_to_json(SPACES), space_json(SPACES)

    assert normalize_signature({"observation_space": ours}) == normalize_signature({"observation_space": probed})


def test_a_checkpoint_of_ours_fits_the_environment_it_was_trained_in(tmp_path):
    own_checkpoint(tmp_path / "c")
    found = PalaestraCheckpoint.read(tmp_path / "c")

    assert find_incompatibilities(found.env_signature, environment("CartPole-v1")["signature"]) == []


def test_every_reason_against_another_environment_is_named():
    cartpole, pendulum = (environment(name)["signature"] for name in ("CartPole-v1", "Pendulum-v1"))

    reasons = find_incompatibilities(cartpole, pendulum)

    assert reasons[0] == "it was trained in CartPole-v1, this is Pendulum-v1"
    assert reasons[1].startswith("its observations are 4 float32 from")
    assert reasons[2] == "its actions are 2 choices, there they are 1 float32 from -2.0 to 2.0"


def test_a_version_of_one_environment_is_named_as_such():
    second = environment("CartPole-v1")["signature"]
    first = {**second, "env_id": "CartPole-v0"}

    assert find_incompatibilities(first, second) == ["it was trained in version 0 of CartPole, this is version 1"]


def test_what_nobody_knows_is_no_reason():
    assert find_incompatibilities({}, environment("CartPole-v1")["signature"]) == []


LEARNED = {"dataset_id": "pendulum/moon-v0", "env_id": "Pendulum-v1", "sha256": "0" * 64}


def test_a_policy_of_a_dataset_does_not_belong_into_another_environment():
    assert find_dataset_mismatch(LEARNED, "CartPole-v1", {}) == (
        "it learned from pendulum/moon-v0, which was recorded in Pendulum-v1, this is CartPole-v1"
    )
    assert find_dataset_mismatch(LEARNED, "Pendulum-v1", {}) == ""
    assert find_dataset_mismatch({}, "CartPole-v1", {}) == ""
    compiled = {**LEARNED, "env_id": "CartPole-v1", "env_kwargs": {}}
    assert find_dataset_mismatch(compiled, "compiled/CartPole-v1", {}) == ""


@pytest.mark.parametrize(
    ("recorded", "current", "ending"),
    [
        ({"g": 1.6}, {}, "in Pendulum-v1 with g = 1.6, this is Pendulum-v1 with g = 10.0"),
        ({}, {"g": 1.6}, "in Pendulum-v1 with g = 10.0, this is Pendulum-v1 with g = 1.6"),
        ({"fog": True}, {}, "in Pendulum-v1 with fog = True, this is Pendulum-v1 with fog = the default"),
        # The same arguments in other words: a number, a default, the way of drawing.
        ({"g": 2.0}, {"g": 2}, ""),
        ({}, {"g": 10.0}, ""),
        ({"g": 10.0, "render_mode": "rgb_array"}, {}, ""),
        # A checkpoint of an earlier version does not know them.
        (None, {"g": 1.6}, ""),
    ],
)
def test_a_policy_of_a_dataset_does_not_belong_into_its_environment_with_other_arguments(recorded, current, ending):
    learned = LEARNED if recorded is None else {**LEARNED, "env_kwargs": recorded}

    mismatch = find_dataset_mismatch(learned, "Pendulum-v1", current)

    assert mismatch.endswith(ending)
    assert bool(mismatch) == bool(ending)
