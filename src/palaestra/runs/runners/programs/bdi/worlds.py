"""What an agent perceives of an environment: facts about the world, and beliefs that change with every step.

Positions are column and row, counted from the top left cell. Facts never reveal what the agent has to find out: the
holes of a lake and the walls of a grid world become beliefs when it meets them.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

_PACKAGE = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
)
GRID_WORLD_ID = "palaestra/GridWorld-v0"
MAX_EPISODE_STEPS = 500
TAXI_STOPS = ((0, 0), (4, 0), (0, 4), (3, 4))
"""Column and row of the stops red, green, yellow and blue."""
_TAXI_DELIVERED = 20.0


class Percept(NamedTuple):
    """A belief from the environment."""

    name: str
    values: tuple[Any, ...] = ()


class StepResult(NamedTuple):
    """What one action led to."""

    state: int
    reward: float
    terminated: bool
    truncated: bool


def find_family(env_id: str) -> str:
    """The family of plans that fits an environment."""
    name = env_id.rpartition("/")[2]
    for start, family in (("FrozenLake", "frozen_lake"), ("CliffWalking", "cliff_walking"), ("Taxi", "taxi")):
        if name.startswith(start):
            return family
    return "grid_world" if env_id == GRID_WORLD_ID else "tabular"


def load_module(name: str, *parts: str) -> Any:
    """A module of palaestra by its path below the package, without importing the packages around it."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(_PACKAGE, *parts))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_env(env_id: str, kwargs: dict[str, Any], max_episode_steps: int | None = None) -> Any:
    """The Gymnasium environment; ours is registered first. One without a time limit gets `MAX_EPISODE_STEPS`."""
    import gymnasium

    if env_id == GRID_WORLD_ID and env_id not in gymnasium.registry:
        module = load_module("grid_world", "env", "grid_world.py")
        gymnasium.register(env_id, entry_point=module.GridWorld, max_episode_steps=module.MAX_EPISODE_STEPS)
    if max_episode_steps is None and gymnasium.spec(env_id).max_episode_steps is None:
        max_episode_steps = MAX_EPISODE_STEPS
    limit: dict[str, Any] = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
    return gymnasium.make(env_id, **limit, **kwargs)


class World:
    """An environment with numbered states and actions, as percepts."""

    def __init__(self, env: Any, family: str) -> None:
        self.env, self.family = env, family
        for kind, space in (("observations", env.observation_space), ("actions", env.action_space)):
            if type(space).__name__ != "Discrete":
                raise ValueError(f"its {kind} are {type(space).__name__}, not Discrete: plans need numbered states")
        self.states, self.actions = int(env.observation_space.n), int(env.action_space.n)
        self.state = 0
        self._fell = False
        self._success = False
        self._goal: tuple[int, int] | None = None

    def reset(self, seed: int | None) -> None:
        """Begin an episode."""
        state, info = self.env.reset(seed=seed)
        self.state = int(state)
        self._fell = self._success = False
        goal = info.get("goal")
        self._goal = None if goal is None else (int(goal[0]), int(goal[1]))

    def step(self, action: int) -> StepResult:
        """Perform an action."""
        state, reward, terminated, truncated, _ = self.env.step(action)
        self.state = int(state)
        if self.family == "cliff_walking":
            self._fell = self._fell or reward <= -100
            self._success = bool(terminated) and not self._fell
        elif self.family == "taxi":
            self._success = bool(terminated) and reward == _TAXI_DELIVERED
        elif self.family == "grid_world":
            self._success = bool(terminated)
        else:
            self._success = bool(terminated) and reward > 0
        return StepResult(self.state, float(reward), bool(terminated), bool(truncated))

    @property
    def is_success(self) -> bool:
        """Whether the episode has reached its aim."""
        return self._success

    def facts(self) -> list[Percept]:
        """Beliefs that hold as long as the agent lives."""
        facts = [Percept("states", (self.states,)), Percept("actions", (self.actions,))]
        world = self.env.unwrapped
        if self.family == "frozen_lake":
            facts += self._grid_facts(world.nrow, world.ncol, ((-1, 0), (0, 1), (1, 0), (0, -1)))
            # The probabilities of the model say whether one action can have several results.
            slips = any(len(outcomes) > 1 for by_action in world.P.values() for outcomes in by_action.values())
            facts += [Percept("slippery")] if slips else []
        elif self.family == "cliff_walking":
            facts += self._grid_facts(world.shape[0], world.shape[1], ((0, -1), (1, 0), (0, 1), (-1, 0)))
            facts += [Percept("slippery")] if getattr(world, "is_slippery", False) else []
        elif self.family == "grid_world":
            facts += self._grid_facts(world.shape[0], world.shape[1], ((0, -1), (1, 0), (0, 1), (-1, 0)))
        elif self.family == "taxi":
            facts += self._grid_facts(5, 5, ((0, 1), (0, -1), (1, 0), (-1, 0)))
            facts += [Percept("stop", (index, x, y)) for index, (x, y) in enumerate(TAXI_STOPS)]
        return facts

    def percepts(self) -> list[Percept]:
        """Beliefs about the current state."""
        percepts = [Percept("state", (self.state,))]
        world = self.env.unwrapped
        if self.family == "frozen_lake":
            columns = int(world.ncol)
            goal = int(world.desc.reshape(-1).tolist().index(b"G"))
            percepts += [self._at(columns), Percept("goal", (goal % columns, goal // columns))]
        elif self.family == "cliff_walking":
            rows, columns = world.shape
            percepts += [self._at(int(columns)), Percept("goal", (int(columns) - 1, int(rows) - 1))]
        elif self.family == "grid_world":
            percepts.append(self._at(int(world.shape[1])))
            if self._goal is not None:
                percepts.append(Percept("goal", self._goal))
        elif self.family == "taxi":
            row, column, passenger, destination = world.decode(self.state)
            percepts += [
                Percept("at", (int(column), int(row))),
                Percept("passenger", (int(passenger),)),
                Percept("destination", (int(destination),)),
            ]
        return percepts

    def close(self) -> None:
        """Release the environment."""
        self.env.close()

    def _at(self, columns: int) -> Percept:
        return Percept("at", (self.state % columns, self.state // columns))

    @staticmethod
    def _grid_facts(rows: int, columns: int, moves: tuple[tuple[int, int], ...]) -> list[Percept]:
        return [
            Percept("size", (int(columns), int(rows))),
            *(Percept("move", (action, dx, dy)) for action, (dx, dy) in enumerate(moves)),
        ]
