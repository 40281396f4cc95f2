"""Sessions of servers with the query-string dialect: `GET /act?action_type=left_click&x=10&y=20` returns a screenshot.

One server is one session without reset or seed, so it has one episode, `assign` decides the task, and only submissions
after the start of the episode count. A server may ignore the step number of an act, so no act is sent twice: if a
response is lost, the session has failed. Actions that the dialect cannot express exactly are refused. Such servers use
PyAutoGUI, which drops characters without a key and fails in the corners of the screen.

`assign_rows` defines the task `simple_data_entry/rows` (enter rows of a sheet into a form), so that a configuration can
name it like any other task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Click, Move, Point, Scroll, UiAction
from palaestra.sessions.clients.client import HttpClient, RetryPolicy
from palaestra.sessions.environment_config import ROWS_TASK
from palaestra.sessions.query_language import SCROLL_PX, write_query
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.session import EpisodeTracker, SessionState, Step
from palaestra.sessions.suite import parse_params
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec
from palaestra.strict_json import read_json

SCREEN = Size(1280, 800)
FIRST_ROW = 2
"""The first row of the sheet below its heading; its index on the server is 0."""
LAST_ROW = 101
INSTRUCTION = "Enter {rows} of the sheet into the form, one at a time, and submit each."
Judge = Callable[[Mapping[str, Any]], TaskProgress]


@dataclass(frozen=True)
class Assignment:
    """The task of such a session."""

    instruction: str
    step_limit: int
    judge: Judge
    """Judges `submitted_rows` (None if the server only counts), `correct_submissions` and `wrong_submissions`."""
    reward_range: tuple[float, float] | None = (-1.0, 1.0)
    """The lowest and the highest reward of `judge`; the highest only for success."""


def rows_entered(rows: set[int], *, cost_of_a_wrong_one: float = 0.1) -> Judge:
    """The rule of the data-entry task: each of `rows` earns its share of 1, a wrong submission costs
    `cost_of_a_wrong_one`, and the reward is at least -1.
    """

    def judge(detail: Mapping[str, Any]) -> TaskProgress:
        if detail["submitted_rows"] is None:
            raise SessionFailed("bad_progress", "the server counts submissions but does not say which rows they were")
        entered = [row for row in detail["submitted_rows"] if row in rows]
        wrong = detail["wrong_submissions"] + len(detail["submitted_rows"]) - len(set(entered))
        done = set(entered) == rows
        reward = max(-1.0, len(set(entered)) / len(rows) - cost_of_a_wrong_one * wrong)
        return TaskProgress(round(reward, 6), done, done and wrong == 0, detail=detail)

    return judge


class QueryDialectSession(SessionState):
    """One session of the dialect, at a URL. `assign` returns the task for a request."""

    def __init__(
        self,
        url: str,
        assign: Callable[[TaskRequest], Assignment],
        *,
        token: str | None = None,
        screen: Size | None = SCREEN,
        delay_s: float = 1.0,
        scroll_px: int = SCROLL_PX,
        deadline_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
        release: Callable[[], Awaitable[object]] | None = None,
        session_id: str = "",
    ) -> None:
        """`delay_s`: seconds from an act to its screenshot. `scroll_px`: pixels of the dialect's only scroll.

        `screen` is the required size; None accepts that of the first screenshot. `headers` are sent with every request,
        such as those of the session that a gateway opened. `release` is awaited when the session is closed.
        `session_id` is the name of the session in trajectories.
        """
        super().__init__()
        self.session_id = session_id
        # A single attempt, because a GET that clicks must never be repeated.
        once = RetryPolicy(attempt_s=deadline_s, attempts=1)
        self._act_client = HttpClient(url, token=token, retry=once, headers=headers)
        self._read_client = HttpClient(url, token=token, retry=RetryPolicy(attempt_s=deadline_s), headers=headers)
        self._assign, self._expected, self._delay_s, self._scroll_px = assign, screen, delay_s, scroll_px
        self._release = release
        self._lock = asyncio.Lock()
        self._judge: Judge | None = None
        self._initial_report: dict[str, Any] = {}
        """The report before the episode, which does not count."""
        self._pointer: Point | None = None

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin the only episode."""
        async with self._lock:
            self._check_open()
            if self._episode is not None:
                text = "a session of this dialect cannot be reset. Open another one."
                raise SessionRefused("cannot_reset", text, status=409)
            assignment = self._assign(request)
            screenshot = await self._screenshot()
            if self._expected is not None and screenshot.size != self._expected:
                text = f"the screen is {screenshot.size}, expected was {self._expected}"
                raise SessionFailed("bad_screenshot", text)
            self._initial_report = await self._read_report()
            spec = request.resolve(
                assignment.instruction, assignment.step_limit, screenshot.size, assignment.reward_range
            )
            self._episode, self._judge = EpisodeTracker(spec), assignment.judge
            return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action at most once."""
        async with self._lock:
            episode, judge = self._require_judge()
            repeated = episode.find_repeated(action, step)
            if repeated is not None:
                return repeated
            query = write_query(action, self._pointer, episode.spec.screen, self._scroll_px)
            episode.begin(action)
            try:
                screenshot = await self._screenshot() if query is None else await self._perform(query, step)
                progress = judge(await self._read_detail())
            except SessionFailed as failure:
                self._failure = failure
                raise
            except SessionRefused as refusal:
                # The act was begun, but a refusal would mean that nothing has changed.
                self._failure = SessionFailed("refused", str(refusal))
                raise self._failure from None
            except BaseException:
                # The caller was cancelled, so the result of the act is not known.
                self._failure = SessionFailed("interrupted", f"step {step} was not waited for")
                raise
            if isinstance(action, Click | Move | Scroll) and action.at is not None:
                self._pointer = action.at
            return episode.finish(screenshot, progress)

    async def screenshot(self) -> Screenshot:
        """The current screen."""
        async with self._lock:
            self._require_episode()
            return await self._screenshot()

    async def progress(self) -> TaskProgress:
        """The judgement of the server's current report."""
        async with self._lock:
            episode, judge = self._require_judge()
            return episode.with_end(judge(await self._read_detail()))

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._act_client.close()
            await self._read_client.close()
        finally:
            if self._release is not None:
                await self._release()

    async def _perform(self, query: Mapping[str, str], step: int) -> Screenshot:
        params = {**query, "step": str(step), "delay": f"{self._delay_s:g}"}
        response = await self._act_client.request("GET", "/act", params=params, extra_s=self._delay_s)
        return Screenshot.of(response.body)

    async def _screenshot(self) -> Screenshot:
        response = await self._read_client.request("GET", "/act", params={"action_type": "screenshot"}, repeatable=True)
        return Screenshot.of(response.body)

    async def _read_detail(self) -> dict[str, Any]:
        """The submissions since the episode began."""
        now, before = await self._read_report(), self._initial_report
        rows, earlier = now["submitted_rows"], before["submitted_rows"]
        since = {name: now[name] - before[name] for name in ("correct_submissions", "wrong_submissions")}
        shrunk = min(since.values()) < 0 or (rows is None) != (earlier is None)
        if shrunk or (rows is not None and rows[: len(earlier)] != earlier):
            text = f"the report contradicts that of the episode's beginning: {before}, then {now}"
            raise SessionFailed("bad_progress", text)
        return {"submitted_rows": None if rows is None else rows[len(earlier) :], **since}

    async def _read_report(self) -> dict[str, Any]:
        response = await self._read_client.request("GET", "/progress", repeatable=True)
        try:
            report = read_json(response.body)
            rows = report.get("submitted_row_indices")
            correct = int(report["num_correct_submissions"]) if rows is None else len(rows)
            rows = None if rows is None else [int(row) for row in rows]
            wrong = int(report.get("num_incorrect_submissions", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A missing field must not be taken for a reward of zero.
            text = f"the progress lacks required fields ({error!r}): {response.body[:200]!r}"
            raise SessionFailed("bad_progress", text) from None
        return {"submitted_rows": rows, "correct_submissions": correct, "wrong_submissions": wrong}

    def _require_judge(self) -> tuple[EpisodeTracker, Judge]:
        episode = self._require_episode()
        assert self._judge is not None
        return episode, self._judge


def assign_rows(request: TaskRequest) -> Assignment:
    """The rows, the instruction and the step limit for a request of the task."""
    if request.task != ROWS_TASK:
        text = f"task = {request.task!r}: a server of the query-string dialect only has the task {ROWS_TASK}."
        raise SessionRefused("unknown_task", text, status=404)
    given = parse_params(
        request.params,
        rows=(list, []),
        wanted=(int, 1),
        last_row=(int, LAST_ROW),
        step_limit=(int, 50),
        instruction=(str, INSTRUCTION),
    )
    if given["step_limit"] < 1:
        raise _bad("step_limit", given["step_limit"], "must be at least 1")
    rows = _choose_rows(given, request.seed)
    instruction = given["instruction"].replace("{rows}", _format_rows(rows))
    return Assignment(instruction, given["step_limit"], rows_entered({row - FIRST_ROW for row in rows}))


def _choose_rows(given: Mapping[str, Any], seed: int) -> list[int]:
    last = given["last_row"]
    if given["rows"]:
        rows = given["rows"]
        for row in rows:
            if isinstance(row, bool) or not isinstance(row, int) or not FIRST_ROW <= row <= last:
                raise _bad("rows", row, f"must be numbers of rows from {FIRST_ROW} to {last}")
        if len(set(rows)) != len(rows):
            raise _bad("rows", rows, "names a row twice")
        return sorted(rows)
    sheet = range(FIRST_ROW, last + 1)
    if not 1 <= given["wanted"] <= len(sheet):
        raise _bad("wanted", given["wanted"], f"must lie between 1 and the {len(sheet)} rows of the sheet")
    return sorted(random.Random(seed).sample(sheet, given["wanted"]))


def _format_rows(rows: list[int]) -> str:
    numbers = [str(row) for row in rows]
    return f"row {numbers[0]}" if len(numbers) == 1 else f"rows {', '.join(numbers[:-1])} and {numbers[-1]}"


def _bad(name: str, value: object, reason: str) -> SessionRefused:
    return SessionRefused("bad_params", f"params.{name} = {value!r}: {reason}.", status=422)
