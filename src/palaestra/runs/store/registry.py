"""Rows of the registry: runs and checkpoints, put and found. An index, never the truth."""

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
from palaestra.runs.store.database import RegistryCorrupt, is_sound, open_reading, open_writing, set_aside
from palaestra.runs.wire import Number, field_types, from_json
from palaestra.strict_json import dump_json, json_number

__all__ = ["ROW_FAULTS", "Registry", "reading_registry"]

_log = logging.getLogger(__name__)

_PROCESSES = ("warden", "trainer")
"""Fields of `RunRecord` that share the JSON column `process`. Every other field has a column of its own name."""
_RUN = (*(name for name in field_types(RunRecord) if name not in _PROCESSES), "process")
_CHECKPOINT = tuple(field_types(CheckpointRecord))
_Convert: TypeAlias = Callable[[Any], Any]


class Registry:
    """The index of all runs. Every method is one transaction; threads may share it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        self._lock = threading.Lock()
        self._file = _identity(path)
        self.repairing = threading.Lock()
        """Held by the one who makes it anew."""
        self.generation = 0
        """How often it was made anew while it was open."""

    @classmethod
    def open(cls, path: Path) -> Registry:
        """To write. `RegistryCorrupt` when the file is damaged; `rebuild.open_registry` then makes a new one."""
        return cls(open_writing(path), path)

    def put(self, record: RunRecord) -> None:
        """Add or replace a run."""
        self.put_many([record])

    def put_many(self, records: Sequence[RunRecord]) -> None:
        """Add or replace several, all or none; but a row that cannot be written keeps no other one out."""
        try:
            self._put([_run_row(record) for record in records])
        except ROW_FAULTS:
            if len(records) < 2:
                raise
            for record in records:
                try:
                    self._put([_run_row(record)])
                except ROW_FAULTS as error:
                    _log.warning("%s: its row cannot be written: %s", record.run_id, error)

    def _put(self, rows: list[list[Any]]) -> None:
        marks = ",".join("?" * len(_RUN))
        with self._transaction() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO runs ({','.join(_RUN)}) VALUES ({marks})", rows)

    def get(self, run_id: str) -> RunRecord | None:
        """One run by its id."""
        found = self._rows(f"SELECT {','.join(_RUN)} FROM runs WHERE run_id = ?", [run_id])
        return next(iter(_readable(found)), None)

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
        """Runs that fit, newest first; `before` is when the newest wanted one's successor was made, and its id."""
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
        query = (
            f"SELECT {','.join(_RUN)} FROM runs WHERE {' AND '.join(where)} ORDER BY created DESC, run_id DESC LIMIT ?"
        )
        return _readable(self._rows(query, values))

    def beginning_with(self, prefix: str, limit: int = 5) -> list[str]:
        """The ids that begin so, archived or not."""
        # Ids are ASCII, so everything that begins with the prefix lies below the prefix and the last of all characters.
        query = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?"
        return [str(row[0]) for row in self._rows(query, [prefix, prefix + "\U0010ffff", limit])]

    def ids(self) -> frozenset[str]:
        """Every run's id, archived ones included."""
        return frozenset(str(row[0]) for row in self._rows("SELECT run_id FROM runs", []))

    def count(self) -> int:
        """How many runs there are, archived ones included."""
        return int(self._rows("SELECT count(*) FROM runs", [])[0][0])

    def delete(self, run_id: str) -> None:
        """Forget a run and its checkpoints."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM runs WHERE run_id = ?", [run_id])
            connection.execute("DELETE FROM checkpoints WHERE run_id = ?", [run_id])

    def put_checkpoint(self, record: CheckpointRecord) -> None:
        """Add or replace a checkpoint; its path is what it is known by."""
        marks = ",".join("?" * len(_CHECKPOINT))
        with self._transaction() as connection:
            connection.execute(
                f"INSERT OR REPLACE INTO checkpoints ({','.join(_CHECKPOINT)}) VALUES ({marks})",
                _checkpoint_row(record),
            )

    def delete_checkpoint(self, path: str) -> None:
        """Forget the checkpoint at a path."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM checkpoints WHERE path = ?", [path])

    def checkpoints(
        self, *, run_id: str | None = None, agent_id: str | None = None, env_id: str | None = None
    ) -> list[CheckpointRecord]:
        """Checkpoints that fit, newest first."""
        given = [("run_id", run_id), ("agent_id", agent_id), ("env_id", env_id)]
        wanted = [(column, value) for column, value in given if value is not None]
        where = " AND ".join(f"{column} = ?" for column, _ in wanted) or "1"
        query = f"SELECT {','.join(_CHECKPOINT)} FROM checkpoints WHERE {where} ORDER BY created DESC, path DESC"
        return [_checkpoint(row) for row in self._rows(query, [value for _, value in wanted])]

    def replace(self) -> Path:
        """Put an empty file in the place of a damaged one; where the damaged one is now."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            aside = set_aside(self._path)
            self._connection = open_writing(self._path)
            self._file = _identity(self._path)
            self.generation += 1
        return aside

    def sound(self) -> bool:
        """Whether the file is whole, and is still the one that lies there under its name."""
        with self._lock:
            return _identity(self._path) == self._file and is_sound(self._connection)

    @property
    def gone(self) -> bool:
        """Whether somebody removed the file or put another in its place."""
        return _identity(self._path) != self._file

    def close(self) -> None:
        """Write the log back into the file and let go."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self.gone:
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
                raise self._named(error) from error

    def _rows(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                raise self._named(error) from error

    def _named(self, error: sqlite3.DatabaseError) -> Exception:
        """A damaged file raises the class itself; a full disk, a lock or a mistake of ours one of its kinds."""
        return RegistryCorrupt(f"{self._path}: {error}") if type(error) is sqlite3.DatabaseError else error


def reading_registry(home: Home) -> Registry | None:
    """The registry to look at, with or without a service; None before the first run."""
    connection = open_reading(home.registry)
    return None if connection is None else Registry(connection, home.registry)


ROW_FAULTS = (OverflowError, UnicodeError, TypeError, ValueError, sqlite3.IntegrityError, sqlite3.InterfaceError,
               sqlite3.ProgrammingError, sqlite3.DataError)  # fmt: skip
"""What one row can be guilty of, unlike a disk that is full or a file that is damaged."""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _readable(rows: Sequence[Sequence[Any]]) -> list[RunRecord]:
    """Every row that can be read; one that cannot is left out, and the directory of its run still knows."""
    found = []
    for row in rows:
        try:
            found.append(_run(row))
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("%s: its row cannot be read: %s", row[0], error)
    return found


def _run_row(record: RunRecord) -> list[Any]:
    record = fit_record(record)
    process = json.dumps({name: getattr(record, name) for name in _PROCESSES}, default=asdict)
    return [*_values(record, _RUN[:-1]), process]


def _run(row: Sequence[Any]) -> RunRecord:
    data = _parsed(RunRecord, _RUN, row)
    return from_json(RunRecord, {**data, **json.loads(data["process"] or "{}")})


def _checkpoint_row(record: CheckpointRecord) -> list[Any]:
    return _values(fit_checkpoint(record), _CHECKPOINT)


def _checkpoint(row: Sequence[Any]) -> CheckpointRecord:
    return from_json(CheckpointRecord, _parsed(CheckpointRecord, _CHECKPOINT, row))


def _values(record: RunRecord | CheckpointRecord, columns: Sequence[str]) -> list[Any]:
    """The fields of a record as SQLite stores them."""
    encoders = _ENCODERS[type(record)]
    return [encoders[name](getattr(record, name)) if name in encoders else getattr(record, name) for name in columns]


def _parsed(kind: type[Any], columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row as the JSON data of a record."""
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
    found = {
        name: by_type.get(type_, by_origin if get_origin(type_) in (tuple, dict) else None) for name, type_ in types
    }
    return {name: convert for name, convert in found.items() if convert is not None}


_ENCODE: dict[Any, _Convert] = {bool: int, Phase: str, Number | None: _encode_number, dict[str, Number]: dump_json}
_ENCODERS = {kind: _converters(kind, _ENCODE, _encode_json) for kind in (RunRecord, CheckpointRecord)}
_DECODERS = {kind: _converters(kind, {bool: bool}, _decode_json) for kind in (RunRecord, CheckpointRecord)}
