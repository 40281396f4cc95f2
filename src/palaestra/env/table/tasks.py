"""A table with coloured blocks seen from above, and an instruction that names one of them.

`TableReach` (move the gripper over the named block) and `TablePush` (push the named block onto the goal) are small
enough to train on a laptop. Three blocks of five colours lie at random places, and only the instruction tells which one
counts, so a policy that ignores the language does no better than guessing.

Episodes are determined by the seed and the actions. The registration with Gymnasium sets the time limit.
`expert_action` solves both tasks from the state and provides demonstrations. docs/table.md explains the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.env.table.physics import BLOCK_RADIUS, GRIPPER_RADIUS, Position, clip_to_table, distance, push_blocks
from palaestra.env.table.rendering import Disc, TableRenderer
from palaestra.env.vector import Array, Info, Space
from palaestra.errors import ConfigError

COLOURS = ("red", "green", "blue", "yellow", "purple")
WORDS = ("", "reach", "push", "the", "block", "to", "goal", *COLOURS)
"""The word of each token. Token 0 is padding. The order is fixed, because checkpoints have learned the tokens."""
INSTRUCTION_LENGTH = 8
"""Number of tokens in an encoded instruction, including padding."""
_TOKENS = {word: token for token, word in enumerate(WORDS) if word}

STRIDE = 0.05
"""Distance that an action of 1 moves the gripper, in table sides."""
_REACH_DISTANCE = 0.06
"""The gripper has reached a block if their centres are closer than this."""
GOAL_RADIUS = 0.1
"""Radius of the goal; a block is on the goal if its centre is."""
NUM_BLOCKS = 3
_MIN_DISTANCE = 0.22
"""Minimum distance between any two objects at the start, so that nothing touches and nothing is solved."""

RGB = {
    "red": (220, 50, 47), "green": (80, 190, 70), "blue": (60, 110, 230), "yellow": (240, 200, 50),
    "purple": (170, 80, 200),
}  # fmt: skip
_BLOCK_DISCS = [Disc(RGB[colour], BLOCK_RADIUS, height=0.05) for colour in COLOURS]
_GRIPPER_DISC = Disc((245, 245, 245), GRIPPER_RADIUS, hole=0.4 * GRIPPER_RADIUS, height=0.15)
_GOAL_DISC = Disc((200, 235, 235), GOAL_RADIUS, hole=0.75 * GOAL_RADIUS)
_RENDER_SIZE = 384

_Observation = dict[str, Array]


class _Table(gymnasium.Env[_Observation, NDArray[np.float32]]):
    """The scene, the instruction and the observations; subclasses define movement, reward and success."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  as Gymnasium declares it
    template = ""
    """The instruction, with a placeholder for the colour."""
    has_goal = False

    def __init__(self, size: int = 48, depth: bool = False, render_mode: str | None = None) -> None:
        """`size`: side of the square image in pixels. `depth`: also observe a height map `[size, size]`."""
        if size < 16:
            raise ConfigError("env.kwargs.size", size, "blocks would be smaller than a pixel", "Use at least 16")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError("env.kwargs.render_mode", render_mode, "unknown render mode", "Use 'rgb_array'")
        observations: dict[str, Space] = {"rgb": spaces.Box(0, 255, (size, size, 3), np.uint8)}
        if depth:
            observations["depth"] = spaces.Box(0.0, 1.0, (size, size), np.float32)
        observations["proprio"] = spaces.Box(-1.0, 1.0, (4,), np.float32)
        observations["language"] = spaces.MultiDiscrete(np.full(INSTRUCTION_LENGTH, len(WORDS)))
        self.observation_space = cast(Any, spaces.Dict(observations))
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode = render_mode
        self._view = TableRenderer(size, depth=depth)
        self._render_view: TableRenderer | None = None
        self.gripper: Position = (0.5, 0.5)
        self.blocks: list[Position] = []
        """Positions of the blocks; `colours` has their colours and `target` the index of the named one."""
        self.colours: list[str] = []
        self.target = 0
        self.goal: Position = (0.5, 0.5)
        self._language = encode_instruction("")
        self._last_action = (0.0, 0.0)
        self._last_remaining = 0.0

    @property
    def instruction(self) -> str:
        """The current instruction as text."""
        return decode_instruction(self._language)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[_Observation, Info]:
        """Draw a new scene. `options={"instruction": "reach the red block"}` sets the instruction."""
        super().reset(seed=seed)
        rng = self.np_random
        self.colours = [COLOURS[k] for k in rng.permutation(len(COLOURS))[:NUM_BLOCKS]]
        positions = _draw_positions(rng, NUM_BLOCKS + 2)
        self.gripper, self.goal, self.blocks = positions[0], positions[1], positions[2:]
        self.target = int(rng.integers(NUM_BLOCKS))
        instruction = (options or {}).get("instruction")
        if instruction is not None:
            self.target = self._find_block(instruction)
        self._language = encode_instruction(self.template.format(self.colours[self.target]))
        self._last_action = (0.0, 0.0)
        self._reset_physics()
        self._last_remaining = self._remaining()
        return self._observe(), {"is_success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[_Observation, float, bool, bool, Info]:
        """Move the gripper by up to `STRIDE` along each axis; the reward is the progress made, plus 1 for success."""
        right, up = float(action[0]), float(action[1])
        self._last_action = (min(max(right, -1.0), 1.0), min(max(up, -1.0), 1.0))
        self._move(STRIDE * self._last_action[0], STRIDE * self._last_action[1])
        remaining, solved = self._remaining(), self._is_solved()
        reward = self._last_remaining - remaining + (1.0 if solved else 0.0)
        self._last_remaining = remaining
        return self._observe(), reward, solved, False, {"is_success": solved}

    def render(self) -> NDArray[np.uint8] | None:
        """An image for people, larger than that of the policy."""
        if self.render_mode is None:
            return None
        if self._render_view is None:
            self._render_view = TableRenderer(_RENDER_SIZE)
        self._render_view.set_background(self._discs())
        return self._render_view.draw(_GRIPPER_DISC, self.gripper)[0]

    def _find_block(self, instruction: str) -> int:
        possible = [self.template.format(colour) for colour in self.colours]
        if instruction not in possible:
            remedy = f"Possible: {', '.join(map(repr, possible))}"
            raise ConfigError("options['instruction']", instruction, "is not possible in this scene", remedy)
        return possible.index(instruction)

    def _discs(self) -> list[tuple[Disc, Position]]:
        goal = [(_GOAL_DISC, self.goal)] if self.has_goal else []
        blocks = [
            (_BLOCK_DISCS[COLOURS.index(c)], position) for c, position in zip(self.colours, self.blocks, strict=True)
        ]
        return goal + blocks

    def _observe(self) -> _Observation:
        rgb, depth = self._draw()
        observation: _Observation = {"rgb": rgb}
        if depth is not None:
            observation["depth"] = depth
        x, y = self.gripper
        observation["proprio"] = np.array((2.0 * x - 1.0, 2.0 * y - 1.0, *self._last_action), np.float32)
        observation["language"] = self._language.copy()
        return observation

    def _draw(self) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        self._view.set_background(self._discs())
        return self._view.draw(_GRIPPER_DISC, self.gripper)

    def _reset_physics(self) -> None:
        """Prepare the simulation of a new episode."""

    def _move(self, right: float, up: float) -> None:
        raise NotImplementedError

    def _remaining(self) -> float:
        """The remaining distance; its decrease is the reward of a step."""
        raise NotImplementedError

    def _is_solved(self) -> bool:
        raise NotImplementedError


class TableReach(_Table):
    """The task "reach the red block": move the gripper, which hovers, over the named block."""

    template = "reach the {} block"

    def _move(self, right: float, up: float) -> None:
        self.gripper = clip_to_table(self.gripper[0] + right, self.gripper[1] + up, GRIPPER_RADIUS)

    def _remaining(self) -> float:
        return 2.0 * distance(self.gripper, self.blocks[self.target])

    def _is_solved(self) -> bool:
        return distance(self.gripper, self.blocks[self.target]) < _REACH_DISTANCE


class TablePush(_Table):
    """The task "push the red block to the goal": the gripper touches the table and pushes blocks."""

    template = "push the {} block to the goal"
    has_goal = True

    def _move(self, right: float, up: float) -> None:
        self.gripper, self.blocks = push_blocks(self.gripper, self.blocks, right, up)

    def _remaining(self) -> float:
        block = self.blocks[self.target]
        return 2.0 * distance(block, self.goal) + 0.5 * distance(self.gripper, block)

    def _is_solved(self) -> bool:
        return distance(self.blocks[self.target], self.goal) < GOAL_RADIUS


def expert_action(
    env: gymnasium.Env[Any, Any], *, noise: float = 0.0, rng: np.random.Generator | None = None
) -> NDArray[np.float32]:
    """The action of an expert who knows the state, plus normal noise with this standard deviation from `rng`."""
    table = env.unwrapped
    assert isinstance(table, _Table)
    waypoint = _push_waypoint(table) if isinstance(table, TablePush) else table.blocks[table.target]
    x, y = table.gripper
    wanted = np.array(((waypoint[0] - x) / STRIDE, (waypoint[1] - y) / STRIDE))
    # Scale both numbers: clipping each one would change the direction.
    wanted /= max(1.0, float(np.abs(wanted).max()))
    if noise:
        if rng is None:
            raise ConfigError("expert_action(rng)", None, "noise needs a random generator", "Pass a generator")
        wanted += noise * rng.standard_normal(2)
    clipped: NDArray[np.float32] = np.clip(wanted, -1.0, 1.0).astype(np.float32)
    return clipped


def _push_waypoint(table: _Table) -> Position:
    """The next position: behind the block as seen from the goal, around the block if necessary, then forward."""
    gripper, block, goal = table.gripper, table.blocks[table.target], table.goal
    gap = max(distance(block, goal), 1e-9)
    to_goal = ((goal[0] - block[0]) / gap, (goal[1] - block[1]) / gap)
    offset = (gripper[0] - block[0], gripper[1] - block[1])
    along = offset[0] * to_goal[0] + offset[1] * to_goal[1]
    aside = offset[1] * to_goal[0] - offset[0] * to_goal[1]
    touching = GRIPPER_RADIUS + BLOCK_RADIUS
    if along < 0.0 and abs(aside) < 0.25 * touching:
        # Aim at the other side of the line to correct an off-centre push.
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


def _draw_positions(rng: np.random.Generator, count: int) -> list[Position]:
    """Draw positions that are apart from each other and from the edge, by rejection sampling of the whole set."""
    while True:
        drawn = rng.uniform(0.15, 0.85, (count, 2)).tolist()
        if all(math.dist(drawn[i], drawn[k]) >= _MIN_DISTANCE for i in range(count) for k in range(i)):
            return [(x, y) for x, y in drawn]


def encode_instruction(text: str) -> NDArray[np.int64]:
    """The tokens of the words of `text`, padded with 0 to `INSTRUCTION_LENGTH`."""
    words = text.split()
    if len(words) > INSTRUCTION_LENGTH:
        raise ConfigError("instruction", text, f"has {len(words)} words", f"Use at most {INSTRUCTION_LENGTH}")
    tokens = np.zeros(INSTRUCTION_LENGTH, np.int64)
    for i, word in enumerate(words):
        if word not in _TOKENS:
            raise ConfigError("instruction", text, f"{word!r} is not a known word", f"Known: {', '.join(_TOKENS)}")
        tokens[i] = _TOKENS[word]
    return tokens


def decode_instruction(tokens: Iterable[int]) -> str:
    """The text of encoded tokens."""
    return " ".join(WORDS[token] for token in tokens if token)
