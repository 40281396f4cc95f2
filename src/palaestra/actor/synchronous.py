"""`SynchronousSource`: collects a rollout when the learner asks for a batch, in the caller's thread.

With several processes each collects in its share of the environments. Counters, episodes and the reward scale are those
of all of them, and the saved state is that of one process with all environments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palaestra.actor.collector import Collector
from palaestra.env.vector import Snapshot, merge_snapshots, slice_snapshot
from palaestra.experience.buffer import RolloutBuffer
from palaestra.transport.ranks import ALONE, Ranks, Share
from palaestra.transport.source import Batch, EpisodeStats, ExperienceSource, SavedState, Timing, TrainingProgress


class SynchronousSource(ExperienceSource[RolloutBuffer]):
    """Collects rollouts into one buffer, which the next batch overwrites."""

    def __init__(self, collector: Collector, *, ranks: Ranks = ALONE) -> None:
        self.collector, self._ranks = collector, ranks
        self.progress = TrainingProgress()
        self.num_steps, self._version = 0, 0
        self._buffer: RolloutBuffer | None = None

    def start(self, version: int, num_steps: int) -> None:
        """Collect `num_steps` steps of every environment per batch, with the policy at `version`."""
        self._version, self.num_steps = version, num_steps

    def next_batch(self) -> Batch[RolloutBuffer]:
        """Collect a rollout."""
        began = time.perf_counter()
        self._buffer = self._ranks.run(self._collect)
        self._buffer.is_fresh = True
        if self._ranks.size > 1 and self.collector.reward_scale is not None:
            scale = self.collector.reward_scale
            self._buffer.reward_scale = scale.merge(self._ranks.gather(scale.latest))
        seconds = time.perf_counter() - began
        steps = self.num_steps * self._buffer.num_envs * self._ranks.size
        episodes = gather_episodes(self._ranks, self.collector.episodes)
        self.progress.add(steps, episodes)
        return Batch(self._buffer, episodes, steps, {"collect_seconds": seconds})

    def _collect(self) -> RolloutBuffer:
        return self.collector.collect(self.num_steps, self._buffer, policy_version=self._version)

    def release(self, batch: Batch[RolloutBuffer], version: int) -> None:
        """Count the batch; the next one overwrites it."""
        self._version = version
        self.progress.updates += 1

    def requeue(self, batch: Batch[RolloutBuffer]) -> None:
        """Subtract the steps of a batch that was not learned from."""
        self.progress.add(-batch.steps)

    def metrics(self, batch: Batch[RolloutBuffer], timing: Timing) -> dict[str, float]:
        """Counters, times and the latest episodes."""
        return rollout_metrics(self.progress, batch, timing)

    def state(self) -> SavedState:
        """The state of the environments, of all processes together."""
        own = self.collector.state()
        if self._ranks.lost:
            # The environments of the other processes are gone.
            return SavedState({}, own.facts | {"started": True, "exact": False, "env": {}})
        return merge_states(self._ranks.gather(own))

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environments start new episodes."""
        share = self._ranks.share(self.collector.env.num_envs * self._ranks.size)
        return self.collector.load_state(state if self._ranks.size == 1 else slice_state(state, share))


def gather_episodes(ranks: Ranks, episodes: Sequence[EpisodeStats]) -> list[EpisodeStats]:
    """The episodes of all processes, in the order in which they ended."""
    if ranks.size == 1:
        return list(episodes)
    every = [episode for part in ranks.gather(list(episodes)) for episode in part]
    return sorted(every, key=lambda episode: (episode.env_step, episode.env_index))


def merge_states(parts: Sequence[SavedState]) -> SavedState:
    """The state of a collector with all environments, from those of consecutive groups of them."""
    if len(parts) == 1:
        return parts[0]
    facts = dict(parts[0].facts)
    merged = merge_snapshots([_snapshot(part) for part in parts]) if facts["started"] else None
    facts["exact"] = merged is not None or not facts["started"]
    facts["env"] = {} if merged is None else merged.facts
    arrays = {} if merged is None else {f"env/{key}": array for key, array in merged.arrays.items()}
    if "reward_scale" in facts:
        arrays["reward_scale/running"] = np.concatenate([_arrays(part)["reward_scale/running"] for part in parts])
    return SavedState({name: torch.from_numpy(array) for name, array in arrays.items()}, facts)


def slice_state(state: SavedState, share: Share) -> SavedState:
    """The part of a collector's state for some of its environments."""
    facts, arrays = dict(state.facts), _arrays(state)
    inner = _snapshot(state)
    if inner is not None:
        kind = inner.facts.get("kind")
        inner = None if kind == "attributes" else slice_snapshot(inner, share.part)
    facts["exact"] = inner is not None or not facts["started"]
    facts["env"] = {} if inner is None else inner.facts
    mine = {} if inner is None else {f"env/{key}": array for key, array in inner.arrays.items()}
    if "reward_scale/running" in arrays:
        mine["reward_scale/running"] = arrays["reward_scale/running"][share.part]
    return SavedState({name: torch.from_numpy(np.array(array)) for name, array in mine.items()}, facts)


def _arrays(state: SavedState) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in state.tensors.items()}


def _snapshot(state: SavedState) -> Snapshot | None:
    """The snapshot of the environments; None if there is none."""
    if not (state.facts["started"] and state.facts["exact"]):
        return None
    return Snapshot({k[4:]: v for k, v in _arrays(state).items() if k.startswith("env/")}, state.facts["env"])


def rollout_metrics(progress: TrainingProgress, batch: Batch[RolloutBuffer], timing: Timing) -> dict[str, float]:
    """Metrics of every source of rollouts."""
    return {
        "env_step": float(progress.steps),
        "update": float(progress.updates),
        "episodes": float(progress.episodes),
        "learn_seconds": timing.total - timing.waited,
        "steps_per_second": batch.steps / max(timing.total, 1e-9),
        **batch.metrics,
        **progress.metrics(),
    }
