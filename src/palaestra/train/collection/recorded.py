"""Recorded episodes of plays as the episodes of a dataset: what a person, or a person and a policy, did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palaestra.env.spaces import ActionLayout
from palaestra.env.vector import Space
from palaestra.errors import ConfigError
from palaestra.experience.datasets import Episode
from palaestra.files.home import Home
from palaestra.runs.play.episode import EpisodeReader, list_episodes, open_episode

_LIST = "palaestra episodes list shows them"


@dataclass(frozen=True)
class Recordings:
    """Recorded episodes of one environment with one set of parameters."""

    readers: tuple[EpisodeReader, ...]
    env_id: str
    parameters: dict[str, Any]

    def episodes(self, action_space: Space) -> Iterator[Episode]:
        """The episodes, oldest first; `ConfigError` if one is damaged or unfinished."""
        for reader in self.readers:
            yield _convert(reader, action_space)

    def describe(self) -> dict[str, Any]:
        """Ids, and how many steps a person made."""
        records = [reader.record for reader in self.readers]
        return {
            "policy": "recorded",
            "episodes": [record.episode_id for record in records],
            "human_steps": sum(record.human_steps for record in records),
            "agent_steps": sum(record.agent_steps for record in records),
        }


def find_recordings(home: Home, names: Sequence[str], env_id: str = "") -> Recordings:
    """The recorded episodes with these ids, or with `all` every finished one of an environment."""
    if list(names) == ["all"]:
        if not env_id:
            raise ConfigError("--env", "", "required to select all recorded episodes", "For example --env CartPole-v1")
        records = [record for record in list_episodes(home, env_id=env_id) if record.ended and not record.problem]
        names = [record.episode_id for record in records if record.steps]
        if not names:
            raise ConfigError("--recorded", "all", f"no finished episode of {env_id} was recorded", _LIST)
    readers = [open_episode(home, name) for name in dict.fromkeys(names)]
    readers.sort(key=lambda reader: (reader.record.started, reader.record.episode_id))
    first = readers[0].record
    for reader in readers:
        record = reader.record
        if record.kind != "gymnasium":
            reason = "is of a screen, whose actions are not numbers"
            raise ConfigError("--recorded", record.episode_id, reason, "Choose episodes of Gymnasium environments")
        if env_id and record.env_id != env_id:
            raise ConfigError(
                "--recorded", record.episode_id, f"was played in {record.env_id}", f"Leave out --env {env_id}"
            )
        if (record.env_id, record.parameters) != (first.env_id, first.parameters):
            reason = (
                f"was played in {record.env_id} with {record.parameters}, {first.episode_id} in another environment"
            )
            raise ConfigError("--recorded", record.episode_id, reason, "Make one dataset for each")
    return Recordings(tuple(readers), first.env_id, dict(first.parameters))


def _convert(reader: EpisodeReader, action_space: Space) -> Episode:
    demonstration, name = reader.demonstration(), reader.record.episode_id
    if not len(demonstration.rewards):
        raise ConfigError("--recorded", name, "has no steps", "Leave it out")
    layout = ActionLayout(action_space)
    actions = demonstration.actions
    if actions.dtype.kind not in "biuf" or actions.size != len(actions) * int(np.prod(layout.shape, dtype=np.int64)):
        raise ConfigError("--recorded", name, f"its actions are not in {action_space}", "Choose other episodes")
    truncated = demonstration.truncated.copy()
    # An episode that the person ended with a reset is cut off there.
    truncated[-1] |= not demonstration.terminated[-1]
    return Episode(
        demonstration.observations,
        # A play records what was asked for, and performs it clipped.
        layout.clip(actions.reshape(len(actions), *layout.shape)),
        demonstration.rewards,
        demonstration.terminated,
        truncated,
        reader.record.seed,
    )
