"""Runs under torchrun: what is refused, what is announced, and the share of each process.

`env.num_envs` counts the environments of the whole run. Synchronous collection acts in them as one process would; an
asynchronous collector plays episodes of its own in each process.
"""

from __future__ import annotations

import os

import numpy as np

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.errors import ConfigError
from palaestra.train.config import RunConfig
from palaestra.transport.ranks import Ranks, launched_by_torchrun


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
        near = [number for number in (config.env.num_envs // size * size, -(-config.env.num_envs // size) * size) if number]
        reason = f"cannot be divided among the {size} processes that torchrun started"
        remedy = f"Nearest that can: {' and '.join(str(number) for number in near)}"
        raise ConfigError("env.num_envs", config.env.num_envs, reason, remedy)
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
