"""A player that really solves its tasks: it reads the instruction, finds what is meant and clicks it.

Buttons of `click_target` are found by their label in the page that the seed leads to; the one thing to click on the
pages of MiniWoB chosen here is found in the pixels. Which episode is to be failed on purpose is fixed ahead, so that
every outcome can be foretold.
"""

from __future__ import annotations

import io
import re

from PIL import Image, ImageChops

from palaestra.sessions.action import Click, Move, Point, Terminate, UiAction
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session
from palaestra.sessions.suites import make_task
from palaestra.sessions.task import TaskRequest, TaskSpec

__all__ = ["expected_outcome", "play", "task_request"]

_PICTURES = ("miniwob/click-test", "miniwob/focus-text")
_STAGE = (3, 52, 157, 207)
"""Where MiniWoB pages have the elements to click: below the instruction, inside the frame."""


def task_request(episode: int) -> TaskRequest:
    """The task of an episode: in turn two of MiniWoB's and the rungs of the ladder."""
    if episode % 4 in (1, 3):
        return TaskRequest(_PICTURES[episode % 4 // 2], episode)
    return TaskRequest("click_target/button", episode, {"difficulty": 1 + episode // 4 % 8})


def expected_outcome(episode: int) -> str:
    """What must come of it; one episode in ten is given up."""
    return "failed" if episode % 10 == 9 else "solved"


async def play(session: Session, episode: int) -> str:
    """One episode to its end; `solved` or `failed` by the verifier's word."""
    spec = await session.reset(task_request(episode))
    at = _target(spec, await session.screenshot())
    last: UiAction = Terminate(success=False) if expected_outcome(episode) == "failed" else Click(at)
    await session.act(Move(Point(1, 1)), step=1)
    step = await session.act(last, step=2)
    if not step.progress.done:
        raise AssertionError(f"episode {episode}: {last} did not end {spec.suite}/{spec.name}")
    return "solved" if step.progress.success else "failed"


def _target(spec: TaskSpec, picture: Screenshot) -> Point:
    if spec.suite == "miniwob":
        return _drawn(picture)
    page = make_task(spec.suite, spec.name, spec.seed, spec.params).html  # the one thing a person sees and we look up
    label = spec.instruction.split('"')[1]
    place = re.search(rf"left:(\d+)px;top:(\d+)px;width:(\d+)px;height:(\d+)px[^>]*>{label}<", page)
    assert place is not None, spec.instruction
    left, top, width, height = map(int, place.groups())
    return Point(left + width // 2, top + height // 2)


def _drawn(picture: Screenshot) -> Point:
    """The middle of what is on the stage."""
    stage = Image.open(io.BytesIO(picture.data)).convert("RGB").crop(_STAGE)
    difference = ImageChops.difference(stage, Image.new("RGB", stage.size, "white")).convert("L")
    box = difference.point(lambda value: 255 if value > 5 else 0).getbbox()
    assert box is not None, "the stage is empty"
    return Point(_STAGE[0] + (box[0] + box[2] - 1) // 2, _STAGE[1] + (box[1] + box[3] - 1) // 2)
