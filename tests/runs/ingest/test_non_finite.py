"""Which metrics are NaN or infinite, and since when."""

import json
import math

import pytest

from palaestra.runs.state.progress import NonFiniteTracker


def _taken(*values, name="loss"):
    metrics = NonFiniteTracker()
    for step, value in enumerate(values, start=1):
        metrics.update(10 * step, {name: value, "other": 1.0})
    return metrics


def test_a_metric_is_in_trouble_since_its_first_bad_value():
    (found,) = _taken(1.0, math.nan, math.inf).current()
    assert (found.name, found.step, found.value, found.finite_since) == ("loss", 20, math.inf, 0)


def test_ten_finite_values_in_a_row_end_the_trouble():
    assert [one.finite_since for one in _taken(math.nan, *[1.0] * 9).current()] == [9]
    assert _taken(math.nan, *[1.0] * 10).current() == ()
    (again,) = _taken(math.nan, *[1.0] * 9, math.nan).current()
    assert (again.step, again.finite_since) == (110, 0)


@pytest.mark.parametrize(
    "name", ["losses/explained_variance", "rollout/ep_rew_mean", "episode_reward_mean", "eval/score"]
)
def test_a_metric_that_is_nan_when_there_is_nothing_to_measure_is_not_in_trouble(name):
    assert _taken(math.nan, name=name).current() == ()
    assert len(_taken(-math.inf, name=name).current()) == 1


def test_a_single_return_that_is_nan_is_in_trouble():
    assert len(_taken(math.nan, name="episode/return").current()) == 1


def test_it_goes_on_after_a_restart_and_is_bounded():
    metrics = NonFiniteTracker()
    metrics.update(8, {f"m{i}": math.nan for i in range(500)})
    stored = json.loads(json.dumps(metrics.to_json(), allow_nan=False))
    assert len(stored) == 100
    again = NonFiniteTracker(stored)
    again.update(16, {"m0": math.nan, "m1": 1.0})
    assert [(one.name, one.step, one.finite_since) for one in again.current()][-1] == ("m1", 8, 1)
    assert repr(again.current()[0]) == repr(metrics.current()[0])
