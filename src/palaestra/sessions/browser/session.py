"""`BrowserSession`: a new browser context for every episode, one action at a time, judged by the task.

It owns the page of the episode and a lock that serialises requests. `EpisodeTracker` has the rules of the protocol,
`Page` everything about browsers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from palaestra.errors import InvalidAction, SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction, decode, fits
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.page import Page
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import EpisodeTracker, SessionState, Step
from palaestra.sessions.suite import Task
from palaestra.sessions.suites import make_task
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec


class BrowserSession(SessionState):
    """One session; `get_browser` returns the browser in which its pages are opened."""

    def __init__(self, get_browser: Callable[[], Awaitable[Browser]], *, deadline: float = 10.0) -> None:
        super().__init__()
        self._get_browser, self._deadline = get_browser, deadline
        self._lock = asyncio.Lock()
        self._page: Page | None = None
        self._task: Task | None = None

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode on a new page."""
        async with self._lock:
            self._check_open()
            task = make_task(request.suite, request.name, request.seed, request.params)
            await self._close_page()
            self._episode, self._failure, self._task = None, None, task
            try:
                with self._record_failure():
                    browser = await self._get_browser()
                    self._page = await Page.open_task(browser, task, seed=request.seed, deadline=self._deadline)
                    instruction = task.instruction(await self._page.evaluate(task.begin))
                    await self._page.settle()
                    await self._page.draw()  # computes the layout of the settled page before the first click
            except SessionFailed:
                await self._close_page()
                raise
            spec = request.resolve(instruction, task.step_limit, task.screen, task.reward_range)
            self._episode = EpisodeTracker(spec)
            Page.prepare_spare(browser, task, deadline=self._deadline)
            return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action once and judge the result."""
        async with self._lock:
            episode, page, task = self._require_page()
            repeated = episode.find_repeated(action, step)
            if repeated is not None:
                return repeated
            episode.begin(action)
            try:
                with self._record_failure():
                    await page.act(action)
                    screenshot = await page.draw()
                    progress = task.judge(await page.evaluate(task.probe))
            except asyncio.CancelledError:
                # An interrupted act has no result, and what follows must not be taken for it.
                self._failure = SessionFailed("interrupted", f"act {step} was cancelled before it was judged")
                raise
            return episode.finish(screenshot, progress)

    async def screenshot(self) -> Screenshot:
        """The current screen."""
        async with self._lock:
            _, page, _ = self._require_page()
            with self._record_failure():
                return await page.screenshot()

    async def progress(self) -> TaskProgress:
        """The verifier's current judgement."""
        async with self._lock:
            episode, page, task = self._require_page()
            with self._record_failure():
                progress = task.judge(await page.evaluate(task.probe))
            return episode.with_end(progress)

    async def oracle_action(self) -> UiAction | None:
        """The next action of the task's oracle; None when nothing is left to do, or the oracle cannot go on.

        For recording demonstrations in this process: it is no part of the `Session` protocol, and session servers do
        not expose it, so that no agent can use it. `SessionRefused` (`no_oracle`) if the task has none.
        """
        async with self._lock:
            episode, page, task = self._require_page()
            if task.oracle is None:
                name = f"{episode.spec.suite}/{episode.spec.name}"
                raise SessionRefused("no_oracle", f"task = '{name}': the task has no oracle.", status=422)
            if episode.is_over:
                return None
            with self._record_failure():
                document = await page.evaluate(task.oracle)
                if document is None:
                    return None
                try:
                    action = decode(document)
                    fits(action, task.screen.width, task.screen.height)
                except InvalidAction as error:
                    raise SessionFailed("oracle_failed", f"the task's oracle returned {document!r}: {error}") from error
                return action

    async def close(self) -> None:
        """Close the page."""
        async with self._lock:
            self._closed = True
            await self._close_page()

    @contextlib.contextmanager
    def _record_failure(self) -> Iterator[None]:
        """Keep an error in this block, also of the task's own code, as the failure of the session."""
        try:
            yield
        except SessionFailed as failure:
            self._failure = failure
            raise
        except SessionRefused:
            raise
        except Exception as error:
            detail = f"the task's verifier raised {type(error).__name__}: {error}"
            self._failure = SessionFailed("verifier_failed", detail)
            raise self._failure from error

    async def _close_page(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            await page.close()

    def _require_page(self) -> tuple[EpisodeTracker, Page, Task]:
        episode = self._require_episode()
        assert self._page is not None
        assert self._task is not None
        return episode, self._page, self._task
