"""A session without a browser: a button drawn by hand in memory, for tests and for writing clients.

It is real in everything a client can notice (screens change, steps count, retries are harmless, failures happen when
asked for), and keeps every rule of the conformance kit.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Click, TypeText, UiAction
from palaestra.sessions.episode import Episode, Repeated, judged
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.session import Step
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = ["FakeSession"]

SCREEN = Size(160, 210)
BUTTON = 40


class FakeSession:
    """`fake/button`: click the square. Its place follows from the seed; `params: {fail_at: n}` breaks at step n."""

    def __init__(self) -> None:
        self._episode: Episode | None = None
        self._typed = ""
        self._clicked: bool | None = None
        self._fail_at = 0
        self._failed: SessionFailed | None = None
        self._closed = False

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """A fresh screen."""
        self._check_open()
        if request.task != "fake/button":
            raise SessionRefused("unknown_task", f"task = {request.task!r}: there is fake/button alone.", status=404)
        unknown = set(request.params) - {"fail_at", "step_limit"}
        if unknown:
            raise SessionRefused("bad_params", f"params.{min(unknown)}: unknown key.", status=422)
        for key, value in request.params.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise SessionRefused("bad_params", f"params.{key} = {value!r}: must be a whole number.", status=422)
        limit = int(request.params.get("step_limit", 5))
        spec = TaskSpec(
            "fake", "button", request.seed, dict(request.params), "Click the square.", limit, SCREEN, (0.0, 1.0)
        )
        self._episode, self._typed, self._clicked, self._failed = Episode(spec), "", None, None
        self._fail_at = int(request.params.get("fail_at", 0))
        return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """One act."""
        episode = self._running()
        repeated = episode.admit(action, step)
        if isinstance(repeated, Repeated):
            reply: Step = repeated.reply
            return reply
        episode.begin(action)
        if step == self._fail_at:
            self._failed = SessionFailed("page_crashed", f"asked to at step {step}")
            raise self._failed
        if isinstance(action, Click) and action.at is not None and self._clicked is None:
            left, top = self._corner(episode.spec.seed)
            self._clicked = left <= action.at.x < left + BUTTON and top <= action.at.y < top + BUTTON
        if isinstance(action, TypeText):
            self._typed += action.text
        progress = judged(self._judge(), action, episode.spec, episode.steps)
        made = Step(episode.steps, self._draw(), progress)
        episode.answer(made, over=progress.done, truncated=progress.truncated)
        return made

    async def screenshot(self) -> Screenshot:
        """The screen as it is."""
        self._running()
        return self._draw()

    async def progress(self) -> Progress:
        """The verifier's word."""
        return self._running().as_it_stands(self._judge())

    async def close(self) -> None:
        """Nothing is held."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SessionRefused("no_session", "the session is closed. Open another one.", status=404)

    def _running(self) -> Episode:
        self._check_open()
        if self._failed is not None:
            raise self._failed
        if self._episode is None:
            raise SessionRefused("not_reset", "no task was begun. Reset the session first.", status=409)
        return self._episode

    def _judge(self) -> Progress:
        solved = self._clicked is True
        return Progress(1.0 if solved else 0.0, self._clicked is not None, solved, detail={"typed": self._typed})

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
        return Screenshot(_png(SCREEN, rows), SCREEN)


def _png(size: Size, rows: list[bytes]) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head: Any = struct.pack(">IIBBBBB", size.width, size.height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\x00" + row for row in rows), 1)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")
