"""Rows of the registry: runs and checkpoints. An index; the run directories are the source of truth."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, get_origin

from palaestra.files.home import Home
from palaestra.runs.phase import Phase
from palaestra.runs.record import CheckpointRecord, RunRecord, fit_checkpoint, fit_record
from palaestra.runs.store.database import RegistryCorrupt, is_intact, move_aside, open_for_reading, open_for_writing
from palaestra.runs.wire import JsonObject, Number, field_types, from_json, upgrade_names
from palaestra.strict_json import dump_json, json_number

_log = logging.getLogger(__name__)

_PROCESSES = ("watchdog", "trainer")
"""Fields of `RunRecord` that share the JSON column `process`. Every other field has a column of its own name."""
_RUN_COLUMNS = (*(name for name in field_types(RunRecord) if name not in _PROCESSES), "process")
_CHECKPOINT_COLUMNS = tuple(field_types(CheckpointRecord))
_Convert: TypeAlias = Callable[[Any], Any]
ROW_ERRORS = (
    OverflowError,
    UnicodeError,
    TypeError,
    ValueError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
)
"""Errors caused by the content of one row, unlike a full disk or a damaged file."""


class Registry:
    """Index of all runs and checkpoints. Every method is one transaction. Thread-safe."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        self._lock = threading.Lock()
        self._file_id = _file_id(path)
        self.rebuild_lock = threading.Lock()
        """Held while the file is replaced and rebuilt."""
        self.generation = 0
        """Number of times the file was replaced while it was open."""

    @classmethod
    def open(cls, path: Path) -> Registry:
        """Open for writing. Raises `RegistryCorrupt` when the file is damaged; see `rebuild.open_registry`."""
        return cls(open_for_writing(path), path)

    def put(self, record: RunRecord) -> None:
        """Add or replace a run."""
        self.put_many([record])

    def put_many(self, records: Sequence[RunRecord]) -> None:
        """Add or replace several runs in one transaction; a row that cannot be written is skipped with a warning."""
        try:
            self._put([_run_row(record) for record in records])
        except ROW_ERRORS:
            if len(records) < 2:
                raise
            for record in records:
                try:
                    self._put([_run_row(record)])
                except ROW_ERRORS as error:
                    _log.warning("%s: the row cannot be written: %s", record.run_id, error)

    def _put(self, rows: list[list[Any]]) -> None:
        with self._transaction() as connection:
            connection.executemany(_insert("runs", _RUN_COLUMNS), rows)

    def get(self, run_id: str) -> RunRecord | None:
        """Return a run by its id; None when there is none."""
        rows = self._rows(f"SELECT {','.join(_RUN_COLUMNS)} FROM runs WHERE run_id = ?", [run_id])
        return next(iter(_parse_runs(rows)), None)

    def runs(
        self,
        *,
        phases: Collection[Phase] | None = None,
        runner: str | None = None,
        env_id: str | None = None,
        tag: str | None = None,
        archived: bool = False,
        before: tuple[float, str] | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        """Return matching runs, newest first; `before` (creation time and id of a run) starts after that run."""
        where, values = ["archived = ?"], [int(archived)]  # type: list[str], list[Any]
        for column, value in (("runner", runner), ("env_id", env_id)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if phases is not None:
            where.append(f"phase IN ({','.join('?' * len(phases))})")
            values.extend(str(phase) for phase in phases)
        if tag is not None:
            where.append("EXISTS (SELECT 1 FROM json_each(runs.tags) WHERE json_each.value = ?)")
            values.append(tag)
        if before is not None:
            where.append("(created, run_id) < (?, ?)")
            values.extend(before)
        values.append(-1 if limit is None else limit)
        select = f"SELECT {','.join(_RUN_COLUMNS)} FROM runs"
        query = f"{select} WHERE {' AND '.join(where)} ORDER BY created DESC, run_id DESC LIMIT ?"
        return _parse_runs(self._rows(query, values))

    def ids_with_prefix(self, prefix: str, limit: int = 5) -> list[str]:
        """Return ids that start with a prefix, archived runs included."""
        # Ids are ASCII, so every match sorts below the prefix followed by the last Unicode character.
        query = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?"
        return [str(row[0]) for row in self._rows(query, [prefix, prefix + "\U0010ffff", limit])]

    def ids(self) -> frozenset[str]:
        """Return the ids of all runs, archived runs included."""
        return frozenset(str(row[0]) for row in self._rows("SELECT run_id FROM runs", []))

    def delete(self, run_id: str) -> None:
        """Delete the rows of a run and of its checkpoints."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM runs WHERE run_id = ?", [run_id])
            connection.execute("DELETE FROM checkpoints WHERE run_id = ?", [run_id])

    def put_checkpoint(self, record: CheckpointRecord) -> None:
        """Add or replace a checkpoint; the path is the key."""
        with self._transaction() as connection:
            connection.execute(_insert("checkpoints", _CHECKPOINT_COLUMNS), _checkpoint_row(record))

    def delete_checkpoint(self, path: str) -> None:
        """Delete the row of the checkpoint at a path."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM checkpoints WHERE path = ?", [path])

    def checkpoints(
        self, *, run_id: str | None = None, agent_id: str | None = None, env_id: str | None = None
    ) -> list[CheckpointRecord]:
        """Return matching checkpoints, newest first."""
        columns = {"run_id": run_id, "agent_id": agent_id, "env_id": env_id}
        filters = {column: value for column, value in columns.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in filters) or "1"
        query = (
            f"SELECT {','.join(_CHECKPOINT_COLUMNS)} FROM checkpoints WHERE {where} ORDER BY created DESC, path DESC"
        )
        return [_parse_checkpoint(row) for row in self._rows(query, list(filters.values()))]

    def replace(self) -> Path:
        """Replace a damaged file with an empty one; return the new path of the damaged file."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            aside = move_aside(self._path)
            self._connection = open_for_writing(self._path)
            self._file_id = _file_id(self._path)
            self.generation += 1
        return aside

    def is_intact(self) -> bool:
        """Whether the file is undamaged and still at its path."""
        with self._lock:
            return not self.was_replaced and is_intact(self._connection)

    @property
    def was_replaced(self) -> bool:
        """Whether the file was removed, or replaced by another one."""
        return _file_id(self._path) != self._file_id

    def close(self) -> None:
        """Close the connection; SQLite writes the log back into the file."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self.was_replaced:
                raise RegistryCorrupt(f"{self._path}: was removed or replaced")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise self._classify(error) from error

    def _rows(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                raise self._classify(error) from error

    def _classify(self, error: sqlite3.DatabaseError) -> Exception:
        # SQLite reports damage as `DatabaseError` itself, and a full disk, a lock or a wrong query as a subclass.
        return RegistryCorrupt(f"{self._path}: {error}") if type(error) is sqlite3.DatabaseError else error


def open_registry_read_only(home: Home) -> Registry | None:
    """Open the registry for reading, with or without a service; None before the first run."""
    connection = open_for_reading(home.registry)
    return None if connection is None else Registry(connection, home.registry)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT OR REPLACE INTO {table} ({','.join(columns)}) VALUES ({','.join('?' * len(columns))})"


def _parse_runs(rows: Sequence[Sequence[Any]]) -> list[RunRecord]:
    """Parse rows; one that cannot be read is skipped, since the run directory still has its data."""
    records = []
    for row in rows:
        try:
            records.append(_parse_run(row))
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("%s: the row cannot be read: %s", row[0], error)
    return records


def _run_row(record: RunRecord) -> list[Any]:
    record = fit_record(record)
    process = json.dumps({name: getattr(record, name) for name in _PROCESSES}, default=asdict)
    return [*_record_to_row(record, _RUN_COLUMNS[:-1]), process]


def _parse_run(row: Sequence[Any]) -> RunRecord:
    data = _row_to_json(RunRecord, _RUN_COLUMNS, row)
    data["alarms"] = [upgrade_names(alarm) for alarm in data["alarms"]]
    return from_json(RunRecord, {**data, **upgrade_names(json.loads(data["process"] or "{}"))})


def _checkpoint_row(record: CheckpointRecord) -> list[Any]:
    return _record_to_row(fit_checkpoint(record), _CHECKPOINT_COLUMNS)


def _parse_checkpoint(row: Sequence[Any]) -> CheckpointRecord:
    return from_json(CheckpointRecord, _row_to_json(CheckpointRecord, _CHECKPOINT_COLUMNS, row))


def _record_to_row(record: RunRecord | CheckpointRecord, columns: Sequence[str]) -> list[Any]:
    """Return the fields of a record as SQLite stores them."""
    encoders = _ENCODERS[type(record)]
    return [encoders[name](getattr(record, name)) if name in encoders else getattr(record, name) for name in columns]


def _row_to_json(kind: type[Any], columns: Sequence[str], row: Sequence[Any]) -> JsonObject:
    """Return a row as the JSON data of a record."""
    data = dict(zip(columns, row, strict=True))
    for name, decode in _DECODERS[kind].items():
        data[name] = decode(data[name])
    return data


def _encode_number(value: float | None) -> float | str | None:
    # SQLite stores NaN as NULL, which would mean that there is no number.
    return None if value is None else json_number(value)


def _encode_json(value: object) -> str:
    return json.dumps(value, default=asdict)


def _decode_json(text: str) -> Any:
    # Most rows hold empty lists; parsing each of them would slow down listing runs.
    return () if text == "[]" else json.loads(text)


def _converters(kind: type[Any], by_type: dict[Any, _Convert], by_origin: _Convert) -> dict[str, _Convert]:
    """Converters of the fields that SQLite has no type for; tuples and dictionaries are JSON text."""
    types = field_types(kind).items()
    converters = {
        name: by_type.get(type_, by_origin if get_origin(type_) in (tuple, dict) else None) for name, type_ in types
    }
    return {name: convert for name, convert in converters.items() if convert is not None}


_ENCODE: dict[Any, _Convert] = {bool: int, Phase: str, Number | None: _encode_number, dict[str, Number]: dump_json}
_ENCODERS = {kind: _converters(kind, _ENCODE, _encode_json) for kind in (RunRecord, CheckpointRecord)}
_DECODERS = {kind: _converters(kind, {bool: bool}, _decode_json) for kind in (RunRecord, CheckpointRecord)}
