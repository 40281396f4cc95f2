"""A session without a browser, for tests and for writing clients: a button drawn in memory.

Clients cannot tell it from a browser (screens change, steps count, retries are safe, failures happen on request), and
it passes the conformance tests.
"""

from __future__ import annotations

import struct
import zlib

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Click, TypeText, UiAction
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.session import EpisodeTracker, SessionState, Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

SCREEN = Size(160, 210)
BUTTON = 40


class FakeSession(SessionState):
    """`fake/button`: click the square, whose place depends on the seed; `params: {fail_at: n}` fails at step n."""

    def __init__(self) -> None:
        super().__init__()
        self._typed = ""
        self._clicked: bool | None = None
        self._fail_at = 0

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode."""
        self._check_open()
        if request.task != "fake/button":
            raise SessionRefused("unknown_task", f"task = {request.task!r}: the only task is fake/button.", status=404)
        unknown = set(request.params) - {"fail_at", "step_limit"}
        if unknown:
            raise SessionRefused("bad_params", f"params.{min(unknown)}: unknown key.", status=422)
        for key, value in request.params.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise SessionRefused("bad_params", f"params.{key} = {value!r}: must be a whole number.", status=422)
        limit = int(request.params.get("step_limit", 5))
        spec = request.resolve("Click the square.", limit, SCREEN, (0.0, 1.0))
        self._episode, self._typed, self._clicked, self._failure = EpisodeTracker(spec), "", None, None
        self._fail_at = int(request.params.get("fail_at", 0))
        return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action."""
        episode = self._require_episode()
        repeated = episode.find_repeated(action, step)
        if repeated is not None:
            return repeated
        episode.begin(action)
        if step == self._fail_at:
            self._failure = SessionFailed("page_crashed", f"asked to at step {step}")
            raise self._failure
        if isinstance(action, Click) and action.at is not None and self._clicked is None:
            left, top = self._corner(episode.spec.seed)
            self._clicked = left <= action.at.x < left + BUTTON and top <= action.at.y < top + BUTTON
        if isinstance(action, TypeText):
            self._typed += action.text
        return episode.finish(self._draw(), self._judge())

    async def screenshot(self) -> Screenshot:
        """The current screen."""
        self._require_episode()
        return self._draw()

    async def progress(self) -> TaskProgress:
        """The verifier's current judgement."""
        return self._require_episode().with_end(self._judge())

    async def close(self) -> None:
        """Refuse further requests."""
        self._closed = True

    def _judge(self) -> TaskProgress:
        solved = self._clicked is True
        return TaskProgress(1.0 if solved else 0.0, self._clicked is not None, solved, detail={"typed": self._typed})

    @staticmethod
    def _corner(seed: int) -> tuple[int, int]:
        return seed * 37 % (SCREEN.width - BUTTON), seed * 53 % (SCREEN.height - BUTTON)

    def _draw(self) -> Screenshot:
        assert self._episode is not None
        left, top = self._corner(self._episode.spec.seed)
        shade = {None: b"\x20\x60\xc0", True: b"\x20\xa0\x40", False: b"\xc0\x30\x20"}[self._clicked]
        white, typed = b"\xff\xff\xff", min(len(self._typed), SCREEN.width)
        plain = white * SCREEN.width
        button = white * left + shade * BUTTON + white * (SCREEN.width - left - BUTTON)
        rows = [button if top <= y < top + BUTTON else plain for y in range(SCREEN.height)]
        rows[-1] = b"\x00\x00\x00" * typed + white * (SCREEN.width - typed)
        return Screenshot(encode_png(SCREEN, rows), SCREEN)


def encode_png(size: Size, rows: list[bytes]) -> bytes:
    """A PNG of rows of RGB bytes."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size.width, size.height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\x00" + row for row in rows), 1)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")
