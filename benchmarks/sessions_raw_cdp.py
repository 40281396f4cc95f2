"""What Chromium alone allows: a program that clicks, looks and reads the score over raw CDP, and does nothing else.

    python -m benchmarks.sessions_raw_cdp miniwob/click-checkboxes --pages 8 --seconds 3

One browser, some pages, one thread that blocks in `read`. It does the browser's share of an act and no more: move,
press and release in one write, their acknowledgements, one frame with its PNG, one expression. With `--settle` page
time is virtual and passes between the click and the picture, as in a session: one frame and one advance more. It knows
no failures, deadlines, numbers of steps, retries or other actions. It says `ready`, waits for a line, works for so
long, prints what it did, and ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Generator
from typing import Any

from palaestra.sessions.browser.browser import FRAME_MS
from palaestra.sessions.browser.chromium import Chromium, ChromiumBinary, find_chromium
from palaestra.sessions.browser.page import ORIGIN
from palaestra.sessions.browser.page_clock import MAX_TASKS_PER_INSTANT, SETTLE_MS, START_S
from palaestra.sessions.suite import PageRequest, Task
from palaestra.sessions.suites import make_task

Call = tuple[str, dict[str, Any], str | None]
Errand = Generator[list[int], list[dict[str, Any]], None]
"""What a page has to do: yields the numbers of the calls it waits for, gets their answers."""


class Wire:
    """The pipe to one browser: calls are numbered, and a waiting task continues when all its calls are answered."""

    def __init__(self, chromium: Chromium) -> None:
        self._to_it, self._from_it = chromium.write_fd, chromium.read_fd
        self._numbers = itertools.count(1)
        self._buffer = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, tuple[list[int], Errand]] = {}
        self._drawing, self._to_draw = 0, deque[tuple[int, Call]]()
        self._advancing: dict[str, int] = {}
        self.tasks: dict[str, Task] = {}
        self.loaded: set[str] = set()
        self.committed: set[str] = set()

    def send(self, *calls: Call) -> list[int]:
        numbers = [next(self._numbers) for _ in calls]
        self._write(b"".join(_message(number, call) for number, call in zip(numbers, calls, strict=True)))
        return numbers

    def draw(self, call: Call) -> list[int]:
        """A frame, when no other is under way: two at once and the browser hangs."""
        number = next(self._numbers)
        self._to_draw.append((number, call))
        self._draw_next()
        return [number]

    def advance(self, session: str) -> list[int]:
        """Let page time pass; answered when the page says that it has."""
        self._advancing[session] = number = next(self._numbers)
        policy = {
            "policy": "pauseIfNetworkFetchesPending", "budget": SETTLE_MS,
            "maxVirtualTimeTaskStarvationCount": MAX_TASKS_PER_INSTANT,
        }  # fmt: skip
        self.send(("Emulation.setVirtualTimePolicy", policy, session))
        return [number]

    def start(self, errand: Errand) -> None:
        self._wait(errand, next(errand))

    def turn(self) -> None:
        """Read once, and continue the tasks that have all their answers."""
        piece = os.read(self._from_it, 1 << 18)
        if not piece:
            raise SystemExit("the browser is gone")
        self._buffer += piece
        *messages, rest = self._buffer.split(b"\0")
        self._buffer = rest
        for raw in messages:
            self._hear(json.loads(raw))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._to_it, view) :]

    def _draw_next(self) -> None:
        if not self._drawing and self._to_draw:
            self._drawing, call = self._to_draw.popleft()
            self._write(_message(self._drawing, call))

    def _wait(self, errand: Errand, numbers: list[int]) -> None:
        # Answers of one page come in the order of its calls, so the last one completes them.
        for number in numbers:
            self._waiting[number] = (numbers, errand)

    def _hear(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is None:
            self._event(message)
            return
        if number == self._drawing:
            self._drawing = 0
            self._draw_next()
        if number not in self._waiting:
            return
        if "error" in message:
            raise SystemExit(f"the browser refused: {message['error']}")
        self._take(number, message["result"])

    def _take(self, number: int, result: dict[str, Any]) -> None:
        self._answers[number] = result
        numbers, errand = self._waiting.pop(number)
        if all(other in self._answers for other in numbers):
            try:
                self._wait(errand, errand.send([self._answers.pop(other) for other in numbers]))
            except StopIteration:
                return

    def _event(self, message: dict[str, Any]) -> None:
        session = message.get("sessionId", "")
        if message["method"] == "Fetch.requestPaused":
            params = message["params"]
            found = self.tasks[session].serve(PageRequest("GET", params["request"]["url"].removeprefix(ORIGIN), b""))
            body, kind = (b"", "text/plain") if found is None else (found.body, found.media_type)
            self.send(("Fetch.fulfillRequest", {
                "requestId": params["requestId"], "responseCode": 404 if found is None else 200,
                "responseHeaders": [{"name": "Content-Type", "value": kind}], "body": base64.b64encode(body).decode(),
            }, session))  # fmt: skip
        elif message["method"] == "Page.loadEventFired":
            self.loaded.add(session)
        elif message["method"] == "Page.frameNavigated":
            self.committed.add(session)
        elif message["method"] == "Emulation.virtualTimeBudgetExpired":
            self._take(self._advancing.pop(session), {})


def _message(number: int, call: Call) -> bytes:
    method, params, session = call
    message: dict[str, Any] = {"id": number, "method": method, "params": params}
    if session is not None:
        message["sessionId"] = session
    return json.dumps(message).encode() + b"\0"


class Pages:
    """Some pages of one browser, and what they have done."""

    def __init__(
        self, wire: Wire, installed: ChromiumBinary, task: str, points: list[list[int]], *, settle: bool
    ) -> None:
        self._wire, self._on_demand, self._points = wire, installed.draws_on_demand, points
        self._suite, _, self._name = task.partition("/")
        self._settle = settle
        self._ticks: dict[str, float] = {}
        self.sessions: list[str] = []
        self.steps = self.running = 0
        self.seconds: list[float] = []
        self.pictures: set[bytes] = set()
        self.over = False

    def open(self, seed: int) -> Errand:
        wire, task = self._wire, make_task(self._suite, self._name, seed, {"step_limit": 10**9})
        size = {"width": task.screen.width, "height": task.screen.height}
        (context,) = yield wire.send(("Target.createBrowserContext", {}, None))
        where = {"url": "about:blank", "browserContextId": context["browserContextId"], **size}
        if self._on_demand:
            where["enableBeginFrameControl"] = True
        (target,) = yield wire.send(("Target.createTarget", where, None))
        (attached,) = yield wire.send(
            ("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}, None)
        )
        session = attached["sessionId"]
        wire.tasks[session] = task
        calls: list[Call] = [
            ("Page.enable", {}, session),
            ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}, session),
        ]
        if not self._on_demand:
            metrics = {**size, "deviceScaleFactor": 1, "mobile": False}
            calls.append(("Emulation.setDeviceMetricsOverride", metrics, session))
        yield wire.send(*calls)
        if self._settle:
            policy = {"policy": "pause", "initialVirtualTime": START_S}
            (clock,) = yield wire.send(("Emulation.setVirtualTimePolicy", policy, session))
            self._ticks[session] = clock["virtualTimeTicksBase"]
        yield wire.send(("Page.navigate", {"url": f"{ORIGIN}{task.entry}"}, session))
        if self._settle:
            while session not in wire.committed:
                yield wire.send(("Browser.getVersion", {}, None))
            yield wire.advance(session)
        while session not in wire.loaded:
            yield wire.send(("Browser.getVersion", {}, None))
        yield wire.send(("Runtime.evaluate", {"expression": task.begin, "returnByValue": True}, session))
        yield from self._settled(session)
        yield self._frame(session)
        self.sessions.append(session)

    def play(self, session: str) -> Errand:
        """Click, look, read the score; again and again."""
        wire, probe = self._wire, self._wire.tasks[session].probe
        self.running += 1
        for number in itertools.count():
            begun = time.perf_counter()
            yield wire.send(*_click(session, *self._points[number % len(self._points)]))
            yield from self._settled(session)
            data = None
            while data is None:
                (answer,) = yield self._frame(session)
                data = answer.get("data") or answer.get("screenshotData")
            picture = base64.b64decode(data)
            (score,) = yield wire.send(("Runtime.evaluate", {"expression": probe, "returnByValue": True}, session))
            assert "value" in score["result"]
            if self.over:
                break
            self.steps += 1
            self.seconds.append(time.perf_counter() - begun)
            self.pictures.add(picture)
        self.running -= 1

    def _settled(self, session: str) -> Errand:
        """Let page time pass, where it is virtual."""
        if not self._settle:
            return
        if self._on_demand:
            yield self._wire.draw(("HeadlessExperimental.beginFrame", self._timed(session, SETTLE_MS), session))
        yield self._wire.advance(session)

    def _timed(self, session: str, milliseconds: float) -> dict[str, Any]:
        if not self._settle:
            return {}
        self._ticks[session] += milliseconds
        return {"frameTimeTicks": self._ticks[session], "interval": FRAME_MS}

    def _frame(self, session: str) -> list[int]:
        if self._on_demand:
            frame = {"screenshot": {"format": "png", "optimizeForSpeed": True}, **self._timed(session, 0.1)}
            return self._wire.draw(("HeadlessExperimental.beginFrame", frame, session))
        shot = {"format": "png", "optimizeForSpeed": True, "captureBeyondViewport": False}
        return self._wire.send(("Page.captureScreenshot", shot, session))


def _click(session: str, x: int, y: int) -> list[Call]:
    kinds = (("mouseMoved", "none", 0, 0), ("mousePressed", "left", 1, 1), ("mouseReleased", "left", 0, 1))
    return [
        (
            "Input.dispatchMouseEvent",
            {"type": kind, "x": x, "y": y, "button": button, "buttons": held, "clickCount": count},
            session,
        )
        for kind, button, held, count in kinds
    ]


def run(chromium: Chromium, installed: ChromiumBinary, options: argparse.Namespace) -> dict[str, Any]:
    wire = Wire(chromium)
    pages = Pages(wire, installed, options.task, options.points, settle=options.settle)
    for number in range(options.pages):
        wire.start(pages.open(options.seed + number))
    while len(pages.sessions) < options.pages:
        wire.turn()
    print("ready", flush=True)
    sys.stdin.readline()
    for session in pages.sessions:
        wire.start(pages.play(session))
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds:
        wire.turn()
    took, steps = time.perf_counter() - begin, pages.steps
    pages.over = True
    while pages.running:
        wire.turn()
    return {"steps": steps, "seconds": took, "step_seconds": pages.seconds, "pictures": len(pages.pictures)}


async def _main(options: argparse.Namespace) -> None:
    installed = find_chromium(options.chromium)
    chromium = await Chromium.start(installed)
    try:
        print(json.dumps(run(chromium, installed, options)), flush=True)
        sys.stdin.read()  # stay alive, so that the parent can measure the CPU time
    finally:
        os.close(chromium.to_it)
        os.close(chromium.from_it)
        await chromium.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=3, help="of the first page")
    parser.add_argument("--points", type=json.loads, default=[[15, 63]], help="where to click, in turn, as JSON")
    parser.add_argument("--chromium", default=None)
    parser.add_argument("--settle", action="store_true", help="let page time pass between the click and the picture")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
