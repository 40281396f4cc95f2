"""Synthetic screens of 160 x 210 pixels, drawn with Pillow, on which the tiny model is pretrained.

A screen is an image and the list of widgets on it. Nothing here is taken from a task suite: positions, sizes, colours,
captions and layouts are drawn from the random generator that is passed in.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 30, 30), "blue": (30, 60, 230), "green": (20, 140, 40), "yellow": (240, 225, 30),
    "purple": (128, 10, 128), "orange": (250, 140, 20), "cyan": (30, 220, 230), "gray": (128, 128, 128),
    "black": (10, 10, 10), "white": (252, 252, 252), "magenta": (240, 20, 240), "pink": (250, 170, 190),
    "brown": (130, 75, 35), "olive": (128, 128, 10), "lime": (40, 250, 40),
}  # fmt: skip
"""Colour names used in instructions; each drawing varies the RGB value a little."""

ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")
_CAPTIONS = (
    "add apply back close copy create delete done edit exit find finish go help home join load login menu more new "
    "open paste play print quit read remove reply reset run save search select send share show sign skip start stop "
    "switch view yes no cancel ok submit next previous accept decline continue"
).split()
_ONSETS = "b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr fl fr gr pl pr sh sl sp st th tr".split()
_VOWELS = "a e i o u a e i o ea ou ai y".split()
_CODAS = ["", "", "", "n", "r", "s", "t", "l", "m", "d", "ck", "x", "nd", "rt", "st"]


def random_word(rng: random.Random) -> str:
    """A pronounceable nonsense word of one to three syllables."""
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def random_caption(rng: random.Random) -> str:
    """Text for a button, a tab or a checkbox."""
    word = rng.choice(_CAPTIONS) if rng.random() < 0.3 else random_word(rng)
    style = rng.random()
    return word if style < 0.5 else word.capitalize() if style < 0.8 else word.upper()


WIDTH, HEIGHT, BAR = 160, 210, 50
KINDS = ("nothing", "button", "input", "textarea", "checkbox", "radio", "link", "cross", "tab", "square")
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Widget:
    """Something that can be clicked."""

    kind: str
    box: Box
    """Left, top, right, bottom; the last two are the last pixels inside."""
    label: str = ""
    colour: str = ""

    @property
    def centre(self) -> tuple[float, float]:
        """In pixels."""
        left, top, right, bottom = self.box
        return (left + right + 1) / 2, (top + bottom + 1) / 2


@dataclass
class Screen:
    """An image and the widgets on it."""

    image: Image.Image
    widgets: list[Widget]
    has_bar: bool
    """Whether the top of the screen is reserved for the instruction."""


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class _Canvas:
    """A screen that is being drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.has_bar = rng, rng.random() < 0.6
        shade = 255 if rng.random() < 0.7 else rng.randint(225, 254)
        self.image = Image.new("RGB", (WIDTH, HEIGHT), (shade, shade, shade))
        self.draw = ImageDraw.Draw(self.image)
        self.widgets: list[Widget] = []
        self.font_size = rng.randint(9, 13)
        self.top = BAR + 2 if self.has_bar else 2

    def text_width(self, text: str) -> int:
        return int(_font(self.font_size).getlength(text))

    def text(self, x: float, y: float, text: str, fill: tuple[int, int, int], anchor: str = "la") -> None:
        self.draw.text((x, y), text, fill=fill, font=_font(self.font_size), anchor=anchor)

    def tint(self, name: str) -> tuple[int, int, int]:
        red, green, blue = (max(0, min(255, part + self.rng.randint(-14, 14))) for part in COLOURS[name])
        return red, green, blue

    def add(self, kind: str, box: Box, label: str = "", colour: str = "") -> None:
        self.widgets.append(Widget(kind, box, label, colour))

    def button(self, box: Box, label: str, *, plain: bool) -> None:
        """Draw a grey button with a border, or a flat coloured one."""
        left, top, right, bottom = box
        colour = ""
        if plain:
            shade = self.rng.randint(215, 245)
            edge = self.rng.randint(60, 190)
            self.draw.rounded_rectangle(box, self.rng.randint(0, 4), (shade,) * 3, (edge,) * 3)
            ink = (self.rng.randint(0, 60),) * 3
        else:
            colour = self.rng.choice(tuple(COLOURS))
            fill = self.tint(colour)
            self.draw.rounded_rectangle(box, self.rng.choice((0, 0, 3)), fill)
            ink = (255, 255, 255) if sum(fill) < 420 else (20, 20, 20)
        self.text((left + right) / 2, (top + bottom) / 2, label, ink, "mm")
        self.add("button", box, label, colour)

    def field(self, box: Box, *, tall: bool = False) -> None:
        shade = self.rng.randint(70, 150)
        self.draw.rounded_rectangle(box, self.rng.randint(0, 3), (255, 255, 255), (shade,) * 3)
        label = random_word(self.rng) if self.rng.random() < 0.3 else ""
        self.text(box[0] + 3, box[1] + 3, label, (30, 30, 30))
        if tall:
            right, bottom = box[2], box[3]
            self.draw.line((right - 6, bottom - 1, right - 1, bottom - 6), (120, 120, 120))
        self.add("textarea" if tall else "input", box)

    def checkbox(self, x: int, y: int, *, round_: bool) -> None:
        side = self.rng.randint(9, 13)
        box = (x, y, x + side, y + side)
        edge = (self.rng.randint(80, 140),) * 3
        if round_:
            self.draw.ellipse(box, (255, 255, 255), edge)
        else:
            self.draw.rounded_rectangle(box, self.rng.randint(0, 2), (255, 255, 255), edge)
        label = random_caption(self.rng)
        self.text(x + side + 4, y + side / 2, label, (20, 20, 20), "lm")
        self.add("radio" if round_ else "checkbox", box, label)

    def square(self, box: Box, colour: str) -> None:
        self.draw.rectangle(box, self.tint(colour), (0, 0, 0) if self.rng.random() < 0.7 else None)
        self.add("square", box, "", colour)

    def paragraph(self, x: int, y: int, right: int, lines: int, *, links: float = 0.0) -> int:
        """Draw running text, some of whose words are links; returns the y position of the next line."""
        grey = (self.rng.randint(0, 90),) * 3
        for _ in range(lines):
            at = x
            while True:
                word = random_word(self.rng)
                width = self.text_width(word)
                if at + width > right:
                    break
                if self.rng.random() < links:
                    blue = (self.rng.randint(0, 40), self.rng.randint(0, 60), self.rng.randint(190, 255))
                    self.text(at, y, word, blue)
                    self.draw.line((at, y + self.font_size, at + width, y + self.font_size), blue)
                    self.add("link", (at, y, at + width, y + self.font_size + 1), word)
                else:
                    self.text(at, y, word, grey)
                at += width + 4
            y += self.font_size + 3
        return y


def _is_free(boxes: list[Box], box: Box) -> bool:
    return all(
        box[2] + 2 < other[0] or other[2] + 2 < box[0] or box[3] + 2 < other[1] or other[3] + 2 < box[1]
        for other in boxes
    )


def _draw_scattered(canvas: _Canvas) -> None:
    """A few widgets at random positions, of one kind or mixed."""
    rng = canvas.rng
    kinds = rng.choice((("button",), ("button",), ("flat",), ("flat",), ("square",), ("input",), _MIXED, _MIXED))
    boxes: list[Box] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8))):
        kind = rng.choice(kinds)
        label = random_caption(rng)
        width, height = _widget_size(canvas, kind, label)
        for _ in range(8):
            x, y = rng.randint(1, WIDTH - width - 2), rng.randint(canvas.top, HEIGHT - height - 2)
            box = (x, y, x + width, y + height)
            if _is_free(boxes, box):
                boxes.append(box)
                _draw_widget(canvas, kind, box, label)
                break


_MIXED = ("button", "flat", "square", "input", "textarea", "checkbox", "radio")


def _widget_size(canvas: _Canvas, kind: str, label: str) -> tuple[int, int]:
    rng = canvas.rng
    if kind in ("button", "flat"):
        return min(120, canvas.text_width(label) + rng.randint(4, 50)), canvas.font_size + rng.randint(3, 40)
    if kind == "square":
        side = rng.randint(12, 52)
        return side, max(10, side + rng.randint(-4, 4))
    if kind in ("checkbox", "radio"):
        return min(120, 18 + canvas.text_width(label)), 14
    return rng.randint(50, 140), rng.randint(16, 24) if kind == "input" else rng.randint(26, 44)


def _draw_widget(canvas: _Canvas, kind: str, box: Box, label: str) -> None:
    if kind in ("button", "flat"):
        canvas.button(box, label, plain=kind == "button")
    elif kind == "square":
        canvas.square(box, canvas.rng.choice(tuple(COLOURS)))
    elif kind in ("checkbox", "radio"):
        canvas.checkbox(box[0], box[1], round_=kind == "radio")
    else:
        canvas.field(box, tall=kind == "textarea")


def _draw_form(canvas: _Canvas) -> None:
    """A form: widgets below each other, aligned to the left."""
    rng = canvas.rng
    kinds = rng.choice((("input",), ("input", "button"), (*_MIXED, "text"), ("text", "button", "button", "input")))
    y = canvas.top + rng.randint(0, 30)
    while y < HEIGHT - 30 and len(canvas.widgets) < 7:
        x, kind = rng.randint(2, 20), rng.choice(kinds)
        if kind == "text":
            y = canvas.paragraph(2, y, 158, rng.choice((1, 1, 2)))
            continue
        label = random_caption(rng)
        width, height = _widget_size(canvas, kind, label)
        _draw_widget(canvas, kind, (x, y, x + width, y + min(height, HEIGHT - 2 - y)), label)
        y = canvas.widgets[-1].box[3] + rng.randint(2, 16)
        if rng.random() < 0.12:
            break


def _draw_dialog(canvas: _Canvas) -> None:
    """A window with a title bar, a cross, a text and buttons."""
    rng = canvas.rng
    width, height = rng.randint(85, 150), rng.randint(70, 120)
    left, top = rng.randint(2, WIDTH - width - 3), rng.randint(canvas.top, HEIGHT - height - 2)
    edge = (rng.randint(120, 200),) * 3
    canvas.draw.rounded_rectangle((left, top, left + width, top + height), 3, (255, 255, 255), edge)
    title = rng.randint(15, 24)
    shade = rng.randint(215, 240) if rng.random() < 0.7 else rng.randint(60, 200)
    canvas.draw.rectangle((left + 3, top + 3, left + width - 3, top + title), (shade,) * 3, edge)
    side = rng.randint(9, 15)
    x, y = left + width - 6 - side - rng.randint(0, 4), top + 3 + (title - 3 - side) // 2
    canvas.draw.rectangle((x, y, x + side, y + side), (min(255, shade + 15),) * 3, edge)
    ink = (rng.randint(0, 90),) * 3
    for ends in ((x + 3, y + 3, x + side - 3, y + side - 3), (x + 3, y + side - 3, x + side - 3, y + 3)):
        canvas.draw.line(ends, ink, 2)
    canvas.add("cross", (x, y, x + side, y + side), "x")
    canvas.paragraph(left + 8, top + title + 8, left + width - 8, rng.choice((1, 2, 3)))
    at = left + width - 6
    for _ in range(rng.choice((0, 1, 2, 2))):
        label = random_caption(rng)
        wide = canvas.text_width(label) + rng.randint(10, 18)
        if at - wide < left + 4:
            break
        low = top + height - 6
        canvas.button((at - wide, low - canvas.font_size - 8, at, low), label, plain=rng.random() < 0.8)
        at -= wide + rng.randint(3, 8)


def _draw_tabs(canvas: _Canvas) -> None:
    """A row of tabs above a text."""
    rng = canvas.rng
    canvas.font_size = min(canvas.font_size, 11)
    numbered, count, start = rng.random() < 0.6, rng.randint(2, 4), rng.randint(2, 12)
    chosen = rng.randrange(count)
    x, y, tall = start, canvas.top + rng.randint(2, 30), rng.randint(15, 22)
    for place in range(count):
        label = f"{rng.choice(('Tab', 'Page', 'Part'))} {place + 1}" if numbered else random_caption(rng)
        wide = canvas.text_width(label) + rng.randint(6, 14)
        if x + wide > WIDTH - 2:
            break
        fill = (30, 110, 230) if place == chosen else (rng.randint(225, 245),) * 3
        canvas.draw.rounded_rectangle((x, y, x + wide, y + tall), 2, fill, (190, 190, 190))
        canvas.text(x + wide / 2, y + tall / 2, label, (255, 255, 255) if place == chosen else (60, 60, 60), "mm")
        canvas.add("tab", (x, y, x + wide, y + tall), label)
        x += wide + rng.randint(0, 3)
    canvas.draw.rectangle((start, y + tall, WIDTH - 4, HEIGHT - 4), None, (200, 200, 200))
    canvas.paragraph(start + 8, y + tall + 10, WIDTH - 10, rng.randint(1, 7))


def _draw_text(canvas: _Canvas) -> None:
    """Running text with links."""
    canvas.font_size = min(canvas.font_size, 11)
    canvas.paragraph(3, canvas.top, WIDTH - 2, canvas.rng.randint(2, 9), links=canvas.rng.uniform(0.08, 0.3))


def _draw_squares(canvas: _Canvas) -> None:
    """Coloured squares in rows."""
    rng = canvas.rng
    side, gap, across = rng.randint(18, 52), rng.randint(4, 14), rng.randint(1, 3)
    left, top = rng.randint(2, 30), canvas.top + rng.randint(0, 30)
    colours = rng.sample(tuple(COLOURS), 9)
    for place in range(rng.randint(2, 6)):
        x, y = left + place % across * (side + gap), top + place // across * (side + gap)
        if x + side < WIDTH - 2 and y + side < HEIGHT - 2:
            canvas.square((x, y, x + side, y + side), colours[place])


_SCENES: tuple[Callable[[_Canvas], None], ...] = (
    *[_draw_scattered] * 4,
    *[_draw_form] * 2,
    _draw_dialog,
    _draw_tabs,
    _draw_text,
    *[_draw_squares] * 2,
)


def draw_screen(rng: random.Random) -> Screen:
    """Draw a random screen with at least one widget."""
    while True:
        canvas = _Canvas(rng)
        rng.choice(_SCENES)(canvas)
        if canvas.widgets:
            return Screen(canvas.image, canvas.widgets, canvas.has_bar)


def draw_instruction_bar(screen: Screen, text: str, rng: random.Random) -> None:
    """Write an instruction into the bar at the top of a screen."""
    draw = ImageDraw.Draw(screen.image)
    yellow = (
        (255, 255, 0) if rng.random() < 0.8 else (rng.randint(200, 255), rng.randint(200, 255), rng.randint(0, 200))
    )
    draw.rectangle((0, 0, WIDTH - 1, BAR - 1), yellow)
    size, line, y = rng.randint(9, 11), "", 3
    for word in text.split():
        if line and _font(size).getlength(f"{line} {word}") > WIDTH - 6:
            draw.text((3, y), line, (0, 0, 0), _font(size))
            line, y = word, y + size + 2
        else:
            line = f"{line} {word}".strip()
    draw.text((3, y), line, (0, 0, 0), _font(size))
