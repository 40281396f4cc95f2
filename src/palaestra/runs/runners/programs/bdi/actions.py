"""The actions that plans can use. Each one succeeds or fails; one that gives something binds its last argument.

.begin_episode   .do(A)   .more_episodes
.rl_action(Skill, A)   .rl_action(Skill, S, A)   .best_action(Skill, A)   .best_action(Skill, S, A)
.learn(Skill)   .learn(Skill, From, To, Over)   .forbid(Skill, S, A)   .use_only(Skill, Actions)   .allow_all(Skill)
.confidence(Skill, C)   .score(Skill, R)   .cache_policy(Skill)   .policy_action(Skill, A)
.follow_policy(Skill, Steps)   .drop_policy(Skill)   .explore_again(Skill)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import agentspeak
import agentspeak.runtime
import agentspeak.stdlib

from .agent import Body, skill_name


class PlanActions:
    """The actions of one body. A method gets the intention and the arguments, and returns whether it succeeded."""

    def __init__(self, body: Body) -> None:
        self._body, self._library = body, body.library

    def add_to(self, table: Any = None) -> Any:
        """Add them to a table of agentspeak, else to a copy of its own actions; returns the table."""
        table = agentspeak.Actions(agentspeak.stdlib.actions) if table is None else table
        methods: dict[tuple[str, int], Callable[..., bool]] = {
            (".more_episodes", 0): lambda _: self._body.has_more_episodes,
            (".begin_episode", 0): self._begin_episode,
            (".do", 1): self._do,
            (".rl_action", 2): self._explore,
            (".rl_action", 3): self._explore_in,
            (".best_action", 2): self._choose_best,
            (".best_action", 3): self._choose_best_in,
            (".learn", 1): self._learn,
            (".learn", 4): self._learn_in,
            (".forbid", 3): self._forbid,
            (".use_only", 2): self._use_only,
            (".allow_all", 1): self._allow_all,
            (".confidence", 2): self._confidence,
            (".score", 2): self._score,
            (".cache_policy", 1): self._cache_policy,
            (".policy_action", 2): self._policy_action,
            (".follow_policy", 2): self._follow_policy,
            (".drop_policy", 1): self._drop_policy,
            (".explore_again", 1): self._explore_again,
        }
        for (name, arity), method in methods.items():
            table.add(name, arity)(_as_action(method))
        return table

    def _begin_episode(self, intention: Any) -> bool:
        self._body.begin_episode()
        return True

    def _do(self, intention: Any, action: Any) -> bool:
        self._body.perform(self._action(action, intention))
        return True

    def _explore(self, intention: Any, skill: Any, action: Any) -> bool:
        return self._choose(intention, skill, self._body.world.state, action, explores=True)

    def _explore_in(self, intention: Any, skill: Any, state: Any, action: Any) -> bool:
        return self._choose(intention, skill, self._state(state, intention), action, explores=True)

    def _choose_best(self, intention: Any, skill: Any, action: Any) -> bool:
        return self._choose(intention, skill, self._body.world.state, action, explores=False)

    def _choose_best_in(self, intention: Any, skill: Any, state: Any, action: Any) -> bool:
        return self._choose(intention, skill, self._state(state, intention), action, explores=False)

    def _choose(self, intention: Any, skill: Any, state: int, action: Any, *, explores: bool) -> bool:
        name = skill_name(skill, intention.scope)
        self._body.chooser, self._body.last_skill, self._body.row = "skill", name, state
        if explores:
            self._body.exploring_skills.add(name)
        choose = self._library.choose if explores else self._library.choose_best
        return _bind(action, choose(name, state), intention)

    def _learn(self, intention: Any, skill: Any) -> bool:
        self._body.learn(skill_name(skill, intention.scope))
        return True

    def _learn_in(self, intention: Any, skill: Any, state: Any, next_state: Any, over: Any) -> bool:
        is_over = agentspeak.grounded(over, intention.scope) is True
        view = (self._state(state, intention), self._state(next_state, intention), is_over)
        self._body.learn(skill_name(skill, intention.scope), view)
        return True

    def _forbid(self, intention: Any, skill: Any, state: Any, action: Any) -> bool:
        name = skill_name(skill, intention.scope)
        self._library.forbid(name, self._state(state, intention), self._action(action, intention))
        return True

    def _use_only(self, intention: Any, skill: Any, actions: Any) -> bool:
        values = agentspeak.grounded(actions, intention.scope)
        if not agentspeak.is_list(values):
            raise ValueError(f"{agentspeak.asl_repr(values)} is not a list of actions, such as [0, 1]")
        allowed = tuple(self._action(value, intention) for value in values)
        self._library.use_only(skill_name(skill, intention.scope), allowed)
        return True

    def _allow_all(self, intention: Any, skill: Any) -> bool:
        self._library.allow_all(skill_name(skill, intention.scope))
        return True

    def _confidence(self, intention: Any, skill: Any, confidence: Any) -> bool:
        value = self._library.get(skill_name(skill, intention.scope)).confidence
        return value is not None and _bind(confidence, value, intention)

    def _score(self, intention: Any, skill: Any, score: Any) -> bool:
        policy = self._library.policies.get(skill_name(skill, intention.scope))
        return policy is not None and _bind(score, policy.score, intention)

    def _cache_policy(self, intention: Any, skill: Any) -> bool:
        name, body = skill_name(skill, intention.scope), self._body
        if not body.is_external:
            body.believe_policy(name, self._library.cache(name, body.episode, body.steps).confidence)
        return True

    def _policy_action(self, intention: Any, skill: Any, action: Any) -> bool:
        name, body = skill_name(skill, intention.scope), self._body
        policy = self._library.policies.get(name)
        if policy is None:
            return False
        body.chooser, body.last_skill, body.row = "policy", name, body.world.state
        return _bind(action, policy.actions[body.world.state], intention)

    def _follow_policy(self, intention: Any, skill: Any, steps: Any) -> bool:
        name, body = skill_name(skill, intention.scope), self._body
        policy = self._library.policies.get(name)
        if policy is None:
            return False
        for _ in range(_number(steps, intention, "the number of steps")):
            if body.is_over or body.pending_action is not None:
                break
            body.chooser, body.last_skill, body.row = "policy", name, body.world.state
            body.perform(policy.actions[body.world.state])
            body.learn(name)
        return True

    def _drop_policy(self, intention: Any, skill: Any) -> bool:
        name = skill_name(skill, intention.scope)
        if self._library.drop(name):
            self._body.repairs += 1
        self._body.believe_policy(name, None)
        return True

    def _explore_again(self, intention: Any, skill: Any) -> bool:
        self._library.reset_exploration(skill_name(skill, intention.scope))
        return True

    def _action(self, term: Any, intention: Any) -> int:
        return _number(term, intention, "action", self._library.actions)

    def _state(self, term: Any, intention: Any) -> int:
        return _number(term, intention, "state", self._library.states)


def _as_action(method: Callable[..., bool]) -> Callable[[Any, Any, Any], Iterator[None]]:
    """A generator as agentspeak calls it: it yields once if the method succeeds."""

    def run(agent: Any, term: Any, intention: Any) -> Iterator[None]:
        try:
            succeeded = method(intention, *term.args)
        except ValueError as error:
            raise agentspeak.AslError(str(error)) from None
        if succeeded:
            yield

    return run


def _number(term: Any, intention: Any, kind: str, count: int | None = None) -> int:
    """A whole number, below `count` if that is given. A quotient such as 4 / 2 is one, although it is a float."""
    value = agentspeak.evaluate(agentspeak.grounded(term, intention.scope), intention.scope)
    if not agentspeak.is_number(value) or value != value // 1:
        expected = "a whole number" if count is None else f"a whole number from 0 to {count - 1}"
        raise ValueError(f"{kind} {agentspeak.asl_repr(value)} is not {expected}")
    if count is not None and not 0 <= value < count:
        raise ValueError(f"{kind} {int(value)} is not one of 0 to {count - 1}")
    return int(value)


def _bind(term: Any, value: Any, intention: Any) -> bool:
    return bool(agentspeak.unify(term, value, intention.scope, intention.stack))
