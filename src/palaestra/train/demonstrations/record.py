"""Records demonstrations: plays the scripted oracle of each task on training seeds and keeps the successes."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaestra.actor.task_runner import EpisodeRequest
from palaestra.errors import ConfigError, ExperienceError, UnsupportedAction
from palaestra.experience.demonstrations import MANIFEST, Demonstrations, DemonstrationWriter
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.vlm import VLMPolicy
from palaestra.sessions.action import UiAction
from palaestra.sessions.session import Session
from palaestra.sessions.task import TaskRequest
from palaestra.sessions.task_sampler import TRAINING_SEEDS, TaskChoice
from palaestra.train.demonstrations.transcription import NoNextAction, transcribe_episode
from palaestra.train.model_run import demonstration_format
from palaestra.train.screen_config import ScreenRunConfig

MAX_DRAWS = 1000
"""Draws of a seed until one is found that has no demonstration yet."""


@dataclass
class RecordingSummary:
    """Demonstrations that were written, and episodes that were not kept."""

    written: Counter[str] = field(default_factory=Counter)
    """By task."""
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By task and reason: the outcome of the episode, `no_action`, `unsupported`, `unwritable` or `present`."""
    details: dict[str, str] = field(default_factory=dict)
    """The first message for each reason."""

    def drop(self, task: str, reason: str, detail: str = "") -> None:
        """Count an episode that is not kept."""
        self.dropped[task, reason] += 1
        if detail:
            self.details.setdefault(reason, detail)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        dropped: dict[str, dict[str, int]] = {}
        for (task, reason), count in sorted(self.dropped.items()):
            dropped.setdefault(task, {})[reason] = count
        return {"written": dict(sorted(self.written.items())), "dropped": dropped, "details": self.details}


def draw_requests(
    choices: Sequence[TaskChoice], episodes: int, *, seed: int, seeds: int | None, present: set[tuple[str, str, int]]
) -> list[EpisodeRequest]:
    """`episodes` starts, evenly over the tasks, on training seeds that have no demonstration in `present` yet.

    `seeds`: as `sampler.seeds`, the number of seeds per task.
    """
    if not choices:
        remedy = "Name some, for example click_target/button; palaestra tasks lists them"
        raise ConfigError("tasks", [], "there is no task to record", remedy)
    rng, taken = random.Random(f"demonstrations {seed}"), set(present)
    limit = TRAINING_SEEDS.stop if seeds is None else seeds
    requests = []
    for number in range(episodes):
        choice = choices[number % len(choices)]
        for _ in range(MAX_DRAWS):
            task = TaskRequest(choice.task, rng.randrange(limit), choice.params)
            start = (choice.task, choice.key, task.seed)
            if start not in taken:
                break
        else:
            reason = f"there are hardly any of the {limit} training seeds of {choice.key} left"
            raise ConfigError("--episodes", episodes, reason, "Record fewer, or raise sampler.seeds")
        taken.add(start)
        name = choice.task.replace("/", "-")
        requests.append(EpisodeRequest(f"oracle-{name}-{task.seed}", task, task.seed, key=choice.key))
    return requests


async def next_oracle_action(session: Any) -> UiAction | None:
    """The next action of the oracle of the session's task."""
    action: UiAction | None = await session.oracle_action()
    return action


async def record_oracles(
    config: ScreenRunConfig,
    policy: VLMPolicy,
    output: Path,
    *,
    episodes: int,
    seed: int = 0,
    workers: int = 2,
    open_session: Callable[[], Awaitable[Session]] | None = None,
    on_finished: Callable[[int], None] = lambda count: None,
) -> RecordingSummary:
    """Play the oracles of the tasks of a configuration and write the successes to `output`.

    `open_session` opens a session with the method `oracle_action`, by default in a browser of this process: session
    servers do not have oracles. `on_finished` is called with the number of finished episodes.
    """
    requests = draw_requests(
        config.tasks, episodes, seed=seed, seeds=config.sampler.seeds, present=_find_present(config.tasks, output)
    )
    summary, waiting, finished = RecordingSummary(), iter(requests), 0

    async def work(open_one: Callable[[], Awaitable[Session]]) -> None:
        nonlocal finished
        for request in waiting:
            await _record_episode(config, policy, request, open_one, summary, writer)
            finished += 1
            on_finished(finished)

    async with AsyncExitStack() as stack:
        opener = open_session or _browser_opener(stack, config.tasks)
        # After everything that refuses the request, so that a refused one leaves no directory.
        about = {"source": "oracle", "model": config.model.name}
        writer = DemonstrationWriter(output, demonstration_format(config, policy), about=about)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(workers, episodes)):
                    group.create_task(work(opener))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return summary


def _find_present(choices: Sequence[TaskChoice], output: Path) -> set[tuple[str, str, int]]:
    """Task, key and seed of the demonstrations that a directory holds already."""
    if not os.path.exists(output / MANIFEST):
        return set()
    return {
        (choice.task, choice.key, entry.seed)
        for entry in Demonstrations(output, place="--output").entries
        for choice in choices
        if entry.task == choice.task and choice.params.items() <= dict(entry.params).items()
    }


async def _record_episode(
    config: ScreenRunConfig,
    policy: VLMPolicy,
    request: EpisodeRequest,
    open_session: Callable[[], Awaitable[Session]],
    summary: RecordingSummary,
    writer: DemonstrationWriter,
) -> None:
    try:
        trajectory = await transcribe_episode(policy, request, open_session, next_oracle_action, config.actor)
    except NoNextAction:
        summary.drop(request.key, "no_action", "the oracle has no further action and the task is not solved")
    except UnsupportedAction as error:
        summary.drop(request.key, "unsupported", str(error))
    except ExperienceError as error:
        summary.drop(request.key, "unwritable", str(error))
    else:
        keep_success(trajectory, request.key, summary, writer)


def keep_success(trajectory: Trajectory, key: str, summary: RecordingSummary, writer: DemonstrationWriter) -> None:
    """Write a demonstration that solved its task, and count one that did not."""
    if trajectory.success and all(turn.action is not None for turn in trajectory.turns):
        writer.add(trajectory)
        summary.written[key] += 1
    else:
        summary.drop(key, trajectory.outcome.value, trajectory.reason)


def _browser_opener(stack: AsyncExitStack, choices: Sequence[TaskChoice]) -> Callable[[], Awaitable[Session]]:
    """Opens sessions in one browser of this process, which the stack stops.

    `SessionRefused` for an unknown task, `ConfigError` for one without an oracle.
    """
    from palaestra.sessions.browser.browser import SharedBrowser
    from palaestra.sessions.browser.session import BrowserSession
    from palaestra.sessions.suites import make_task

    for choice in choices:
        request = TaskRequest(choice.task, 0, choice.params)
        if make_task(request.suite, request.name, request.seed, request.params).oracle is None:
            remedy = "Leave it out, or solve it in the studio and import the play: palaestra demos import"
            raise ConfigError("task", choice.task, "the task has no oracle", remedy)
    browser = SharedBrowser()
    stack.push_async_callback(browser.stop)

    async def open_session() -> Session:
        return BrowserSession(browser.get)

    return open_session
