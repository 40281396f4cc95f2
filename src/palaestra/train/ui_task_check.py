"""Every task of a configuration is loaded once before a run exists: a name that no suite has is found at once, not
after browsers have played for an hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from palaestra.actor.task_sampler import TaskChoice, held_out
from palaestra.errors import ConfigError, EnvironmentFailed, SessionRefused
from palaestra.learner.trajectories.reward import reward_warnings
from palaestra.sessions.task import TaskRequest, TaskSpec
from palaestra.train.session_source import SessionAddress, open_source
from palaestra.train.ui_config import UiRunConfig

__all__ = ["check_tasks"]

AT_ONCE = 4
NO_VERDICT = ("no_session", "no_room", "draining")
"""Refusals that say something about the moment, and nothing about the task."""


def check_tasks(config: UiRunConfig, address: SessionAddress, tasks: Sequence[TaskChoice] | None = None) -> list[str]:
    """Load each task once, on a seed that no training draws; `ConfigError` for the first that cannot be.

    Returns what is worth a warning: rewards that teach an agent of a task not to finish.
    """
    chosen = tuple(tasks or config.tasks)
    with asyncio.Runner() as runner:
        verdicts = runner.run(_verdicts(config, address, chosen))
    warnings: dict[str, None] = {}
    for verdict in verdicts:
        if isinstance(verdict, ConfigError):
            raise verdict
        if verdict is not None:
            low, _ = verdict.reward_range or config.reward.assumed_range
            task = f"{verdict.suite}/{verdict.name}"
            warnings |= dict.fromkeys(reward_warnings(config.reward, low, task=task))
    return list(warnings)


async def _verdicts(
    config: UiRunConfig, address: SessionAddress, choices: Sequence[TaskChoice]
) -> list[TaskSpec | ConfigError | None]:
    source = open_source(config, address)
    places = asyncio.Semaphore(min(AT_ONCE, config.actor_pool.target_concurrent_actors))

    async def verdict(number: int, request: TaskRequest) -> TaskSpec | ConfigError | None:
        place = f"tasks[{number}].task"
        try:
            async with places:
                session = await source.open()
                try:
                    return await session.reset(request)
                finally:
                    await session.close()
        except SessionRefused as refusal:
            if refusal.code in NO_VERDICT:
                return None
            reason, _, remedy = str(refusal).removeprefix(f"task = {request.task!r}: ").partition(". ")
            return ConfigError(place, request.task, reason.rstrip("."), remedy)
        except EnvironmentFailed as failure:
            remedy = f"Try it by hand: palaestra sessions try {request.task}"
            return ConfigError(place, request.task, f"does not load ({str(failure).rstrip('.')})", remedy)

    try:
        asked = enumerate(held_out(choices, len(choices)))
        return await asyncio.gather(*(verdict(number, request) for number, (_, request) in asked))
    finally:
        await source.close()
