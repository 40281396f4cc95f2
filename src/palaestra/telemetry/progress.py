"""Progress display of a training run on stderr.

On a terminal: a bar, the remaining time and the most important metrics, redrawn at most ten times per second.
Otherwise: one plain line every ten seconds and one at the end, without colour codes. In a notebook or a script that
calls `palaestra.train`: one short line that is rewritten. Events drive the display; there is no thread. `rich` is
imported when the first event arrives at a terminal.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TextIO

from palaestra.errors import ConfigError
from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, Event, LogLine, PhaseChanged, TrainingStep
from palaestra.telemetry.series import Series

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_REDRAW_EVERY_S = 0.1
PLAIN_LINE_EVERY_S = 10.0
_REWRITE_EVERY_S = 0.25
_RECENT_EPISODES = 100
_CURVE_POINTS = 512
_CURVE_WIDTH = 28
_BARS = "▁▂▃▄▅▆▇█"
_MAX_WIDTH = 110
"""Widest display; a wider bar is hard to read."""
_NUM_COLUMNS = ((72, 3), (52, 2), (0, 1))
"""Minimum terminal width for three, two and one columns of metrics."""

_COLUMNS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("return", "episode_return"), ("length", "episode_length"), ("episodes", "episodes")),
    (("policy loss", "policy_loss"), ("value loss", "value_loss"), ("explained variance", "explained_variance")),
    (("approx KL", "approx_kl"), ("entropy", "entropy"), ("learning rate", "learning_rate")),
)

_SCREEN_COLUMNS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("success", "success_rate"), ("return", "episode_return"), ("held out", "eval_success_rate")),
    (("episodes", "episodes"), ("turns each", "episode_length"), ("unreadable", "unreadable_share")),
    (("staleness", "staleness"), ("loss", "loss"), ("entropy", "entropy")),
)
"""For training on screens, which is counted in updates."""

_ASYNC_ROW = (
    ("staleness", "staleness"),
    ("collector busy", "collector_utilisation"),
    ("learner busy", "learner_utilisation"),
)
"""An additional row for asynchronous collection."""


class ProgressRate:
    """Computes fraction done, steps per second and remaining seconds from (env_step, time)."""

    def __init__(self, total_env_steps: int, now: float) -> None:
        if total_env_steps < 1:
            raise ConfigError("total_env_steps", total_env_steps, "a run has at least one step", "Give 1 or more")
        self.total = total_env_steps
        self.env_step = 0
        self.reported_rate: float | None = None
        self._start_time = now
        self._first: tuple[int, float] | None = None

    def advance(self, env_step: int, now: float) -> None:
        """Report that the run reached `env_step`. The first call sets the baseline, for resumed runs."""
        if self._first is None:
            self._first = (env_step, now)
        self.env_step = max(self.env_step, env_step)

    def fraction(self) -> float:
        """The completed fraction, from 0 to 1."""
        return min(1.0, self.env_step / self.total)

    def elapsed_seconds(self, now: float) -> float:
        """Seconds since the start."""
        return max(0.0, now - self._start_time)

    def rate(self, now: float) -> float | None:
        """Steps per second since the first report, or else the rate that the trainer reports."""
        if self._first is not None:
            steps, seconds = self.env_step - self._first[0], now - self._first[1]
            if steps > 0 and seconds > 0:
                return steps / seconds
        return self.reported_rate

    def remaining_seconds(self, now: float) -> float | None:
        """Remaining seconds; None if unknown."""
        rate = self.rate(now)
        if not rate or not math.isfinite(rate):
            return None
        return max(0, self.total - self.env_step) / rate


class ProgressSink:
    """Shows one run. `plain` prints lines even on a terminal; `rewrite` rewrites one line with a carriage return."""

    def __init__(
        self,
        total_env_steps: int,
        title: str,
        stream: TextIO | None = None,
        plain: bool = False,
        clock: Callable[[], float] = time.monotonic,
        unit: Literal["steps", "updates"] = "steps",
        rewrite: bool = False,
    ) -> None:
        """`total_env_steps` is counted in `unit`."""
        self._title, self._unit = title, unit
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or rewrite or not can_redraw(self._stream)
        self._rewrite, self._written = rewrite, 0
        self._clock = clock
        now = clock()
        self._rate = ProgressRate(total_env_steps, now)
        self._metrics: dict[str, float] = {}
        self._returns: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self._lengths: deque[int] = deque(maxlen=_RECENT_EPISODES)
        self._curve = Series(_CURVE_POINTS)
        self._note = ""
        self._redraw_time = now if self._plain else -math.inf
        self._redraw_step = -1
        self._live: Live | None = None
        self._closed = False

    def emit(self, event: Event) -> None:
        """Update the display if it is due. Events after `close` are ignored."""
        if self._closed:
            return
        now = self._clock()
        if isinstance(event, EpisodeSummary):
            if self._unit == "steps":
                self._rate.advance(event.env_step, now)
            self._returns.append(event.episode_return)
            self._lengths.append(event.length)
            if "episodes" not in self._metrics or event.episode > self._metrics["episodes"]:
                self._metrics["episodes"] = event.episode
        elif isinstance(event, TrainingStep):
            self._add_training_step(event, now)
        elif isinstance(event, CheckpointSaved):
            self._note = _checkpoint_note(event)
        elif isinstance(event, PhaseChanged):
            self._note = f"{event.phase}: {event.reason}" if event.reason else event.phase
        elif isinstance(event, LogLine):
            self._print_log_line(event)
        interval = _REWRITE_EVERY_S if self._rewrite else PLAIN_LINE_EVERY_S if self._plain else _REDRAW_EVERY_S
        if now - self._redraw_time >= interval:
            self._redraw(now)

    def flush(self) -> None:
        """Redraw the live display; plain lines keep their interval."""
        if not self._closed and self._live is not None:
            self._redraw(self._clock())

    def close(self) -> None:
        """Show the end of the run and restore the terminal."""
        if self._closed:
            return
        self._closed = True
        now = self._clock()
        if self._plain:
            if (self._rewrite or self._rate.env_step != self._redraw_step) and self._rate.env_step:
                self._redraw(now)
            if self._written:
                self._stream.write("\n")
                self._stream.flush()
        elif self._live is not None:
            # `stop` draws the last update.
            self._live.update(self.panel(self._live.console, now))
            self._live.stop()

    def _add_training_step(self, event: TrainingStep, now: float) -> None:
        self._rate.advance(event.env_step if self._unit == "steps" else event.update, now)
        self._metrics.update(event.metrics)
        self._rate.reported_rate = event.metrics.get("steps_per_second", self._rate.reported_rate)
        value = self._value(self._curve_metric)
        if value is not None and math.isfinite(value):
            self._curve.add(event.env_step, value)

    @property
    def _curve_metric(self) -> str:
        """The metric whose curve is drawn."""
        return "episode_return" if self._unit == "steps" else "success_rate"

    def _value(self, metric: str) -> float | None:
        if metric == "episode_return" and self._returns:
            return fmean(self._returns)
        if metric == "episode_length" and self._lengths:
            return fmean(self._lengths)
        return self._metrics.get(metric)

    def _print_log_line(self, line: LogLine) -> None:
        if line.level == "debug":
            return
        text = "".join(c if c.isprintable() else " " for c in line.text)
        text = text if line.level == "info" else f"{line.level}: {text}"
        if self._plain:
            self._write(text)
        else:
            colour = {"info": "dim", "warning": "yellow"}.get(line.level, "red")
            self._start_live().console.print(text, style=colour, markup=False, highlight=False)

    def _redraw(self, now: float) -> None:
        self._redraw_time = now
        self._redraw_step = self._rate.env_step
        if self._rewrite:
            self._rewrite_line(self._plain_line(now))
        elif self._plain:
            self._write(self._plain_line(now))
        else:
            live = self._start_live()
            live.update(self.panel(live.console, now), refresh=True)

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{' ' * self._written}\r{text}\n" if self._written else text + "\n")
        self._written = 0
        self._stream.flush()

    def _rewrite_line(self, text: str) -> None:
        if self._stream.isatty():
            text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be rewritten
        self._stream.write(f"\r{text.ljust(self._written)}")
        self._written = len(text)
        self._stream.flush()

    def _start_live(self) -> Live:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True, highlight=False)
            # Do not redirect stdout: a program may read it.
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self._live

    def _plain_line(self, now: float) -> str:
        rate = self._rate
        steps = f"{_format_count(rate.env_step)}/{_format_count(rate.total)} {self._unit}"
        title = "" if self._rewrite else f"{self._title}  "
        parts = [f"{title}{steps} ({_format_percent(rate.fraction())})"]
        shown = (("success", "success_rate"), ("return", "episode_return"), ("length", "episode_length"))
        for label, metric in shown[:2] if self._rewrite else shown:
            value = self._value(metric)
            if value is not None:
                parts.append(f"{label} {_format_value(value, metric)}")
        staleness = self._value("staleness")
        is_asynchronous = self._unit == "updates" or self._value("queue_depth") is not None
        if staleness is not None and is_asynchronous:
            parts.append(f"staleness {_format_value(staleness, 'staleness')}")
        parts.extend(self._format_timing(now))
        return "  ".join(parts)

    def _format_timing(self, now: float) -> list[str]:
        rate, remaining = self._rate.reported_rate or self._rate.rate(now), self._rate.remaining_seconds(now)
        if self._unit == "updates":
            episode_rate = self._value("episodes_per_second")
            parts = [] if episode_rate is None else [f"{episode_rate:.1f} episodes/s"]
        else:
            parts = [f"{_format_count(rate)} steps/s"] if rate and math.isfinite(rate) else []
        parts.append(f"{_format_duration(self._rate.elapsed_seconds(now))} elapsed")
        if remaining is not None and not self._closed and remaining > 0:
            parts.append(f"{_format_duration(remaining)} left")
        return parts

    def panel(self, console: Console, now: float) -> RenderableType:
        """The live display, laid out for the width of the console."""
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rate = self._rate
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self._title, style="bold"), Text(" · ".join(self._format_timing(now)), style="dim"))
        bar = Table.grid(expand=True, padding=(0, 2))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_column(justify="right", no_wrap=True)
        done = ProgressBar(rate.total, min(rate.env_step, rate.total), complete_style="cyan", finished_style="green")
        steps = Text(f"{_format_count(rate.env_step)} / {_format_count(rate.total)} {self._unit}", style="dim")
        bar.add_row(done, Text(_format_percent(rate.fraction()), style="bold"), steps)
        rows: list[RenderableType] = [head, bar, Text(), self._metric_grid(console.width)]
        curve = self._sparkline(console)
        if curve is not None:
            rows.append(curve)
        if self._note:
            rows.append(Text(self._note, style="dim", no_wrap=True, overflow="ellipsis"))
        return Constrain(Padding(Group(*rows), (1, 1)), _MAX_WIDTH)

    def _metric_grid(self, width: int) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        layout = _COLUMNS if self._unit == "steps" else _SCREEN_COLUMNS
        columns = layout[: next(count for min_width, count in _NUM_COLUMNS if width >= min_width)]
        grid = Table.grid(padding=(0, 1))
        for column in range(len(columns)):
            if column:
                grid.add_column(width=2)
            grid.add_column(no_wrap=True, style="dim")
            grid.add_column(no_wrap=True, justify="right", min_width=8)
        rows = list(zip(*columns, strict=True))
        if self._unit == "steps" and self._value("success_rate") is not None:
            rows[-1] = (("success", "success_rate"), *rows[-1][1:])  # more useful than the number of episodes
        if self._value("queue_depth") is not None:
            rows.append(_ASYNC_ROW[: len(columns)])
        for row in rows:
            cells: list[RenderableType] = []
            for label, metric in row:
                if cells:
                    cells.append("")
                value = self._value(metric)
                style = "bold green" if metric == self._curve_metric else ""
                if value is not None and not math.isfinite(value):
                    style = "bold red"
                cells += [label, Text("–" if value is None else _format_value(value, metric), style=style)]
            grid.add_row(*cells)
        return grid

    def _sparkline(self, console: Console) -> RenderableType | None:
        from rich.text import Text

        points = [point.value for point in self._curve.points()]
        if len(points) < 2 or console.options.ascii_only:
            return None
        low, high = min(points), max(points)
        label = "return" if self._unit == "steps" else "success"
        line = Text(f"\n{label} so far  ", style="dim", no_wrap=True, overflow="ellipsis")
        line.append(render_bars(points, max(4, min(_CURVE_WIDTH, console.width - 36))), style="green")
        line.append(f"  {_format_value(low, self._curve_metric)} … {_format_value(high, self._curve_metric)}")
        return line


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a display can be drawn again."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def render_bars(values: list[float], width: int) -> str:
    """The values as a row of bars, scaled from the lowest to the highest value."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def _checkpoint_note(event: CheckpointSaved) -> str:
    kind = "best checkpoint" if event.best else "checkpoint"
    score = "" if event.metric is None else f", {_format_value(event.metric, 'episode_return')}"
    return f"{kind} saved at step {_format_count(event.env_step)}{score}"


def _format_count(value: float) -> str:
    return f"{value:,.0f}"


def _format_percent(fraction: float) -> str:
    # Rounded down, so that 100 % appears only at the end.
    return f"{math.floor(fraction * 100)} %"


def _format_duration(seconds: float) -> str:
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


_Format = Literal["count", "tenth", "thousandth", "compact", "percent"]
_FORMATS: dict[str, _Format] = {
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


def _format_value(value: float, metric: str) -> str:
    """The value with the precision that suits this metric."""
    if not math.isfinite(value):
        return str(value)
    style = _FORMATS.get(metric)
    if style == "count":
        return _format_count(value)
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
