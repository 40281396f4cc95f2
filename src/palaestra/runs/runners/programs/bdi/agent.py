"""An AgentSpeak agent with a body: the beliefs that an environment gives it, and the actions that its plans can use.

The same plans act in training, where `.do` performs a step of the environment, and in plays, where the play performs
it. docs/bdi.md lists beliefs and actions.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from collections import Counter
from typing import Any

import agentspeak
import agentspeak.runtime

from .skills import SkillLibrary, Transition
from .worlds import Percept, World

PERCEPT = frozenset([agentspeak.Literal("source", (agentspeak.Literal("percept"),))])
BODY_BELIEFS = frozenset(
    "state at goal step episode reward last_action over outcome bumped passenger destination states actions size move "
    "slippery stop cache_threshold has_policy".split()
)
"""Names of beliefs that the body maintains; all others are added by the plans."""
MAX_BELIEFS = 200
MAX_DEPTH = 10_000
"""Goals within goals. A plan that repeats itself by recursion, for example per episode, nests one more each time."""
_DEPTH_SHOWN = 100
_SOURCES = ("agentspeak.runtime", "agentspeak.parser", "agentspeak.lexer", "agentspeak")


class PlanError(Exception):
    """The plans cannot be used, or failed; the message names file and line."""


class LogCapture(logging.Handler):
    """Collects what agentspeak logs, because its exceptions only count errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[int, str]] = []
        """Level and text, with file and line."""
        for name in _SOURCES:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = False
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        place = getattr(record, "loc", None)
        where = f"{place.filename}:{place.lineno}: " if place else ""
        cause = record.exc_info[1] if record.exc_info else None
        if cause is None:
            text = record.getMessage()
        else:
            text = str(cause) if isinstance(cause, PlanError) else f"{type(cause).__name__}: {cause}"
        self.lines.append((record.levelno, where + text))

    def take(self) -> list[str]:
        """The errors, and the warnings about actions that do not exist; clears them."""
        lines, self.lines = self.lines, []
        return [text for level, text in lines if level >= logging.ERROR or "no such action" in text]


class TracedAgent(agentspeak.runtime.Agent):  # type: ignore[misc]  # the library has no types
    """An agent that knows which plan each of its intentions executes, and that can recover from a failed plan."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._labels: dict[int, str] = {}
        self.rule_places: dict[tuple[str, int], str] = {}
        """File and line of the first rule, by its name and number of arguments."""
        self.recovered_failures = 0
        """Plans that failed and were replaced by a plan for `-!goal`."""

    def add_plan(self, plan: Any) -> None:
        """Add a plan under its label, or under its trigger."""
        super().add_plan(plan)
        trigger = f"{plan.trigger.value}{plan.goal_type.value}{plan.head.functor}"
        self._labels[id(plan.body)] = str(plan.annotation.functor) if plan.annotation else trigger

    @property
    def labels(self) -> list[str]:
        """The labels of all plans."""
        return list(self._labels.values())

    def call(self, trigger: Any, goal_type: Any, term: Any, calling_intention: Any, delayed: bool = False) -> Any:
        """Select a plan, and note its label in the new intention. `PlanError` if goals nest without end."""
        if any(len(stack) >= MAX_DEPTH and stack[-1] is calling_intention for stack in self.intentions):
            # Not an AslError: a plan for `-!goal` cannot recover from it without nesting again.
            event = f"{trigger.value}{goal_type.value}{term.functor}"
            reason = f"{event} is nested in {MAX_DEPTH:,} goals, and no more are possible"
            raise PlanError(f"{reason}: repeat with while instead of a goal that calls itself")
        result = super().call(trigger, goal_type, term, calling_intention, delayed)
        for stack in self.intentions:
            if stack and not hasattr(stack[-1], "label"):
                stack[-1].label = self._labels.get(id(stack[-1].instr), "")
                stack[-1].can_recover = goal_type == agentspeak.GoalType.achievement
        return result

    def recover(self) -> bool:
        """Replace the plan that has just failed by a plan for `-!goal` of its goal, or of a goal that it belongs to.

        The library parses such plans and never executes them. False if none applies.
        """
        stack = next(stack for stack in self.intentions if stack and stack[-1].waiter is None)
        for depth in reversed(range(len(stack))):
            failed = stack[depth]
            # A plan for `-!goal` that fails itself is a failure of the goal above.
            recovery = self._select_recovery(failed) if getattr(failed, "can_recover", False) else None
            if recovery is not None:
                while len(stack) > depth:
                    stack.pop()
                stack.append(recovery)
                self.recovered_failures += 1
                return True
        return False

    def _select_recovery(self, failed: Any) -> Any:
        """An intention with the first applicable plan for the failure of a goal; None if there is none."""
        goal = failed.head_term
        key = (agentspeak.Trigger.removal, agentspeak.GoalType.achievement, goal.functor, len(goal.args))
        for plan in self.plans.get(key, ()):
            intention = agentspeak.runtime.Intention()
            for _ in agentspeak.unify_annotated(plan.head, goal, intention.scope, intention.stack):
                for _ in plan.context.execute(self, intention):
                    intention.head_term, intention.calling_term = goal, failed.calling_term
                    intention.instr, intention.label = plan.body, self._labels[id(plan.body)]
                    return intention
        return None

    def describe_intentions(self) -> list[dict[str, str]]:
        """The goal and the plan of every intention, from the outermost one on; of a deep one only the first levels."""
        return [
            {"goal": write_term(intention.head_term), "plan": getattr(intention, "label", "")}
            for stack in self.intentions
            for intention in itertools.islice(stack, _DEPTH_SHOWN)
            if intention.head_term is not None
        ]


class Body:
    """Connects an agent with an environment and with its skills, and counts what it does."""

    def __init__(self, world: World, library: SkillLibrary, *, episodes: int, seed: int, threshold: float) -> None:
        self.world, self.library = world, library
        self.max_episodes, self.threshold = episodes, threshold
        self.agent: Any = None
        self.stop_requested = False
        self.is_external = False
        """Whether a play performs the actions: `.do` then only says which one."""
        self.pending_action: int | None = None
        self.episode = self.env_step = self.length = 0
        self.episode_return = 0.0
        self.is_over = True
        self.outcome = ""
        self.steps: list[Transition] = []
        """The steps of this episode."""
        self.plan = self.chooser = ""
        self.choosers: Counter[str] = Counter()
        """Number of actions chosen by a `plan`, a cached `policy` or a `skill`."""
        self.actions_by_plan: Counter[str] = Counter()
        """Actions by the label of the plan that chose them."""
        self.td_errors: list[float] = []
        self.repairs = 0
        self.used_skills: set[str] = set()
        """Skills used in this episode."""
        self.exploring_skills: set[str] = set()
        """Skills that explored in this episode."""
        self.last_skill = ""
        """The skill that plans used last; empty before the first."""
        self.row: int | None = None
        """The row of its table that the last choice looked at; None if the plans chose without it."""
        self._seed: int | None = seed
        self.on_episode: Any = lambda: None
        self.on_step: Any = lambda: None
        """Called after a step that does not end the episode."""

    @property
    def finished_episodes(self) -> int:
        """Episodes that are over."""
        return self.episode if self.is_over else self.episode - 1

    @property
    def has_more_episodes(self) -> bool:
        """Whether another episode may begin."""
        return not self.stop_requested and self.episode < self.max_episodes

    def attach(self, agent: Any, beliefs: list[str]) -> None:
        """Give an agent its body, the facts of the world, and the beliefs of its checkpoint."""
        self.agent = agent
        for percept in [*self.world.facts(), Percept("cache_threshold", (self.threshold,))]:
            self.agent.beliefs[percept.name, len(percept.values)].add(
                agentspeak.Literal(percept.name, percept.values, PERCEPT)
            )
        for term in parse_beliefs(beliefs):
            self.agent.beliefs[term.literal_group()].add(term)
        for name, policy in self.library.policies.items():
            self.believe_policy(name, policy.confidence)

    def begin_episode(self) -> None:
        """Reset the environment."""
        if not self.is_over:
            raise agentspeak.AslError("the episode is not over: .begin_episode has to wait until the belief over holds")
        self.world.reset(self._seed)
        self._seed = None
        self.episode += 1
        self.length, self.episode_return, self.outcome = 0, 0.0, ""
        self.is_over = False
        self.steps.clear()
        self.used_skills.clear()
        self.exploring_skills.clear()
        for name, arity in (("over", 0), ("outcome", 1), ("bumped", 1), ("last_action", 1), ("reward", 1)):
            self._forget(name, arity)
        self.perceive([Percept("episode", (self.episode,))])
        self._perceive_state()

    def perform(self, action: int) -> None:
        """Do what a plan has chosen."""
        if self.is_over:
            raise agentspeak.AslError("the episode is over: .do needs .begin_episode first")
        if not 0 <= action < self.world.actions:
            raise agentspeak.AslError(f"action {action} is not one of 0 to {self.world.actions - 1}")
        self.plan = self._current_plan()
        self.actions_by_plan[self.plan] += 1
        self.choosers[self.chooser or "plan"] += 1
        self.chooser = ""
        if self.is_external:
            self.pending_action = action
            return
        before = self.world.state
        result = self.world.step(action)
        self.env_step += 1
        self.length += 1
        self.episode_return += result.reward
        self.steps.append(Transition(before, action, result.reward, result.state, result.terminated))
        self.perceive([Percept("last_action", (action,)), Percept("reward", (result.reward,))])
        self._perceive_state()
        if result.state == before and not result.terminated:
            self.perceive([Percept("bumped", (action,))])
        else:
            self._forget("bumped", 1)
        if result.terminated or result.truncated:
            self._end_episode(result.terminated)
        else:
            self.on_step()

    def _end_episode(self, terminated: bool) -> None:
        success = self.world.is_success
        self.outcome = "success" if success else "failure" if terminated else "timeout"
        self.is_over = True
        for name in self.used_skills:
            self.library.finish_episode(name, success, name in self.exploring_skills)
        self.perceive([Percept("outcome", (agentspeak.Literal(self.outcome),)), Percept("over")])
        self.on_episode()

    def learn(self, name: str, view: tuple[int, int, bool] | None = None) -> None:
        """Let a skill learn from the last step; a view replaces its states and says whether its part is over."""
        self.last_skill = name
        if self.is_external:
            return
        if not self.steps:
            raise agentspeak.AslError("no step of this episode to learn from: .learn needs .do first")
        state, action, reward, next_state, terminated = self.steps[-1]
        if view is not None:
            state, next_state, terminated = view
        self.used_skills.add(name)
        self.td_errors.append(abs(self.library.learn(name, state, action, reward, next_state, terminated)))

    def believe_policy(self, name: str, confidence: float | None) -> None:
        """Replace the belief `has_policy` of a skill; without a confidence, remove it."""
        beliefs = self.agent.beliefs["has_policy", 2]
        for belief in [belief for belief in beliefs if skill_name(belief.args[0], {}) == name]:
            beliefs.discard(belief)
        if confidence is not None:
            beliefs.add(agentspeak.Literal("has_policy", (name_term(name), round(confidence, 4)), PERCEPT))

    def perceive(self, percepts: list[Percept]) -> None:
        """Replace beliefs. Plans that wait for the event are called; without such a plan the belief just changes."""
        for name, values in percepts:
            key = (name, len(values))
            term = agentspeak.Literal(name, values, PERCEPT)
            if self.agent.plans.get((agentspeak.Trigger.addition, agentspeak.GoalType.belief, *key)):
                if term not in self.agent.beliefs[key]:
                    self.agent.beliefs[key].clear()
                    self.agent.call(
                        agentspeak.Trigger.addition, agentspeak.GoalType.belief, term, agentspeak.runtime.Intention()
                    )
            else:
                self.agent.beliefs[key] = {term}

    def beliefs(self) -> list[str]:
        """All beliefs as text, sorted, without their source."""
        texts = [write_term(belief) for group in list(self.agent.beliefs.values()) for belief in group]
        return sorted(texts)[:MAX_BELIEFS]

    def learned_beliefs(self) -> list[str]:
        """Beliefs that the plans added, as text."""
        return sorted(
            write_term(belief)
            for (name, _), group in self.agent.beliefs.items()
            for belief in group
            if name not in BODY_BELIEFS
        )

    def confidence(self) -> float | None:
        """The confidence in the skill that was used last; None as long as it is unknown."""
        skill = self.library.skills.get(self.last_skill)
        return None if skill is None else skill.confidence

    def _perceive_state(self) -> None:
        self.perceive([*self.world.percepts(), Percept("step", (self.length,))])

    def take_choice(self) -> int | None:
        """The action that the plans have chosen for a play; None if they have not chosen since the last call."""
        choice, self.pending_action = self.pending_action, None
        return choice

    def observe(self, state: int) -> None:
        """Take a state from a play."""
        self.world.state = state
        self._perceive_state()

    def _forget(self, name: str, arity: int) -> None:
        self.agent.beliefs[name, arity] = set()

    def _current_plan(self) -> str:
        """The innermost plan with a label of its own, of the intention that acts."""
        for stack in self.agent.intentions:
            if stack and stack[-1].waiter is None:
                labels = (getattr(intention, "label", "") for intention in reversed(stack))
                own = (label for label in labels if not label.startswith(("+", "-")))
                return next(own, getattr(stack[-1], "label", ""))
        return ""


def build_agent(asl: str, file_name: str, body: Body, actions: Any, capture: LogCapture, beliefs: list[str]) -> Any:
    """Build the agent of a plan file. `PlanError` with file and line if it cannot be parsed."""
    source, log = agentspeak.StringSource(file_name, asl), agentspeak.Log(logging.getLogger("agentspeak"), 3)
    rules: dict[tuple[str, int], str] = {}
    try:
        tree = agentspeak.parser.parse(file_name, agentspeak.lexer.TokenStream(source, log), log)
        log.throw()
        for rule in reversed(tree.rules):
            rules[rule.head.functor, len(rule.head.terms)] = f"{rule.head.loc.filename}:{rule.head.loc.lineno}"
        environment = agentspeak.runtime.Environment()
        _, agent = environment.build_agent_from_ast(source, tree, actions, TracedAgent, "agent")
    except (agentspeak.AggregatedError, agentspeak.AslError) as error:
        raise PlanError("; ".join(capture.take()) or f"{file_name}: {error}") from None
    except RecursionError as error:
        reason = _describe_recursion(error, rules) or f"{file_name}: an expression is nested too deeply"
        raise PlanError(reason) from None
    agent.rule_places = rules
    problems = capture.take()
    if problems:
        raise PlanError("; ".join(problems))
    if not agent.intentions:
        raise PlanError(f"{file_name}: has no initial goal, so the agent would do nothing: add a line like !live.")
    body.attach(agent, beliefs)
    return agent


def _describe_recursion(error: RecursionError, rules: dict[tuple[str, int], str]) -> str | None:
    """The rule that has exhausted the stack of the interpreter, with file and line; None if it was none."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        query = frame.f_locals.get("self")
        if isinstance(query, agentspeak.runtime.TermQuery) and agentspeak.is_literal(query.term):
            name, arity = query.term.literal_group()
            if (name, arity) in rules:
                return f"{rules[name, arity]}: the rules of {name}/{arity} use themselves without end, or too often"
    return None


def parse_beliefs(texts: list[str]) -> list[Any]:
    """Literals from their text, as `Body.learned_beliefs` writes them."""
    source = agentspeak.StringSource("beliefs", "\n".join(f"{text}." for text in texts))
    log = agentspeak.Log(logging.getLogger("agentspeak"), 1)
    tree = agentspeak.parser.parse("beliefs", agentspeak.lexer.TokenStream(source, log), log)
    log.throw()
    return [belief.accept(agentspeak.runtime.BuildTermVisitor({})) for belief in tree.beliefs]


def write_term(term: Any) -> str:
    """A term as AgentSpeak text, without annotations: at(3,4)."""
    if not agentspeak.is_literal(term):
        return str(agentspeak.asl_repr(term))
    values = ",".join(write_term(value) for value in term.args)
    return f"{term.functor}({values})" if term.args else str(term.functor)


def skill_name(term: Any, scope: Any) -> str:
    """The name of a skill: `ice`, or `goal_7_3` for the term goal(7,3)."""
    term = agentspeak.grounded(term, scope)
    if not agentspeak.is_literal(term):
        return str(term)
    return "_".join([term.functor, *(agentspeak.asl_str(value) for value in term.args)]).lower()


def name_term(name: str) -> Any:
    """The term of a skill's name: goal(7,3) for `goal_7_3`."""
    word, *values = name.split("_")
    if values and all(value.isdecimal() for value in values):
        return agentspeak.Literal(word, tuple(int(value) for value in values))
    return agentspeak.Literal(name)


def step_agent(agent: Any, capture: LogCapture) -> bool:
    """Execute one instruction; False if nothing is ready.

    `PlanError` with file and line if a plan fails and no plan for the failure of its goal applies.
    """
    try:
        return bool(agent.step())
    except (agentspeak.AggregatedError, agentspeak.AslError) as error:
        reason = "; ".join(capture.take()) or str(error)
        if isinstance(error.__context__, RecursionError):
            reason = _describe_recursion(error.__context__, agent.rule_places) or reason
        # Other exceptions are faults of a program, not of a plan.
        if isinstance(error.__context__, agentspeak.AslError) and agent.recover():
            return True
        raise PlanError(reason) from None
