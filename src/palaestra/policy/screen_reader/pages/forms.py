"""Forms on synthetic pages: fields to fill in with values from the instruction, or from the page itself."""

from __future__ import annotations

import html
import random
from collections.abc import Sequence

from palaestra.policy.screen_reader.pages.elements import (
    Goal,
    PageDraft,
    add_button,
    add_field,
    draw_distinct,
    draw_margin,
    join_with_and,
)
from palaestra.policy.screen_reader.pages.words import (
    UI_WORDS,
    random_email,
    random_label,
    random_name,
    random_number,
    random_value,
    random_word,
)


def draw_form(draft: PageDraft) -> list[Goal]:
    """Fields to fill in with values from the instruction."""
    rng = draft.rng
    count = rng.choice((1, 1, 2, 2, 3))
    labels = draw_distinct(rng, count, random_label)
    values = draw_distinct(rng, count, random_value)
    same_value = count == 2 and rng.random() < 0.25
    if same_value:
        values = [values[0]] * 2
    filled, focused = _form_state(rng, count)
    has_labels = count > 1 or rng.random() < 0.4
    keys = []
    for place in range(count):
        kind = "password" if "password" in labels[place].lower() else "text"
        if has_labels:
            weight = rng.choice(("", "font-weight:bold;"))
            draft.add(f"<div style='{weight}{draw_margin(rng)}'>{labels[place]}{rng.choice(('', ':'))}</div>")
        content = values[place] if place < filled else ""
        keys.append(add_field(draft, content, focused=focused == place, kind=kind))
    caption = rng.choice(("Submit", "Submit", "Submit", "Login", *rng.sample(UI_WORDS, 2)))
    button = add_button(draft, caption)
    text = _form_instruction(rng, labels, values, caption, same_value=same_value)
    return [_form_goal(text, keys, values, filled, focused, button)]


def _form_instruction(
    rng: random.Random, labels: list[str], values: list[str], caption: str, *, same_value: bool
) -> str:
    last = rng.choice(
        (
            f" and press {caption}",
            f" and hit {caption.lower()}",
            f" and click {caption}",
            f" and press {caption.lower()}",
        )
    )
    quote = rng.choice(('"', '"', '"', ""))
    where = rng.choice(("into the text field", "into the textbox", "in the field"))
    if same_value:
        return f"Enter the {labels[0].lower()} {quote}{values[0]}{quote} into both text fields{last}."
    if len(values) == 1:
        what = rng.choice(("", "", f"the {labels[0].lower()} "))
        text = f"{rng.choice(('Enter', 'Enter', 'Type'))} {what}{quote}{values[0]}{quote} {where}{last}."
        if rng.random() < 0.15:
            text = f"Enter {values[0]} as the {labels[0].lower()}{last}."
        return text
    if rng.random() < 0.3:
        pairs = [f"{quote}{value}{quote} into {label}" for label, value in zip(labels, values, strict=True)]
        return f"Enter {join_with_and(pairs)}{last}."
    pairs = [f"the {label.lower()} {quote}{value}{quote}" for label, value in zip(labels, values, strict=True)]
    return f"Enter {join_with_and(pairs)} into the text fields{last}."


def _form_state(rng: random.Random, count: int) -> tuple[int, int]:
    """How many fields are filled in, and which one has the focus (-1: none)."""
    filled = rng.randrange(count + 1)
    focused = rng.choice((filled - 1, filled, filled)) if filled < count else filled - 1
    return filled, focused


def _form_goal(text: str, keys: list[str], values: Sequence[str], filled: int, focused: int, button: str) -> Goal:
    if filled == len(keys):
        return Goal(text, button)
    return Goal(text, text=values[filled]) if focused == filled else Goal(text, keys[filled])


def draw_copy_form(draft: PageDraft) -> list[Goal]:
    """Values on the page that belong into a form."""
    rng = draft.rng
    shown = rng.choice((1, 1, 2, 2, 3, 4, 5))
    labels, values = draw_distinct(rng, shown, random_label), draw_distinct(rng, shown, random_value)
    values = [value[:14] for value in values]
    sheet = _value_sheet(rng, labels, values)
    count = min(shown, rng.choice((1, 1, 2, 2, 3)))
    wanted = rng.sample(range(shown), count)
    sheet_first = rng.random() < 0.85
    if sheet_first:
        draft.add(sheet)
    filled, focused = _form_state(rng, count)
    keys = []
    has_labels = count > 1 or rng.random() < 0.6
    for place, row in enumerate(wanted):
        if has_labels:
            draft.add(f"<div style='{draw_margin(rng)}'>{html.escape(labels[row])}{rng.choice(('', ':'))}</div>")
        keys.append(add_field(draft, values[row] if place < filled else "", focused=focused == place))
    caption = rng.choice(("Submit", "Submit", "Submit", *rng.sample(UI_WORDS, 1)))
    button = add_button(draft, caption)
    if not sheet_first:
        draft.add(sheet)
    names = [labels[row] for row in wanted]
    last = rng.choice((f" and press {caption}", f" and click {caption}", f", then press {caption}"))
    if count == 1:
        forms = [
            f"Enter the value of {names[0]} into the text field{last}.",
            f"Type the {names[0].lower()} into the field{last}.",
            f"Copy the {names[0].lower()} into the form{last}.",
        ]
    else:
        # The order of the fields need not be that of the instruction.
        listed = rng.sample(names, count) if rng.random() < 0.5 else names
        forms = [
            f"Copy {join_with_and([name.lower() for name in listed])} into the form{last}.",
            f"{rng.choice(('Copy', 'Enter', 'Type'))} {join_with_and(listed)} into the form{last}.",
        ]
        if count == shown and has_labels:
            forms += [f"Copy {'both' if count == 2 else 'all'} values into the form{last}."] * 2
    return [_form_goal(rng.choice(forms), keys, [values[row] for row in wanted], filled, focused, button)]


def _value_sheet(rng: random.Random, labels: list[str], values: list[str]) -> str:
    """HTML of labels and their values: a table, or lines of one of three kinds."""
    style = rng.choice(("table", "inline", "colon", "under"))
    size = rng.choice((9, 10, 12, 14, 14, 14))
    rows = []
    for label, value in zip(map(html.escape, labels), map(html.escape, values), strict=True):
        bold = rng.random() < 0.3
        if style == "table":
            rows.append(
                f"<tr><td style='border:1px solid #aaa;padding:0 2px'>{label}"
                f"<td style='border:1px solid #aaa;padding:0 2px'>{value}"
            )
        elif style == "inline":
            gap = rng.choice((6, 10, 16, 24))
            rows.append(
                f"<div>{'<b>' if bold else ''}{label}{'</b>' if bold else ''}"
                f"<span style='margin-left:{gap}px'>{value}</span></div>"
            )
        elif style == "colon":
            rows.append(f"<div>{label}: {value}</div>")
        else:
            rows.append(f"<div style='color:#666'>{label}</div><div>{value}</div>")
    inner = "".join(rows)
    if style == "table":
        inner = f"<table style='border-collapse:collapse;font-size:{size}px'>{inner}</table>"
    return f"<div style='font-size:{size}px;{draw_margin(rng)}'>{inner}</div>"


def draw_sheet(draft: PageDraft) -> list[Goal]:
    """A table with numbered rows beside a form, into which one row is copied."""
    rng = draft.rng
    draft.size = rng.choice(((320, 240), (480, 320), (640, 400)))
    columns = 2 if draft.size[0] == 320 else 3
    count = rng.randint(3, draft.size[1] // 40)
    labels = draw_distinct(rng, columns, random_label)
    draws = rng.choices((random_word, random_number, random_name, random_email), k=columns)
    rows = list(zip(*(draw_distinct(rng, count, draw) for draw in draws), strict=True))
    number = rng.randint(1, count)
    filled, focused = _form_state(rng, columns)
    border, size = (
        rng.choice(("#aaa", "#bbb", "#ddd")),
        rng.choice((9, 10)) if columns == 2 else rng.choice((11, 12, 12)),
    )
    cell = f"style='border:1px solid {border};padding:2px {rng.choice((2, 3, 5))}px'"
    lines = [("#", *labels), *((str(place), *row) for place, row in enumerate(rows, start=1))]
    table = "".join(f"<tr>{''.join(f'<td {cell}>{html.escape(text)}</td>' for text in line)}</tr>" for line in lines)
    draft.add(
        f"<div style='display:flex;font-size:{size}px'><div style='width:62%;white-space:nowrap'>"
        f"<table style='border-collapse:collapse;font-size:{size}px'>{table}</table></div><div style='padding:4px'>"
    )
    keys = []
    for place, label in enumerate(labels):
        draft.add(f"<div style='{draw_margin(rng)}'>{html.escape(label)}</div>")
        value = rows[number - 1][place] if place < filled else ""
        keys.append(add_field(draft, value, focused=focused == place, width_px=draft.size[0] * 3 // 10))
    caption = rng.choice(("Submit", "Submit", *rng.sample(UI_WORDS, 1)))
    button = add_button(draft, caption)
    draft.add("</div></div>")
    text = rng.choice(
        (
            f"Enter row {number} of the sheet into the form, one at a time, and submit each.",
            f"Enter row {number} of the sheet into the form and press {caption}.",
            f"Copy row {number} of the table into the form and click {caption}.",
        )
    )
    return [_form_goal(text, keys, rows[number - 1], filled, focused, button)]
