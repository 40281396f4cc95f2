"""Pages drawn by Chromium, with the place of every visible character and widget."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from palaestra.errors import SessionFailed
from palaestra.policy.screen_reader.pages import SyntheticPage
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Box, Detections, mean_colours
from palaestra.policy.screen_reader.tower import CHAR_CLASSES, WIDGET_KINDS
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.page import Page
from palaestra.sessions.screen import Size
from palaestra.sessions.suite import PageRequest, PageResponse

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
_BLANK_PAGE = (
    b"<!doctype html><meta charset=utf-8><style>*{scrollbar-width:none}</style>"
    b"<body style='margin:0;overflow:hidden'></body>"
)

_SHOW_PAGE = """((markup) => {
  document.body.innerHTML = markup;
  const chosen = document.querySelector('[data-focus]');
  if (chosen) { chosen.focus(); chosen.setSelectionRange && chosen.setSelectionRange(99, 99); }
  else if (document.activeElement) document.activeElement.blur();
})"""

_DESCRIBE_PAGE = r"""(() => {
  const width = innerWidth, height = innerHeight, chars = [], widgets = [], places = {};
  const visible = (x, y, owner) => {
    if (x < 0 || y < 0 || x >= width || y >= height) return false;
    const top = document.elementFromPoint(x, y);
    return top !== null && (top === owner || owner.contains(top));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let node; (node = walker.nextNode());) {
    const owner = node.parentElement, text = node.textContent;
    if (['SCRIPT', 'STYLE', 'TEXTAREA', 'OPTION'].includes(owner.tagName)) continue;
    for (let i = 0; i < text.length; i++) {
      if (/\s/.test(text[i])) continue;
      range.setStart(node, i); range.setEnd(node, i + 1);
      const box = range.getBoundingClientRect();
      if (!box.width || !visible(box.x + box.width / 2, box.y + box.height / 2, owner)) continue;
      chars.push([text[i], box.x, box.y, box.width, box.height]);
    }
  }
  const pen = document.createElement('canvas').getContext('2d');
  const typed = (element, text, left, middle, limit, size) => {
    const style = getComputedStyle(element);
    pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const height = size * 1.17;
    for (let i = 0; i < text.length; i++) {
      const from = left + pen.measureText(text.slice(0, i)).width, wide = pen.measureText(text[i]).width;
      if (from + wide > limit || /\s/.test(text[i])) continue;
      if (!visible(from + wide / 2, middle, element)) continue;
      chars.push([text[i], from, middle - height / 2, wide, height]);
    }
  };
  for (const element of document.querySelectorAll('input,button,select,textarea,[data-box]')) {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element), kind = element.type;
    if (!box.width || !visible(box.x + box.width / 2, box.y + box.height / 2, element)) continue;
    let name = element.tagName.toLowerCase();
    if (name === 'input') name = ['checkbox', 'radio'].includes(kind) ? kind : 'field';
    if (element.dataset.box) name = 'box';
    const on = (kind === 'checkbox' || kind === 'radio') ? element.checked : element === document.activeElement;
    widgets.push([name, on ? 1 : 0, box.x, box.y, box.width, box.height]);
    if (name === 'field' || name === 'textarea' || name === 'select') {
      const inset = parseFloat(style.borderLeftWidth) + parseFloat(style.paddingLeft);
      const left = box.x + inset + (name === 'select' ? 4 : 0);
      let text = name === 'select' ? (element.selectedOptions[0] || {text: ''}).text : element.value;
      if (kind === 'password') text = '•'.repeat(text.length);
      const size = parseFloat(style.fontSize);
      const middle = name === 'textarea' ? box.y + 2 + size * 0.6 + 1 : box.y + box.height / 2;
      typed(element, text, left, middle, box.right - (name === 'select' ? 18 : 3), size);
    }
  }
  for (const element of document.querySelectorAll('[id]')) {
    const boxes = [...element.getClientRects()];
    if (!boxes.length) continue;
    const box = boxes[0];
    const x = box.x + box.width / 2, y = box.y + box.height / 2;
    if (box.width && visible(x, y, element)) places[element.id] = [box.x, box.y, box.width, box.height];
  }
  return {chars, widgets, places};
})()"""


@dataclass(frozen=True, eq=False)
class DrawnPage:
    """A screenshot and what is on it, in pixels."""

    pixels: npt.NDArray[np.uint8]
    """[height, width, 3]"""
    chars: list[tuple[str, float, float, float, float]]
    """Character, left, top, width, height."""
    widgets: list[tuple[str, int, float, float, float, float]]
    """Kind, whether it is checked or focused, left, top, width, height."""
    places: dict[str, Box]
    """Left, top, width, height of the visible elements with an id."""

    def detections(self) -> Detections:
        """The labels in the form of a perfect tower's output."""
        rows = [(CHAR_CLASSES[char], *box) for char, *box in self.chars if char in CHAR_CLASSES]
        rows += [
            (FIRST_WIDGET + 2 * WIDGET_KINDS[kind] + on, *box)
            for kind, on, *box in self.widgets
            if kind in WIDGET_KINDS
        ]
        table = np.array(rows, np.float32).reshape(-1, 5)
        return Detections(table[:, 0].astype(np.int64), table[:, 1:], mean_colours(self.pixels, table[:, 1:]))


class PageRenderer:
    """Draws synthetic pages in one browser, one page per screen size."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._pages: dict[tuple[int, int], Page] = {}

    async def draw(self, page: SyntheticPage) -> DrawnPage:
        """Draw one page; after a failure in a new browser page, because a recipe draws thousands."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._draw(page)
            except SessionFailed as error:
                _log.warning("a page is drawn again: %s", error)
                await self._close(page.size)
        return await self._draw(page)

    async def _close(self, size: tuple[int, int]) -> None:
        target = self._pages.pop(size, None)
        if target is not None:
            await target.close()

    async def _draw(self, page: SyntheticPage) -> DrawnPage:
        target = self._pages.get(page.size)
        if target is None:
            target = await Page.open(self._browser, Size(*page.size), _serve_blank, seed=0)
            self._pages[page.size] = target
        await target.evaluate(f"{_SHOW_PAGE}({json.dumps(page.html)})")
        labels: dict[str, Any] = await target.evaluate(_DESCRIBE_PAGE)
        screenshot = await target.draw()
        return DrawnPage(
            _decode(screenshot.data),
            [tuple(char) for char in labels["chars"]],
            [tuple(widget) for widget in labels["widgets"]],
            {key: tuple(box) for key, box in labels["places"].items()},
        )


def _serve_blank(request: PageRequest) -> PageResponse | None:
    return PageResponse(_BLANK_PAGE) if request.path == "/" else None


def _decode(data: bytes) -> npt.NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
