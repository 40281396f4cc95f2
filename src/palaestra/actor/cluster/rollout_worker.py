"""`RolloutWorker`: a collector of a share of the environments, for a process on any node.

It holds a copy of the policy and fills one segment per call with the weights that the call brings. In exact mode every
result has the state of the environments after it, so that a replacement continues exactly there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.actor.cluster.env_share import WholeBatch, make_share
from palaestra.actor.collector import Collector, StopCollecting, fill_final_values
from palaestra.actor.collector_process import SharedLayout, build_tensors
from palaestra.actor.collector_thread import START_GRACE_S
from palaestra.actor.policy_actor import Compiled, PolicyActor, build_actor
from palaestra.env.make import EnvConfig
from palaestra.env.vector import EpisodeEnd, Snapshot
from palaestra.experience.buffer import RolloutBuffer
from palaestra.policy.network import eval_mode
from palaestra.policy.weight_sync import LiveWeights, clone_policy, deserialize_structure
from palaestra.processes.threads import limit_threads
from palaestra.transport.ranks import Share
from palaestra.transport.ray_cluster import control
from palaestra.transport.source import EpisodeStats, SavedState


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that a worker needs besides the weights."""

    env: EnvConfig
    """With the number of environments of the run."""
    share: Share
    exact: bool
    """Act on batches of all environments, and return the state after every segment."""
    mask_size: int
    layout: SharedLayout
    structure: bytes
    """The policy without its tensors (`serialize_structure`)."""
    arguments: dict[str, Any]
    """Arguments of `Collector` besides environment and policy."""
    num_steps: int
    """Steps taken by each environment before."""
    state: Snapshot | None
    """State to continue from; None: new episodes."""
    attempt: int
    """Number of this worker among those of its share; chooses new episodes if the state cannot be restored."""
    torch_threads: int
    device: str


@dataclass(frozen=True)
class ShareOfSegment:
    """The part of a segment that one worker collected."""

    number: int
    """Number of the segment."""
    arrays: list[NDArray[Any]]
    episodes: list[EpisodeStats]
    """Indices and steps as those of a collector of all environments."""
    truncated: list[tuple[int, EpisodeEnd]]
    state: Snapshot | None
    """State after the segment; None if not in exact mode. Arrays, because tensors travel by torch's own pickle."""
    collect_seconds: float
    idle_seconds: float


class RolloutWorker:
    """Collects segments of its share. One call runs at a time, beside those that are marked."""

    def __init__(self, setup: WorkerSetup, frozen: list[NDArray[Any]]) -> None:
        """`frozen`: the weights that are not trained, as bytes."""
        self._setup, self._frozen = setup, frozen
        self._collector: Collector | None = None
        self._buffer: RolloutBuffer | None = None
        self._version = -1
        self._stopping = False
        self._is_first = True
        self._step_started_at = time.monotonic() + START_GRACE_S
        self._working = False
        self._idle_from = time.monotonic()

    def prepare(self) -> tuple[int, bool]:
        """Make environments and policy; returns the process id, and whether the state was restored exactly."""
        setup, share = self._setup, self._setup.share
        tensors = build_tensors(setup.layout, [np.array(array) for array in self._frozen])
        policy = deserialize_structure(setup.structure, tensors).to(setup.device)
        env = make_share(setup.env, share, setup.mask_size)
        whole = share.count == share.total
        if setup.exact and not whole:
            env = WholeBatch(env, share)
        collector = Collector(env, policy, share=None if setup.exact else share, **setup.arguments)
        exact = setup.state is None or collector.load_state(to_saved_state(setup.state))
        if not exact:
            collector.start_new_episodes(setup.attempt)
        collector.num_steps = setup.num_steps
        self._collector, self._weights = collector, LiveWeights(policy)
        return os.getpid(), exact

    def fill(self, number: int, num_steps: int, version: int, weights: list[NDArray[Any]]) -> ShareOfSegment:
        """Collect segment `number` with these weights."""
        collector, setup = self._collector, self._setup
        assert collector is not None
        began, self._working = time.monotonic(), True
        self._step_started_at = max(self._step_started_at, began)
        try:
            with limit_threads(setup.torch_threads):
                self._load(version, weights)
                buffer = collector.collect(
                    num_steps, self._buffer, policy_version=version, before_step=self._before_step
                )
        finally:
            self._working = False
        self._buffer = buffer
        share = setup.share
        padded = buffer.num_envs == share.total
        own, first = (share.part, 0) if padded else (slice(0, share.count), share.first)
        truncated = [(t, end._replace(index=end.index + first)) for t, end in collector.truncated]
        idle, self._idle_from = began - self._idle_from, time.monotonic()
        return ShareOfSegment(
            number,
            buffer.read_environments(own),
            collector.episodes,
            truncated,
            _to_snapshot(collector.state()) if setup.exact else None,
            self._idle_from - began,
            idle,
        )

    @control
    def seconds_in_step(self) -> float:
        """Seconds since the present step started, less the extra time of the first; 0 while idle."""
        return time.monotonic() - self._step_started_at if self._working else 0.0

    @control
    def stop(self) -> None:
        """Stop before the next step."""
        self._stopping = True

    def close(self) -> None:
        """Close the environments."""
        if self._collector is not None:
            self._collector.env.close()

    def _load(self, version: int, weights: list[NDArray[Any]]) -> None:
        if version != self._version:
            self._weights.write(lambda targets: copy_arrays(targets, weights))
            self._version = version

    def _before_step(self, t: int) -> int:
        if not self._is_first:  # the very first step keeps its extra time
            self._step_started_at = time.monotonic()
        self._is_first = False
        if self._stopping:
            raise StopCollecting
        return self._version


def to_saved_state(snapshot: Snapshot) -> SavedState:
    """A state of a collector as a checkpoint stores it."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in snapshot.arrays.items()}
    return SavedState(tensors, snapshot.facts)


def _to_snapshot(state: SavedState) -> Snapshot:
    return Snapshot({name: tensor.numpy() for name, tensor in state.tensors.items()}, state.facts)


class FinalValues:
    """Values of the final observations of truncated episodes, in batches of all shares, with a copy of the policy."""

    def __init__(self, policy: nn.Module, compiled: Compiled) -> None:
        self._policy, self._compiled = policy, compiled
        self._copy: nn.Module | None = None
        self._version = -1

    def fill(
        self, buffer: RolloutBuffer, version: int, weights: Sequence[Any], truncated: list[tuple[int, EpisodeEnd]]
    ) -> None:
        """Write them to `next_value`."""
        if self._copy is None:
            self._copy = clone_policy(self._policy)
        if version != self._version:
            LiveWeights(self._copy).write(lambda targets: copy_arrays(targets, weights))
            self._version = version
        acting: PolicyActor = build_actor(self._copy, self._compiled, masked=buffer.action_mask is not None)
        with eval_mode(self._copy):
            fill_final_values(buffer, acting, truncated)


def copy_arrays(targets: Sequence[NDArray[Any]], arrays: Sequence[NDArray[Any]]) -> int:
    """Copy weights, for `LiveWeights.write`."""
    for target, array in zip(targets, arrays, strict=True):
        np.copyto(target, array)
    return 0
