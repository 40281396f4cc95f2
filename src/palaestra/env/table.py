"""A table with coloured blocks, seen from above, and an instruction that says which block counts.

Two tasks for vision-language-action policies that a laptop can train: `TableReach` (move the gripper over the named
block) and `TablePush` (push the named block onto the goal). Three blocks of five colours lie at random places, and
only the words tell them apart, so a policy that ignores the language does no better than guessing.

Everything follows from the seed and the actions. The time limit is Gymnasium's, from the registration. `expert_action`
looks at the state, not at the picture, and solves both tasks: it is where demonstrations come from. docs/table.md
explains the numbers.
"""

from __future__ import annotations

import math
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.env.instruction import COLOURS, LENGTH, WORDS, decode, encode
from palaestra.env.table_physics import BLOCK, GRIPPER, Point, distance, pushed, within_table
from palaestra.env.table_render import Look, TopView
from palaestra.errors import ConfigError

__all__ = ["NUM_BLOCKS", "RGB", "STRIDE", "Table", "TablePush", "TableReach", "expert_action"]

STRIDE = 0.05
"""How far an action of 1 moves the gripper, in table sides."""
CLOSE = 0.06
"""The gripper has reached a block when their centres are closer than this."""
GOAL = 0.1
"""Radius of the goal; a block is on it when its centre is."""
NUM_BLOCKS = 3
_APART = 0.22
"""Least distance between any two things when an episode starts: nothing touches and nothing is solved."""

RGB = {
    "red": (220, 50, 47), "green": (80, 190, 70), "blue": (60, 110, 230), "yellow": (240, 200, 50),
    "purple": (170, 80, 200),
}  # fmt: skip
_BLOCKS = [Look(RGB[colour], BLOCK, height=0.05) for colour in COLOURS]
_GRIPPER = Look((245, 245, 245), GRIPPER, hole=0.4 * GRIPPER, height=0.15)
_GOAL = Look((200, 235, 235), GOAL, hole=0.75 * GOAL)
_FOR_PEOPLE = 384

_Observation = dict[str, NDArray[Any]]


class Table(gymnasium.Env[_Observation, NDArray[np.float32]]):
    """What both tasks share: the scene, the instruction, the senses. A task says what is worth what."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  as Gymnasium declares it
    sentence = ""
    """The instruction, with a gap for the colour."""
    has_goal = False

    def __init__(self, size: int = 48, depth: bool = False, render_mode: str | None = None) -> None:
        """`size`: side of the square image in pixels. `depth`: also show how high things are, `[size, size]`."""
        if size < 16:
            raise ConfigError("env.kwargs.size", size, "blocks would be smaller than a pixel", "Use at least 16")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError("env.kwargs.render_mode", render_mode, "it cannot be shown so", "Use 'rgb_array'")
        senses: dict[str, gymnasium.Space[Any]] = {"rgb": spaces.Box(0, 255, (size, size, 3), np.uint8)}
        if depth:
            senses["depth"] = spaces.Box(0.0, 1.0, (size, size), np.float32)
        senses["proprio"] = spaces.Box(-1.0, 1.0, (4,), np.float32)
        senses["language"] = spaces.MultiDiscrete(np.full(LENGTH, len(WORDS)))
        self.observation_space = cast(Any, spaces.Dict(senses))
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode = render_mode
        self._view = TopView(size, depth=depth)
        self._large: TopView | None = None
        self.gripper: Point = (0.5, 0.5)
        self.blocks: list[Point] = []
        """Where the blocks are; `colours` says which is which and `target` which one counts."""
        self.colours: list[str] = []
        self.target = 0
        self.goal: Point = (0.5, 0.5)
        self._language = encode("")
        self._last_action = (0.0, 0.0)
        self._owed = 0.0

    @property
    def instruction(self) -> str:
        """What the policy is asked to do, in words."""
        return decode(self._language)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Observation, dict[str, Any]]:
        """A new scene. `options={"instruction": "reach the red block"}` asks for that in the scene that is drawn."""
        super().reset(seed=seed)
        rng = self.np_random
        self.colours = [COLOURS[k] for k in rng.permutation(len(COLOURS))[:NUM_BLOCKS]]
        places = _scattered(rng, NUM_BLOCKS + 2)
        self.gripper, self.goal, self.blocks = places[0], places[1], places[2:]
        self.target = int(rng.integers(NUM_BLOCKS))
        asked = (options or {}).get("instruction")
        if asked is not None:
            self.target = self._named(asked)
        self._language = encode(self.sentence.format(self.colours[self.target]))
        self._last_action = (0.0, 0.0)
        self._place()
        self._owed = self._left()
        return self._seen(), {"is_success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[_Observation, float, bool, bool, dict[str, Any]]:
        """Move the gripper by up to `STRIDE` along each axis; pays what that brought the task closer to its end."""
        right, up = float(action[0]), float(action[1])
        self._last_action = (min(max(right, -1.0), 1.0), min(max(up, -1.0), 1.0))
        self._move(STRIDE * self._last_action[0], STRIDE * self._last_action[1])
        left, solved = self._left(), self._solved()
        reward = self._owed - left + (1.0 if solved else 0.0)
        self._owed = left
        return self._seen(), reward, solved, False, {"is_success": solved}

    def render(self) -> NDArray[np.uint8] | None:
        """A picture for people, larger than the policy's."""
        if self.render_mode is None:
            return None
        if self._large is None:
            self._large = TopView(_FOR_PEOPLE)
        self._large.lay(self._lying())
        return self._large.picture(_GRIPPER, self.gripper)[0]

    def _named(self, sentence: str) -> int:
        """Which of the blocks a sentence asks for."""
        for i, colour in enumerate(self.colours):
            if sentence == self.sentence.format(colour):
                return i
        here = ", ".join(repr(self.sentence.format(colour)) for colour in self.colours)
        raise ConfigError("options['instruction']", sentence, "nobody can do this in this scene", f"Possible: {here}")

    def _lying(self) -> list[tuple[Look, Point]]:
        goal = [(_GOAL, self.goal)] if self.has_goal else []
        blocks = [(_BLOCKS[COLOURS.index(c)], place) for c, place in zip(self.colours, self.blocks, strict=True)]
        return goal + blocks

    def _seen(self) -> _Observation:
        rgb, depth = self._pictures()
        seen: _Observation = {"rgb": rgb}
        if depth is not None:
            seen["depth"] = depth
        x, y = self.gripper
        seen["proprio"] = np.array((2.0 * x - 1.0, 2.0 * y - 1.0, *self._last_action), np.float32)
        seen["language"] = self._language.copy()
        return seen

    def _pictures(self) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        self._view.lay(self._lying())
        return self._view.picture(_GRIPPER, self.gripper)

    def _place(self) -> None:
        """Whatever physics has to know at the start of an episode."""

    def _move(self, right: float, up: float) -> None:
        raise NotImplementedError

    def _left(self) -> float:
        """What is left to do, as a length; what a step takes off it is paid."""
        raise NotImplementedError

    def _solved(self) -> bool:
        raise NotImplementedError


class TableReach(Table):
    """The task "reach the red block": the gripper hovers, and has done it when it is over the named block."""

    sentence = "reach the {} block"

    def _move(self, right: float, up: float) -> None:
        self.gripper = within_table(self.gripper[0] + right, self.gripper[1] + up, GRIPPER)

    def _left(self) -> float:
        return 2.0 * distance(self.gripper, self.blocks[self.target])

    def _solved(self) -> bool:
        return distance(self.gripper, self.blocks[self.target]) < CLOSE


class TablePush(Table):
    """The task "push the red block to the goal": the gripper stands on the table, and blocks make way for it."""

    sentence = "push the {} block to the goal"
    has_goal = True

    def _move(self, right: float, up: float) -> None:
        self.gripper, self.blocks = pushed(self.gripper, self.blocks, right, up)

    def _left(self) -> float:
        block = self.blocks[self.target]
        return 2.0 * distance(block, self.goal) + 0.5 * distance(self.gripper, block)

    def _solved(self) -> bool:
        return distance(self.blocks[self.target], self.goal) < GOAL


def expert_action(
    env: gymnasium.Env[Any, Any], *, noise: float = 0.0, rng: np.random.Generator | None = None
) -> NDArray[np.float32]:
    """What somebody who sees the state would do, plus normal noise of this standard deviation drawn from `rng`."""
    table = env.unwrapped
    assert isinstance(table, Table)
    heading = _towards_push(table) if isinstance(table, TablePush) else table.blocks[table.target]
    x, y = table.gripper
    wanted = np.array(((heading[0] - x) / STRIDE, (heading[1] - y) / STRIDE))
    # Shortened as a whole: cutting each number by itself would bend the way off the line to the block.
    wanted /= max(1.0, float(np.abs(wanted).max()))
    if noise:
        if rng is None:
            raise ConfigError("expert_action(rng)", None, "noise has to come from somewhere", "Pass a generator")
        wanted += noise * rng.standard_normal(2)
    clipped: NDArray[np.float32] = np.clip(wanted, -1.0, 1.0).astype(np.float32)
    return clipped


def _towards_push(table: Table) -> Point:
    """Where to go next: to the far side of the block as seen from the goal, around it if need be, then through it."""
    gripper, block, goal = table.gripper, table.blocks[table.target], table.goal
    gap = max(distance(block, goal), 1e-9)
    to_goal = ((goal[0] - block[0]) / gap, (goal[1] - block[1]) / gap)
    offset = (gripper[0] - block[0], gripper[1] - block[1])
    along = offset[0] * to_goal[0] + offset[1] * to_goal[1]
    aside = offset[1] * to_goal[0] - offset[0] * to_goal[1]
    touching = GRIPPER + BLOCK
    if along < 0.0 and abs(aside) < 0.25 * touching:
        # Aim to the other side of the line: pushing off centre turns the block away, and this brings it back.
        return (
            block[0] + 0.05 * to_goal[0] + 0.5 * aside * to_goal[1],
            block[1] + 0.05 * to_goal[1] - 0.5 * aside * to_goal[0],
        )
    clear = touching + 0.03
    behind = (block[0] - clear * to_goal[0], block[1] - clear * to_goal[1])
    if along < -0.5 * touching:
        return behind
    side = 1.0 if aside >= 0.0 else -1.0
    around = (block[0] - side * clear * to_goal[1], block[1] + side * clear * to_goal[0])
    back = 0.6 * clear
    return around[0] - back * to_goal[0], around[1] - back * to_goal[1]


def _scattered(rng: np.random.Generator, count: int) -> list[Point]:
    """Places on the table, none near another or near the edge. Drawn together, and again together when two are."""
    while True:
        drawn = rng.uniform(0.15, 0.85, (count, 2)).tolist()
        if all(math.dist(drawn[i], drawn[k]) >= _APART for i in range(count) for k in range(i)):
            return [(x, y) for x, y in drawn]
