"""Goals and elements of synthetic pages: buttons, fields and paragraphs as HTML, with random looks.

The order of the random draws is part of the recipe: another order gives other pages, and so another model.
"""

from __future__ import annotations

import html
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from palaestra.policy.screen_reader.pages.words import pseudo_word, random_word


@dataclass(frozen=True)
class Goal:
    """An instruction, and the next action that serves it."""

    instruction: str
    target: str = ""
    """Id of the element to click."""
    text: str = ""
    """Text to type."""
    keys: tuple[str, ...] = ()
    scroll: int = 0


@dataclass
class PageDraft:
    """A page in the making."""

    rng: random.Random
    size: tuple[int, int] | None = None
    """Width and height in pixels; None: any."""
    parts: list[str] = field(default_factory=list)
    count: int = 0

    def new_id(self) -> str:
        """An id for the next element that can be a target."""
        self.count += 1
        return f"e{self.count}"

    def add(self, markup: str) -> None:
        """Append HTML."""
        self.parts.append(markup)


def draw_margin(rng: random.Random) -> str:
    """CSS of a margin at the left and above."""
    left, top = rng.choice((0, 0, 0, 2, 5, 10, 20)), rng.choice((0, 0, 1, 2, 4, 8, 14))
    return f"margin:{top}px 0 0 {left}px;"


def add_button(draft: PageDraft, text: str, *, inline: bool = False) -> str:
    """Add a button; returns its id."""
    rng, key = draft.rng, draft.new_id()
    size = rng.choice((10, 11, 13.333, 13.333, 13.333, 14))
    extra = rng.choice(("", "", "width:100px;height:30px;", "padding:5px 12px;", "height:25px;", "border-radius:4px;"))
    colours = rng.choice(
        ("", "", "", "", "background:#ddd;", "background:#f6f6f6;border:1px solid #c5c5c5;color:#454545;")
    )
    show = "inline-block" if inline else "block"
    draft.add(
        f"<button id={key} style='{draw_margin(rng)}font-size:{size}px;{extra}{colours}display:{show}'>"
        f"{html.escape(text)}</button>"
    )
    return key


def add_text(draft: PageDraft, text: str) -> None:
    """Add a line of text."""
    draft.add(f"<div style='{draw_margin(draft.rng)}'>{html.escape(text)}</div>")


def add_field(
    draft: PageDraft, value: str = "", *, focused: bool = False, kind: str = "text", width_px: int = 0
) -> str:
    """Add an input field, by default of random width; returns its id."""
    rng, key = draft.rng, draft.new_id()
    wide = width_px or rng.choice((80, 100, 120, 128, 140))
    tall = rng.choice(("", "", "height:20px;", "height:22px;", "height:24px;", "padding:3px;"))
    size = rng.choice((10, 12, 13.333, 13.333, 14))
    mark = " data-focus=1" if focused else ""
    draft.add(
        f"<input id={key} type={kind} value='{html.escape(value)}'{mark} autocomplete=off "
        f"style='{draw_margin(rng)}font-size:{size}px;width:{wide}px;{tall}box-sizing:border-box;display:block'>"
    )
    return key


def add_paragraph(draft: PageDraft, link_count: int) -> list[tuple[str, str]]:
    """Add text with links in it; returns their words and ids."""
    rng = draft.rng
    words = [pseudo_word(rng) for _ in range(rng.randint(link_count + 2, 14))]
    places, links = set(rng.sample(range(len(words)), link_count)), []
    for place in places:
        key, word = draft.new_id(), rng.choice((words[place], words[place].capitalize()))
        links.append((word, key))
        words[place] = f"<span id={key} style='color:#00e;text-decoration:underline'>{word}</span>"
        if rng.random() < 0.3:
            words[place] += rng.choice((",", "."))
    draft.add(f"<div style='{draw_margin(rng)}'>{' '.join(words)}</div>")
    return links


def draw_distinct(rng: random.Random, count: int, draw: Callable[[random.Random], str] = random_word) -> list[str]:
    """Random texts that differ in more than their case."""
    texts: list[str] = []
    while len(texts) < count:
        text = draw(rng)
        if all(text.lower() != other.lower() for other in texts):
            texts.append(text)
    return texts


def draw_captions(rng: random.Random, count: int) -> list[str]:
    """Distinct words, of which the first two are sometimes hard to tell apart."""
    words = draw_distinct(rng, count)
    if len(words) > 1 and rng.random() < 0.3:
        words[1] = words[0] + rng.choice("aeisxn2") if rng.random() < 0.5 else words[0].swapcase()
    return words


def join_with_and(parts: list[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
