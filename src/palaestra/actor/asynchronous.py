"""Background collection for one trainer, put together: ring, weight board, collector and source, across its `train`s.

The ring and what is unread in it live as long as the shape of a segment stays the same; the collector runs only
between `start` and the source's `stop`. Chooses between thread and process; refuses what a process cannot be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from palaestra.actor.acting import Compiled
from palaestra.actor.async_config import AsyncConfig
from palaestra.actor.background import BackgroundSource, Filler, Following, ThreadFiller
from palaestra.actor.collector import Collector, seed_of_attempt, stream_base
from palaestra.actor.fit import buffer_shape
from palaestra.actor.process import Orders, ProcessFiller, SharedPlan
from palaestra.actor.reward_scale import RewardScale
from palaestra.actor.source import Segment
from palaestra.env.catalogue import EnvConfig, make_env
from palaestra.env.vector import Snapshot, VectorEnv
from palaestra.errors import CollectorFailed, ConfigError, ExperienceError
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.policy.device import device_of
from palaestra.policy.flat import FlatParameters
from palaestra.policy.live import LiveWeights, twin
from palaestra.transport.queue import SegmentQueue
from palaestra.transport.shared import SharedArrays
from palaestra.transport.weights import WeightBoard

__all__ = ["AsyncCollection"]


class AsyncCollection:
    """Makes the sources of one trainer."""

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
    ) -> None:
        """`discount`: of the reward scale, None without; `env_config`: how another process makes the environments.

        `torch_threads`: of a collector process; one, unless asked for, because the learner has the other cores.
        """
        if config.collector == "process" and env_config is None:
            raise ConfigError(
                "trainer.collector", "process", "environment objects cannot be sent to another process",
                "Name the environment (env='CartPole-v1' or an EnvConfig), or use trainer.collector=thread",
            )  # fmt: skip
        if config.reproducible and config.overflow == "overwrite_oldest":
            raise ConfigError(
                "trainer.reproducible", True, "what is overwritten depends on the timing (trainer.overflow)",
                "Use trainer.overflow=block, or leave trainer.reproducible out",
            )  # fmt: skip
        self._config, self._policy, self._env, self._seed = config, policy, env, seed
        self._compiled, self._discount, self._env_config = compiled, discount, env_config
        self._torch_threads = torch_threads
        self._first_stream = stream_base(seed)
        self._attempt = 0
        self._num_steps = 0
        self._scale_state: tuple[float, float, float] | None = None
        self._source: BackgroundSource | None = None
        self._ring: VLABuffer | None = None
        self._board: WeightBoard | None = None
        self._failures: list[str] = []
        self._running = False
        self._layout = FlatParameters.refresh(policy)
        self.collector = self._make_collector()

    def _make_collector(self) -> Collector:
        """The thread's own, acting on a copy; with a process, one for whoever collects in turn."""
        policy = twin(self._policy) if self._config.collector == "thread" else self._policy
        scale = None if self._discount is None else RewardScale(self._env.num_envs, self._discount)
        return Collector(self._env, policy, seed=self._seed, compiled=self._compiled, reward_scale=scale)

    def start(
        self, version: int, rollout_length: int, num_segments: int, *, buffer_size: int | None = None
    ) -> BackgroundSource:
        """A source that is collecting, the learner being at `version`; `buffer_size`: steps the ring holds."""
        if not self.stop():
            raise CollectorFailed(
                "train: the collector's thread of the last call still hangs in its step, and two cannot share the "
                "environments. Wait until that step ends, or make a new trainer."
            )
        self._follow_layout()
        size = buffer_size or self.default_segments * rollout_length
        known = self._ring is not None and (self._ring.segment_length, self._ring.buffer_size) == (rollout_length, size)
        if self._source is None or not known:
            self._source = self._make_source(rollout_length, size)
        self._running = True
        self._source.start(version, num_segments)
        return self._source

    def _follow_layout(self) -> None:
        """Copy the policy again if its weights were thawed or replaced since: the old copy and its board do not fit."""
        layout = FlatParameters.refresh(self._policy)
        if layout is not self._layout:
            self._layout, self._source = layout, None
            if self.collector.policy is not self._policy:
                self.collector.replace_policy(twin(self._policy))

    @property
    def default_segments(self) -> int:
        """Rollouts that the ring holds unless `buffer_size` says otherwise."""
        return self._config.max_staleness + 1 + (self._config.overflow == "overwrite_oldest")

    def stop(self) -> bool:
        """End collection in bounded time; whether nothing of it is left. Harmless when nothing runs."""
        self._running = self._source is not None and not self._source.stop()
        return not self._running

    def note(self, segment: Segment) -> None:
        """Remember how far experience has come, for a checkpoint or the next collector."""
        self._num_steps = segment.buffer.first_env_step + segment.buffer.num_steps
        self._scale_state = segment.scale_state

    def catch_up(self) -> None:
        """Give the collector's copy of the policy the learner's weights, for collecting in turn."""
        if self.collector.policy is not self._policy:
            if self._running:
                raise ExperienceError(
                    "collect_rollouts: the collector's thread has the environments until train() ends. Call it after "
                    "that, or on a trainer of its own."
                )
            self._follow_layout()
            LiveWeights(self.collector.policy).write(self._copy_weights)

    def _copy_weights(self, targets: Sequence[NDArray[Any]]) -> int:
        for target, array in zip(targets, LiveWeights(self._policy).read(), strict=True):
            np.copyto(target, array)
        return 0

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> Snapshot:
        """Counters alone: the environments are under way in the background and cannot be caught in the act."""
        facts: dict[str, Any] = {
            "started": True, "exact": False, "num_steps": self._num_steps, "attempt": self._attempt + 1,
            "rng": np.random.default_rng(self._seed).bit_generator.state, "env": {},
        }  # fmt: skip
        arrays = {}
        if self._scale_state is not None:
            facts["reward_scale"] = list(self._scale_state)
            arrays["reward_scale/running"] = np.zeros(self._env.num_envs)
        return Snapshot(arrays, facts)

    def restore(self, snapshot: Snapshot) -> bool:
        """Go on counting; the environments start afresh."""
        self.collector.restore(snapshot)
        self._num_steps = self.collector.num_steps
        self._scale_state = self.collector.scale_state()
        self._attempt = int(snapshot.facts.get("attempt", 1))
        self.collector.start_afresh(self._attempt)
        # What lies in the ring and on the board is of another policy, with version numbers of its own.
        self._source = self._ring = self._board = None
        return False

    def _start_afresh(self) -> None:
        self._attempt += 1
        self.collector.start_afresh(self._attempt)

    # ------------------------------------------------------------------ what a source is made of

    def _make_source(self, rollout_length: int, buffer_size: int) -> BackgroundSource:
        c = self._config
        sizes: dict[str, Any] = {
            "buffer_size": buffer_size, "segment_length": rollout_length, "overflow": c.overflow
        }  # fmt: skip
        # A reproducible collector may ask for the oldest weights the bound allows; another wants the newest.
        depth = c.max_staleness + 2 if c.reproducible else 2
        shape = buffer_shape(self._env, self._policy)
        filler: Filler
        lost = 0 if self._ring is None else self._ring.dropped_steps + self._ring.unread_steps
        if c.collector == "process":
            plan = SharedPlan.of(self._policy, shape, depth=depth, **sizes)
            block = plan.block()
            self._ring, self._board, *_ = plan.lay(SharedArrays(block))
            queue = self._queue()
            filler = ProcessFiller(self._policy, plan, block, queue, self._orders)
        else:
            self._ring = VLABuffer(**sizes, **shape)
            self._board = WeightBoard(LiveWeights(self._policy).read(), depth)
            queue = self._queue()
            filler = ThreadFiller(
                self.collector, queue, Following(self.collector.policy, self._board), self._start_afresh
            )
        self._ring.discarded_steps = lost
        return BackgroundSource(
            self._policy, queue, self._board, filler, step_timeout=c.step_timeout, restarts=c.collector_restarts,
            failures=self._failures,
        )  # fmt: skip

    def _queue(self) -> SegmentQueue:
        assert self._ring is not None
        c = self._config
        return SegmentQueue(self._ring, max_staleness=c.max_staleness, reproducible=c.reproducible)

    def _orders(self) -> Orders:
        assert self._env_config is not None
        orders = Orders(
            make_env=partial(make_env, self._env_config),
            seed=seed_of_attempt(self._seed, self._attempt),
            compiled=self._compiled,
            discount=self._discount,
            scale_state=self._scale_state,
            # Every process is another stream: what a killed one had begun is never mistaken for what came after.
            first_stream=self._first_stream if self._attempt == 0 else stream_base(self._seed),
            num_steps=self._num_steps,
            torch_threads=self._torch_threads,
            device=str(device_of(self._policy)),
        )
        self._attempt += 1
        return orders
