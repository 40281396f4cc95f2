"""The short acquaintance before a run: what it measures and what it refuses."""

import time
from functools import partial

import numpy as np
import pytest
from tests.env.faulty import Faulty

from palaestra.env.inspection import inspect_env
from palaestra.env.toy import Bandit, Countdown, MaskedChoice, MixedSenses
from palaestra.errors import ConfigError


def test_a_healthy_environment_is_measured_by_the_clock_it_is_given():
    ticks = iter([0.0, 1.0, 1.0, 3.0, 3.0, 8.0])
    facts = inspect_env(Countdown, steps=3, clock=lambda: next(ticks))
    assert facts.step_seconds == 2.0  # the median of 1, 2 and 5
    assert facts.action_space.n == 2
    assert facts.mask_size == 0


class Waiting(Countdown):
    """Waits in every step, as for an answer over a network."""

    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


class Computing(Countdown):
    """Keeps a core busy in every step, and never gives it up."""

    def step(self, action):
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass
        return super().step(action)


def test_waiting_is_told_from_computing_however_busy_the_machine_is():
    assert inspect_env(Waiting).busy_share < 0.5
    assert inspect_env(Computing).busy_share > 0.9


def test_masks_are_noticed_and_respected_and_episodes_may_end():
    assert inspect_env(partial(MaskedChoice, n=4)).mask_size == 4
    assert inspect_env(Bandit).mask_size == 0
    assert set(inspect_env(MixedSenses).observation_space) == {"camera", "body/joints", "body/contact", "room"}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nan_observation", "at step 2, observation holds a number that is not finite"),
        ("nan_reward", "at step 2, the reward is nan"),
        ("shape", r"at step 2, the observation has shape \(3,\)"),
        ("raise", "RuntimeError: the simulator fell over"),
    ],
)
def test_a_broken_environment_is_refused_with_the_step_it_broke_at(fault, told):
    with pytest.raises(ConfigError, match=f"env.id = 'broken'.*{told}"):
        inspect_env(partial(Faulty, fault=fault, at=2), name="broken")


class _Odd(Countdown):
    def __init__(self, reward=1.0, flag=False, mask=None, observation=None):
        super().__init__()
        self._odd = (reward, flag, mask, observation)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation, info if self._odd[2] is None else {"action_mask": self._odd[2]}

    def step(self, action):
        reward, flag, _, observation = self._odd
        return (self._observe() if observation is None else observation), reward, flag, False, {}


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"reward": "much"}, "not one number"),
        ({"reward": np.ones(2)}, "not one number"),
        ({"reward": None}, "not a number"),
        ({"flag": 1}, "terminated is 1, not a bool"),
        ({"mask": np.zeros(2)}, "allows nothing"),
        ({"mask": np.ones(3)}, "3 entries"),
        ({"observation": ["x"]}, "could not convert"),
    ],
)
def test_what_a_rollout_would_trip_over_later_is_refused_now(odd, told):
    with pytest.raises(ConfigError, match=told):
        inspect_env(partial(_Odd, **odd))


def test_an_environment_that_cannot_be_reset_is_refused():
    class Stuck(Countdown):
        def reset(self, *, seed=None, options=None):
            raise OSError("no display")

    with pytest.raises(
        ConfigError, match=r"reset\(seed=0\) raised OSError: no display \(.*test_inspection.py:\d+, in reset\)"
    ):
        inspect_env(Stuck)
