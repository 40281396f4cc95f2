"""Runs under torchrun: what is refused, what is announced, and the share of each process.

`env.num_envs` counts the environments of the whole run. Synchronous collection acts in them as one process would; an
asynchronous collector plays episodes of its own in each process. Episodes on screens are played by the first process
alone (`FirstRankEpisodes`), which has the sessions and the sampler; all processes learn from them.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.actor.episode_source import EpisodeSource
from palaestra.errors import ConfigError
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.device import choose_device
from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.sharding import find_layers
from palaestra.train.config import RunConfig, make_algorithm
from palaestra.train.screen_config import ScreenRunConfig
from palaestra.transport.ranks import Ranks, launched_by_torchrun
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing


def refuse_transitions(config: RunConfig) -> None:
    """Raise `ConfigError` if torchrun started a run that learns from transitions."""
    if launched_by_torchrun():
        name, size = config.algorithm["name"], os.environ["WORLD_SIZE"]
        reason = f"learns from transitions in one process, and torchrun started {size}"
        raise ConfigError("algorithm.name", name, reason, "Start it with palaestra train, or use ppo")


def check_rollout_ranks(config: RunConfig, ranks: Ranks) -> None:
    """Raise `ConfigError` for settings that do not suit this number of processes."""
    size, t = ranks.size, config.trainer
    if size == 1:
        return
    if config.env.num_envs % size:
        near = [
            number for number in (config.env.num_envs // size * size, -(-config.env.num_envs // size) * size) if number
        ]
        reason = f"cannot be divided among the {size} processes that torchrun started"
        remedy = f"Nearest that can: {' and '.join(str(number) for number in near)}"
        raise ConfigError("env.num_envs", config.env.num_envs, reason, remedy)
    if config.actors.backend == "ray":
        reason = f"actors on a cluster serve one learner, and torchrun started {size} processes"
        raise ConfigError("actors.backend", "ray", reason, "Use actors.backend=local, or start it with palaestra train")
    if t.compiled == "on":
        reason = f"the compiled update is for one process, and torchrun started {size}"
        raise ConfigError("trainer.compiled", "on", reason, "Use trainer.compiled=auto")
    if config.asynchronous is not None and config.env.normalize_reward:
        reason = "the asynchronous collectors of several processes have no common reward statistics"
        remedy = "Use trainer.collection=synchronous, or leave it out"
        raise ConfigError("env.normalize_reward", True, reason, remedy)
    check_own_devices(t.device, place="trainer.device")


def check_own_devices(device: str, *, place: str) -> None:
    """Raise `ConfigError` if all processes of a machine would use one GPU."""
    if launched_by_torchrun() and device.startswith("cuda:") and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        reason = "all processes of a machine would use the same GPU"
        raise ConfigError(place, device, reason, "Use 'cuda', which is a different one for each process")


def collector_seed(seed: int, ranks: Ranks, asynchronous: AsyncConfig | None) -> int:
    """The seed of this process's collector; the same for all if they act as one (synchronous collection)."""
    if asynchronous is None or ranks.is_first:
        return seed
    return int(np.random.SeedSequence([seed, 7, ranks.rank]).generate_state(1)[0])


def rank_notices(config: RunConfig, ranks: Ranks) -> list[str]:
    """Messages at the start of a run in several processes."""
    if ranks.size == 1:
        return []
    each = ranks.share(config.env.num_envs).count
    text = f"{ranks.size} processes learn together; each steps {each} of the {config.env.num_envs} environments."
    if config.trainer.compiled != "off":
        text += " The compiled update of small networks is for one process and is not used."
    return [text]


def is_divided(config: ScreenRunConfig, ranks: Ranks) -> bool:
    """Whether the learning weights are divided among the processes."""
    return ranks.size > 1 and config.trainer.sharding == "fsdp"


def place_sampler(config: ScreenRunConfig, model: Any, ranks: Ranks) -> None:
    """Move the sampler to the device of the configuration, in the process that samples."""
    if config.inference.device is None:
        return
    device = choose_device(config.inference.device, place="inference.device")
    if not isinstance(model, VLMPolicy):
        reason = f"a {type(model).__name__} samples and learns on one device"
        raise ConfigError("inference.device", config.inference.device, reason, "Leave it out")
    if ranks.is_first and config.inference.backend == "thread" and device != model.learner.device:
        model.sample_on(device)


def divide_model(config: ScreenRunConfig, model: Any, ranks: Ranks) -> None:
    """Divide the learning weights among the processes, if the configuration says so."""
    check_own_devices(config.model.device, place="model.device")
    if not is_divided(config, ranks):
        return
    if not isinstance(model, VLMPolicy):
        reason = f"a {type(model).__name__} cannot be divided"
        raise ConfigError("trainer.sharding", "fsdp", reason, "Use trainer.sharding=ddp")
    algorithm = make_algorithm(config.algorithm, "trajectories")
    if algorithm.needs_reference and not config.model.use_lora:
        reason = "full training with algorithm.kl_coef needs a whole copy of the first weights in every process"
        raise ConfigError("trainer.sharding", "fsdp", reason, "Use LoRA, or set algorithm.kl_coef=0")
    ranks.run(lambda: find_layers(model.learner.model))
    dtype = torch.bfloat16 if config.trainer.fsdp_dtype == "bfloat16" else None
    # Only the first process samples, unless a process of its own does.
    model.shard(compute_dtype=dtype, samples=ranks.is_first)


def screen_rank_notices(config: ScreenRunConfig, ranks: Ranks) -> list[tuple[str, str]]:
    """Messages at the start of a run on screens in several processes."""
    if ranks.size == 1:
        return [("warning", "trainer.sharding=fsdp has no effect in one process.")] * (
            config.trainer.sharding == "fsdp"
        )
    how = "each has a part of the layers" if is_divided(config, ranks) else "each has all weights"
    return [("info", f"{ranks.size} processes learn together; {how}. The first one plays the episodes.")]


class FirstRankEpisodes(ExperienceSource[list[Trajectory]]):
    """Batches of trajectories in the first process, and empty batches at the same time in the others."""

    def __init__(self, episodes: EpisodeSource | ExperienceSource[list[Trajectory]], ranks: Ranks) -> None:
        self._episodes, self._ranks = episodes, ranks
        self.progress = episodes.progress

    def open(self, *args: Any, **options: Any) -> None:
        """Play from now on."""
        assert isinstance(self._episodes, EpisodeSource)
        self._episodes.open(*args, **options)

    def next_batch(self) -> Batch[list[Trajectory]] | None:
        """Wait until the first process has played a batch; None in all processes if it was stopped before."""
        batch = self._ranks.run(self._play)
        return None if self._ranks.any(batch is None) else batch

    def _play(self) -> Batch[list[Trajectory]] | None:
        return self._episodes.next_batch() if self._ranks.is_first else Batch(list[Trajectory]())

    def release(self, batch: Batch[list[Trajectory]], version: int) -> None:
        """Allow further episodes."""
        if self._ranks.is_first:
            self._episodes.release(batch, version)
        else:
            self.progress.updates += 1

    def requeue(self, batch: Batch[list[Trajectory]]) -> None:
        """Put the episodes first in the next batch."""
        self._episodes.requeue(batch)

    def raise_if_failed(self) -> None:
        """Raise if the actors have failed."""
        self._episodes.raise_if_failed()

    def metrics(self, batch: Batch[list[Trajectory]], timing: Timing) -> dict[str, float]:
        """Metrics of the batch, in the first process."""
        return self._episodes.metrics(batch, timing) if self._ranks.is_first else {}

    def state(self) -> SavedState:
        """The state of the episodes, in the first process."""
        return self._episodes.state() if self._ranks.is_first else SavedState({}, {})

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`."""
        return self._episodes.load_state(state) if self._ranks.is_first else True

    def close(self) -> None:
        """Stop every actor."""
        self._episodes.close()
