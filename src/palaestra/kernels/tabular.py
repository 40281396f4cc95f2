"""Tabular Q-learning and SARSA: choice of actions, updates of the table and schedules, as plain functions of arrays.

The table has one row per state and one column per action, in float64. Random numbers are arguments (uniform in [0, 1)),
so every function is deterministic. Nothing is imported, and no function calls another: an interpreter without this
package loads the file by its path, and `compile_kernel` compiles each function as it stands.
"""

from __future__ import annotations


def greedy_action(values, uniform):
    """Return the action with the highest value; `uniform` selects among equal values, each with the same chance.

    Without it, a table of zeros would always take action 0.
    """
    best = values[0]
    ties = 1
    for action in range(1, values.shape[0]):
        if values[action] > best:
            best = values[action]
            ties = 1
        elif values[action] == best:
            ties += 1
    skip = int(uniform * ties)
    for action in range(values.shape[0]):
        if values[action] == best:
            if skip == 0:
                return action
            skip -= 1
    raise ValueError("the table holds a value that is not a number")


def epsilon_greedy_action(values, epsilon, explore_uniform, action_uniform):
    """Return a random action if `explore_uniform` is below `epsilon`, otherwise a greedy one.

    `action_uniform` selects the random action, or one of the greedy actions as in `greedy_action`.
    """
    if explore_uniform < epsilon:
        return int(action_uniform * values.shape[0])
    best = values[0]
    ties = 1
    for action in range(1, values.shape[0]):
        if values[action] > best:
            best = values[action]
            ties = 1
        elif values[action] == best:
            ties += 1
    skip = int(action_uniform * ties)
    for action in range(values.shape[0]):
        if values[action] == best:
            if skip == 0:
                return action
            skip -= 1
    raise ValueError("the table holds a value that is not a number")


def update_q_learning(table, state, action, reward, next_state, terminated, learning_rate, discount):
    """Move one entry towards `reward + discount * max Q(next_state)`; return the TD error.

    A terminated transition has no future. A truncated one has: pass `terminated=False` for it.
    """
    target = reward
    if not terminated:
        target += discount * table[next_state].max()
    error = target - table[state, action]
    table[state, action] += learning_rate * error
    return error


def update_sarsa(table, state, action, reward, next_state, next_action, terminated, learning_rate, discount):
    """Move one entry towards `reward + discount * Q(next_state, next_action)`; return the TD error.

    `next_action` is the action that the policy chooses in `next_state`; it is not read after termination. A truncated
    transition needs one although no step follows it.
    """
    target = reward
    if not terminated:
        target += discount * table[next_state, next_action]
    error = target - table[state, action]
    table[state, action] += learning_rate * error
    return error


def update_q_learning_in_order(table, states, actions, rewards, next_states, terminated, learning_rate, discount):
    """Apply `update_q_learning` to transitions in the order of time; return the mean absolute TD error."""
    total = 0.0
    for i in range(states.shape[0]):
        target = rewards[i]
        if not terminated[i]:
            target += discount * table[next_states[i]].max()
        error = target - table[states[i], actions[i]]
        table[states[i], actions[i]] += learning_rate * error
        total += abs(error)
    return total / max(states.shape[0], 1)


def update_sarsa_in_order(
    table, states, actions, rewards, next_states, next_actions, terminated, learning_rate, discount
):
    """Apply `update_sarsa` to transitions in the order of time; return the mean absolute TD error."""
    total = 0.0
    for i in range(states.shape[0]):
        target = rewards[i]
        if not terminated[i]:
            target += discount * table[next_states[i], next_actions[i]]
        error = target - table[states[i], actions[i]]
        table[states[i], actions[i]] += learning_rate * error
        total += abs(error)
    return total / max(states.shape[0], 1)


def scheduled_value(step, start, end, duration, exponential):
    """Return `start` at step 0 and `end` from step `duration` on; linear or exponential (equal ratios) in between.

    Both values must be positive if `exponential` is true.
    """
    if step >= duration:
        return float(end)
    fraction = step / duration
    if exponential:
        return start * (end / start) ** fraction
    return start + (end - start) * fraction
