"""`data_entry/form`: a sheet of people beside a form; "enter rows 3, 7 and 9". The verifier checks every submission.

Submissions are sent to `serve`, so the state of the page does not count. Each requested row that is entered exactly
earns its share of 1; a wrong or repeated submission costs 0.1.
"""

from __future__ import annotations

import html
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from palaestra.errors import SessionRefused
from palaestra.sessions.screen import Size
from palaestra.sessions.suite import STEP_LIMIT_SCHEMA, PageRequest, PageResponse, Task, parse_params
from palaestra.sessions.task import TaskProgress

FIRST = "Ada Ben Cleo Dara Egon Fay Gus Hana Ivo June Kai Lena Milo Nora Otto Pia Quin Rosa Sven Tess Uma Vito".split()
LAST = (
    "Abel Brandt Costa Dietz Ekman Fuchs Gruber Holm Ito Jansen Krause Lund Meyer Novak Olsen Price Quist Ruiz".split()
)
WRONG_SUBMISSION_COST = 0.1
MAX_ROWS = 14
_ROWS, _WANTED, _STEPS = 10, 3, 60


class DataEntry:
    """The suite."""

    name = "data_entry"

    def names(self) -> Sequence[str]:
        """One task."""
        return ("form",)

    def parameters(self, name: str) -> dict[str, Any]:
        """JSON Schema of the parameters."""
        limits = {"type": "integer", "minimum": 1, "maximum": MAX_ROWS}
        return {
            "rows": {**limits, "default": _ROWS, "description": "Rows of the sheet."},
            "wanted": {**limits, "default": _WANTED, "description": "Rows to enter; at most as many as there are."},
            "step_limit": {**STEP_LIMIT_SCHEMA, "default": _STEPS},
        }

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The task with `rows` rows in the sheet, of which `wanted` are to be entered."""
        given = parse_params(params, rows=(int, _ROWS), wanted=(int, _WANTED), step_limit=(int, _STEPS))
        if not 1 <= given["wanted"] <= given["rows"] <= MAX_ROWS:
            numbers = f"params.wanted = {given['wanted']}, params.rows = {given['rows']}"
            text = f"{numbers}: need 1 <= wanted <= rows <= {MAX_ROWS}."
            raise SessionRefused("bad_params", text, status=422)
        if given["step_limit"] < 1:
            raise SessionRefused("bad_params", "params.step_limit: must be at least 1.", status=422)
        return _Form(seed, given["rows"], given["wanted"], given["step_limit"])


class _Form(Task):
    screen = Size(640, 400)
    reward_range = (-1.0, 1.0)

    def __init__(self, seed: int, rows: int, wanted: int, step_limit: int) -> None:
        self.step_limit = step_limit
        rng = random.Random(seed)
        self._people = [_person(rng) for _ in range(rows)]
        self._wanted = sorted(rng.sample(range(1, rows + 1), wanted))
        self._submitted: list[int] = []
        self._wrong = 0
        self.html = _page(self._people)

    def serve(self, request: PageRequest) -> PageResponse | None:
        """The page, and the form's submissions."""
        if request.method == "POST" and request.path == "/submit":
            self._submit(request.body)
            return PageResponse(b"{}", "application/json")
        return super().serve(request)

    def _submit(self, body: bytes) -> None:
        try:
            entered = json.loads(body)
            person = (entered["first"], entered["last"], entered["email"])
        except (ValueError, KeyError, TypeError):
            self._wrong += 1
            return
        row = self._people.index(person) + 1 if person in self._people else 0
        if row in self._wanted and row not in self._submitted:
            self._submitted.append(row)
        else:
            self._wrong += 1

    def instruction(self, begin_value: Any) -> str:
        """Which rows to enter."""
        numbers = [str(number) for number in self._wanted]
        listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        what = "row" if len(numbers) == 1 else "rows"
        return f"Enter {what} {listed} of the sheet into the form, one at a time, and submit each."

    def judge(self, probe_value: Any) -> TaskProgress:
        """A share for every row entered, minus a cost for every wrong submission; done when all rows are entered."""
        done = len(self._submitted) == len(self._wanted)
        # At least -1: one act can submit the form many times, for example by typing a text of many lines.
        reward = max(-1.0, len(self._submitted) / len(self._wanted) - WRONG_SUBMISSION_COST * self._wrong)
        detail = {"submitted_rows": sorted(self._submitted), "wrong_submissions": self._wrong, "wanted": self._wanted}
        return TaskProgress(round(reward, 6), done, done and self._wrong == 0, detail=detail)


def _person(rng: random.Random) -> tuple[str, str, str]:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    return first, last, f"{first.lower()}.{last.lower()}{rng.randint(1, 99)}@example.org"


def _page(people: list[tuple[str, str, str]]) -> str:
    rows = "".join(
        f"<tr><td>{number}</td>{''.join(f'<td>{html.escape(part)}</td>' for part in person)}</tr>"
        for number, person in enumerate(people, start=1)
    )
    fields = "".join(
        f'<label>{label}<input id="{name}" autocomplete="off"></label>'
        for label, name in (("First name", "first"), ("Last name", "last"), ("Email", "email"))
    )
    script = """
      document.querySelector('form').addEventListener('submit', async (event) => {
        event.preventDefault();
        const value = (id) => document.getElementById(id).value;
        const entered = {first: value('first'), last: value('last'), email: value('email')};
        // Reset at once, so that text typed before the response does not go into the old entry.
        event.target.reset();
        await fetch('/submit', {method: 'POST', body: JSON.stringify(entered)});
        document.getElementById('said').textContent = 'Submitted.';
      });"""
    style = """
      body{margin:0;font:12px 'DejaVu Sans';display:flex;background:#fff}
      #sheet{width:380px;padding:8px}table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:2px 5px}
      form{width:220px;padding:12px;border-left:2px solid #ccc}label{display:block;margin-bottom:10px}
      input{display:block;width:200px;height:22px;box-sizing:border-box}button{height:28px;width:90px}"""
    return (
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body><div id=sheet><table>"
        f"<tr><th>#</th><th>First name</th><th>Last name</th><th>Email</th></tr>{rows}</table></div>"
        f"<form><h3>New entry</h3>{fields}<button>Submit</button><p id=said></p></form><script>{script}</script></body>"
    )
