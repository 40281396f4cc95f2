"""`data_entry/*`: copy values that the page shows into a form; from one field to rows of a sheet.

`field` and `fields` show one or two labelled values above a form; the first submission ends the episode. `form` is a
sheet of people beside a form: "enter rows 3, 7 and 9". Each requested row that is entered exactly earns its share of 1;
a wrong or repeated submission costs 0.1.

Submissions are sent to `serve`, so the state of the page does not count.
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
from palaestra.sessions.suites.oracles import build_oracle
from palaestra.sessions.task import TaskProgress

FIRST = "Ada Ben Cleo Dara Egon Fay Gus Hana Ivo June Kai Lena Milo Nora Otto Pia Quin Rosa Sven Tess Uma Vito".split()
LAST = (
    "Abel Brandt Costa Dietz Ekman Fuchs Gruber Holm Ito Jansen Krause Lund Meyer Novak Olsen Price Quist Ruiz".split()
)
WORD_LABELS = "Name City Item Team Plan Shop".split()
"""Labels of values that are words."""
NUMBER_LABELS = "Code Room Tag Unit Lot Gate".split()
"""Labels of values that are numbers."""
CONSONANTS, VOWELS = "bdfghklmnprstvwz", "aeiou"
WRONG_SUBMISSION_COST = 0.1
MAX_ROWS = 14
MAX_DISTRACTORS = 3
FONT_PX = (10, 16)
"""The smallest and the largest font of values; five lines of a larger one hardly fit above two fields."""
_ROWS, _WANTED, _STEPS = 10, 3, 60
_FIELD_COUNTS = {"field": 1, "fields": 2}
_FIELD_STEPS = {"field": 8, "fields": 12}
_DISTRACTORS, _FONT_PX = 0, 14


class DataEntry:
    """The suite."""

    name = "data_entry"

    def names(self) -> Sequence[str]:
        """From the easiest to the hardest."""
        return (*_FIELD_COUNTS, "form")

    def parameters(self, name: str) -> dict[str, Any]:
        """JSON Schema of the parameters."""
        if name in _FIELD_COUNTS:
            return _describe_fields(name)
        limits = {"type": "integer", "minimum": 1, "maximum": MAX_ROWS}
        return {
            "rows": {**limits, "default": _ROWS, "description": "Rows of the sheet."},
            "wanted": {**limits, "default": _WANTED, "description": "Rows to enter; at most as many as there are."},
            "step_limit": {**STEP_LIMIT_SCHEMA, "default": _STEPS},
        }

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The task; the parameters are those of `parameters(name)`."""
        return _make_form(seed, params) if name == "form" else _make_fields(name, seed, params)


def _describe_fields(name: str) -> dict[str, Any]:
    distractors = {"minimum": 0, "maximum": MAX_DISTRACTORS, "description": "Further values that are not asked for."}
    font = {"minimum": FONT_PX[0], "maximum": FONT_PX[1], "description": "Font size of the values in pixels."}
    return {
        "distractors": {"type": "integer", "default": _DISTRACTORS, **distractors},
        "font_px": {"type": "integer", "default": _FONT_PX, **font},
        "step_limit": {**STEP_LIMIT_SCHEMA, "default": _FIELD_STEPS[name]},
    }


def _make_fields(name: str, seed: int, params: Mapping[str, Any]) -> Task:
    defaults = {"distractors": _DISTRACTORS, "font_px": _FONT_PX, "step_limit": _FIELD_STEPS[name]}
    given = parse_params(params, **{key: (int, default) for key, default in defaults.items()})
    _check_range("distractors", given["distractors"], 0, MAX_DISTRACTORS)
    _check_range("font_px", given["font_px"], *FONT_PX)
    _check_step_limit(given["step_limit"])
    return _Fields(seed, _FIELD_COUNTS[name], given["distractors"], given["font_px"], given["step_limit"])


def _make_form(seed: int, params: Mapping[str, Any]) -> Task:
    given = parse_params(params, rows=(int, _ROWS), wanted=(int, _WANTED), step_limit=(int, _STEPS))
    if not 1 <= given["wanted"] <= given["rows"] <= MAX_ROWS:
        numbers = f"params.wanted = {given['wanted']}, params.rows = {given['rows']}"
        text = f"{numbers}: need 1 <= wanted <= rows <= {MAX_ROWS}."
        raise SessionRefused("bad_params", text, status=422)
    _check_step_limit(given["step_limit"])
    return _Form(seed, given["rows"], given["wanted"], given["step_limit"])


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        text = f"params.{name} = {value}: must lie between {low} and {high}."
        raise SessionRefused("bad_params", text, status=422)


def _check_step_limit(step_limit: int) -> None:
    if step_limit < 1:
        raise SessionRefused("bad_params", "params.step_limit: must be at least 1.", status=422)


class _Fields(Task):
    screen = Size(160, 210)
    reward_range = (-1.0, 1.0)
    oracle = build_oracle("""
      const values = Object.fromEntries(all('#values p').map((row) => [...row.children].map(textOf)));
      const pairs = all('form label').map((label) => [label.querySelector('input'), values[textOf(label)]]);
      const button = document.querySelector('form button');
      return button.disabled ? null : fillAndClick(pairs, button);""")

    def __init__(self, seed: int, fields: int, distractors: int, font_px: int, step_limit: int) -> None:
        self.step_limit = step_limit
        rng = random.Random(f"{seed} {fields} {distractors}")
        labels = rng.sample(WORD_LABELS + NUMBER_LABELS, fields + distractors)
        values = {label: _draw_value(rng, label) for label in labels}
        self._wanted = {label: values[label] for label in labels[:fields]}
        self._names_labels = distractors > 0
        self._exact: int | None = None
        """Number of exact fields in the first submission."""
        self.html = _fields_page(rng, values, list(self._wanted), font_px)

    def serve(self, request: PageRequest) -> PageResponse | None:
        """The page, and the form's submission."""
        if request.method == "POST" and request.path == "/submit":
            if self._exact is None:
                self._exact = self._count_exact(request.body)
            return PageResponse(b"{}", "application/json")
        return super().serve(request)

    def _count_exact(self, body: bytes) -> int:
        try:
            entered = json.loads(body)
        except ValueError:
            return 0
        if not isinstance(entered, dict):
            return 0
        return sum(entered.get(label) == value for label, value in self._wanted.items())

    def instruction(self, begin_value: Any) -> str:
        """What to copy."""
        first, *more = self._wanted
        if not more:
            return f"Type the {first.lower()} into the field and press Submit."
        what = f"{first} and {more[0]}" if self._names_labels else "both values"
        return f"Copy {what} into the form and press Submit."

    def judge(self, probe_value: Any) -> TaskProgress:
        """The first submission decides: 1 if every field is exact, otherwise the share of exact fields minus 1."""
        count = len(self._wanted)
        if self._exact is None:
            return TaskProgress(0.0, False, False, detail={"exact_fields": None, "fields": count})
        solved = self._exact == count
        reward = 1.0 if solved else self._exact / count - 1.0
        return TaskProgress(reward, True, solved, detail={"exact_fields": self._exact, "fields": count})


def _draw_value(rng: random.Random, label: str) -> str:
    """A word of 3 to 6 letters, or a number of 3 to 5 digits; the longer, the likelier, because there are more."""
    if label in NUMBER_LABELS:
        (digits,) = rng.choices((3, 4, 5), weights=(1, 2, 3))
        return str(rng.randrange(10 ** (digits - 1), 10**digits))
    (letters,) = rng.choices((3, 4, 5, 6), weights=(1, 2, 3, 4))
    return "".join(rng.choice(VOWELS if place % 2 else CONSONANTS) for place in range(letters)).capitalize()


def _fields_page(rng: random.Random, values: dict[str, str], wanted: list[str], font_px: int) -> str:
    """The values in one random order, the fields in another."""
    line, field, button = font_px + 4, 34, 22
    room = 206 - len(values) * line - len(wanted) * field - button
    top = rng.randint(2, max(2, min(24, room // 2)))
    gap = rng.randint(2, max(2, min(24, room - top)))
    left, column = rng.randint(3, 10), rng.randint(3 * font_px + 4, 3 * font_px + 14)
    shown = "".join(
        f"<p><span class=label>{label}</span><span class=value>{value}</span></p>"
        for label, value in rng.sample(list(values.items()), len(values))
    )
    fields = "".join(
        f'<label>{label}<input name="{label}" autocomplete="off" spellcheck="false"></label>'
        for label in rng.sample(wanted, len(wanted))
    )
    style = f"""
      body{{margin:0;padding:{top}px 0 0 {left}px;background:#fff;font:12px 'DejaVu Sans';color:#000}}
      p{{margin:0;height:{line}px;font-size:{font_px}px;line-height:{line}px;white-space:nowrap}}
      .label{{display:inline-block;width:{column}px;color:#555}}
      form{{margin-top:{gap}px}}label{{display:block;height:{field}px;line-height:12px;font-size:11px;color:#555}}
      input{{display:block;width:120px;height:20px;box-sizing:border-box;font:12px 'DejaVu Sans'}}
      button{{height:{button}px;width:70px;font:12px 'DejaVu Sans'}}"""
    script = """
      document.querySelector('form').addEventListener('submit', async (event) => {
        event.preventDefault();
        const entered = Object.fromEntries(new FormData(event.target));
        document.querySelector('button').disabled = true;
        await fetch('/submit', {method: 'POST', body: JSON.stringify(entered)});
      });"""
    return (
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body><div id=values>{shown}</div>"
        f"<form>{fields}<button>Submit</button></form><script>{script}</script></body>"
    )


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
        self.oracle = _build_row_oracle(self._wanted[0])
        self.html = _form_page(self._people)

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
            self.oracle = _build_row_oracle(min(set(self._wanted) - set(self._submitted), default=None))
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


def _build_row_oracle(row: int | None) -> str:
    """Enters one row of the sheet, counted from 1; None: no row is left."""
    if row is None:
        return "null"
    return build_oracle(f"""
      const values = [...document.querySelector('table').rows[{row}].cells].slice(1).map(textOf);
      const pairs = all('form input').map((field, index) => [field, values[index]]);
      return fillAndClick(pairs, document.querySelector('form button'));""")


def _person(rng: random.Random) -> tuple[str, str, str]:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    return first, last, f"{first.lower()}.{last.lower()}{rng.randint(1, 99)}@example.org"


def _form_page(people: list[tuple[str, str, str]]) -> str:
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
