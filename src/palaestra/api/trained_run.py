"""`TrainedRun`: a run and the policy of one of its checkpoints, and `load`, which finds one on disk."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.atomic import atomic_directory
from palaestra.files.checkpoint import checkpoint_kind, open_checkpoint, read_state
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory, find_checkpoint
from palaestra.intervals import format_return
from palaestra.telemetry.event import TrainingStep
from palaestra.telemetry.journal import JournalReader
from palaestra.telemetry.progress import render_bars

if TYPE_CHECKING:
    from palaestra.api.policy import TrainedPolicy
    from palaestra.api.screen_policy import TrainedScreenPolicy

_SPARKLINE_WIDTH = 24
_STYLE = "font-family:system-ui,sans-serif;line-height:1.5;max-width:34rem"
_SOFT = "opacity:0.65;font-style:normal"

EnvFactory: TypeAlias = Callable[..., Any]
"""A class or function that makes one Gymnasium environment."""


class TrainedRun:
    """A run with a policy: what `palaestra.train` returns, and what `palaestra.load` finds on disk."""

    def __init__(
        self, checkpoint: Path, *, env: Mapping[str, Any] | None = None, interrupted: bool | None = None
    ) -> None:
        """`env` replaces keys of the section `env` of the configuration."""
        state = read_state(checkpoint)
        if state is None:
            raise CheckpointError("checkpoint", str(checkpoint), "cannot be read", "Name a run or another checkpoint")
        self.checkpoint = checkpoint
        """The directory of the checkpoint whose policy is used."""
        self.interrupted = interrupted
        """Whether Ctrl-C or a signal ended the training; None if the run was loaded."""
        self.config: dict[str, Any] = state["about"]["config"]
        """The configuration with all values."""
        self.env = dict(env or {})
        self._progress, self._about = state["progress"], state["about"]

    @property
    def directory(self) -> RunDirectory | None:
        """The directory of the run; None for a copy of its checkpoint."""
        if self.checkpoint.parent.name != "checkpoints":
            return None
        run = RunDirectory(self.checkpoint.absolute().parents[2])
        return run if run.resolved.is_file() else None

    @property
    def run_id(self) -> str:
        """The id of the run, as in `palaestra runs list`."""
        return str(self._about.get("run_id", self.checkpoint.name))

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that the run has kept, oldest first: the first is from before training, if it was kept."""
        return [self.checkpoint] if self.directory is None else self.directory.all_checkpoints()[::-1]

    @property
    def on_screens(self) -> bool:
        """Whether the policy is a model that operates screens."""
        return checkpoint_kind(self.checkpoint) == "screens"

    @property
    def task(self) -> str:
        """Name of the environment, without the module of an address; or the tasks on screens."""
        if not self.on_screens:
            return str(self.config["env"]["id"]).rpartition(":")[2]
        return ", ".join(choice["task"] for choice in self.config["tasks"])

    @property
    def steps(self) -> int:
        """Steps in the environment until the checkpoint; on screens, episodes."""
        return int(self._progress["steps"])

    @cached_property
    def history(self) -> list[dict[str, float]]:
        """The metrics of every logged update of the run, oldest first (docs/metrics.md); empty for a copy."""
        updates: dict[int, dict[str, float]] = {}
        attempts = [] if self.directory is None else self.directory.attempts()
        for attempt in attempts:
            if not attempt.journal.is_file():
                continue
            for record in JournalReader(attempt.journal).read():
                event = record.event
                if isinstance(event, TrainingStep):
                    # A resumed run repeats the updates after the checkpoint that it continues from.
                    facts = {"update": float(event.update), "env_step": float(event.env_step)}
                    updates[event.update] = facts | event.metrics
        return [updates[number] for number in sorted(updates)]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last logged update."""
        return dict(self.history[-1]) if self.history else {}

    @property
    def score(self) -> float | None:
        """The last value of the metric that the curve shows; for a copy, the score of the checkpoint."""
        values = self._curve()
        return values[-1] if values else self._about.get("score")

    @property
    def steps_per_second(self) -> float | None:
        """Mean over all logged updates of the speed that they report; on screens, episodes per second."""
        name = "episodes_per_second" if self.on_screens else "steps_per_second"
        rates = [metrics[name] for metrics in self.history if metrics.get(name)]
        return len(rates) / sum(1 / rate for rate in rates) if rates else None

    @cached_property
    def policy(self) -> TrainedPolicy | TrainedScreenPolicy:
        """The policy of the checkpoint; loaded when first used."""
        open_checkpoint(self.checkpoint)
        if self.on_screens:
            from palaestra.api.screen_policy import TrainedScreenPolicy

            return TrainedScreenPolicy.from_checkpoint(self.checkpoint)
        from palaestra.api.policy import TrainedPolicy

        return TrainedPolicy.from_checkpoint(self.checkpoint, env=self.env)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copy the checkpoint to a new directory, from which `palaestra.load` loads it on any machine."""
        target = Path(path)
        if target.exists():
            raise CheckpointError("save(path)", str(target), "exists and is never overwritten", "Choose another name")
        open_checkpoint(self.checkpoint)
        with atomic_directory(target) as directory:
            shutil.copytree(self.checkpoint, directory, dirs_exist_ok=True)
        return target

    def _curve(self) -> list[float]:
        """The values of the most telling metric over the updates."""
        for name in ("success_rate", "eval_success_rate") if self.on_screens else ("episode_return", "eval_return"):
            values = [metrics[name] for metrics in self.history if math.isfinite(metrics.get(name, math.nan))]
            if values:
                return values
        return []

    def _facts(self) -> dict[str, str]:
        """Score, steps and speed as text."""
        facts: dict[str, str] = {}
        if self.score is not None:
            name, value = (
                ("success", f"{100 * self.score:.0f} %") if self.on_screens else ("return", format_return(self.score))
            )
            facts[name] = value
        unit = "episodes" if self.on_screens else "steps"
        facts[unit] = f"{self.steps:,}"
        if self.steps_per_second is not None:
            facts[f"{unit}/s"] = f"{self.steps_per_second:,.{1 if self.on_screens else 0}f}"
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        curve = self._curve()
        bars = f" {render_bars(curve, _SPARKLINE_WIDTH)}" if len(curve) > 1 else ""
        return f"<TrainedRun {self.run_id}: {self.task} with {self.config['algorithm']['name']}, {facts}{bars}>"

    def _repr_html_(self) -> str:
        """A small card for notebooks: the facts and the curve, in the colours of the page."""
        cells = "".join(
            f'<span style="margin-right:1.5em"><i style="{_SOFT}">{escape(name)}</i> <b>{escape(value)}</b></span>'
            for name, value in self._facts().items()
        )
        state = " (interrupted)" if self.interrupted else ""
        title = (
            f"{escape(self.task)} <span style='{_SOFT}'>with {escape(self.config['algorithm']['name'])}{state}</span>"
        )
        where = f"<div style='{_SOFT};font-size:85%'>{escape(self.run_id)}</div>"
        curve = sparkline_svg(self._curve())
        return f'<div style="{_STYLE}"><div><b>{title}</b></div><div>{cells}</div>{curve}{where}</div>'


def load(
    name: str | os.PathLike[str], *, which: Literal["best", "latest"] = "best", env: EnvFactory | None = None
) -> TrainedRun:
    """A run or a saved checkpoint, by its path or by the id of the run or the beginning of it.

    `which`: which checkpoint of a run. `env`: a function that makes the environment, if the one of the training was a
    function without an address (docs/python.md).
    """
    given: Any = name
    if not isinstance(given, str | os.PathLike):
        remedy = "Give the id of a run, or the path of a run or a saved checkpoint"
        raise ConfigError("load(name)", given, f"has type {type(given).__name__}, which names no run", remedy)
    if which not in ("best", "latest"):
        raise ConfigError("load(which)", which, "is not known", "Use best or latest")
    checkpoint = find_checkpoint(os.fspath(name), Home.default().runs, which=which)
    open_checkpoint(checkpoint)
    section = None
    if env is not None:
        from palaestra.api.environments import environment_section

        section = environment_section(env)
    return TrainedRun(checkpoint, env=section)


def sparkline_svg(values: list[float], width: int = 320, height: int = 48) -> str:
    """A curve without axes as inline SVG, with its lowest and highest value; empty for less than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = " ".join(
        f"{4 + (width - 8) * i / (len(values) - 1):.1f},{height - 4 - (height - 8) * (value - low) / span:.1f}"
        for i, value in enumerate(values)
    )
    first, last, least, most = map(format_return, (values[0], values[-1], low, high))
    label = f"from {first} to {last}, between {least} and {most}"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="curve {label}">'
        f'<title>{label}</title><polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        "</svg>"
    )
