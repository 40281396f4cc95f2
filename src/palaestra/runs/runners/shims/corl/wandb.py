"""The functions of W&B that scripts of CORL call: metrics become marked lines of output, which the run service reads.

The scripts log every gradient step. Losses are averaged over `metrics_every` updates and written once; rows of an
evaluation and of an episode are written at once, all of them. New checkpoints are announced with their hash. If the run
asks for W&B, every call is also made to the real package, which is found behind this file on the path. Python 3.8+.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
import importlib
import json
import math
import os
import sys
from typing import Any

import d4rl

_HERE = os.path.dirname(os.path.abspath(__file__))
SCORE, RETURN = "d4rl_normalized_score", "eval_score"
"""Normalised score and mean return of an evaluation."""
_OTHER_NAMES = {
    "eval/d4rl_normalized_score": SCORE,
    "eval/normalized_score_mean": SCORE,
    "eval/eval_score": RETURN,
    "eval/reward_mean": RETURN,
    "eval/return_mean": RETURN,
    "eval/return_std": "eval/reward_std",
}
"""What some scripts call them. Those that log no return only print it."""
_EPISODE = "train/episode_return"


class MetricWriter:
    """Writes the rows of one run."""

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}
        self._every = max(1, int(d4rl.settings().get("metrics_every", 1)))
        self._sums: dict[str, list[float]] = {}
        self._interval = 0
        self._last_added = 0
        self._first_step: int | None = None
        self._rows = 0
        self._step = 0
        self._announced: set[str] = set()
        self._best: float | None = None
        self._score: float | None = None
        self._return_step = -1
        self._has_evaluated = False

    def begin(self, config: dict[str, Any]) -> None:
        """Take note of the configuration of the script."""
        self._config = dict(config)

    def add(self, row: dict[str, Any], step: int | None) -> None:
        """Add one row of the script."""
        if self._has_evaluated:
            # A script saves its checkpoint before or after it logs the evaluation, and always before the next row.
            self.announce_checkpoints()
        numbers = {
            _OTHER_NAMES.get(name, name): number
            for name, value in row.items()
            if (number := _to_number(value)) is not None
        }
        self._step = self._find_step(numbers, step)
        if _is_evaluation(numbers):
            self.flush()
            self._write_evaluation(numbers)
            return
        if _EPISODE in numbers:
            length = int(numbers.pop("train/episode_length", 0))
            episode = {"episode_return": numbers.pop(_EPISODE), "length": length}
            _write({"kind": "EpisodeSummary", "env_step": self._step, **episode})
        interval = (self._step - 1) // self._every
        if interval != self._interval:
            self.flush()
            self._interval = interval
        self._last_added = self._step
        for name, number in numbers.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += number
            total[1] += 1.0
        if self._step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Write the means since the last time."""
        if self._sums:
            means = {name: _to_json(total / count) for name, (total, count) in self._sums.items()}
            self._sums = {}
            _write({"kind": "TrainingStep", "env_step": self._last_added, "update": self._last_added, "metrics": means})

    def announce_checkpoints(self) -> None:
        """Announce the files that the script saved since the last time."""
        self._has_evaluated = False
        directory = self._config.get("checkpoints_path")
        files = glob.glob(os.path.join(glob.escape(str(directory)), "*.pt")) if directory else []
        new = sorted((path for path in files if path not in self._announced), key=os.path.getmtime)
        for path in new:
            self._announced.add(path)
            is_best = path == new[-1] and self._score is not None and (self._best is None or self._score > self._best)
            self._best = self._score if is_best else self._best
            with open(path, "rb") as file:
                sha256 = hashlib.sha256(file.read()).hexdigest()
            event = {"path": path, "sha256": sha256, "best": is_best, "metric": self._score}
            _write({"kind": "CheckpointSaved", "env_step": self._step, "update": self._step, **event})

    def _find_step(self, numbers: dict[str, float], step: int | None) -> int:
        """The number of updates so far, from 1 on.

        Some scripts count from 0, after a warm start they continue the count of the checkpoint, and others log epochs,
        or the iterations of a phase, and no step.
        """
        if step is not None:
            self._first_step = step if self._first_step is None else self._first_step
            return step - self._first_step + 1
        for name, earlier in (("offline_iter", 0), ("online_iter", self._config.get("num_offline_updates", 0))):
            if name in numbers:
                return int(earlier) + int(numbers[name]) + 1
        updates, log_every = self._config.get("num_updates_on_epoch"), self._config.get("log_every")
        if updates is None or "epoch" not in numbers:
            return max(1, self._step) if _is_evaluation(numbers) else self._step + 1
        if log_every is None or _is_evaluation(numbers):
            return (int(numbers["epoch"]) + 1) * int(updates)
        self._rows += 1
        return (self._rows - 1) * int(log_every) + 1

    def _write_evaluation(self, numbers: dict[str, float]) -> None:
        self._has_evaluated = True
        raw_return = d4rl.take_last_return()
        if raw_return is not None and SCORE in numbers and self._return_step != self._step:
            numbers.setdefault(RETURN, raw_return)
        self._return_step = self._step
        for target in self._config.get("target_returns", ())[:1]:
            # The decision transformer evaluates once per target return; the first one is the evaluation.
            for name, tag in (("return_mean", RETURN), ("normalized_score_mean", SCORE)):
                if f"eval/{target}_{name}" in numbers:
                    numbers[tag] = numbers[f"eval/{target}_{name}"]
        finite = [numbers[name] for name in (SCORE, RETURN) if math.isfinite(numbers.get(name, math.nan))]
        self._score = finite[0] if finite else self._score
        metrics = {name: _to_json(number) for name, number in numbers.items()}
        _write({"kind": "TrainingStep", "env_step": self._step, "update": self._step, "metrics": metrics})


def _is_evaluation(numbers: dict[str, float]) -> bool:
    return any(name.startswith("eval") or name == SCORE for name in numbers)


def _to_number(value: Any) -> float | None:
    """A number, or an array of numpy, torch or JAX with one number, as a float; None for anything else."""
    if isinstance(value, (str, bytes, dict, list, tuple)) or value is None:
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _to_json(number: float) -> Any:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _write(event: dict[str, Any]) -> None:
    sys.stdout.write("@palaestra " + json.dumps(event) + "\n")
    sys.stdout.flush()


class TrackedRun:
    """What `wandb.run` is in a run without W&B."""

    def __init__(self, **facts: Any) -> None:
        self.id, self.name = facts.get("id"), facts.get("name")
        self.config = dict(facts.get("config") or {})
        self.summary: dict[str, Any] = {}
        self.dir = os.getcwd()

    def save(self, *_: Any, **__: Any) -> bool:
        """Do nothing: all files stay in the run directory."""
        return True

    def log(self, data: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """As `wandb.log`."""
        log(data, step=step)

    def finish(self, *_: Any, **__: Any) -> None:
        """As `wandb.finish`."""
        finish()


_writer = MetricWriter()
config: dict[str, Any] = {}
run: TrackedRun | None = None


def init(**facts: Any) -> TrackedRun:
    """Begin the run of the script."""
    global run, config
    run = TrackedRun(**facts)
    config = run.config
    _writer.begin(config)
    return run


def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None, sync: bool | None = None) -> None:
    """Add a row of metrics."""
    _writer.add(data, step)


def finish(*_: Any, **__: Any) -> None:
    """Write what is pending. May be called again."""
    _writer.flush()
    _writer.announce_checkpoints()


def define_metric(*_: Any, **__: Any) -> None:
    """Do nothing: steps are the horizontal axis."""


def mark_preempting() -> None:
    """Do nothing: the run service stops and resumes runs."""


def save(*_: Any, **__: Any) -> None:
    """Do nothing: all files stay in the run directory."""


def watch(*_: Any, **__: Any) -> None:
    """Do nothing: gradients are not recorded."""


def _use_real_package() -> None:
    """Put the real package in the place of this module, with `init` and `log` that also write lines."""
    path, here = list(sys.path), sys.modules.pop("wandb")
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or ".") != _HERE]
    try:
        real: Any = importlib.import_module("wandb")
    finally:
        sys.path[:] = path
    real_init = real.init

    def new_init(*args: Any, **facts: Any) -> Any:
        _writer.begin(dict(facts.get("config") or {}))
        tracked = real_init(*args, **facts)
        # Later versions need a file name, which the scripts do not give.
        tracked_class = type(tracked)
        real_save = tracked_class.save
        tracked_class.save = lambda self, *words, **named: real_save(self, *words, **named) if words or named else True
        _replace_log(real)
        return tracked

    real.init = new_init
    _replace_log(real)
    # Keeps this module, whose functions the real one calls now, and its handler at exit.
    real.palaestra_writer = here


def _replace_log(real: Any) -> None:
    """Replace `log`, which the package sets anew when a run begins."""
    real_log = real.log
    if getattr(real_log, "writes_lines", False):
        return

    def new_log(data: dict[str, Any], step: int | None = None, *args: Any, **named: Any) -> Any:
        log(data, step)
        return real_log(data, step, *args, **named)

    new_log.writes_lines = True  # type: ignore[attr-defined]
    real.log = new_log


atexit.register(finish)
if d4rl.settings().get("wandb"):
    _use_real_package()
