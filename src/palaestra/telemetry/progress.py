"""How far a training run is, for the person who started it.

On a terminal: a bar, the time left and the few numbers that tell whether it learns, redrawn at most ten times
a second. Elsewhere: one plain line every ten seconds and one at the end, without colour codes. Writes to
stderr, so that stdout stays free for results. `Pace` and the formatting decide; `ProgressSink` draws. It
starts no thread: the events themselves drive it, and `rich` is imported when the first of them arrives at a
terminal.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TextIO

from palaestra.errors import ConfigError
from palaestra.telemetry.event import (
    CheckpointSaved,
    EpisodeSummary,
    Event,
    LogLine,
    PhaseChanged,
    TrainingStep,
)
from palaestra.telemetry.series import Series

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

__all__ = ["Pace", "ProgressSink"]

_REDRAW_EVERY_S = 0.1
_PLAIN_LINE_EVERY_S = 10.0
_RECENT_EPISODES = 100
_CURVE_POINTS = 512
_CURVE_WIDTH = 28
_BARS = "▁▂▃▄▅▆▇█"
_MOST_COLUMNS = 110
"""A bar across a very wide window is harder to read, not easier."""
_WIDTH_FOR = ((72, 3), (52, 2), (0, 1))
"""From how many columns of the terminal on the numbers stand in three, two or one."""

_COLUMNS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("return", "episode_return"), ("length", "episode_length"), ("episodes", "episodes")),
    (
        ("policy loss", "policy_loss"),
        ("value loss", "value_loss"),
        ("explained variance", "explained_variance"),
    ),
    (("approx KL", "approx_kl"), ("entropy", "entropy"), ("learning rate", "learning_rate")),
)

_EPISODE_COLUMNS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("success", "success_rate"), ("return", "episode_return"), ("held out", "eval_success_rate")),
    (("episodes", "episodes"), ("turns each", "episode_length"), ("unreadable", "unreadable_share")),
    (("staleness", "staleness"), ("loss", "loss"), ("entropy", "entropy")),
)
"""For runs that are counted in updates, of whole episodes each."""

_BEHIND = (
    ("staleness", "staleness"),
    ("collector busy", "collector_utilisation"),
    ("learner busy", "learner_utilisation"),
)
"""A further row for runs that collect in the background."""


class Pace:
    """Turns (env_step, time) into a share done, steps per second and seconds left."""

    def __init__(self, total_env_steps: int, now: float) -> None:
        if total_env_steps < 1:
            raise ConfigError("total_env_steps", total_env_steps, "a run takes at least one step", "Give 1 or more")
        self.total = total_env_steps
        self.env_step = 0
        self.reported_rate: float | None = None
        self._began = now
        self._first: tuple[int, float] | None = None

    def advance(self, env_step: int, now: float) -> None:
        """The run came to `env_step`. The first is the baseline, so that a resumed run is not overrated."""
        if self._first is None:
            self._first = (env_step, now)
        self.env_step = max(self.env_step, env_step)

    def share(self) -> float:
        """How much is done, from 0 to 1."""
        return min(1.0, self.env_step / self.total)

    def elapsed(self, now: float) -> float:
        """Seconds since the display was opened."""
        return max(0.0, now - self._began)

    def rate(self, now: float) -> float | None:
        """Steps per second over the whole attempt, or as the trainer reports it when that is all there is."""
        if self._first is not None:
            steps, seconds = self.env_step - self._first[0], now - self._first[1]
            if steps > 0 and seconds > 0:
                return steps / seconds
        return self.reported_rate

    def left(self, now: float) -> float | None:
        """Seconds still to go; None while nobody can tell."""
        rate = self.rate(now)
        if not rate or not math.isfinite(rate):
            return None
        return max(0, self.total - self.env_step) / rate


class ProgressSink:
    """Shows one run. `plain` asks for lines even on a terminal."""

    def __init__(
        self,
        total_env_steps: int,
        title: str,
        stream: TextIO | None = None,
        plain: bool = False,
        clock: Callable[[], float] = time.monotonic,
        unit: Literal["steps", "updates"] = "steps",
    ) -> None:
        """`total_env_steps` counts whatever the `unit` is."""
        self._title, self._unit = title, unit
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not _can_redraw(self._stream)
        self._clock = clock
        now = clock()
        self._pace = Pace(total_env_steps, now)
        self._metrics: dict[str, float] = {}
        self._returns: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self._lengths: deque[int] = deque(maxlen=_RECENT_EPISODES)
        self._curve = Series(_CURVE_POINTS)
        self._note = ""
        self._shown_at = now if self._plain else -math.inf
        self._shown_step = -1
        self._live: Live | None = None
        self._closed = False

    def emit(self, event: Event) -> None:
        """Take the event in, and redraw when it is time; everything after `close` is ignored."""
        if self._closed:
            return
        now = self._clock()
        if isinstance(event, EpisodeSummary):
            if self._unit == "steps":
                self._pace.advance(event.env_step, now)
            self._returns.append(event.episode_return)
            self._lengths.append(event.length)
            if "episodes" not in self._metrics or event.episode > self._metrics["episodes"]:
                self._metrics["episodes"] = event.episode
        elif isinstance(event, TrainingStep):
            self._take_step(event, now)
        elif isinstance(event, CheckpointSaved):
            self._note = _checkpoint_note(event)
        elif isinstance(event, PhaseChanged):
            self._note = f"{event.phase}: {event.reason}" if event.reason else event.phase
        elif isinstance(event, LogLine):
            self._say(event)
        if now - self._shown_at >= (_PLAIN_LINE_EVERY_S if self._plain else _REDRAW_EVERY_S):
            self._show(now)

    def flush(self) -> None:
        """Redraw the display; lines keep their own rhythm."""
        if not self._closed and self._live is not None:
            self._show(self._clock())

    def close(self) -> None:
        """Show the end of the run and leave the terminal as it was."""
        if self._closed:
            return
        self._closed = True
        now = self._clock()
        if self._plain:
            if self._pace.env_step != self._shown_step and self._pace.env_step:
                self._show(now)
        elif self._live is not None:
            # Stopping draws what it was given last.
            self._live.update(self.panel(self._live.console, now))
            self._live.stop()

    def _take_step(self, event: TrainingStep, now: float) -> None:
        self._pace.advance(event.env_step if self._unit == "steps" else event.update, now)
        self._metrics.update(event.metrics)
        self._pace.reported_rate = event.metrics.get("steps_per_second", self._pace.reported_rate)
        followed = self._value(self._followed)
        if followed is not None and math.isfinite(followed):
            self._curve.add(event.env_step, followed)

    @property
    def _followed(self) -> str:
        """The metric whose curve is drawn."""
        return "episode_return" if self._unit == "steps" else "success_rate"

    def _value(self, metric: str) -> float | None:
        if metric == "episode_return" and self._returns:
            return fmean(self._returns)
        if metric == "episode_length" and self._lengths:
            return fmean(self._lengths)
        return self._metrics.get(metric)

    def _say(self, line: LogLine) -> None:
        if line.level == "debug":
            return
        text = "".join(c if c.isprintable() else " " for c in line.text)
        text = text if line.level == "info" else f"{line.level}: {text}"
        if self._plain:
            self._write(text)
        else:
            colour = {"info": "dim", "warning": "yellow"}.get(line.level, "red")
            self._display().console.print(text, style=colour, markup=False, highlight=False)

    def _show(self, now: float) -> None:
        self._shown_at = now
        self._shown_step = self._pace.env_step
        if self._plain:
            self._write(self._line(now))
        else:
            live = self._display()
            live.update(self.panel(live.console, now), refresh=True)

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _display(self) -> Live:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True, highlight=False)
            # stdout is left alone: what is printed there may be read by a program.
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self._live

    def _line(self, now: float) -> str:
        pace = self._pace
        parts = [f"{self._title}  {_count(pace.env_step)}/{_count(pace.total)} {self._unit} ({_percent(pace.share())})"]
        shown = (("success", "success_rate"), ("return", "episode_return"), ("length", "episode_length"))
        for label, metric in shown:
            value = self._value(metric)
            if value is not None:
                parts.append(f"{label} {_amount(value, metric)}")
        staleness = self._value("staleness")
        behind = self._unit == "updates" or self._value("queue_depth") is not None
        if staleness is not None and behind:
            parts.append(f"staleness {_amount(staleness, 'staleness')}")
        parts.extend(self._timing(now))
        return "  ".join(parts)

    def _timing(self, now: float) -> list[str]:
        rate, left = self._pace.reported_rate or self._pace.rate(now), self._pace.left(now)
        if self._unit == "updates":
            pace = self._value("episodes_per_second")
            parts = [] if pace is None else [f"{pace:.1f} episodes/s"]
        else:
            parts = [f"{_count(rate)} steps/s"] if rate and math.isfinite(rate) else []
        parts.append(f"{_duration(self._pace.elapsed(now))} elapsed")
        if left is not None and not self._closed and left > 0:
            parts.append(f"{_duration(left)} left")
        return parts

    def panel(self, console: Console, now: float) -> RenderableType:
        """The display as it stands, for a console of that width."""
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        pace = self._pace
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self._title, style="bold"), Text(" · ".join(self._timing(now)), style="dim"))
        bar = Table.grid(expand=True, padding=(0, 2))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_column(justify="right", no_wrap=True)
        done = ProgressBar(pace.total, min(pace.env_step, pace.total), complete_style="cyan", finished_style="green")
        steps = Text(f"{_count(pace.env_step)} / {_count(pace.total)} {self._unit}", style="dim")
        bar.add_row(done, Text(_percent(pace.share()), style="bold"), steps)
        rows: list[RenderableType] = [head, bar, Text(), self._numbers(console.width)]
        curve = self._sparkline(console)
        if curve is not None:
            rows.append(curve)
        if self._note:
            rows.append(Text(self._note, style="dim", no_wrap=True, overflow="ellipsis"))
        return Constrain(Padding(Group(*rows), (1, 1)), _MOST_COLUMNS)

    def _numbers(self, width: int) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        layout = _COLUMNS if self._unit == "steps" else _EPISODE_COLUMNS
        columns = layout[: next(shown for least, shown in _WIDTH_FOR if width >= least)]
        grid = Table.grid(padding=(0, 1))
        for place in range(len(columns)):
            if place:
                grid.add_column(width=2)
            grid.add_column(no_wrap=True, style="dim")
            grid.add_column(no_wrap=True, justify="right", min_width=8)
        rows = list(zip(*columns, strict=True))
        if self._unit == "steps" and self._value("success_rate") is not None:
            rows[-1] = (("success", "success_rate"), *rows[-1][1:])  # worth more than a count of episodes
        if self._value("queue_depth") is not None:
            rows.append(_BEHIND[: len(columns)])
        for row in rows:
            cells: list[RenderableType] = []
            for label, metric in row:
                if cells:
                    cells.append("")
                value = self._value(metric)
                strength = "bold green" if metric == self._followed else ""
                if value is not None and not math.isfinite(value):
                    strength = "bold red"
                cells += [label, Text("–" if value is None else _amount(value, metric), style=strength)]
            grid.add_row(*cells)
        return grid

    def _sparkline(self, console: Console) -> RenderableType | None:
        from rich.text import Text

        points = [point.value for point in self._curve.points()]
        if len(points) < 2 or console.options.ascii_only:
            return None
        low, high = min(points), max(points)
        named = "return" if self._unit == "steps" else "success"
        drawn = Text(f"\n{named} so far  ", style="dim", no_wrap=True, overflow="ellipsis")
        drawn.append(_bars(points, max(4, min(_CURVE_WIDTH, console.width - 36))), style="green")
        drawn.append(f"  {_amount(low, self._followed)} … {_amount(high, self._followed)}")
        return drawn


def _can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _bars(values: list[float], width: int) -> str:
    """The values as a row of bars, from the lowest to the highest among them."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def _checkpoint_note(event: CheckpointSaved) -> str:
    kind = "best checkpoint" if event.best else "checkpoint"
    score = "" if event.metric is None else f", {_amount(event.metric, 'episode_return')}"
    return f"{kind} saved at step {_count(event.env_step)}{score}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(share: float) -> str:
    # Rounded down: 100 % is said when it is done and not before.
    return f"{math.floor(share * 100)} %"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


_Style = Literal["count", "tenth", "thousandth", "compact", "percent"]
_STYLES: dict[str, _Style] = {
    "episodes": "count",
    "episode_return": "tenth",
    "episode_length": "tenth",
    "entropy": "thousandth",
    "explained_variance": "thousandth",
    "learning_rate": "compact",
    "staleness": "tenth",
    "success_rate": "percent",
    "eval_success_rate": "percent",
    "unreadable_share": "percent",
    "collector_utilisation": "percent",
    "learner_utilisation": "percent",
}


def _amount(value: float, metric: str) -> str:
    """The value at the precision that is worth reading for this metric."""
    if not math.isfinite(value):
        return str(value)
    style = _STYLES.get(metric)
    if style == "count":
        return _count(value)
    if style == "percent":
        return f"{value:.0%}".replace("%", " %")
    if style == "compact":
        return f"{value:.2g}"
    size = abs(value)
    if size >= 1e6 or (0 < size < 1e-4 and style is None):
        return f"{value:.2e}"
    digits = {"tenth": 1 if size >= 10 else 2, "thousandth": 3}.get(
        style or "", 1 if size >= 100 else 4 if size < 1 else 2
    )
    return f"{value:,.{digits}f}"
