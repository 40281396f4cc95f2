"""`click_target/*`: click the named button, from one large button to many small ones by `difficulty`.

Places, labels and colours depend on the seed. They are drawn here and not in the page, so that the verifier knows them.
"""

from __future__ import annotations

import html
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from palaestra.errors import SessionRefused
from palaestra.sessions.screen import Size
from palaestra.sessions.suite import STEP_LIMIT_SCHEMA, Task, parse_params
from palaestra.sessions.suites.oracles import build_oracle
from palaestra.sessions.task import TaskProgress

LABELS = "apple bread cloud dune ember fern glass honey iron jade kite lemon moss north olive pearl quill river".split()
COLOURS = "#c0392b #2980b9 #27ae60 #8e44ad #d35400 #16a085 #7f8c8d #2c3e50".split()
LEVELS = (
    (1, 90, 60), (1, 50, 30), (2, 60, 30), (3, 50, 24), (4, 44, 20), (6, 40, 18), (8, 38, 16), (12, 36, 14),
)  # fmt: skip
"""Number of buttons, and width and height of each, by difficulty from 1."""
_STEPS = 3


class ClickTarget:
    """The suite."""

    name = "click_target"

    def names(self) -> Sequence[str]:
        """One task; `difficulty` is a parameter."""
        return ("button",)

    def parameters(self, name: str) -> dict[str, Any]:
        """JSON Schema of the parameters."""
        description = "From one large button to twelve small ones."
        limits = {"minimum": 1, "maximum": len(LEVELS)}
        return {
            "difficulty": {"type": "integer", "default": 1, **limits, "description": description},
            "step_limit": {**STEP_LIMIT_SCHEMA, "default": _STEPS},
        }

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The task with the parameters `difficulty` and `step_limit`."""
        given = parse_params(params, difficulty=(int, 1), step_limit=(int, _STEPS))
        if not 1 <= given["difficulty"] <= len(LEVELS):
            text = f"params.difficulty = {given['difficulty']}: must lie between 1 and {len(LEVELS)}."
            raise SessionRefused("bad_params", text, status=422)
        if given["step_limit"] < 1:
            raise SessionRefused("bad_params", "params.step_limit: must be at least 1.", status=422)
        return _Button(seed, given["difficulty"], given["step_limit"])


class _Button(Task):
    screen = Size(160, 210)
    reward_range = (0.0, 1.0)
    probe = "window.clicked ?? null"

    def __init__(self, seed: int, difficulty: int, step_limit: int) -> None:
        self.step_limit = step_limit
        rng = random.Random(seed * 31 + difficulty)
        count, width, height = LEVELS[difficulty - 1]
        labels = rng.sample(LABELS, count)
        self._wanted = labels[0]
        self.oracle = build_oracle(f"return click(byText('button', {json.dumps(self._wanted)})[0]);")
        self.html = _page(labels, _places(rng, count, width, height), rng, width, height)

    def instruction(self, begin_value: Any) -> str:
        """Names the button by its label."""
        return f'Click the button "{self._wanted}".'

    def judge(self, probe_value: Any) -> TaskProgress:
        """The first button clicked decides; clicks elsewhere do not count."""
        solved = probe_value == self._wanted
        return TaskProgress(1.0 if solved else 0.0, probe_value is not None, solved, detail={"clicked": probe_value})


def _places(rng: random.Random, count: int, width: int, height: int) -> list[tuple[int, int]]:
    """Corners of buttons that do not touch: in distinct cells of a grid, at random within each."""
    columns, rows = max(1, 156 // (width + 4)), max(1, 206 // (height + 4))
    cells = rng.sample([(column, row) for column in range(columns) for row in range(rows)], count)
    room_x, room_y = 156 // columns - width, 206 // rows - height
    return [
        (2 + column * (156 // columns) + rng.randint(0, room_x), 2 + row * (206 // rows) + rng.randint(0, room_y))
        for column, row in cells
    ]


def _page(labels: list[str], places: list[tuple[int, int]], rng: random.Random, width: int, height: int) -> str:
    buttons = "".join(
        f'<button style="left:{x}px;top:{y}px;width:{width}px;height:{height}px;background:{rng.choice(COLOURS)}" '
        f"onclick=\"window.clicked ??= '{label}'; this.style.opacity = .4\">{html.escape(label)}</button>"
        for label, (x, y) in zip(labels, places, strict=True)
    )
    style = (
        "body{margin:0;background:#fff}button{position:absolute;border:0;padding:0;color:#fff;font:10px 'DejaVu Sans'}"
    )
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><body>{buttons}</body>"
