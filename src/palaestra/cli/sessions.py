"""`palaestra sessions try`: play a UI task by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, print_json
from palaestra.errors import ConfigError, InvalidAction, SessionRefused

if TYPE_CHECKING:
    from palaestra.sessions import Screenshot, TaskProgress, TaskRequest
    from palaestra.sessions.action import UiAction
    from palaestra.sessions.browser.session import BrowserSession

_ACTIONS = """  click X Y      double X Y     right X Y      move X Y       drag X Y X Y
  type TEXT      press Control+a               scroll DY [X Y]
  wait SECONDS   answer TEXT    done           give-up        {"kind": ...}
  Ctrl-D ends the session."""


def try_command(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Such as miniwob/click-button.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Parameters of the task.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed; the same seed gives the same screen.")] = 0,
    picture: Annotated[
        Path, typer.Option(metavar="FILE", help="Screenshot file, rewritten after every action.")
    ] = Path("screen.png"),
    as_json: JsonOption = False,
) -> None:
    """Open a UI task in a browser and act on it by typing.

    Reads actions from standard input, one per line, so a file of actions can be replayed.
    """
    import asyncio

    from palaestra.sessions.task import TaskRequest

    request = TaskRequest(task, seed, _parse_params(settings or []))
    if not picture.absolute().parent.is_dir():
        raise ConfigError("--picture", str(picture), "its directory does not exist", "Create it, or name another one")
    asyncio.run(_InteractiveSession(request, picture, as_json).run())


def _parse_params(settings: list[str]) -> dict[str, Any]:
    import yaml

    params = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError("parameter", setting, "is not key=value", "Write for example difficulty=3")
        try:
            params[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(key, value, "is not a YAML value", "Quote it for the shell") from None
    return params


class _InteractiveSession:
    """One session that is controlled from standard input."""

    def __init__(self, request: TaskRequest, picture: Path, as_json: bool) -> None:
        self._request, self._picture, self._as_json = request, picture, as_json
        self._steps: list[dict[str, Any]] = []
        self._lines = _InputLines()

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    async def run(self) -> None:
        from palaestra.sessions.browser.browser import Browser
        from palaestra.sessions.browser.chromium import find_chromium
        from palaestra.sessions.browser.session import BrowserSession

        browser = await Browser.start(find_chromium())

        async def get_browser() -> Browser:
            return browser

        session = BrowserSession(get_browser)
        try:
            spec = await session.reset(self._request)
            self._print(spec.instruction)
            self._save_screenshot(await session.screenshot())
            progress = await session.progress()
            if self._lines.are_typed:
                self._print(_ACTIONS)
            progress = await self._play(session, progress)
        finally:
            await session.close()
            await browser.stop()
        if self._as_json:
            print_json({**spec.facts(), "steps": self._steps, "progress": progress.facts()})

    async def _play(self, session: BrowserSession, progress: TaskProgress) -> TaskProgress:
        from palaestra.sessions.action import encode

        step = 0
        while not progress.done:
            if self._lines.are_typed:
                print("> ", end="", file=sys.stderr, flush=True)
            line = await self._lines.read()
            if not line or line.strip() in ("quit", "exit"):
                break
            if not line.strip():
                continue
            try:
                action = parse_action(line)
                result = await session.act(action, step=step + 1)
            except SessionRefused as error:
                if not self._lines.are_typed:
                    raise
                self._print(f"error: {error}")
                continue
            step, progress = result.number, result.progress
            self._steps.append({"action": encode(action), "screenshot": result.screenshot.sha256})
            self._save_screenshot(result.screenshot)
            self._print(_format_progress(step, progress))
        return progress

    def _save_screenshot(self, screenshot: Screenshot) -> None:
        self._picture.write_bytes(screenshot.data)
        if not self._steps:
            self._print(f"Screen of {screenshot.size.width} x {screenshot.size.height} pixels in {self._picture}")


class _InputLines:
    """Lines of standard input, read without a thread.

    A thread that waits for a terminal cannot be interrupted, and the end of the event loop would wait for it.
    """

    def __init__(self) -> None:
        self._pending = b""
        """Bytes that were read after the last line."""
        self.are_typed = sys.stdin is not None and sys.stdin.isatty()
        """Whether they come from a terminal."""

    async def read(self) -> str:
        """The next line; empty at the end of the input."""
        if sys.stdin is None:  # closed by the caller
            return ""
        while b"\n" not in self._pending:
            await _wait_until_readable(sys.stdin.fileno())
            data = os.read(sys.stdin.fileno(), 4096)
            self._pending += data
            if not data:
                break
        line, newline, self._pending = self._pending.partition(b"\n")
        return (line + newline).decode(sys.stdin.encoding, sys.stdin.errors or "strict")


async def _wait_until_readable(descriptor: int) -> None:
    import asyncio

    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:
        return  # a regular file, which is always readable
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _format_progress(step: int, progress: TaskProgress) -> str:
    state = "solved" if progress.success else "ended" if progress.done else "running"
    truncated = ", step limit reached" if progress.truncated else ""
    detail = "".join(f", {key} {value}" for key, value in progress.detail.items() if value not in (None, "", []))
    return f"step {step}: reward {progress.reward:g}, {state}{truncated}{detail}"


def parse_action(line: str) -> UiAction:
    """Parse an action as a person types it, such as `click 80 120` or `press Control+a`, or as JSON."""
    from palaestra.sessions import action as ui

    line = line.strip()
    if line.startswith("{"):
        try:
            return ui.decode(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise InvalidAction("action", line, f"is not JSON ({error})") from None
    word, _, rest = line.partition(" ")
    if word in ("type", "answer"):
        return ui.TypeText(rest) if word == "type" else ui.Answer(rest)
    if word == "press":
        # The plus sign is also a key: Control++.
        keys = ("+",) if rest.strip() == "+" else tuple(rest.strip().removesuffix("++").split("+"))
        return ui.PressKeys((*keys, "+") if rest.strip().endswith("++") else keys)
    if word in ("done", "give-up"):
        return ui.Terminate(word == "done")
    numbers = _parse_numbers(line, rest)
    if word == "wait" and len(numbers) == 1:
        return ui.Wait(numbers[0])
    pixels = [_parse_pixels(line, number) for number in numbers]
    if word in ("click", "double", "right", "move") and len(pixels) == 2:
        at = ui.Point(*pixels)
        if word == "move":
            return ui.Move(at)
        return ui.Click(at, "right" if word == "right" else "left", 2 if word == "double" else 1)
    if word == "drag" and len(pixels) == 4:
        return ui.Drag((ui.Point(*pixels[:2]), ui.Point(*pixels[2:])))
    if word == "scroll" and len(pixels) in (1, 3):
        return ui.Scroll(ui.Point(*pixels[1:]) if len(pixels) == 3 else None, 0, pixels[0])
    raise InvalidAction("action", line, "is not an action", "Write for example: click 80 120")


def _parse_pixels(line: str, number: float) -> int:
    if not number.is_integer():
        raise InvalidAction("action", line, f"{number:g} is not a whole number", "Coordinates are pixels")
    return int(number)


def _parse_numbers(line: str, rest: str) -> list[float]:
    try:
        return [float(part) for part in rest.replace(",", " ").split()]
    except ValueError:
        raise InvalidAction("action", line, "needs numbers") from None
