"""One held-out episode of two policies, such as before and after training, as a picture and as frames of a clip.

The picture has one row per policy. A panel is the screen of a step with its click, drag or scroll marked, and the
action as caption; the last panel is the final screen. Needs Pillow.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from palaestra.evaluation.screens import ScreenComparison
from palaestra.evaluation.viewer import describe_action
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.experience.trajectory_archive import TrajectoryEntry
from palaestra.files.atomic import write_bytes

PICTURE_NAME = "before-after.png"
MAX_STEPS = 8
"""Steps of an episode in a row of the picture; of a longer one, the first and the last are drawn."""
MAX_PANEL = (480, 420)
"""Maximum width and height of a screen in pixels. Small screens are enlarged by a whole number."""
MARGIN, GAP = 16, 12
HEADING, ROW_TITLE, CAPTION = 54, 26, 42
"""Heights in pixels: the task and its instruction, the title of a row, the caption of a panel."""
MARK = (214, 39, 40)
"""Colour of clicks, drags and scrolls."""
_PAPER, _INK, _SOFT, _LINE = (255, 255, 255), (29, 36, 48), (91, 102, 117), (200, 206, 214)
_SOLVED, _NOT_SOLVED = (26, 127, 55), (180, 35, 24)
FRAME_S, LAST_FRAME_S = 1.2, 4.0
"""Seconds that the clip shows a step, and the end."""

OUTCOMES = {
    Outcome.SUCCESS: "solved",
    Outcome.FAILURE: "not solved",
    Outcome.TRUNCATED: "not solved, step limit reached",
    Outcome.UNREADABLE: "not solved, unreadable replies",
    Outcome.ENVIRONMENT_FAILED: "not finished, the session failed",
}


@dataclass(frozen=True)
class EpisodePair:
    """One task with one seed, played by two policies."""

    before: Trajectory
    after: Trajectory
    names: tuple[str, str] = ("before", "after")
    """Names of the two policies."""

    @property
    def shows_improvement(self) -> bool:
        """Whether only the second policy solved the task."""
        return self.after.success and not self.before.success

    def rows(self) -> Iterator[tuple[str, Trajectory]]:
        """The name and the episode of each policy."""
        yield from zip(self.names, (self.before, self.after), strict=True)


@dataclass(frozen=True)
class _Panel:
    screen: Image.Image
    caption: str


def choose_pair(comparison: ScreenComparison) -> tuple[TrajectoryEntry, TrajectoryEntry] | None:
    """The first pair that A solved and B did not, otherwise the first pair, as episodes of (A, B).

    None without pairs.
    """
    improved = (pair for pair in comparison.pairs if pair[0].success and not pair[1].success)
    return next(improved, comparison.pairs[0] if comparison.pairs else None)


def select_steps(count: int, limit: int) -> list[int]:
    """The steps that are drawn: all of them, or the first and the last ones."""
    if count <= limit:
        return list(range(count))
    first = (limit + 1) // 2
    return [*range(first), *range(count - limit + first, count)]


def panel_size(screen: tuple[int, int]) -> tuple[int, int]:
    """The size at which a screen is drawn."""
    scale = min(most / side for most, side in zip(MAX_PANEL, screen, strict=True))
    scale = int(scale) if scale >= 1 else scale
    return max(1, round(screen[0] * scale)), max(1, round(screen[1] * scale))


def mark_place(point: Sequence[int], screen: tuple[int, int]) -> tuple[int, int]:
    """The pixel of a panel that shows the centre of a pixel of the screen."""
    width, height = panel_size(screen)
    return int((point[0] + 0.5) * width / screen[0]), int((point[1] + 0.5) * height / screen[1])


def draw_picture(pair: EpisodePair) -> Image.Image:
    """Both episodes below each other, step by step."""
    rows = [(name, episode, _draw_panels(episode, MAX_STEPS)) for name, episode in pair.rows()]
    width, height = panel_size(_screen_size(pair.after))
    columns = max(len(panels) for _, _, panels in rows)
    row_height = ROW_TITLE + height + CAPTION
    size = (2 * MARGIN + columns * width + (columns - 1) * GAP, HEADING + 2 * row_height + 2 * MARGIN)
    picture, draw = _blank_picture(size)
    _draw_heading(draw, pair.after, size[0])
    for number, (name, episode, panels) in enumerate(rows):
        top = MARGIN + HEADING + number * row_height
        _draw_row_title(draw, (MARGIN, top), size[0] - 2 * MARGIN, name, episode)
        for column, panel in enumerate(panels):
            _draw_panel(picture, draw, (MARGIN + column * (width + GAP), top + ROW_TITLE), panel)
    return picture


def draw_frames(pair: EpisodePair) -> list[tuple[Image.Image, float]]:
    """The frames of a clip and the seconds of each. Both episodes advance side by side; the shorter one waits."""
    rows = [(name, episode, _draw_panels(episode, len(episode))) for name, episode in pair.rows()]
    width, height = panel_size(_screen_size(pair.after))
    size = (2 * MARGIN + 2 * width + 2 * GAP, 2 * MARGIN + HEADING + ROW_TITLE + height + CAPTION)
    last = max(len(panels) for _, _, panels in rows) - 1
    frames = []
    for step in range(last + 1):
        picture, draw = _blank_picture(size)
        _draw_heading(draw, pair.after, size[0])
        for column, (name, episode, panels) in enumerate(rows):
            left, has_ended = MARGIN + column * (width + 2 * GAP), step >= len(panels) - 1
            _draw_row_title(draw, (left, MARGIN + HEADING), width, name, episode if has_ended else None)
            _draw_panel(picture, draw, (left, MARGIN + HEADING + ROW_TITLE), panels[min(step, len(panels) - 1)])
        frames.append((picture, LAST_FRAME_S if step == last else FRAME_S))
    return frames


def write_picture(pair: EpisodePair, path: Path) -> None:
    """Write the picture as PNG."""
    data = io.BytesIO()
    draw_picture(pair).save(data, "PNG", optimize=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data.getvalue(), durable=False)


def write_gif(pair: EpisodePair, path: Path) -> None:
    """Write the clip as an animated GIF, which needs no encoder."""
    data, frames = io.BytesIO(), draw_frames(pair)
    first, *others = (picture for picture, _ in frames)
    durations = [round(1000 * seconds) for _, seconds in frames]
    first.save(data, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    write_bytes(path, data.getvalue(), durable=False)


def _screen_size(episode: Trajectory) -> tuple[int, int]:
    width, height = (episode.task.get(side) for side in ("width", "height"))
    if isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0:
        return width, height
    return next((turn.image_sizes[-1] for turn in episode.turns if turn.image_sizes), (160, 210))


def _draw_panels(episode: Trajectory, limit: int) -> list[_Panel]:
    """The panels of an episode: at most `limit` steps, and the final screen."""
    panels, steps = [], select_steps(len(episode), limit)
    for place, step in enumerate(steps):
        turn = episode.turns[step]
        screen = _load_screen(episode, turn.pictures[-1] if turn.pictures else "")
        caption = f"unreadable reply: {turn.unreadable}"
        if turn.action is not None:
            _draw_mark(screen, turn.action, _screen_size(episode))
            caption = describe_action(turn.action)
        left_out = steps[place + 1] - step - 1 if place + 1 < len(steps) else 0
        skipped = f" ({left_out} steps left out)" if left_out else ""
        panels.append(_Panel(screen, f"{step + 1}. {caption}{skipped}"))
    if episode.last_picture or not panels:
        panels.append(_Panel(_load_screen(episode, episode.last_picture), OUTCOMES[episode.outcome]))
    return panels


def _load_screen(episode: Trajectory, sha: str) -> Image.Image:
    """A recorded screen at the size of a panel; an empty one if it is missing or damaged."""
    size = panel_size(_screen_size(episode))
    try:
        with Image.open(io.BytesIO(episode.pictures[sha])) as picture:
            enlarged = size[0] % picture.width == 0 and size[1] % picture.height == 0
            method = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
            return picture.convert("RGB").resize(size, method)
    except (KeyError, UnidentifiedImageError, OSError, ValueError):
        return Image.new("RGB", size, _LINE)


def _draw_mark(panel: Image.Image, action: Mapping[str, Any], screen: tuple[int, int]) -> None:
    """Mark where an action takes place: a dot in a ring, and a line for a drag."""
    path = action.get("path") or ([action["at"]] if action.get("at") is not None else [])
    points = [mark_place(point, screen) for point in path]
    if not points:
        return
    draw = ImageDraw.Draw(panel)
    if len(points) > 1:
        draw.line(points, fill=_PAPER, width=7)
        draw.line(points, fill=MARK, width=3)
    x, y = points[-1]
    for radius, colour, width in ((13, _PAPER, 5), (12, MARK, 3)):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=width)
    draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=MARK, outline=_PAPER)


def _blank_picture(size: tuple[int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", size, _PAPER)
    return picture, ImageDraw.Draw(picture)


def _draw_heading(draw: ImageDraw.ImageDraw, episode: Trajectory, width: int) -> None:
    task = episode.task
    title = f"{task.get('task', '')}, seed {task.get('seed')}"
    _draw_text(draw, (MARGIN, MARGIN), title, 13, _SOFT, width - 2 * MARGIN)
    _draw_text(draw, (MARGIN, MARGIN + 18), str(task.get("instruction", "")), 16, _INK, width - 2 * MARGIN)


def _draw_row_title(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], width: int, name: str, ended: Trajectory | None
) -> None:
    """The name of a policy, and how its episode ended once it has."""
    text = name if ended is None else f"{name}: {OUTCOMES[ended.outcome]}"
    colour = _INK if ended is None else _SOLVED if ended.success else _NOT_SOLVED
    _draw_text(draw, place, text, 16, colour, width)


def _draw_panel(picture: Image.Image, draw: ImageDraw.ImageDraw, place: tuple[int, int], panel: _Panel) -> None:
    left, top = place
    width, height = panel.screen.size
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=_LINE)
    picture.paste(panel.screen, place)
    _draw_text(draw, (left, top + height + 5), panel.caption, 14, _INK, width, lines=2)


def _draw_text(
    draw: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    size: int,
    colour: tuple[int, int, int],
    width: int,
    *,
    lines: int = 1,
) -> None:
    """Write text in at most `lines` lines of about `width` pixels; the rest is cut."""
    font = _load_font(size)
    characters = max(4, int(width / font.getlength("n")))
    wrapped = textwrap.wrap(" ".join(text.split()), characters, max_lines=lines, placeholder=" …")
    draw.multiline_text(place, "\n".join(wrapped), fill=colour, font=font, spacing=2)


def _load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """DejaVu Sans where it is installed, because the font of Pillow has few characters beyond ASCII."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)
