"""Measured times from the journals of real runs.

A synchronous run on screens, or any run in vector environments, holds what a plan needs: how long collecting, sampling
and learning took, and how long the episodes were. Two runs with different numbers of sessions (or environments, or
episodes per update) also show how times grow with the size of a batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palaestra.errors import ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.planner.throughput import Setup, Times, simulate
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import JournalReader

ITERATIONS = 8
"""Rounds of fitting the simulation to a measured run."""


@dataclass(frozen=True)
class MeasuredRun:
    """What one run took, as means over its updates without the first one."""

    run_id: str
    setup: Setup
    collect: float
    """Seconds of collecting a batch."""
    busy: float
    """Seconds of these in which replies were sampled; of a vector environment, all of them."""
    learn: float
    overhead: float
    """Seconds of an update outside collecting and learning."""
    turns: float
    turns_variation: float
    failure_rate: float
    on_screens: bool
    memory: dict[str, Any]
    """The keys of the run's configuration that determine its memory."""


def read_run(run: RunDirectory) -> MeasuredRun:
    """The times of a run; `ConfigError` if it has too few updates, or was asynchronous on screens."""
    attempts = [attempt for attempt in run.attempts() if attempt.journal.is_file()]
    records = JournalReader(attempts[-1].journal).read() if attempts else []
    steps = [
        (record.time, record.event)
        for record in records
        if isinstance(record.event, TrainingStep) and record.event.update > 0
    ]
    if len(steps) < 3:
        reason = f"its journal has {len(steps)} updates, and the first one is not counted"
        remedy = "Use a run of at least 3 updates, or give the times, such as times.session_step=0.4"
        raise ConfigError("--from", run.run_id, reason, remedy)
    config = run.read_config()
    (began, first), (ended, last) = steps[0], steps[-1]
    metrics = [step.metrics for _, step in steps[1:]]
    missing = next((name for name in ("collect_seconds", "learn_seconds") if name not in metrics[0]), None)
    if missing is not None:
        remedy = "Use a run of palaestra train that collects experience itself"
        raise ConfigError("--from", run.run_id, f"its journal has no {missing}", remedy)
    setup = read_setup(config)
    on_screens = "model" in config and "env" not in config
    if on_screens and setup.collection == "asynchronous":
        remedy = "Measure a few updates with trainer.collection=synchronous"
        raise ConfigError("--from", run.run_id, "an asynchronous run hides the time of its sessions", remedy)

    def mean(name: str) -> float:
        return statistics.fmean(one.get(name, 0.0) for one in metrics)

    collect, learn = mean("collect_seconds"), mean("learn_seconds")
    busy = statistics.fmean(one["collect_seconds"] * one.get("inference_utilisation", 1.0) for one in metrics)
    whole = (ended - began) / (len(steps) - 1)
    alone = whole - learn - (collect if setup.collection == "synchronous" else mean("wait_seconds"))
    lengths = [float(record.event.length) for record in records if isinstance(record.event, EpisodeSummary)]
    turns = statistics.fmean(lengths) if lengths and on_screens else _rollout_length(config, first, last)
    varied = on_screens and len(lengths) > 1
    failed = mean("environment_failures") if on_screens else 0.0
    return MeasuredRun(
        run.run_id,
        setup,
        collect=collect,
        busy=min(busy, collect),
        learn=learn,
        overhead=max(0.0, alone),
        turns=turns,
        turns_variation=statistics.pstdev(lengths) / turns if varied else 0.0,
        failure_rate=min(0.99, failed / (setup.batch_size + failed)),
        on_screens=on_screens,
        memory=dict(config.get("model") or {}),
    )


def _rollout_length(config: dict[str, Any], first: TrainingStep, last: TrainingStep) -> float:
    """Steps per environment and update."""
    envs = int((config.get("env") or {}).get("num_envs", 1))
    return max(1.0, (last.env_step - first.env_step) / max(1, last.update - first.update) / envs)


def read_setup(config: dict[str, Any]) -> Setup:
    """The setup that a training configuration describes."""
    trainer, inference = config.get("trainer") or {}, config.get("inference") or {}
    common = {key: trainer[key] for key in ("collection", "max_staleness") if trainer.get(key) is not None}
    if "env" in config:
        return Setup(sessions=1, batch_size=1, rows=int((config["env"] or {}).get("num_envs", 1)), **common)
    pool = config.get("actor_pool") or {}
    return Setup(
        sessions=int(pool.get("target_concurrent_actors", 2)),
        batch_size=int(trainer.get("batch_size", 32)),
        max_batch=int(inference.get("max_batch", 64)),
        **common,
    )


def fit_times(runs: Sequence[MeasuredRun], *, session_variation: float = 0.0) -> Times:
    """The times that explain the measured runs best, for sessions whose steps vary this much.

    With runs of different batch sizes, the fixed and the growing part of a time are told apart by least squares. With
    one, a batch of replies is taken to cost the same at any size up to the maximum, and an update to grow with it.
    """
    if len({run.on_screens for run in runs}) > 1:
        raise ConfigError("--from", [run.run_id for run in runs], "mixes screens and vector environments", "Plan one")
    fits = [_fit_one(run, session_variation) for run in runs]
    inference = _fit_line([(batch, seconds) for batch, seconds, _ in fits], grows=False)
    sizes = [float(run.setup.batch_size * run.setup.rows) for run in runs]
    update = _fit_line([(size, run.learn) for size, run in zip(sizes, runs, strict=True)], grows=True)
    return Times(
        session_step=statistics.fmean(step for _, _, step in fits),
        session_variation=session_variation,
        inference_batch=inference[0],
        inference_reply=inference[1],
        update=update[0],
        update_episode=update[1],
        overhead=statistics.fmean(run.overhead for run in runs),
        turns=statistics.fmean(run.turns for run in runs),
        turns_variation=statistics.fmean(run.turns_variation for run in runs),
        failure_rate=statistics.fmean(run.failure_rate for run in runs),
    )


def _fit_one(run: MeasuredRun, variation: float) -> tuple[float, float, float]:
    """Mean rows of a batch of replies, its seconds, and the seconds of a session step, of one run.

    The steps of a round end with the slowest session, so their mean follows from what the simulation makes of it.
    """
    if not run.on_screens:
        return float(run.setup.rows), run.collect / run.turns, 0.0
    alone = max(run.collect - run.busy, 1e-6)
    rounds = run.setup.batch_size * run.turns / min(run.setup.sessions, run.setup.batch_size)
    seconds, step, batch = run.busy / rounds, alone / rounds, 1.0
    setup = run.setup.model_copy(update={"collection": "synchronous"})
    for _ in range(ITERATIONS):
        times = Times(
            session_step=step,
            session_variation=variation,
            inference_batch=seconds,
            turns=run.turns,
            turns_variation=run.turns_variation,
            failure_rate=run.failure_rate,
            update_episode=0.0,
            update=1e-9,
        )
        simulated = simulate(times, setup, updates=12)
        busy = simulated.sampler_utilisation * simulated.update_seconds
        seconds *= max(run.busy, 1e-6) / max(busy, 1e-9)
        step *= alone / max(simulated.update_seconds - busy, 1e-9)
        batch = simulated.mean_batch
    return batch, seconds, step


def _fit_line(points: Sequence[tuple[float, float]], *, grows: bool) -> tuple[float, float]:
    """Intercept and slope, neither negative. With one size only, all is slope if it `grows`, else intercept."""
    middle, seconds = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    spread = sum((size - middle) ** 2 for size, _ in points)
    if spread <= 1e-9 * middle**2:
        return (0.0, seconds / middle) if grows else (seconds, 0.0)
    slope = sum((size - middle) * (value - seconds) for size, value in points) / spread
    if slope <= 0:
        return seconds, 0.0
    intercept = seconds - slope * middle
    return (intercept, slope) if intercept > 0 else (0.0, seconds / middle)
