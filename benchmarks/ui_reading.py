"""What the tower of the built-in reading model reads: text by font size and length, and widgets by kind.

`python -m benchmarks.ui_reading` draws held-out texts and pages in Chromium and compares what the tower detects with
what the browser reports. A string is exact if all its characters are there, in order, without a further symbol between
them. A character is right if the detection whose centre is on it has its class. A widget is found if a detection of its
kind overlaps it by half (intersection over union). Writes benchmarks/results/ui_reading.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import facts, load
from palaestra.evaluation.statistics import wilson_interval
from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.image_processor import PictureReader
from palaestra.policy.screen_reader.pages import SyntheticPage, draw_page
from palaestra.policy.screen_reader.pages.words import pseudo_word, random_code
from palaestra.policy.screen_reader.recipe import SHIPPED
from palaestra.policy.screen_reader.rendering import DrawnPage, PageRenderer
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Detections, read_in_order
from palaestra.policy.screen_reader.tower import CHARACTERS, WIDGETS, Tower
from palaestra.sessions.browser.browser import Browser

RESULTS = Path(__file__).parent / "results"
SIZES_PX = (9, 10, 11, 12, 13.333, 14, 16)
WEIGHTS = ("regular", "bold")
LENGTHS = ((1, 3), (4, 6), (7, 10), (11, 20), (21, 30))
KINDS = ("word", "code", "number", "e-mail")
SHORTEST_EMAIL = 7
COUNTS = ("strings", "exact", "chars", "right")
SCREEN = (560, 320)
LINES = 12
SEED = 90_210
"""None of the recipe's pages are drawn with it."""


@dataclass(frozen=True)
class TextResult:
    """Strings of one kind and length in one font."""

    size_px: float
    weight: str
    length: str
    kind: str
    strings: int
    exact: int
    chars: int
    right: int


@dataclass(frozen=True)
class WidgetResult:
    """One widget of a page."""

    kind: str
    is_found: bool
    has_right_state: bool


def draw_text(rng: random.Random, kind: str, length: int) -> str:
    if kind == "word":
        word = ""
        while len(word) < length:
            word += pseudo_word(rng)
        return rng.choice((str.lower, str.capitalize, str.upper))(word[:length])
    if kind == "code":
        return random_code(rng, length, length)
    if kind == "number":
        digits = "".join(rng.choice("0123456789") for _ in range(length))
        if length > 3:  # a price, a date or a time
            place = rng.randrange(1, length - 1)
            digits = digits[:place] + rng.choice(".,/:") + digits[place + 1 :]
        return digits
    local = ""
    while len(local) < length:
        local += pseudo_word(rng, 1)
    at = rng.randrange(1, length - 5)
    return f"{local[:at]}@{local[at : length - 4][: length - 5 - at]}.org"


def draw_strings(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """`count` strings per length, evenly over the kinds that have it: (kind, length, text)."""
    strings = []
    for low, high in LENGTHS:
        kinds = [kind for kind in KINDS if kind != "e-mail" or low >= SHORTEST_EMAIL]
        for number in range(count):
            kind = kinds[number % len(kinds)]
            strings.append((kind, f"{low}-{high}", draw_text(rng, kind, rng.randint(low, high))))
    rng.shuffle(strings)
    return strings


def text_page(rng: random.Random, texts: Sequence[str], size_px: float, weight: str) -> SyntheticPage:
    """One text per line, at different fractions of a pixel."""
    lines = "".join(
        f"<div style='height:26px;line-height:26px;padding-left:{rng.choice((0, 2, 5.25, 9.5, 20.75))}px;"
        f"white-space:nowrap;color:{rng.choice(('#000', '#000', '#333', '#00e'))}'>{html.escape(text)}</div>"
        for text in texts
    )
    style = f"font:{'bold ' if weight == 'bold' else ''}{size_px}px DejaVu Sans;width:{SCREEN[0]}px;background:#fff"
    return SyntheticPage(SCREEN, f"<div style='{style}'>{lines}</div>", [])


def centres(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return boxes[:, 0] + boxes[:, 2] / 2, boxes[:, 1] + boxes[:, 3] / 2


def read_band(detections: Detections, top: float, bottom: float) -> str:
    """The text that the language model would get from a band of the screen."""
    _, y = centres(detections.boxes)
    rows = (y >= top) & (y < bottom)
    band = Detections(detections.symbols[rows], detections.boxes[rows], detections.colours[rows])
    return read_in_order(band).text().removeprefix("\n")


def count_right(page_chars: Sequence[Any], detections: Detections, confusions: Counter[str]) -> int:
    """Characters whose class is detected on them; adds the others to `confusions`."""
    x, y = centres(detections.boxes)
    right = 0
    for char, left, top, wide, tall in page_chars:
        near = np.flatnonzero((x >= left) & (x < left + wide) & (y >= top) & (y < top + tall))
        classes = {int(detections.symbols[index]) for index in near}
        if CHARACTERS.find(char) in classes:
            right += 1
        else:
            seen = "".join(CHARACTERS[symbol] for symbol in sorted(classes) if symbol < len(CHARACTERS))
            confusions[f"{char} as {seen or 'nothing'}"] += 1
    return right


async def read_texts(renderer: PageRenderer, tower: Tower, count: int) -> dict[str, Any]:
    rng, confusions, misread = random.Random(SEED), Counter[str](), []
    totals: dict[tuple[float, str, str, str], np.ndarray] = {}
    for size_px in SIZES_PX:
        for weight in WEIGHTS:
            strings = draw_strings(rng, count)
            for start in range(0, len(strings), LINES):
                part = strings[start : start + LINES]
                page = await renderer.draw(text_page(rng, [text for *_, text in part], size_px, weight))
                detections = detect(tower, page.pixels)
                for line, (kind, length, text) in enumerate(part):
                    top, bottom = 26 * line, 26 * (line + 1)
                    chars = [char for char in page.chars if top <= char[2] + char[4] / 2 < bottom]
                    assert "".join(char for char, *_ in chars) == text, "the browser does not show a text whole"
                    right = count_right(chars, detections, confusions)
                    read = read_band(detections, top, bottom)
                    if read != text:
                        misread.append([text, read])
                    cell = totals.setdefault((size_px, weight, length, kind), np.zeros(4, int))
                    cell += (1, read == text, len(text), right)
    return {
        "texts": [asdict(TextResult(*cell, *counts.tolist())) for cell, counts in sorted(totals.items())],
        "confusions": dict(confusions.most_common(20)),
        "misread": misread,
    }


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (left, top, width, height)."""
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    tall = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    shared = max(0.0, wide) * max(0.0, tall)
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)


def match_widgets(page: DrawnPage, detections: Detections) -> tuple[list[WidgetResult], int]:
    """Each widget of a page, and the number of detected widgets that are none."""
    rows = np.flatnonzero(detections.symbols >= FIRST_WIDGET).tolist()
    free, results = set(rows), []
    for kind, on, *box in page.widgets:
        best = max(
            (row for row in free if WIDGETS[(detections.symbols[row] - FIRST_WIDGET) // 2] == kind),
            key=lambda row: overlap(box, detections.boxes[row]),
            default=None,
        )
        is_found = best is not None and bool(overlap(box, detections.boxes[best].tolist()) >= 0.5)
        is_right = is_found and bool((detections.symbols[best] - FIRST_WIDGET) % 2 == on)
        results.append(WidgetResult(kind, is_found, is_right))
        if is_found:
            free.discard(best)
    return results, len(free)


async def read_widgets(renderer: PageRenderer, tower: Tower, count: int) -> tuple[list[WidgetResult], int]:
    rng, results, extra = random.Random(SEED + 1), [], 0
    for _ in range(count):
        page = await renderer.draw(draw_page(rng, dense=False))
        widgets, others = match_widgets(page, detect(tower, page.pixels))
        results += widgets
        extra += others
    return results, extra


async def measure(tower: Tower, strings: int, pages: int) -> dict[str, Any]:
    browser = await Browser.start()
    try:
        renderer = PageRenderer(browser)
        texts = await read_texts(renderer, tower, strings)
        widgets, extra = await read_widgets(renderer, tower, pages)
    finally:
        await browser.stop()
    return {
        **texts,
        "widgets": {
            kind: {
                "count": len(own := [one for one in widgets if one.kind == kind]),
                "found": sum(one.is_found for one in own),
                "right_state": sum(one.has_right_state for one in own),
            }
            for kind in WIDGETS
        },
        "pages": pages,
        "extra_widgets": extra,
    }


def share(count: int, total: int) -> str:
    if not total:
        return "none drawn"
    low, high = wilson_interval(count, total)
    return f"{100 * count / total:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def text_row(name: str, rows: Iterable[TextResult]) -> str:
    rows = list(rows)
    strings, exact, chars, right = (sum(getattr(row, key) for row in rows) for key in COUNTS)
    return f"| {name} | {strings} | {share(exact, strings)} | {share(right, chars)} |"


def report(result: dict[str, Any]) -> str:
    texts = [TextResult(**row) for row in result["texts"]]
    head = " | strings | exact | characters right |"
    lines = [
        "<!-- written by `python -m benchmarks.ui_reading` -->",
        "",
        "Shares with 95 % Wilson intervals; those of characters treat characters of one string as independent.",
        "",
        f"| font{head}",
        "| --- | ---: | --- | --- |",
    ]
    lines += [
        text_row(f"{size:g} px, {weight}", (row for row in texts if (row.size_px, row.weight) == (size, weight)))
        for size in SIZES_PX
        for weight in WEIGHTS
    ]
    lines += [text_row("all", texts), "", f"| length{head}", "| --- | ---: | --- | --- |"]
    for low, high in LENGTHS:
        lines.append(text_row(f"{low} to {high}", (row for row in texts if row.length == f"{low}-{high}")))
    lines += ["", f"| text{head}", "| --- | ---: | --- | --- |"]
    lines += [text_row(kind, (row for row in texts if row.kind == kind)) for kind in KINDS]
    lines += ["", "| widget | drawn | found | of these with the right state |", "| --- | ---: | --- | --- |"]
    for kind, counts in result["widgets"].items():
        found, right = share(counts["found"], counts["count"]), share(counts["right_state"], counts["found"])
        lines.append(f"| {kind} | {counts['count']} | {found} | {right if counts['count'] else ''} |")
    misread = result["misread"]
    spaced = sum(read.replace(" ", "") == text for text, read in misread)
    errors = ", ".join(f"`{error}` {count}" for error, count in result["confusions"].items())
    machine = result["machine"]
    lines += [
        "",
        f"Of {len(misread)} strings that are not exact, {spaced} differ only by spaces of the sorting rule.",
        "",
        f"Widgets that are detected where there are none: {result['extra_widgets']} on {result['pages']} pages.",
        "",
        f"Most frequent errors of characters: {errors}.",
        "",
        f"Load {machine['load_at_start']} before and {result['load_at_end']} after; {machine['date']}.",
    ]
    return "\n".join(lines) + "\n"


def dump(result: dict[str, Any]) -> str:
    """JSON with one line per row."""
    parts = []
    for key, value in result.items():
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) if isinstance(value, list) else ""
        parts.append(f'"{key}": ' + (f"[\n  {rows}\n ]" if rows else json.dumps(value, ensure_ascii=False)))
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strings", type=int, default=40, help="per font and length")
    parser.add_argument("--pages", type=int, default=400, help="with widgets")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="directory of the model")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts()
    tower = PictureReader.from_pretrained(options.model).tower
    result = {"machine": machine, **asyncio.run(measure(tower, options.strings, options.pages)), "load_at_end": load()}
    (options.output / "ui_reading.json").write_text(dump(result))
    (options.output / "ui_reading.md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
