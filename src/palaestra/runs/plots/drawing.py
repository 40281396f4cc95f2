"""Figures as SVG text, which needs no package, and as PNG with Pillow."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from palaestra.errors import ConfigError
from palaestra.runs.plots.figure import Area, Figure, Point, Polyline, Shape, Text

if TYPE_CHECKING:
    from PIL import Image

_SCALE = 2
"""Pixels of a PNG per unit of the figure: for screens with small pixels, and smooth when shrunk."""
_SUPERSAMPLING = 2
_FONT = "system-ui, 'DejaVu Sans', Arial, sans-serif"


def to_svg(figure: Figure) -> str:
    """The figure as one SVG element without external resources."""
    size = f'width="{figure.width}" height="{figure.height}" viewBox="0 0 {figure.width} {figure.height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{html.escape(_FONT)}">']
    parts.append(f'<rect width="{figure.width}" height="{figure.height}" fill="#ffffff"/>')
    parts += map(_shape_to_svg, figure.shapes)
    for label, shapes in figure.groups.items():
        parts.append(f'<g class="group" data-group="{html.escape(label)}">')
        parts += map(_shape_to_svg, shapes)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _shape_to_svg(shape: Shape) -> str:
    if isinstance(shape, Text):
        x, y = shape.at
        turn = f' transform="rotate(-90 {x:g} {y:g})"' if shape.vertical else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{shape.anchor}" font-size="{shape.size}" fill="{shape.color}"'
        return f"<text {place}{turn}>{html.escape(_printable(shape.text))}</text>"
    points = " ".join(f"{x:g},{y:g}" for x, y in shape.points)
    if isinstance(shape, Area):
        return f'<polygon points="{points}" fill="{shape.color}" fill-opacity="{shape.opacity:g}"/>'
    stroke = f'stroke="{shape.color}" stroke-width="{shape.width:g}" stroke-opacity="{shape.opacity:g}"'
    return f'<polyline points="{points}" fill="none" stroke-linejoin="round" {stroke}/>'


def _printable(text: str) -> str:
    """Control characters are not allowed in XML, not even escaped."""
    return "".join(character if character.isprintable() else "�" for character in text)


def to_png(figure: Figure) -> bytes:
    """The figure as PNG. `ConfigError` without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        remedy = "pip install Pillow, or write .svg or .html"
        raise ConfigError("png", None, f"Pillow is required and cannot be imported ({error})", remedy) from None
    scale = _SCALE * _SUPERSAMPLING
    image = Image.new("RGBA", (figure.width * scale, figure.height * scale), "#ffffff")
    texts: list[Text] = []
    for shape in _all_shapes(figure):
        if isinstance(shape, Text):
            texts.append(shape)
            continue
        points = [(x * scale, y * scale) for x, y in shape.points]
        color = (*_rgb(shape.color), round(255 * shape.opacity))
        # Drawn on a layer of its own, so that a translucent shape mixes with what is below it.
        box = _bounding_box(points, scale * (shape.width if isinstance(shape, Polyline) else 1) + 2, image.size)
        layer = Image.new("RGBA", (box[2] - box[0], box[3] - box[1]), (*color[:3], 0))
        moved = [(x - box[0], y - box[1]) for x, y in points]
        draw = ImageDraw.Draw(layer)
        if isinstance(shape, Area):
            draw.polygon(moved, fill=color)
        else:
            draw.line(moved, fill=color, width=max(1, round(shape.width * scale)), joint="curve")
        image.alpha_composite(layer, (box[0], box[1]))
    image = image.resize((figure.width * _SCALE, figure.height * _SCALE), Image.Resampling.LANCZOS)
    for text in texts:
        _draw_text(image, text)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def _all_shapes(figure: Figure) -> Iterable[Shape]:
    yield from figure.shapes
    for shapes in figure.groups.values():
        yield from shapes


def _bounding_box(points: list[Point], margin: float, size: tuple[int, int]) -> tuple[int, int, int, int]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, top = max(0, int(min(xs) - margin)), max(0, int(min(ys) - margin))
    return (
        left,
        top,
        max(left + 1, min(size[0], int(max(xs) + margin))),
        max(top + 1, min(size[1], int(max(ys) + margin))),
    )


def _draw_text(image: Image.Image, text: Text) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(text.size * _SCALE)
    x, y = text.at[0] * _SCALE, text.at[1] * _SCALE
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
    words = _printable(text.text)
    if not text.vertical:
        ImageDraw.Draw(image).text((x, y), words, _rgb(text.color), font, anchor=anchor)
        return
    width = round(font.getlength(words)) + 4
    layer = Image.new("RGBA", (width, text.size * _SCALE * 2), (255, 255, 255, 0))
    ImageDraw.Draw(layer).text((width / 2, text.size * _SCALE * 1.5), words, _rgb(text.color), font, anchor="ms")
    turned = layer.rotate(90, expand=True)
    image.alpha_composite(turned, (max(0, round(x - turned.width * 0.75)), max(0, round(y - turned.height / 2))))


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
