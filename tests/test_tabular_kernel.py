"""Tabular kernels: choice of actions, updates with numbers checked by hand, schedules, and use without the package."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from palaestra.kernels import tabular
from palaestra.kernels.compile import compile_kernel


def _table():
    return np.array([[0.0, 1.0], [2.0, 4.0], [8.0, 16.0]])


def test_the_greedy_action_has_the_highest_value():
    assert tabular.greedy_action(np.array([1.0, 3.0, 2.0]), 0.999) == 1


def test_equal_values_are_chosen_equally_often():
    uniforms = (np.arange(300) + 0.5) / 300
    chosen = Counter(tabular.greedy_action(np.array([5.0, 1.0, 5.0, 5.0]), u) for u in uniforms)
    assert chosen == {0: 100, 2: 100, 3: 100}


def test_exploration_draws_every_action_equally_often_and_ignores_the_values():
    uniforms = (np.arange(300) + 0.5) / 300
    values = np.array([5.0, 1.0, 2.0])
    assert Counter(tabular.epsilon_greedy_action(values, 0.1, 0.09, u) for u in uniforms) == {0: 100, 1: 100, 2: 100}
    assert Counter(tabular.epsilon_greedy_action(values, 0.1, 0.1, u) for u in uniforms) == {0: 300}


def test_epsilon_zero_never_explores_and_one_always_does():
    assert tabular.epsilon_greedy_action(np.array([0.0, 1.0]), 0.0, 0.0, 0.0) == 1
    assert tabular.epsilon_greedy_action(np.array([0.0, 1.0]), 1.0, 0.999, 0.0) == 0


def test_a_table_without_numbers_is_an_error_and_not_an_action():
    with pytest.raises(ValueError, match="not a number"):
        tabular.greedy_action(np.array([np.nan, np.nan]), 0.5)
    with pytest.raises(ValueError, match="not a number"):
        tabular.epsilon_greedy_action(np.array([np.nan, np.nan]), 0.0, 0.5, 0.5)


def test_q_learning_bootstraps_from_the_best_next_action():
    table = _table()
    # 1 + 0.5 * max(8, 16) = 9; the error is 9 - 2 = 7; a quarter of it is 1.75.
    assert tabular.update_q_learning(table, 1, 0, 1.0, 2, False, 0.25, 0.5) == 7.0
    assert table.tolist() == [[0.0, 1.0], [3.75, 4.0], [8.0, 16.0]]


def test_sarsa_bootstraps_from_the_chosen_next_action():
    table = _table()
    # 1 + 0.5 * 8 = 5; the error is 5 - 2 = 3; a quarter of it is 0.75.
    assert tabular.update_sarsa(table, 1, 0, 1.0, 2, 0, False, 0.25, 0.5) == 3.0
    assert table.tolist() == [[0.0, 1.0], [2.75, 4.0], [8.0, 16.0]]


def test_a_terminated_transition_has_no_future():
    for update in (
        lambda table: tabular.update_q_learning(table, 1, 0, 1.0, 2, True, 0.25, 0.5),
        lambda table: tabular.update_sarsa(table, 1, 0, 1.0, 2, 0, True, 0.25, 0.5),
    ):
        table = _table()
        assert update(table) == -1.0
        assert table[1, 0] == 1.75


def test_transitions_are_applied_in_order_so_a_later_one_sees_the_earlier_update():
    table = np.zeros((3, 2))
    states, actions, next_states = np.array([1, 0]), np.array([0, 1]), np.array([2, 1])
    rewards, terminated = np.array([8.0, 0.0]), np.array([True, False])
    # First Q(1, 0) = 0.5 * 8 = 4; then Q(0, 1) = 0.5 * (0.5 * 4) = 1. The errors are 8 and 2.
    mean = tabular.update_q_learning_in_order(table, states, actions, rewards, next_states, terminated, 0.5, 0.5)
    assert mean == 5.0
    assert table.tolist() == [[0.0, 1.0], [4.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_stretch_equals_the_same_transitions_one_at_a_time(compiled):
    random = np.random.default_rng(3)
    states, next_states = random.integers(0, 5, (2, 200))
    actions, next_actions = random.integers(0, 3, (2, 200))
    rewards, terminated = random.normal(size=200), random.random(200) < 0.2
    one, many = np.zeros((5, 3)), np.zeros((5, 3))
    build = compile_kernel if compiled else lambda function: function
    stretch = build(tabular.update_sarsa_in_order)
    stretch(many, states, actions, rewards, next_states, next_actions, terminated, 0.1, 0.9)
    rows = zip(states, actions, rewards, next_states, next_actions, terminated, strict=True)
    for state, action, reward, next_state, next_action, end in rows:
        tabular.update_sarsa(one, state, action, reward, next_state, next_action, end, 0.1, 0.9)
    np.testing.assert_allclose(many, one, rtol=1e-12)
    q_one, q_many = np.zeros((5, 3)), np.zeros((5, 3))
    build(tabular.update_q_learning_in_order)(q_many, states, actions, rewards, next_states, terminated, 0.1, 0.9)
    for state, action, reward, next_state, end in zip(states, actions, rewards, next_states, terminated, strict=True):
        tabular.update_q_learning(q_one, state, action, reward, next_state, end, 0.1, 0.9)
    np.testing.assert_allclose(q_many, q_one, rtol=1e-12)
    assert not np.allclose(q_many, many)


def test_a_linear_schedule_takes_equal_steps_and_an_exponential_one_equal_ratios():
    linear = [tabular.scheduled_value(step, 1.0, 0.2, 4, False) for step in range(6)]
    np.testing.assert_allclose(linear, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    exponential = [tabular.scheduled_value(step, 1.0, 0.0625, 4, True) for step in range(6)]
    np.testing.assert_allclose(exponential, [1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625])
    assert tabular.scheduled_value(0, 1.0, 0.2, 0, False) == 0.2


def test_an_interpreter_without_the_package_loads_the_file_by_its_path():
    program = """
import importlib.util, json, sys
sys.modules["palaestra"] = sys.modules["numba"] = None
import numpy as np
spec = importlib.util.spec_from_file_location("tabular_file", sys.argv[1])
tabular = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tabular)
table = np.zeros((2, 2))
tabular.update_q_learning(table, 0, 1, 1.0, 1, True, 0.5, 0.9)
print(json.dumps([table.tolist(), tabular.greedy_action(table[0], 0.0)]))
"""
    path = Path(tabular.__file__)
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [[[0.0, 0.5], [0.0, 0.0]], 1]
