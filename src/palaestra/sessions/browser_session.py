"""A session in a browser: a fresh context for every episode, one action at a time, judged by its task.

Owns the page of one episode and the lock that keeps acts apart. Everything that is a rule of the protocol is in
`Episode`; everything that is a matter of browsers is in `Page`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction
from palaestra.sessions.browser import Browser
from palaestra.sessions.episode import Episode, Repeated, judged
from palaestra.sessions.page import Page
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Step
from palaestra.sessions.suite import Task
from palaestra.sessions.suites import make_task
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = ["BrowserSession"]


class BrowserSession:
    """One session; `browser` gives the browser to open its pages in."""

    def __init__(self, browser: Callable[[], Awaitable[Browser]], *, deadline: float = 10.0) -> None:
        self._browser, self._deadline = browser, deadline
        self._turn = asyncio.Lock()
        self._page: Page | None = None
        self._task: Task | None = None
        self._episode: Episode | None = None
        self._failure: SessionFailed | None = None
        self._closed = False

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode on a fresh page."""
        async with self._turn:
            self._check_open()
            task = make_task(request.suite, request.name, request.seed, request.params)
            await self._let_go()
            self._episode, self._failure, self._task = None, None, task
            try:
                with self._failing():
                    browser = await self._browser()
                    self._page = await Page.open(
                        browser, task.screen, task.serve, seed=request.seed, entry=task.entry, deadline=self._deadline
                    )
                    told = task.told(await self._page.evaluate(task.begin))
                    await self._page.settle()
                    await self._page.draw()  # lays the settled page out before the first click
            except SessionFailed:
                await self._let_go()
                raise
            spec = TaskSpec(
                request.suite, request.name, request.seed, dict(request.params), told, task.step_limit, task.screen,
                task.reward_range,
            )  # fmt: skip
            self._episode = Episode(spec)
            browser.keep_spare(task.screen)
            return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action once and look at what came of it."""
        async with self._turn:
            episode, page, task = self._running()
            repeated = episode.admit(action, step)
            if isinstance(repeated, Repeated):
                reply: Step = repeated.reply
                return reply
            episode.begin(action)
            try:
                with self._failing():
                    await page.act(action)
                    picture = await page.draw()
                    found = task.judge(await page.evaluate(task.probe))
            except asyncio.CancelledError:
                # Half an act cannot be answered for: nobody may take what follows for its result.
                self._failure = SessionFailed("interrupted", f"act {step} was cancelled before it was judged")
                raise
            progress = judged(found, action, episode.spec, episode.steps)
            made = Step(episode.steps, picture, progress)
            episode.answer(made, over=progress.done, truncated=progress.truncated)
            return made

    async def screenshot(self) -> Screenshot:
        """What is on the screen."""
        async with self._turn:
            _, page, _ = self._running()
            with self._failing():
                return await page.screenshot()

    async def progress(self) -> Progress:
        """The verifier's word."""
        async with self._turn:
            episode, page, task = self._running()
            with self._failing():
                found = task.judge(await page.evaluate(task.probe))
            return episode.as_it_stands(found)

    async def close(self) -> None:
        """Dispose of the page."""
        async with self._turn:
            self._closed = True
            await self._let_go()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What breaks in here has broken the session, also when it is the task's own code that breaks."""
        try:
            yield
        except SessionFailed as failure:
            self._failure = failure
            raise
        except SessionRefused:
            raise
        except Exception as error:
            what = f"the task's verifier raised {type(error).__name__}: {error}"
            self._failure = SessionFailed("verifier_failed", what)
            raise self._failure from error

    async def _let_go(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            await page.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionRefused("no_session", "the session is closed. Open another one.", status=404)

    def _running(self) -> tuple[Episode, Page, Task]:
        self._check_open()
        if self._failure is not None:
            raise self._failure
        if self._episode is None or self._page is None or self._task is None:
            raise SessionRefused("not_reset", "no task was begun. Reset the session first.", status=409)
        return self._episode, self._page, self._task
