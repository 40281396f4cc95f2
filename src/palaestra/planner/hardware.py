"""GPUs: who uses which of them, how fast an update is on several, what fails, and what an hour costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from palaestra.config import Section
from palaestra.errors import ConfigError
from palaestra.planner.memory import (
    FLOAT32,
    GB,
    MemoryPlan,
    ModelPlan,
    fitting_microbatch,
    fitting_sampler_batch,
    plan_learner_memory,
    plan_sampler_memory,
    trained_parameters,
)
from palaestra.planner.shapes import ModelShape
from palaestra.planner.throughput import Setup, Times

MAX_SHARDS = 8
"""GPUs over which one sampler splits its weights, at most: those of one machine."""


class Hardware(Section):
    """The section `hardware`: machines, their prices and their failures."""

    gpus: int = Field(default=8, ge=1, le=1_000_000)
    """Number of GPUs for sampling and learning together."""
    gpu_memory_gb: float = Field(default=80.0, gt=0)
    """Memory of one GPU, in 10^9 bytes."""
    gpu_hour_price: float = Field(default=2.0, ge=0)
    """Price of one GPU for an hour."""
    samplers: int | None = Field(default=None, ge=1)
    """GPUs that sample replies, with asynchronous collection. null: the split with the highest throughput."""
    interconnect_gb_s: float = Field(default=50.0, gt=0)
    """Bandwidth between GPUs in 10^9 bytes per second, as one GPU sees it."""
    runtime_gb: float = Field(default=2.0, ge=0)
    """Memory of a GPU that CUDA and the allocator take."""
    session_core_seconds: float = Field(default=0.03, ge=0)
    """Processor time of a session step, on the machines of the sessions."""
    session_memory_mb: float = Field(default=120.0, ge=0)
    """Memory of a session."""
    core_hour_price: float = Field(default=0.04, ge=0)
    """Price of one core with its memory for an hour, on the machines of the sessions."""
    sessions_per_core: float = Field(default=16.0, gt=0)
    """Sessions per core, at most, however rarely they step."""
    gpu_hours_between_failures: float = Field(default=50_000.0, gt=0)
    """Mean hours between two failures of one GPU or its machine."""
    restart_seconds: float = Field(default=300.0, ge=0)
    """From a failure to the first update after it."""
    checkpoint_seconds: float = Field(default=120.0, gt=0)
    """Interval of checkpoints (`trainer.checkpoint_seconds`); half of it is lost with a failure."""

    @property
    def lost_share(self) -> float:
        """Share of the time that failures cost."""
        per_hour = self.gpus / self.gpu_hours_between_failures
        return min(1.0, per_hour * (self.restart_seconds + self.checkpoint_seconds / 2) / 3600)


@dataclass(frozen=True)
class Placement:
    """How the GPUs are used."""

    sampler_gpus: int
    sampler_shards: int
    """GPUs over which one sampler splits its weights."""
    learner_gpus: int
    learner_shards: int
    """GPUs over which FSDP splits the learner; 1: every GPU holds the whole model."""
    sampler_batch: int
    """Replies at a time per sampler, within `max_batch` and memory."""
    microbatch: int
    """Turns per forward pass of the learner, within the configured number and memory."""
    fitting_microbatch: int
    """Turns per forward pass that would fit."""
    learner_memory: MemoryPlan | None
    sampler_memory: MemoryPlan | None
    alternate: bool
    """Whether sampling and learning take turns on the same GPUs."""

    @property
    def samplers(self) -> int:
        """Number of samplers."""
        return max(1, self.sampler_gpus // self.sampler_shards)


@dataclass(frozen=True)
class ScreenModel:
    """A model with its shape; `None` in its place plans a run whose memory is not of interest."""

    plan: ModelPlan
    shape: ModelShape


def place(model: ScreenModel | None, times: Times, setup: Setup, hardware: Hardware) -> Placement:
    """Split the GPUs between samplers and learner, and find batches that fit; `ConfigError` if nothing does."""
    gpus = hardware.gpus
    alternate = setup.collection == "synchronous" or gpus == 1
    if alternate:
        return _place_on(gpus, gpus, model, setup, hardware, alternate=True)
    if hardware.samplers is not None:
        if hardware.samplers >= gpus:
            reason = f"leaves no GPU of {gpus} to the learner"
            raise ConfigError("hardware.samplers", hardware.samplers, reason, f"At most {gpus - 1}")
        return _place_on(hardware.samplers, gpus - hardware.samplers, model, setup, hardware)
    step = max(1, gpus // 64)
    candidates = sorted({1, *range(step, gpus, step), gpus - 1})
    best, error = None, None
    for count in candidates:
        try:
            one = _place_on(count, gpus - count, model, setup, hardware)
        except ConfigError as problem:
            error = problem
            continue
        rate = min(sampler_rate(one, times, setup), learner_rate(one, model, times, setup, hardware))
        if best is None or rate > best[0] * (1 + 1e-9):
            best = (rate, one)
    if best is None:
        assert error is not None
        raise error
    return best[1]


def _place_on(
    sampler_gpus: int,
    learner_gpus: int,
    model: ScreenModel | None,
    setup: Setup,
    hardware: Hardware,
    *,
    alternate: bool = False,
) -> Placement:
    if model is None:
        return Placement(sampler_gpus, 1, learner_gpus, 1, setup.max_batch, 1, 1, None, None, alternate)
    plan, shape = model.plan, model.shape
    overhead = int(hardware.runtime_gb * GB)
    memory = hardware.gpu_memory_gb * GB
    fits = shards = 0
    for shards in dict.fromkeys((1, learner_gpus)):
        fits = fitting_microbatch(plan, shape, memory, shards=shards, overhead=overhead)
        if fits:
            break
    if not fits:
        needed = plan_learner_memory(plan, shape, shards=learner_gpus, turns=1, overhead=overhead).total / GB
        reason = f"an update of {plan.name} needs {needed:.0f} GB on each of {learner_gpus} GPUs"
        remedy = "Use more GPUs, model.gradient_checkpointing=true, or a shorter model.history"
        raise ConfigError("hardware.gpu_memory_gb", hardware.gpu_memory_gb, reason, remedy)
    split = batch = 0
    for split in (1, 2, 4, MAX_SHARDS):
        batch = (
            fitting_sampler_batch(plan, shape, memory, shards=split, overhead=overhead) if split <= sampler_gpus else 0
        )
        if batch >= min(4, setup.max_batch):
            break
    if not batch:
        reason = f"a sampler of {plan.name} does not fit on {min(sampler_gpus, MAX_SHARDS)} GPUs"
        raise ConfigError("hardware.gpu_memory_gb", hardware.gpu_memory_gb, reason, "Use more or larger GPUs")
    microbatch, batch = min(plan.microbatch_turns, fits), min(setup.max_batch, batch)
    return Placement(
        sampler_gpus,
        split,
        learner_gpus,
        shards,
        batch,
        microbatch,
        fits,
        plan_learner_memory(plan, shape, turns=microbatch, shards=shards, overhead=overhead),
        plan_sampler_memory(plan, shape, batch=batch, shards=split, overhead=overhead),
        alternate,
    )


def update_seconds(
    placement: Placement, model: ScreenModel | None, times: Times, setup: Setup, hardware: Hardware
) -> float:
    """Seconds of an update on the learner's GPUs: the episodes are divided, and weights or gradients are exchanged."""
    count, episodes = placement.learner_gpus, setup.batch_size * setup.rows
    seconds = times.update + times.update_episode * episodes / min(count, episodes)
    if model is None or count == 1:
        return seconds
    bandwidth, others = hardware.interconnect_gb_s * GB, (count - 1) / count
    gradients = trained_parameters(model.plan, model.shape) * FLOAT32
    exchanged = 2 * gradients * others
    if placement.learner_shards > 1:
        # FSDP gathers all weights for every pass over a microbatch: forward, backward, and once more to recompute.
        turns = setup.batch_size * times.turns / count
        passes = math.ceil(turns / placement.microbatch) * (3 if model.plan.gradient_checkpointing else 2)
        exchanged += passes * model.shape.parameters * model.plan.bytes_per_weight * others
    return seconds + exchanged / bandwidth


def sampler_rate(placement: Placement, times: Times, setup: Setup) -> float:
    """Turns per second that all samplers could answer with full batches."""
    batch = placement.sampler_batch
    return placement.samplers * batch / max(times.inference(batch * setup.rows), 1e-9)


def learner_rate(
    placement: Placement, model: ScreenModel | None, times: Times, setup: Setup, hardware: Hardware
) -> float:
    """Turns per second that the learner could learn from."""
    seconds = update_seconds(placement, model, times, setup, hardware) + times.overhead
    return setup.batch_size * times.turns / max(seconds, 1e-9)


@dataclass(frozen=True)
class Cost:
    """Machines for the sessions, and prices."""

    session_cores: int
    session_memory_gb: float
    per_hour: float
    per_1000_episodes: float
    per_1000_updates: float


def price(hardware: Hardware, setup: Setup, *, turns_per_second: float, update_seconds: float) -> Cost:
    """The cost of a run at these rates, time lost to failures included."""
    cores = max(
        math.ceil(turns_per_second * hardware.session_core_seconds),
        math.ceil(setup.sessions / hardware.sessions_per_core),
    )
    per_hour = hardware.gpus * hardware.gpu_hour_price + cores * hardware.core_hour_price
    per_update = per_hour * update_seconds / 3600 / max(1e-9, 1 - hardware.lost_share)
    return Cost(
        cores,
        setup.sessions * hardware.session_memory_mb / 1000,
        per_hour,
        per_1000_episodes=1000 * per_update / setup.batch_size,
        per_1000_updates=1000 * per_update,
    )
