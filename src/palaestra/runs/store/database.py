"""The SQLite file of the registry: one service writes it, any process reads it.

The write-ahead log keeps readers from blocking the service. A damaged file is detected here and never repaired:
`RegistryCorrupt` is raised, and the service rebuilds the file from the run directories.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from palaestra.errors import ConfigError, PalaestraError

_BUSY_TIMEOUT_S = 5.0

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE runs (
        run_id TEXT PRIMARY KEY, runner TEXT NOT NULL, agent_id TEXT NOT NULL, env_id TEXT NOT NULL,
        phase TEXT NOT NULL, reason TEXT NOT NULL, code TEXT NOT NULL, attempt INTEGER NOT NULL,
        supervised INTEGER NOT NULL, priority INTEGER NOT NULL, created REAL NOT NULL, started REAL, ended REAL,
        process TEXT NOT NULL, env_step INTEGER NOT NULL, total_steps INTEGER, episodes INTEGER NOT NULL,
        episode_return REAL, seed INTEGER, tags TEXT NOT NULL, alarms TEXT NOT NULL, archived INTEGER NOT NULL,
        tracking_url TEXT NOT NULL, bytes_on_disk INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX runs_by_time ON runs (archived, created DESC);
    CREATE INDEX runs_by_phase ON runs (phase);
    CREATE INDEX runs_by_agent ON runs (agent_id, env_id, run_id);
    CREATE TABLE checkpoints (
        path TEXT PRIMARY KEY, checkpoint_id TEXT NOT NULL, run_id TEXT NOT NULL, agent_id TEXT NOT NULL,
        env_id TEXT NOT NULL, attempt INTEGER NOT NULL, env_step INTEGER NOT NULL, sha256 TEXT NOT NULL,
        size_bytes INTEGER NOT NULL, format TEXT NOT NULL, created REAL NOT NULL, best INTEGER NOT NULL, metric REAL,
        profile TEXT NOT NULL, env_signature TEXT NOT NULL, metrics_digest TEXT NOT NULL, verified REAL
    ) WITHOUT ROWID;
    CREATE INDEX checkpoints_by_key ON checkpoints (agent_id, env_id, run_id);
    CREATE INDEX checkpoints_by_run ON checkpoints (run_id, created DESC);
    CREATE INDEX checkpoints_by_id ON checkpoints (checkpoint_id);
    """,
    """
    ALTER TABLE checkpoints RENAME TO checkpoints_1;
    CREATE TABLE checkpoints (
        path TEXT PRIMARY KEY, checkpoint_id TEXT NOT NULL, run_id TEXT NOT NULL, agent_id TEXT NOT NULL,
        env_id TEXT NOT NULL, attempt INTEGER NOT NULL, env_step INTEGER, step_source TEXT NOT NULL DEFAULT '',
        sha256 TEXT NOT NULL, size_bytes INTEGER NOT NULL, format TEXT NOT NULL, created REAL NOT NULL,
        best INTEGER NOT NULL, metric REAL, profile TEXT NOT NULL, env_signature TEXT NOT NULL,
        metrics_digest TEXT NOT NULL, verified REAL
    ) WITHOUT ROWID;
    INSERT INTO checkpoints (
        path, checkpoint_id, run_id, agent_id, env_id, attempt, env_step, sha256, size_bytes, format, created, best,
        metric, profile, env_signature, metrics_digest, verified
    ) SELECT
        path, checkpoint_id, run_id, agent_id, env_id, attempt, env_step, sha256, size_bytes, format, created, best,
        metric, profile, env_signature, metrics_digest, verified
    FROM checkpoints_1;
    DROP TABLE checkpoints_1;
    CREATE INDEX checkpoints_by_key ON checkpoints (agent_id, env_id, run_id);
    CREATE INDEX checkpoints_by_run ON checkpoints (run_id, created DESC);
    CREATE INDEX checkpoints_by_id ON checkpoints (checkpoint_id);
    """,
    """
    ALTER TABLE runs ADD COLUMN name TEXT NOT NULL DEFAULT '';
    ALTER TABLE runs ADD COLUMN notes TEXT NOT NULL DEFAULT '';
    ALTER TABLE runs ADD COLUMN config_digest TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE checkpoints ADD COLUMN offline_dataset TEXT NOT NULL DEFAULT '{}';
    """,
    """
    ALTER TABLE runs ADD COLUMN host TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE runs ADD COLUMN code_version TEXT NOT NULL DEFAULT '';
    ALTER TABLE runs ADD COLUMN environment_digest TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE runs ADD COLUMN favorite INTEGER NOT NULL DEFAULT 0;
    """,
)
"""Statements that upgrade each schema version to the next, starting from an empty file."""


class RegistryCorrupt(PalaestraError):
    """The registry file is damaged; all of it can be rebuilt from the run directories."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database and migrate it to the current schema. `RegistryCorrupt` when the file is damaged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    except (sqlite3.OperationalError, OSError) as error:
        raise _unusable(path, error) from None
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        result = connection.execute("PRAGMA quick_check").fetchone()[0]
        if result != "ok":
            raise RegistryCorrupt(f"{path}: {result}")
        _migrate(connection, path)
    except sqlite3.OperationalError as error:
        connection.close()
        if "locked" in str(error) or "unable to open" in str(error) or "full" in str(error):
            raise _unusable(path, error) from None
        raise RegistryCorrupt(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise RegistryCorrupt(f"{path}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def is_intact(connection: sqlite3.Connection) -> bool:
    """Whether an open database passes SQLite's integrity check."""
    try:
        return bool(connection.execute("PRAGMA quick_check").fetchone()[0] == "ok")
    except sqlite3.OperationalError:
        return True  # locked, or no space left: not damaged
    except sqlite3.DatabaseError:
        return False


def open_for_reading(path: Path) -> sqlite3.Connection | None:
    """Open the database read-only; None when there is none.

    A damaged file raises `RegistryCorrupt`, here or at the first query.
    """
    if not path.exists():
        return None
    # A log without an open writer needs a shared-memory file, which a read-only connection may not create.
    for address in (f"{path.resolve().as_uri()}?mode=ro", path.resolve().as_uri()):
        connection = None
        try:
            connection = sqlite3.connect(
                address, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            version = _schema_version(connection)
            connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone()
        except sqlite3.OperationalError:
            if connection is not None:
                connection.close()
            continue
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            raise RegistryCorrupt(f"{path}: {error}") from error
        if version == len(MIGRATIONS):
            return connection
        connection.close()
        if version > len(MIGRATIONS):
            raise _too_new(path, version)
        if not version:
            return None
        # An earlier version wrote it, and no service of this version has opened it yet.
        open_for_writing(path).close()
        return open_for_reading(path)
    raise RegistryCorrupt(f"{path}: cannot be opened")


def move_aside(path: Path) -> Path:
    """Rename a damaged database and its log, and return the new path. If the database is gone, delete the log."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.stem}.corrupt-{stamp}{path.suffix}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.corrupt-{stamp}-{number}{path.suffix}")
    exists = path.exists()
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            if exists:
                file.rename(aside.with_name(aside.name + suffix))
            else:
                file.unlink()
    return aside


def _schema_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = _schema_version(connection)
    if version > len(MIGRATIONS):
        raise _too_new(path, version)
    while version < len(MIGRATIONS):
        # Tables and version change in one transaction, and only one process changes them.
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _schema_version(connection)
            if version < len(MIGRATIONS):
                for statement in MIGRATIONS[version].split(";"):
                    connection.execute(statement)
                version += 1
                connection.execute(f"PRAGMA user_version = {version}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def _unusable(path: Path, error: Exception) -> ConfigError:
    reason, remedy = f"cannot be opened ({error})", "Free disk space, or check the permissions of the file"
    if path.is_dir():
        reason, remedy = "is a directory", "Move it away; the registry is rebuilt from the run directories"
    elif "locked" in str(error):
        reason, remedy = "is locked by another process", "Close that process, for example a database browser"
    return ConfigError("registry", str(path), reason, remedy)


def _too_new(path: Path, version: int) -> ConfigError:
    reason = f"has schema {version}, and this version of Palaestra knows {len(MIGRATIONS)}"
    return ConfigError("registry", str(path), reason, "Update Palaestra, or move the file away to have it rebuilt")
