"""`palaestra tasks` and `palaestra sessions try`: what tasks there are, and one of them in a person's own hands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.errors import ConfigError, SessionRefused

if TYPE_CHECKING:
    from palaestra.sessions import Progress, Screenshot, TaskRequest

__all__ = ["sessions_app", "tasks"]

sessions_app = typer.Typer(help="Screens for UI agents.", no_args_is_help=True, rich_markup_mode=None)


def tasks(
    contains: Annotated[str, typer.Argument(help="Only tasks whose name contains this.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the UI tasks that sessions can play."""
    from palaestra.sessions.suites import suites

    found = [f"{name}/{task}" for name, suite in sorted(suites().items()) for task in suite.names()]
    found = [name for name in found if contains.lower() in name.lower()]
    print(json.dumps(found) if as_json else "\n".join(found))


@sessions_app.command("try")
def try_command(
    task: Annotated[str, typer.Argument(metavar="TASK", help="For example miniwob/click-button.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="The task's parameters.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same screen.")] = 0,
    picture: Annotated[Path, typer.Option(help="Where to save the screenshot, after every action.")] = Path(
        "screen.png"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    """Open a task in a browser, save what it shows, and act on it by typing.

    Actions come from standard input, one per line, so a file of them can be played as well.
    """
    import asyncio

    from palaestra.sessions.task import TaskRequest

    request = TaskRequest(task, seed, _params(settings or []))
    if not picture.absolute().parent.is_dir():
        raise ConfigError("--picture", str(picture), "its directory does not exist", "Make it, or name another one")
    asyncio.run(_Try(request, picture, as_json).run())


def _params(settings: list[str]) -> dict[str, Any]:
    import yaml

    params = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError("parameter", setting, "is not of the form key=value", "Write for example difficulty=3")
        try:
            params[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(key, value, "is not a YAML value", "Quote it for the shell") from None
    return params


class _Try:
    """One person, one session."""

    def __init__(self, request: TaskRequest, picture: Path, as_json: bool) -> None:
        self._request, self._picture, self._as_json = request, picture, as_json
        self._steps: list[dict[str, Any]] = []

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    async def run(self) -> None:
        from palaestra.sessions.browser import Browser
        from palaestra.sessions.browser_session import BrowserSession
        from palaestra.sessions.chromium import find_chromium

        installed = find_chromium()
        browser = await Browser.start(installed)

        async def give() -> Browser:
            return browser

        session = BrowserSession(give)
        try:
            spec = await session.reset(self._request)
            self._say(spec.instruction)
            self._show(await session.screenshot())
            progress = await session.progress()
            if sys.stdin.isatty():
                from palaestra.cli.words import HELP

                self._say(HELP)
            progress = await self._play(session, progress)
        finally:
            await session.close()
            await browser.stop()
        if self._as_json:
            print(json.dumps({**spec.facts(), "steps": self._steps, "progress": progress.facts()}))

    async def _play(self, session: Any, progress: Progress) -> Progress:
        from asyncio import to_thread

        from palaestra.cli.words import action_in_words
        from palaestra.sessions.action import encode

        step = 0
        while not progress.done:
            line = await to_thread(self._line)
            if line is None or line.strip() in ("quit", "exit"):
                break
            if not line.strip():
                continue
            try:
                action = action_in_words(line)
                made = await session.act(action, step=step + 1)
            except SessionRefused as refusal:
                if not sys.stdin.isatty():
                    raise
                self._say(f"refused: {refusal}")
                continue
            step, progress = made.number, made.progress
            self._steps.append({"action": encode(action), "screenshot": made.screenshot.sha256})
            self._show(made.screenshot)
            self._say(_sentence(step, progress))
        return progress

    def _line(self) -> str | None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line or None

    def _show(self, screenshot: Screenshot) -> None:
        self._picture.write_bytes(screenshot.data)
        if not self._steps:
            self._say(f"Screen of {screenshot.size.width} x {screenshot.size.height} pixels in {self._picture}")


def _sentence(step: int, progress: Progress) -> str:
    state = "solved" if progress.success else "over" if progress.done else "goes on"
    why = ", step limit reached" if progress.truncated else ""
    detail = "".join(f", {key} {value}" for key, value in progress.detail.items() if value not in (None, "", []))
    return f"step {step}: reward {progress.reward:g}, {state}{why}{detail}"
