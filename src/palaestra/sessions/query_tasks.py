"""The task that servers of the query-string dialect carry: rows of a sheet to be entered into a form.

Such a server knows neither instruction nor reward. `assign_rows` decides both from a request for
`simple_data_entry/rows`, so that a configuration can name the task like any other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from palaestra.errors import SessionRefused
from palaestra.sessions.query_dialect import Assignment, rows_entered
from palaestra.sessions.suite import checked_params
from palaestra.sessions.task import TaskRequest

__all__ = ["ROWS_TASK", "assign_rows"]

ROWS_TASK = "simple_data_entry/rows"
FIRST_ROW = 2
"""The first row of the sheet below its heading; the server calls it row index 0."""
LAST_ROW = 101
INSTRUCTION = "Enter {rows} of the sheet into the form, one at a time, and submit each."


def assign_rows(request: TaskRequest) -> Assignment:
    """What a request for the task means: which rows, what the agent is told, when it is over."""
    if request.task != ROWS_TASK:
        text = f"task = {request.task!r}: a server of the query-string dialect carries {ROWS_TASK} alone."
        raise SessionRefused("unknown_task", text, status=404)
    given = checked_params(
        request.params, rows=(list, []), wanted=(int, 1), last_row=(int, LAST_ROW), step_limit=(int, 50),
        instruction=(str, INSTRUCTION),
    )  # fmt: skip
    if given["step_limit"] < 1:
        raise _bad("step_limit", given["step_limit"], "must be at least 1")
    rows = _rows(given, request.seed)
    instruction = given["instruction"].replace("{rows}", _format_rows(rows))
    return Assignment(instruction, given["step_limit"], rows_entered({row - FIRST_ROW for row in rows}))


def _rows(given: Mapping[str, Any], seed: int) -> list[int]:
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
