"""The datasets of the state directory as the run service shows them, and the runs that use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from palaestra.errors import ConfigError, DatasetError, UnknownRun
from palaestra.experience.datasets.dataset import DatasetSummary, find_dataset, list_datasets
from palaestra.files.atomic import read_json
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.catalogue import DatasetInfo
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.wire import JsonObject

_LIVE = tuple(phase for phase in Phase if not phase.has_ended)


def list_dataset_infos(reader: RunReader, env_id: str | None = None) -> list[DatasetInfo]:
    """The datasets of a state directory, sorted by id; reads no data."""
    return _describe(reader, [row for row in list_datasets(reader.home.datasets) if env_id in (None, row.env_id)])


def verify_dataset(reader: RunReader, dataset_id: str) -> DatasetInfo:
    """A dataset after comparing every byte with its manifest; `UnknownRun` if there is none of this name."""
    root = reader.home.datasets
    rows = [row for row in list_datasets(root) if row.dataset_id == dataset_id]
    if not rows:
        remedy = "palaestra datasets list shows all"
        raise UnknownRun("dataset", dataset_id, "there is no dataset of this name", remedy)
    (info,) = _describe(reader, rows)
    if info.state == "unverified":
        return info
    try:
        find_dataset(dataset_id, root, mark_used=False)
    except DatasetError as error:
        return replace(info, state="damaged", problem=error.reason)
    return replace(info, state="verified", problem="")


def _describe(reader: RunReader, rows: list[DatasetSummary]) -> list[DatasetInfo]:
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
