"""Environments with unusual pictures, paces and actions can be played."""

from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from palaestra.errors import EnvironmentContractError
from palaestra.runs.play.spec import PlaySpec
from palaestra.train.play.environment import GymnasiumPlay


class Unusual(gymnasium.Env):
    """Renders what the test gives it, at the pace that the test gives it."""

    pace = 30
    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.MultiDiscrete([2, 3], start=[1, -1])

    def __init__(self, render_mode=None, shape=(8, 6, 3)):
        self.render_mode, self.shape = render_mode, shape
        self.metadata = {**self.metadata, "render_fps": self.pace}

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def render(self):
        return np.full(self.shape, 200, np.uint8)


def open_play(**parameters):
    play = GymnasiumPlay(PlaySpec(env_id=f"{__name__}:Unusual", parameters=parameters))
    play.reset(0)
    return play


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 1), (8, 6, 3), (8, 6, 4)])
def test_grey_rgb_and_rgba_images_become_pictures(shape):
    picture = open_play(shape=shape).picture()
    assert picture.data.startswith(b"\xff\xd8\xff")
    assert (picture.width, picture.height) == (6, 8)


@pytest.mark.parametrize("shape", [(8,), (8, 6, 2), (0, 6, 3)])
def test_an_array_that_is_no_image_is_refused_with_its_shape(shape):
    with pytest.raises(EnvironmentContractError, match="is not an RGB image"):
        open_play(shape=shape).picture()


@pytest.mark.parametrize(
    ("declared", "fps"), [(12, 12.0), (-5, 30.0), ("fast", 30.0), (None, 30.0), (10**400, 30.0), (True, 30.0)]
)
def test_only_a_positive_finite_pace_is_used(declared, fps, monkeypatch):
    monkeypatch.setattr(Unusual, "pace", declared)
    assert open_play().description.fps == fps


def test_the_idle_action_of_a_multi_discrete_space_begins_at_its_start():
    play = open_play()
    controls = play.description.controls
    assert controls.idle == [1, -1]
    assert [(axis.low, axis.high, axis.idle) for axis in controls.axes] == [(1.0, 2.0, 1.0), (-1.0, 1.0, -1.0)]
    assert play.step(controls.idle).reward == 1.0
