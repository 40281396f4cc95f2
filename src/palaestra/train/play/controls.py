"""How a person acts in an environment: which keys choose which action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from palaestra.env.vector import GymEnv
from palaestra.runs.play.state import Axis, Choice, Controls

_LEFT, _RIGHT, _UP, _DOWN = ("ArrowLeft", "a"), ("ArrowRight", "d"), ("ArrowUp", "w"), ("ArrowDown", "s")
_MAX_CHOICES = 64

# Label and keys of each action, by the name of the environment without its version. None: no key chooses it.
_CHOICES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "CartPole": (("push left", _LEFT), ("push right", _RIGHT)),
    "MountainCar": (("left", _LEFT), ("coast", ()), ("right", _RIGHT)),
    "Acrobot": (("torque −1", _LEFT), ("no torque", ()), ("torque +1", _RIGHT)),
    "LunarLander": (("coast", ()), ("left engine", _LEFT), ("main engine", (*_UP, " ")), ("right engine", _RIGHT)),
    "FrozenLake": (("left", _LEFT), ("down", _DOWN), ("right", _RIGHT), ("up", _UP)),
    "CliffWalking": (("up", _UP), ("right", _RIGHT), ("down", _DOWN), ("left", _LEFT)),
    "Taxi": (
        ("south", _DOWN),
        ("north", _UP),
        ("east", _RIGHT),
        ("west", _LEFT),
        ("pick up", ("p",)),
        ("drop off", ("o",)),
    ),
    "Blackjack": (("stick", ("s", "ArrowDown")), ("hit", ("h", "ArrowUp"))),
    "CarRacing": (("coast", ()), ("right", _RIGHT), ("left", _LEFT), ("gas", _UP), ("brake", _DOWN)),
    "MiniGrid": (
        ("turn left", _LEFT),
        ("turn right", _RIGHT),
        ("forward", _UP),
        ("pick up", ("p", "Tab")),
        ("drop", ("o", "Shift")),
        ("toggle", (" ", "t")),
        ("done", ("Enter",)),
    ),
}
# Index of the action without effect, for environments that go on without input.
_IDLE = {"MountainCar": 1, "Acrobot": 1, "LunarLander": 0, "CarRacing": 0}
# Label, negative and positive keys of each number of an action.
_AXES: dict[str, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "Pendulum": (("torque", _LEFT, _RIGHT),),
    "MountainCarContinuous": (("force", _LEFT, _RIGHT),),
    "LunarLander": (("main engine", (), (*_UP, " ")), ("side engines", _LEFT, _RIGHT)),
    "LunarLanderContinuous": (("main engine", (), (*_UP, " ")), ("side engines", _LEFT, _RIGHT)),
    "CarRacing": (("steering", _LEFT, _RIGHT), ("gas", (), _UP), ("brake", (), _DOWN)),
    "BipedalWalker": (
        ("hip 1", ("q",), ("a",)),
        ("knee 1", ("w",), ("s",)),
        ("hip 2", ("e",), ("d",)),
        ("knee 2", ("r",), ("f",)),
    ),
}
_AXIS_KEYS = (("q", "a"), ("w", "s"), ("e", "d"), ("r", "f"), ("t", "g"), ("y", "h"), ("u", "j"), ("i", "k"))


def controls_of(env: GymEnv, env_id: str) -> Controls:
    """The controls of an environment, from the tables above or from its action space."""
    space = env.action_space
    name = _family(env, env_id)
    if isinstance(space, spaces.Discrete) and space.n <= _MAX_CHOICES:
        known = _CHOICES.get(name, ())
        rows = known if len(known) == space.n else _numbered_choices(int(space.n))
        start = int(space.start)
        choices = tuple(Choice(action=start + i, label=label, keys=keys) for i, (label, keys) in enumerate(rows))
        idle = start + _IDLE[name] if name in _IDLE and rows is known else None
        return Controls(kind="choices", choices=choices, idle=idle)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.shape:
        axes = _axes(space, _AXES.get(name, ()))
        return Controls(kind="axes", axes=axes, idle=_shape([axis.idle for axis in axes], space.shape))
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        axes = tuple(_switch(i, 0.0, 1.0) for i in range(int(space.shape[0])))
        return Controls(kind="axes", axes=axes, idle=[0] * len(axes))
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        starts = space.start.tolist()
        bounds = zip(starts, space.nvec.tolist(), strict=True)
        axes = tuple(_switch(i, float(start), float(start + n - 1)) for i, (start, n) in enumerate(bounds))
        return Controls(kind="axes", axes=axes, idle=starts)
    return Controls(kind="none")


def _family(env: GymEnv, env_id: str) -> str:
    module = type(env.unwrapped).__module__
    if module.startswith("minigrid."):
        return "MiniGrid"
    return env_id.rpartition("/")[2].partition("-v")[0].removesuffix("8x8")


def _numbered_choices(n: int) -> Sequence[tuple[str, tuple[str, ...]]]:
    return [(f"action {i}", (str(i + 1),) if i < 9 else ()) for i in range(n)]


def _axes(space: spaces.Box, known: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]]) -> tuple[Axis, ...]:
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    rows = known if len(known) == len(low) else [_unnamed_axis(i) for i in range(len(low))]
    axes = []
    for (label, negative, positive), least, most in zip(rows, low.tolist(), high.tolist(), strict=True):
        least, most = max(least, -1e6), min(most, 1e6)
        idle = min(max(0.0, least), most)
        axes.append(Axis(label=label, low=least, high=most, idle=idle, negative_keys=negative, positive_keys=positive))
    return tuple(axes)


def _unnamed_axis(index: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    if index < len(_AXIS_KEYS):
        negative, positive = _AXIS_KEYS[index]
        return f"action {index}", (negative,), (positive,)
    return f"action {index}", (), ()


def _switch(index: int, low: float, high: float) -> Axis:
    keys = (str(index + 1),) if index < 9 else ()
    return Axis(label=f"action {index}", low=low, high=high, idle=low, positive_keys=keys)


def _shape(values: list[float], shape: tuple[int, ...]) -> Any:
    return np.array(values).reshape(shape).tolist()
