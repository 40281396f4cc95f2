"""Synthetic pages with goals: what to do next on a page in its present state, and the instruction that asks for it.

None of them is a page of a task suite. They have the same kinds of things on them: buttons, links, fields, check boxes,
tabs, dialogs, tables and values to copy, in random words, sizes and places.
"""

from __future__ import annotations

import html
import random
from collections.abc import Callable
from dataclasses import dataclass

from palaestra.policy.screen_reader.pages.elements import Goal, PageDraft
from palaestra.policy.screen_reader.pages.families import (
    draw_buttons_and_links,
    draw_choices,
    draw_coloured_boxes,
    draw_dense_text,
    draw_dialog,
    draw_hidden_link,
    draw_ordered_fields,
    draw_typing_and_keys,
    draw_widget_kinds,
)
from palaestra.policy.screen_reader.pages.forms import draw_copy_form, draw_form, draw_sheet

SMALL = (160, 210)


@dataclass
class SyntheticPage:
    """HTML, and goals in the state that it shows."""

    size: tuple[int, int]
    """Width and height in pixels."""
    html: str
    goals: list[Goal]


def draw_page(rng: random.Random, *, dense: bool = True) -> SyntheticPage:
    """A random page; `dense`: possibly one of text alone, without goals."""
    families = {family: weight for family, weight in _FAMILIES.items() if dense or family is not draw_dense_text}
    family = rng.choices(list(families), weights=list(families.values()))[0]
    draft = PageDraft(rng)
    goals = family(draft)
    size = draft.size or (rng.choice(((240, 200), (320, 240), (200, 260))) if rng.random() < 0.12 else SMALL)
    has_bar = rng.random() < 0.6
    if has_bar and goals:
        goals = [rng.choice(goals)]
        bar = _instruction_bar(rng, goals[0].instruction)
    else:
        bar = f"<div style='height:{rng.choice((0, 4, 12, 50))}px'></div>"
    padding = rng.choice((0, 0, 2, 4, 8))
    body = "".join(draft.parts)
    font = rng.choice((9, 10, 10, 10, 11, 12, 13, 14, 14, 16))
    page = (
        f"<div style='font:{font}px DejaVu Sans;width:{size[0]}px;height:{size[1]}px;overflow:hidden;position:relative;"
        f"background:{rng.choice(('#fff', '#fff', '#fff', '#fff', '#fafafa', '#f4f4ff'))}'>{bar}"
        f"<div style='padding:{padding}px'>{body}</div></div>"
    )
    return SyntheticPage(size, page, goals)


def _instruction_bar(rng: random.Random, instruction: str) -> str:
    """A bar with the instruction on top of the page."""
    background = rng.choice(("yellow", "yellow", "yellow", "#ff0", "#eee", "#dde"))
    size_px = rng.choice((10, 10, 10, 9, 11))
    parts = html.escape(instruction).split("&quot;")
    if len(parts) >= 3 and rng.random() < 0.5:
        parts[1] = f"<b>{parts[1]}</b>"
    return (
        f"<div style='background:{background};height:50px;padding:2px;font:{size_px}px DejaVu Sans;"
        f"box-sizing:border-box;overflow:hidden'>{'&quot;'.join(parts)}</div>"
    )


_FAMILIES: dict[Callable[[PageDraft], list[Goal]], float] = {
    draw_buttons_and_links: 3.0,
    draw_hidden_link: 1.5,
    draw_choices: 2.0,
    draw_form: 2.5,
    draw_copy_form: 6.0,
    draw_sheet: 0.8,
    draw_dialog: 1.0,
    draw_widget_kinds: 1.0,
    draw_ordered_fields: 0.6,
    draw_coloured_boxes: 0.5,
    draw_typing_and_keys: 0.3,
    draw_dense_text: 4.0,
}
