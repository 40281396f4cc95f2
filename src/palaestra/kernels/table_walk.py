"""Compiled kernels of tabular learning: walking through a table of transitions, and the updates of `kernels.tabular`.

A Markov decision process is four flat arrays of outcomes (cumulative probability, next state, reward, termination),
`first[s, a]`, the place of the first outcome of action `a` in state `s` (`first[s, a + 1]` is the end), and the
cumulative probability of first states. Random numbers are taken from arrays in the order in which Gymnasium's toy text
environments draw them: one for each step, one for each reset. So a walk visits the same states as the environment with
the same generator.
"""

from __future__ import annotations

from palaestra.kernels import tabular
from palaestra.kernels.compile import compile_kernel

choose_action = compile_kernel(tabular.epsilon_greedy_action)
update_q_learning = compile_kernel(tabular.update_q_learning_in_order)
update_sarsa = compile_kernel(tabular.update_sarsa_in_order)


@compile_kernel
def _draw(cumulative, first, end, uniform):
    for i in range(first, end):
        if cumulative[i] > uniform:
            return i
    return first  # rounding: the probabilities sum to a little less than 1


@compile_kernel
def walk_table(table, epsilon, process, limit, position, episode_return, uniforms, columns, ends, chooses_next):
    """Fill `columns` with consecutive transitions of an epsilon-greedy walk; returns the number of ended episodes.

    `position` holds, and receives, the state, the steps of the episode, the action chosen for this state (-1: none) and
    how many random numbers of the environment and of the policy were used.
    With `chooses_next`, the action of the next step is chosen when its state is reached, also after a truncation, and
    written to `next_action`. `ends` are arrays of the ended episodes: index of their last step, return and length.
    """
    first, cumulative, next_states, rewards, terminations, initial = process
    env_uniforms, policy_uniforms = uniforms
    states, actions, reward_column, following, terminated, next_actions = columns
    last_steps, returns, lengths = ends
    state, elapsed, pending = position[0], position[1], position[2]
    env_at, policy_at, count = position[3], position[4], 0
    for t in range(states.shape[0]):
        action = pending
        if action < 0:
            action = choose_action(table[state], epsilon, policy_uniforms[policy_at], policy_uniforms[policy_at + 1])
            policy_at += 2
        pending = -1
        outcome = _draw(cumulative, first[state, action], first[state, action + 1], env_uniforms[env_at])
        env_at += 1
        states[t], actions[t], reward_column[t] = state, action, rewards[outcome]
        following[t], terminated[t] = next_states[outcome], terminations[outcome]
        state = next_states[outcome]
        elapsed += 1
        episode_return[0] += rewards[outcome]
        next_actions[t] = 0
        if chooses_next and not terminations[outcome]:
            pending = choose_action(table[state], epsilon, policy_uniforms[policy_at], policy_uniforms[policy_at + 1])
            policy_at += 2
            next_actions[t] = pending
        if terminations[outcome] or elapsed >= limit:
            last_steps[count], returns[count], lengths[count] = t, episode_return[0], elapsed
            count += 1
            state, elapsed, pending, episode_return[0] = (
                _draw(initial, 0, initial.shape[0], env_uniforms[env_at]),
                0,
                -1,
                0.0,
            )
            env_at += 1
    position[0], position[1], position[2], position[3], position[4] = state, elapsed, pending, env_at, policy_at
    return count
