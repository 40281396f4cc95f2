"""The Q-learning skills of an agent, the policies that it caches from them, and how much it trusts each.

A skill is a table of states and actions that plans use under a name: one for the whole task, one per goal, or one per
part of the task. Choice and update are those of `palaestra/kernels/tabular.py`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .worlds import load_module

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_SKILLS = 1000
_kernel: Any = load_module("tabular", "kernels", "tabular.py")


class Transition(NamedTuple):
    """One step."""

    state: int
    action: int
    reward: float
    next_state: int
    terminated: bool


@dataclass(frozen=True)
class QLearning:
    """Parameters of the Q-learning skill."""

    learning_rate: float = 0.1
    discount: float = 0.99
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_decay_steps: int = 20_000
    """Steps of a skill until its epsilon has reached the end."""
    exponential_decay: bool = False
    initial_value: float = 0.0
    confidence_window: int = 20
    """Episodes without exploration over which the success of a skill is averaged."""


@dataclass
class Skill:
    """One table."""

    q: NDArray[np.float64]
    """Values; a forbidden action has minus infinity, so that no maximum contains it."""
    steps: int = 0
    episodes: int = 0
    recent: deque[float] = field(default_factory=deque)
    """1 for success and 0 for failure, of the last episodes in which the skill acted without exploring."""

    @property
    def forbidden(self) -> NDArray[np.bool_]:
        """The actions that plans have forbidden."""
        return np.isneginf(self.q)

    @property
    def confidence(self) -> float | None:
        """Share of successes in the last episodes without exploration; None until the window is half full."""
        window = self.recent.maxlen or 1
        return sum(self.recent) / len(self.recent) if len(self.recent) >= max(1, window // 2) else None


@dataclass(frozen=True)
class CachedPolicy:
    """The actions of an episode that succeeded, and the greedy actions of the skill elsewhere."""

    actions: tuple[int, ...]
    confidence: float
    """Confidence in the skill at that moment, or 1 for a path that has just worked."""
    score: float
    """Return of that episode without its detours."""
    episode: int
    """Episode in which it was cached."""


class SkillLibrary:
    """All skills and cached policies of an agent, with one stream of random numbers."""

    def __init__(self, states: int, actions: int, parameters: QLearning, seed: int) -> None:
        self.states, self.actions, self.parameters = states, actions, parameters
        self.skills: dict[str, Skill] = {}
        self.policies: dict[str, CachedPolicy] = {}
        self.explores = True
        """False in plays with deterministic actions: epsilon is 0."""
        self._random = np.random.default_rng(seed)

    def get(self, name: str) -> Skill:
        """The skill of this name; a new one knows nothing."""
        skill = self.skills.get(name)
        if skill is None:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a skill: use a lower-case word of at most 64 characters")
            if len(self.skills) >= MAX_SKILLS:
                raise ValueError(f"the plans use more than {MAX_SKILLS} skills")
            table = np.full((self.states, self.actions), self.parameters.initial_value)
            skill = self.skills[name] = Skill(table, recent=deque(maxlen=self.parameters.confidence_window))
        return skill

    def epsilon(self, name: str) -> float:
        """The chance of a random action at this moment."""
        if not self.explores:
            return 0.0
        p = self.parameters
        steps = self.get(name).steps
        return float(
            _kernel.scheduled_value(steps, p.epsilon_start, p.epsilon_end, p.epsilon_decay_steps, p.exponential_decay)
        )

    def choose(self, name: str, state: int) -> int:
        """An epsilon-greedy action among those that are not forbidden."""
        values = self.get(name).q[self._check_state(state)]
        possible = np.flatnonzero(values != -np.inf)
        explore, pick = self._random.random(2)
        index = _kernel.epsilon_greedy_action(values[possible], self.epsilon(name), explore, pick)
        return int(possible[index])

    def choose_best(self, name: str, state: int) -> int:
        """The action with the highest value; a random one among equals."""
        return int(_kernel.greedy_action(self.get(name).q[self._check_state(state)], self._random.random()))

    def learn(self, name: str, state: int, action: int, reward: float, next_state: int, terminated: bool) -> float:
        """Update a skill with one transition and return the TD error.

        A truncated episode is not terminated. A forbidden action that was taken nevertheless stays forbidden.
        """
        skill = self.get(name)
        skill.steps += 1
        self._check_state(state), self._check_state(next_state)
        if skill.q[state, action] == -np.inf:
            return 0.0
        p = self.parameters
        return float(
            _kernel.update_q_learning(
                skill.q, state, action, reward, next_state, terminated, p.learning_rate, p.discount
            )
        )

    def forbid(self, name: str, state: int, action: int) -> bool:
        """Forbid an action in a state; False if it would be the last one that is left."""
        values = self.get(name).q[self._check_state(state)]
        others = [index for index in range(self.actions) if index != action and values[index] != -np.inf]
        if not others:
            return False
        values[action] = -np.inf
        return True

    def use_only(self, name: str, actions: tuple[int, ...]) -> None:
        """Forbid all other actions in every state."""
        if not actions or not all(0 <= action < self.actions for action in actions):
            raise ValueError(f"{actions} is not a list of actions from 0 to {self.actions - 1}")
        self.get(name).q[:, [action for action in range(self.actions) if action not in actions]] = -np.inf

    def allow_all(self, name: str) -> None:
        """Lift every prohibition of a skill."""
        skill = self.get(name)
        skill.q[skill.forbidden] = self.parameters.initial_value

    def finish_episode(self, name: str, success: bool, has_explored: bool) -> None:
        """Count an episode that used a skill; with exploration it says nothing about the skill's policy."""
        skill = self.get(name)
        skill.episodes += 1
        if not has_explored:
            skill.recent.append(float(success))

    def cache(self, name: str, episode: int, steps: Sequence[Transition]) -> CachedPolicy:
        """Cache the policy of the last episode, unless the cached one has a higher score; returns the cached one.

        In each state of the episode the policy takes the action of the last visit, which leaves out detours: where
        actions have certain results, that path is free of loops and ends as the episode did.
        """
        skill = self.get(name)
        last = {step.state: step for step in steps}
        score, state = 0.0, steps[0].state if steps else -1
        while state in last:
            step = last.pop(state)
            score, state = score + step.reward, step.next_state
        known = self.policies.get(name)
        if known is None or score >= known.score:
            actions = [int(action) for action in skill.q.argmax(axis=1)]
            for step in steps:
                actions[step.state] = step.action
            confidence = 1.0 if skill.confidence is None else skill.confidence
            known = self.policies[name] = CachedPolicy(tuple(actions), confidence, score, episode)
        return known

    def drop(self, name: str) -> bool:
        """Forget a cached policy and the confidence in its skill; False if there was none."""
        if self.policies.pop(name, None) is None:
            return False
        self.get(name).recent.clear()
        return True

    def reset_exploration(self, name: str) -> None:
        """Let a skill explore again as if it were new; it keeps its values."""
        self.get(name).steps = 0

    def _check_state(self, state: int) -> int:
        if not 0 <= state < self.states:
            raise ValueError(f"state {state} is not one of {self.states}")
        return state


def write_table(table: NDArray[np.float64]) -> list[list[float]]:
    """The values of a table for display, rounded; a forbidden action has less than the lowest value."""
    lowest = float(table[np.isfinite(table)].min(initial=0.0))
    shown: list[list[float]] = np.where(np.isneginf(table), lowest - 1.0, table).round(4).tolist()
    return shown
