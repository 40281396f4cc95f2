"""`AsynchronousSource`: a collector in a thread or a process fills segments while the learner learns.

The collector runs from the first batch after `start` until `stop`. The ring keeps unread segments between calls of
`train`, as long as the shape of a segment stays the same. A collector that raises, dies or hangs causes a
`CollectorFailed` in the learner, unless it may be replaced. `publisher` writes the weights to a board that the
collector reads before every step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import nn

from palaestra.actor.collector import Collector, attempt_seed, stream_base
from palaestra.actor.collector_process import CollectorProcess, CollectorSetup, SharedLayout
from palaestra.actor.collector_thread import CollectorThread, SegmentReport
from palaestra.actor.compatibility import buffer_shape
from palaestra.actor.policy_actor import Compiled
from palaestra.actor.synchronous import gather_episodes, rollout_metrics
from palaestra.config import Section
from palaestra.env.make import EnvConfig
from palaestra.env.vector import VectorEnv
from palaestra.errors import CollectorFailed, ConfigError, ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.vla_buffer import Overflow, VLABuffer
from palaestra.policy.device import check_device_name, choose_device, device_of
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.weight_sync import LiveWeights, clone_policy
from palaestra.processes.children import usable_cores
from palaestra.processes.shared_memory import SharedArrays, allocate_shared_block
from palaestra.transport.queue import SegmentQueue, TakenSegment
from palaestra.transport.ranks import ALONE, Ranks
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress
from palaestra.transport.weights import BoardPublisher, WeightBoard

POLL_S = 0.2
"""Interval in which a waiting learner checks the collector."""
HANG_CONFIRMED_S = 0.5
"""Time after the step timeout before a collector counts as hung: after a pause of the whole machine or of the learner,
the collector needs a moment to update its heartbeat."""


class AsyncConfig(Section):
    """Settings of asynchronous collection."""

    collector: Literal["thread", "process"] = "thread"
    """Where the asynchronous collector runs. `thread`: if inference waits for a server or a GPU. `process`: if
    inference or the environment needs a CPU core; requires `env.id` instead of environment objects."""
    collector_device: str | None = None
    """Device of the asynchronous collector's copy of the policy: `cpu`, `cuda:1`, …; null: that of the learner. A copy
    on another device shares no memory with the learner."""
    max_staleness: int = Field(default=1, ge=0, le=1000)
    """Maximum age of the acting weights in updates when a step is learned from. 1 overlaps collection and learning
    fully; more compensates for varying durations; 0 is equal to synchronous training."""
    overflow: Overflow = "block"
    """If the learner is the slower one: `block` makes the collector wait; `overwrite_oldest` drops the oldest unread
    segment (counted in `dropped_steps`)."""
    reproducible: bool = False
    """Act with weights exactly `max_staleness` updates old, so that the same seed gives the same numbers. Otherwise
    with the newest weights before every step."""
    step_timeout: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds after which a step counts as hung and training fails."""
    collector_restarts: int = Field(default=0, ge=0)
    """Number of times a failed or hung collector is replaced, with new episodes, before training fails."""

    @field_validator("collector_device", mode="before")
    @classmethod
    def _check_collector_device(cls, value: Any) -> Any:
        if value is not None:
            check_device_name(value, place="trainer.collector_device")
        return value


class AsynchronousSource(ExperienceSource[RolloutBuffer]):
    """Returns segments from an asynchronous collector."""

    def __init__(
        self,
        config: AsyncConfig,
        policy: nn.Module,
        env: VectorEnv,
        *,
        seed: int,
        compiled: Compiled,
        discount: float | None,
        env_config: EnvConfig | None,
        torch_threads: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        """`discount`: discount of the reward scale, None: no scaling; `env_config`: environments of a process.

        `torch_threads`: threads of a collector process. The default of 1 leaves the other cores to the learner. `seed`
        must differ between `ranks`.
        """
        if config.collector == "process" and env_config is None:
            raise ConfigError(
                "trainer.collector",
                "process",
                "environment objects cannot be sent to another process",
                "Name the environment (env='CartPole-v1' or an EnvConfig), or use trainer.collector=thread",
            )
        if config.reproducible and config.overflow == "overwrite_oldest":
            raise ConfigError(
                "trainer.reproducible",
                True,
                "with trainer.overflow=overwrite_oldest the result depends on timing",
                "Use trainer.overflow=block, or leave trainer.reproducible out",
            )
        self._config, self._policy, self._env, self._seed = config, policy, env, seed
        self._compiled, self._discount, self._env_config = compiled, discount, env_config
        self._torch_threads, self._ranks = torch_threads, ranks
        self._first_stream = stream_base(seed)
        self._attempt = self._num_steps = self._version = 0
        self._moments: tuple[float, float, float] | None = None
        self.ring: VLABuffer | None = None
        """None before the first start."""
        self._queue: SegmentQueue
        self._worker: CollectorThread | CollectorProcess
        self._is_allocated = False  # whether ring, board, queue and worker fit the policy
        self._worker_started = self._running = self._is_ahead = False
        self._suspected_at: float | None = None
        self._layout = FlatParameters.refresh(policy)
        self.progress = TrainingProgress()
        self.publisher = BoardPublisher()
        self.failures: list[str] = []
        """The errors of replaced collectors."""
        self._device = device_of(policy)
        if config.collector_device is not None:
            self._device = choose_device(config.collector_device, place="trainer.collector_device")
        acting = clone_policy(policy, self._device) if config.collector == "thread" else policy
        self.collector = Collector(env, acting, seed=seed, compiled=compiled, discount=discount)
        """The collector of the thread, with a copy of the policy; with a process, only for `collect_rollouts`."""
        self._set_in_use("")

    @property
    def default_segments(self) -> int:
        """Number of segments of the ring unless `buffer_size` is given."""
        return self._config.max_staleness + 1 + (self._config.overflow == "overwrite_oldest")

    def start(self, version: int, rollout_length: int, num_segments: int, *, buffer_size: int | None = None) -> None:
        """Prepare to collect `num_segments` segments, with the learner at `version`; `buffer_size`: steps of the ring.

        The collector starts with the first batch, after the first weights were published.
        """
        if not self.stop():
            raise CollectorFailed(
                "train: the collector thread of the last call still hangs in its step, and two threads cannot share "
                "the environments. Wait until that step ends, or create a new trainer."
            )
        self._refresh_copy()
        size = buffer_size or self.default_segments * rollout_length
        ring = self.ring
        if not self._is_allocated or ring is None or (ring.segment_length, ring.buffer_size) != (rollout_length, size):
            self._allocate(rollout_length, size)
        assert self.publisher.board is not None
        # The weights may have changed without a new version.
        self.publisher.board.clear()
        self._suspected_at, self._version, self._worker_started = None, version, False
        self._running = True
        self._set_in_use("the asynchronous collector has the environments until train() ends")
        self._queue.open(version, num_segments)

    def stop(self) -> bool:
        """Stop collection in bounded time; returns whether it stopped. Unread segments are kept."""
        if not self._running:
            return True
        self._queue.close()
        self._running = not self._worker.stop()
        if not self._running:
            self._set_in_use("")
        return not self._running

    def _set_in_use(self, reason: str) -> None:
        """Allow calls into the environments (empty `reason`), or make them raise with the reason."""
        env: Any = self._env
        if self._config.collector == "process":
            reason = "the collector process has its own environments. Collect synchronously, or in a thread"
        env.in_use = reason and f"{reason}, and would not see the change."

    def close(self) -> None:
        """Stop collection."""
        self.stop()

    def sync_weights(self) -> None:
        """Copy the learner's weights to the collector's policy, for `collect_rollouts`."""
        if self.collector.policy is self._policy:
            return
        if self._running:
            raise ExperienceError(
                "collect_rollouts: the collector thread has the environments until train() ends. Call it after that, "
                "or on another trainer."
            )
        self._refresh_copy()
        weights = LiveWeights(self._policy).read()

        def copy(targets: Sequence[NDArray[Any]]) -> int:
            for target, array in zip(targets, weights, strict=True):
                np.copyto(target, array)
            return 0

        LiveWeights(self.collector.policy).write(copy)

    def _refresh_copy(self) -> None:
        """Copy the policy again if its trainable parameters changed: the old copy and board no longer fit."""
        layout = FlatParameters.refresh(self._policy)
        if layout is not self._layout:
            self._layout, self._is_allocated = layout, False
            if self.collector.policy is not self._policy:
                self.collector.replace_policy(clone_policy(self._policy, self._device))

    def next_batch(self) -> Batch[RolloutBuffer]:
        """Wait for the next segment; raises if the collector fails or hangs."""
        if not self._worker_started:
            self._worker_started = True
            self._worker.start()
        self._is_ahead = len(self._queue.ring) > 0
        return self._make_batch(self._ranks.run(self._take_segment))

    def _take_segment(self) -> TakenSegment:
        while True:
            self.raise_if_failed()
            self._worker.wake()  # dropped segments may have freed slots
            segment = self._queue.take(self._version, POLL_S)
            if segment is not None:
                return segment

    def has_spare_core(self) -> bool:
        """Whether the learner may use a second core: it would otherwise slow down a collector that it waits for."""
        return self._config.collector == "thread" or self._is_ahead or usable_cores() > 2

    def _make_batch(self, segment: TakenSegment) -> Batch[RolloutBuffer]:
        buffer, report = self._queue.ring.segments[segment.slot], segment.report
        self._num_steps = buffer.first_env_step + buffer.num_steps
        self._moments = report.moments
        steps = buffer.num_steps * buffer.num_envs * self._ranks.size
        episodes = gather_episodes(self._ranks, report.episodes)
        self.progress.add(steps, episodes)
        busy = report.collect_seconds
        metrics = {
            "collect_seconds": busy,
            "queue_depth": float(segment.queue_depth),
            "collector_utilisation": busy / max(busy + report.idle_seconds, 1e-9),
        }
        return Batch(buffer, episodes, steps, metrics, segment)

    def release(self, batch: Batch[RolloutBuffer], version: int) -> None:
        """Free the slot. Its weights are already published, so the collector finds them."""
        self._version = version
        self.progress.updates += 1
        self._queue.release(batch.origin.slot)
        self._worker.wake()

    def requeue(self, batch: Batch[RolloutBuffer]) -> None:
        """Make the segment the oldest unread one again. Its episodes are already counted."""
        self.progress.add(-batch.steps)
        report: SegmentReport = batch.origin.report
        self._queue.requeue(batch.origin.slot, report._replace(episodes=[]))

    def raise_if_failed(self) -> None:
        """Raise if the collector has failed or hangs, unless it can be replaced."""
        still = self._worker.seconds_in_step()
        if self._is_hung(still):
            self._queue.fail(
                CollectorFailed(
                    f"the asynchronous collector hangs: its step has not ended for {still:.1f} s, and "
                    f"trainer.step_timeout is {self._config.step_timeout:g}. Look at what the environment or the "
                    "policy waits for, or raise trainer.step_timeout."
                )
            )
        try:
            self._queue.raise_if_failed()
        except CollectorFailed as failure:
            if len(self.failures) >= self._config.collector_restarts or not self._worker.stop():
                raise
            self.failures.append(str(failure))
            self._suspected_at = None
            self._queue.reopen()
            if self._config.collector == "thread":
                self._start_new_episodes()
            self._worker.start()

    def _is_hung(self, still: float) -> bool:
        now = time.monotonic()
        if still <= self._config.step_timeout:
            self._suspected_at = None
        elif self._suspected_at is None:
            self._suspected_at = now
        return self._suspected_at is not None and now - self._suspected_at > HANG_CONFIRMED_S

    def metrics(self, batch: Batch[RolloutBuffer], timing: Timing) -> dict[str, float]:
        """Counters, durations, the latest episodes, and utilisation."""
        return {
            **rollout_metrics(self.progress, batch, timing),
            "wait_seconds": timing.waited,
            "learner_utilisation": 1.0 - timing.waited / max(timing.total, 1e-9),
            "dropped_steps": float(self._queue.ring.dropped_steps),
            "collector_restarts": float(len(self.failures)),
        }

    def state(self) -> SavedState:
        """Counters only: running environments cannot be saved."""
        facts: dict[str, Any] = {
            "started": True,
            "exact": False,
            "num_steps": self._num_steps,
            "attempt": self._attempt + 1,
            "rng": np.random.default_rng(self._seed).bit_generator.state,
            "env": {},
        }
        tensors = {}
        if self._moments is not None:
            facts["reward_scale"] = list(self._moments)
            tensors["reward_scale/running"] = torch.zeros(self._env.num_envs, dtype=torch.float64)
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> bool:
        """Restore the counters; the environments start new episodes."""
        self.collector.load_state(state)
        self._num_steps = self.collector.num_steps
        scale = self.collector.reward_scale
        self._moments = None if scale is None else scale.moments
        self._attempt = int(state.facts.get("attempt", 1))
        self.collector.start_new_episodes(self._attempt)
        # Ring and board hold experience and weights from before the load.
        self.ring, self._is_allocated = None, False
        return False

    def _allocate(self, rollout_length: int, size: int) -> None:
        """Create ring, board, queue and worker for segments of this length."""
        c = self._config
        lost = 0 if self.ring is None else self.ring.dropped_steps + self.ring.unread_steps
        # A reproducible collector may need the oldest weights that the bound allows.
        depth = c.max_staleness + 2 if c.reproducible else 2
        sizes = {"buffer_size": size, "segment_length": rollout_length, "overflow": c.overflow}
        arguments: dict[str, Any] = {**sizes, **buffer_shape(self._env, self._policy)}
        limits: dict[str, Any] = {"max_staleness": c.max_staleness, "reproducible": c.reproducible}
        if c.collector == "process":
            layout = SharedLayout.of(self._policy, arguments, depth)
            block = allocate_shared_block(layout.allocate)
            ring, board, *_ = layout.allocate(SharedArrays(block))
            self._queue = SegmentQueue(ring, **limits)
            self._worker = CollectorProcess(self._policy, layout, block, self._queue, self._next_setup)
        else:
            ring = VLABuffer(**arguments)
            board = WeightBoard(LiveWeights(self._policy).read(), depth)
            self._queue = SegmentQueue(ring, **limits)
            self._worker = CollectorThread(self.collector, self._queue, board)
        ring.dropped_steps = lost
        self.ring, self.publisher.board, self._is_allocated = ring, board, True

    def _start_new_episodes(self) -> None:
        self._attempt += 1
        self.collector.start_new_episodes(self._attempt)

    def _next_setup(self) -> CollectorSetup:
        assert self._env_config is not None
        arguments = {
            "seed": attempt_seed(self._seed, self._attempt),
            "compiled": self._compiled,
            "discount": self._discount,
            # A new process does not continue the unfinished segment of the previous one, so it has a new stream.
            "first_stream": self._first_stream if self._attempt == 0 else stream_base(self._seed),
        }
        self._attempt += 1
        counters = (self._moments, self._num_steps, self._torch_threads)
        return CollectorSetup(self._env_config, arguments, *counters, str(self._device))
