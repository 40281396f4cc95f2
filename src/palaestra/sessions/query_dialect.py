"""Sessions that speak the query-string dialect: `GET /act?action_type=left_click&x=10&y=20` answers with a picture.

One server is one session: there is no reset and no seed, so an episode can be begun once, what is asked of the agent is
decided here (`assign`), and only what is reported after its beginning counts. A server need not heed the step number
that goes with an act, so no act is sent twice: whenever its answer is lost the session has failed. What the dialect
cannot say exactly is refused with the reason rather than approximated. It types and clicks through PyAutoGUI, which
drops characters it has no key for and gives up in the corners of the screen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Click, Move, Point, Scroll, UiAction
from palaestra.sessions.episode import Episode, Repeated, judged
from palaestra.sessions.http_caller import HttpCaller, Patience
from palaestra.sessions.query_language import SCROLL_PX, write_query
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.session import Step
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec
from palaestra.strict_json import read_json

__all__ = ["Assignment", "QueryDialectSession", "rows_entered"]

SCREEN = Size(1280, 800)
Judge = Callable[[Mapping[str, Any]], Progress]


@dataclass(frozen=True)
class Assignment:
    """What an agent is asked to do with such a session."""

    instruction: str
    step_limit: int
    judge: Judge
    """Progress from `submitted_rows` (None if the server only counts), `correct_submissions`, `wrong_submissions`."""
    reward_range: tuple[float, float] | None = (-1.0, 1.0)
    """The least and the most that `judge` pays; the most for success alone."""


def rows_entered(rows: set[int], *, cost_of_a_wrong_one: float = 0.1) -> Judge:
    """The rule of our own data-entry task: each of `rows` earns its share of 1, a wrong submission costs a tenth, and
    an episode is never paid less than -1.
    """

    def judge(detail: Mapping[str, Any]) -> Progress:
        if detail["submitted_rows"] is None:
            raise SessionFailed("bad_progress", "the server counts submissions but does not say which rows they were")
        entered = [row for row in detail["submitted_rows"] if row in rows]
        wrong = detail["wrong_submissions"] + len(detail["submitted_rows"]) - len(set(entered))
        done = set(entered) == rows
        reward = max(-1.0, len(set(entered)) / len(rows) - cost_of_a_wrong_one * wrong)
        return Progress(round(reward, 6), done, done and wrong == 0, detail=detail)

    return judge


class QueryDialectSession:
    """One session of the dialect, at a URL. `assign` says what a request for a task means there."""

    def __init__(
        self, url: str, assign: Callable[[TaskRequest], Assignment], *, token: str | None = None,
        screen: Size | None = SCREEN, delay_s: float = 1.0, scroll_px: int = SCROLL_PX, deadline_s: float = 30.0,
        headers: Mapping[str, str] | None = None, give_up: Callable[[], Awaitable[object]] | None = None,
        session_id: str = "",
    ) -> None:  # fmt: skip
        """`delay_s`: from an act to its picture. `scroll_px`: what its one kind of scroll amounts to.

        `screen` is the size to insist on; None takes that of the first picture. `headers` go with every request, such
        as those of the session that a gateway opened. `give_up` is awaited when the session is closed. `session_id` is
        what trajectories call the session.
        """
        self.session_id = session_id
        # One attempt and no more: a GET that clicks must never be repeated.
        once = Patience(attempt_s=deadline_s, attempts=1)
        self._acting = HttpCaller(url, token=token, patience=once, headers=headers)
        self._asking = HttpCaller(url, token=token, patience=Patience(attempt_s=deadline_s), headers=headers)
        self._assign, self._expected, self._delay_s, self._scroll_px = assign, screen, delay_s, scroll_px
        self._give_up = give_up
        self._turn = asyncio.Lock()
        self._episode: Episode | None = None
        self._judge: Judge | None = None
        self._before: dict[str, Any] = {}
        """What was reported before the episode, and is no merit of the agent's."""
        self._pointer: Point | None = None
        self._failure: SessionFailed | None = None
        self._closed = False

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin the one episode there is."""
        async with self._turn:
            self._check_open()
            if self._episode is not None:
                text = "a session of this dialect cannot be reset. Open another one."
                raise SessionRefused("cannot_reset", text, status=409)
            assignment = self._assign(request)
            picture = await self._look()
            if self._expected is not None and picture.size != self._expected:
                text = f"the screen is {picture.size}, expected was {self._expected}"
                raise SessionFailed("bad_screenshot", text)
            self._before = await self._report()
            spec = TaskSpec(
                request.suite, request.name, request.seed, dict(request.params), assignment.instruction,
                assignment.step_limit, picture.size, assignment.reward_range,
            )  # fmt: skip
            self._episode, self._judge = Episode(spec), assignment.judge
            return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action, once or not at all."""
        async with self._turn:
            episode, judge = self._running()
            repeated = episode.admit(action, step)
            if isinstance(repeated, Repeated):
                reply: Step = repeated.reply
                return reply
            query = write_query(action, self._pointer, episode.spec.screen, self._scroll_px)
            episode.begin(action)
            try:
                picture = await self._look() if query is None else await self._perform(query, step)
                found = judge(await self._detail())
            except SessionFailed as failure:
                self._failure = failure
                raise
            except SessionRefused as refusal:
                # The act counts as begun; a refusal would promise that nothing has changed.
                self._failure = SessionFailed("refused", str(refusal))
                raise self._failure from None
            except BaseException:
                # The caller stopped waiting: what became of the act is not known, so nothing more can be.
                self._failure = SessionFailed("interrupted", f"step {step} was not waited for")
                raise
            if isinstance(action, Click | Move | Scroll) and action.at is not None:
                self._pointer = action.at
            progress = judged(found, action, episode.spec, episode.steps)
            made = Step(episode.steps, picture, progress)
            episode.answer(made, over=progress.done, truncated=progress.truncated)
            return made

    async def screenshot(self) -> Screenshot:
        """What is on the screen."""
        async with self._turn:
            self._running()
            return await self._look()

    async def progress(self) -> Progress:
        """The rule's word on what the server reports."""
        async with self._turn:
            episode, judge = self._running()
            return episode.as_it_stands(judge(await self._detail()))

    async def close(self) -> None:
        """Let go of the connection; the server is ended by whoever started it."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._acting.close()
            await self._asking.close()
        finally:
            if self._give_up is not None:
                await self._give_up()

    async def _perform(self, query: Mapping[str, str], step: int) -> Screenshot:
        sent = {**query, "step": str(step), "delay": f"{self._delay_s:g}"}
        answer = await self._acting.call("GET", "/act", params=sent, extra_s=self._delay_s)
        return Screenshot.of(answer.body)

    async def _look(self) -> Screenshot:
        answer = await self._asking.call("GET", "/act", params={"action_type": "screenshot"}, repeatable=True)
        return Screenshot.of(answer.body)

    async def _detail(self) -> dict[str, Any]:
        """What was reported since the episode began."""
        now, before = await self._report(), self._before
        rows, earlier = now["submitted_rows"], before["submitted_rows"]
        since = {name: now[name] - before[name] for name in ("correct_submissions", "wrong_submissions")}
        shrunk = min(since.values()) < 0 or (rows is None) != (earlier is None)
        if shrunk or (rows is not None and rows[: len(earlier)] != earlier):
            text = f"the report does not follow on that of the episode's beginning: {before}, then {now}"
            raise SessionFailed("bad_progress", text)
        return {"submitted_rows": None if rows is None else rows[len(earlier) :], **since}

    async def _report(self) -> dict[str, Any]:
        answer = await self._asking.call("GET", "/progress", repeatable=True)
        try:
            told = read_json(answer.body)
            rows = told.get("submitted_row_indices")
            correct = int(told["num_correct_submissions"]) if rows is None else len(rows)
            rows = None if rows is None else [int(row) for row in rows]
            wrong = int(told.get("num_incorrect_submissions", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A field that went by another name was once read as "nothing earned", step after step.
            text = f"progress without the fields it should have ({error!r}): {answer.body[:200]!r}"
            raise SessionFailed("bad_progress", text) from None
        return {"submitted_rows": rows, "correct_submissions": correct, "wrong_submissions": wrong}

    def _check_open(self) -> None:
        if self._closed:
            raise SessionRefused("no_session", "the session is closed. Open another one.", status=404)

    def _running(self) -> tuple[Episode, Judge]:
        self._check_open()
        if self._failure is not None:
            raise self._failure
        if self._episode is None or self._judge is None:
            raise SessionRefused("not_reset", "no task was begun. Reset the session first.", status=409)
        return self._episode, self._judge
