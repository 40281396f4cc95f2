"""Demonstrations from recorded plays: what a person did on the screen of a task, written as replies of a model.

The pictures, actions and rewards are those of the recording; nothing is played again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from palaestra.actor.task_runner import EpisodeRequest
from palaestra.errors import ConfigError, ExperienceError, InvalidAction, UnsupportedAction
from palaestra.experience.demonstrations import Demonstrations, DemonstrationWriter
from palaestra.policy.vlm import VLMPolicy
from palaestra.runs.play.episode import EpisodeReader
from palaestra.sessions.action import UiAction, decode
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec
from palaestra.sessions.task_sampler import TRAINING_SEEDS
from palaestra.train.demonstrations.record import RecordingSummary, keep_success
from palaestra.train.demonstrations.transcription import transcribe_episode
from palaestra.train.model_run import demonstration_format
from palaestra.train.screen_config import ScreenRunConfig


def import_plays(
    config: ScreenRunConfig, policy: VLMPolicy, episodes: Sequence[EpisodeReader], output: Path
) -> RecordingSummary:
    """Write recorded plays of screen tasks as demonstrations; `ConfigError` for one that is not such a play.

    Episodes that did not solve their task, and those whose actions the model could not have written, are not kept.
    """
    recordings = [_Recording(reader) for reader in episodes]
    about = {"source": "play", "model": config.model.name}
    writer = DemonstrationWriter(output, demonstration_format(config, policy), about=about)
    summary, present = RecordingSummary(), {entry.episode_id for entry in Demonstrations(output).entries}
    for recording in recordings:
        if recording.name in present:
            summary.drop(recording.request.task, "present", "the directory holds it already")
            continue
        present.add(recording.name)
        request = EpisodeRequest(recording.name, recording.request, recording.request.seed, key=recording.request.task)
        actor = config.actor.model_copy(update={"max_steps_per_episode": len(recording.actions)})
        try:
            playing = transcribe_episode(
                policy, request, recording.open, _next_recorded_action, actor, moves_pointer=False
            )
            trajectory = asyncio.run(playing)
        except UnsupportedAction as error:
            summary.drop(request.key, "unsupported", str(error))
        except ExperienceError as error:
            summary.drop(request.key, "unwritable", str(error))
        else:
            keep_success(trajectory, request.key, summary, writer)
    return summary


class _Recording:
    """A recorded play as everything that a session returned."""

    def __init__(self, reader: EpisodeReader) -> None:
        reader.verify()
        record, steps = reader.record, reader.steps()
        self.name = record.episode_id
        if record.kind != "screen":
            raise _error(self.name, f"is a play of {record.env_id}, which is not a screen task")
        if record.agent_steps or len(steps) < 2:
            raise _error(self.name, "has no actions, or actions of a policy; demonstrations are of a person alone")
        if record.seed is None:
            raise _error(self.name, "has no seed, so that its task cannot be told from those for evaluation")
        if record.seed not in TRAINING_SEEDS:
            raise _error(self.name, f"has the seed {record.seed}, which is reserved for evaluation")
        if any(step.picture is None for step in steps):
            raise _error(self.name, "has a step without a picture")
        self.request = TaskRequest(record.env_id, record.seed, record.parameters)
        self.screens = [Screenshot.of(reader.picture(step)) for step in steps]
        try:
            self.actions = [decode(step.report.action) for step in steps[1:]]
        except InvalidAction as error:
            raise _error(self.name, f"has an action that cannot be performed ({error})") from None
        reports = [step.report for step in steps]
        self.progress = [
            TaskProgress(report.episode_return, report.is_last, bool(report.success), truncated=report.truncated)
            for report in reports
        ]
        self.spec = self.request.resolve(record.instruction, len(self.actions), self.screens[0].size, None)

    async def open(self) -> Session:
        """A session that returns what was recorded."""
        return RecordedSession(self)


class RecordedSession:
    """A `Session` that answers from a recording, whatever the action is."""

    def __init__(self, recording: _Recording) -> None:
        self._recording, self._step = recording, 0

    def next_action(self) -> UiAction | None:
        """The recorded action on the present screen; None after the last."""
        actions = self._recording.actions
        return actions[self._step] if self._step < len(actions) else None

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """The recorded task."""
        self._step = 0
        return self._recording.spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """The recorded result of the next action."""
        self._step += 1
        return Step(step, self._recording.screens[self._step], self._recording.progress[self._step])

    async def screenshot(self) -> Screenshot:
        """The present screen."""
        return self._recording.screens[self._step]

    async def progress(self) -> TaskProgress:
        """The recorded judgement."""
        return self._recording.progress[self._step]

    async def close(self) -> None:
        """Nothing to release."""


async def _next_recorded_action(session: RecordedSession) -> UiAction | None:
    return session.next_action()


def _error(name: str, reason: str) -> ConfigError:
    return ConfigError("EPISODE", name, reason, "See: palaestra episodes list")
