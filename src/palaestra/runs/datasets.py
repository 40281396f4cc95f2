"""The datasets of the state directory as the run service shows them, and the runs that use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from palaestra.errors import ConfigError
from palaestra.experience.datasets.dataset import DatasetSummary, State, list_datasets
from palaestra.files.atomic import read_json
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.wire import API_SCHEMA, JsonObject

_LIVE = tuple(phase for phase in Phase if not phase.has_ended)


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A dataset to learn from."""

    __pydantic_config__ = API_SCHEMA

    dataset_id: str
    """The id of Minari: `pendulum/medium-v0`."""
    path: str
    state: State
    """`verified`: the files are those whose SHA-256 matched; `unchecked`: their sizes match; `damaged`: they do not, or
    the dataset cannot be read; `unverified`: there is no manifest to compare with, and it cannot be used."""
    problem: str = ""
    """Why it is damaged or unverified."""
    env_id: str = ""
    """The environment that the data comes from; empty if it is unknown."""
    total_steps: int = 0
    total_episodes: int = 0
    random_score: float | None = None
    """Mean return of random actions."""
    expert_score: float | None = None
    """Mean return of an expert."""
    size_bytes: int = 0
    created: float = 0.0
    """Unix time of its data."""
    last_used: float = 0.0
    """Unix time at which it was last verified for use, or made."""
    sha256: str = ""
    """Digest of its manifest, which identifies the data."""
    about: JsonObject = field(default_factory=dict)
    """How it was made: policy, seed, checkpoint and so on."""
    used_by: tuple[str, ...] = ()
    """Ids of queued and running runs whose configuration or command names it."""


def list_dataset_infos(reader: RunReader, env_id: str | None = None) -> list[DatasetInfo]:
    """The datasets of a state directory, sorted by id; reads no data."""
    rows = [row for row in list_datasets(reader.home.datasets) if env_id in (None, row.env_id)]
    users = find_users(reader, rows)
    names = [item.name for item in fields(DatasetSummary)]
    return [
        DatasetInfo(**{name: getattr(row, name) for name in names}, used_by=tuple(users.get(row.dataset_id, ())))
        for row in rows
    ]


def find_users(reader: RunReader, rows: list[DatasetSummary]) -> dict[str, list[str]]:
    """Ids of the queued and running runs that name each dataset, by its id or its path."""
    names = {name: row.dataset_id for row in rows for name in (row.dataset_id, row.path)}
    users: dict[str, list[str]] = {}
    for record in reader.runs(phases=_LIVE) if rows else ():
        try:
            run = reader.paths(record.run_id)
        except ConfigError:
            continue
        texts = {text for document in _read_documents(run, record.attempt) for text in _iterate_texts(document)}
        for dataset_id in {names[text] for text in texts if text in names}:
            users.setdefault(dataset_id, []).append(record.run_id)
    return users


def _read_documents(run: RunDirectory, attempt: int) -> Iterator[JsonObject]:
    newest = run.attempt(attempt)
    for path in (run.spec, run.resolved, newest.resolved, newest.command):
        yield read_json(path) or {}


def _iterate_texts(value: Any) -> Iterator[str]:
    """All strings in JSON data, and the values of words such as `dataset.name=pendulum/medium-v0`."""
    if isinstance(value, str):
        yield value
        yield value.rpartition("=")[2]
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iterate_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(item)
