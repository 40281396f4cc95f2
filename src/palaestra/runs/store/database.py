"""The SQLite file under the registry: opened to write by the one service, opened to read by anybody.

Write-ahead log, so that readers never wait for the service. A file that is damaged is recognised here and never
repaired: `RegistryCorrupt` says so and the service rebuilds it from the run directories.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from palaestra.errors import ConfigError, PalaestraError
from palaestra.runs.store.migrations import MIGRATIONS

__all__ = ["RegistryCorrupt", "is_sound", "open_reading", "open_writing", "set_aside"]

_BUSY_S = 5.0


class RegistryCorrupt(PalaestraError):
    """The registry's file is damaged; everything in it can be rebuilt from the run directories."""


def open_writing(path: Path) -> sqlite3.Connection:
    """The database with its tables as they are today. `RegistryCorrupt` when the file is damaged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    except (sqlite3.OperationalError, OSError) as error:
        raise _unusable(path, error) from None
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        verdict = connection.execute("PRAGMA quick_check").fetchone()[0]
        if verdict != "ok":
            raise RegistryCorrupt(f"{path}: {verdict}")
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


def is_sound(connection: sqlite3.Connection) -> bool:
    """Whether a database that is open is whole."""
    try:
        return bool(connection.execute("PRAGMA quick_check").fetchone()[0] == "ok")
    except sqlite3.OperationalError:
        return True  # locked or without space: that is no damage
    except sqlite3.DatabaseError:
        return False


def open_reading(path: Path) -> sqlite3.Connection | None:
    """The database to look at; None when there is none. A damaged one raises `RegistryCorrupt`, here or at a query."""
    if not path.exists():
        return None
    # A log that nobody has open needs a shared-memory file beside it, which may have to be made; hence the second try.
    for address in (f"{path.resolve().as_uri()}?mode=ro", path.resolve().as_uri()):
        connection = None
        try:
            connection = sqlite3.connect(
                address, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone()
        except sqlite3.OperationalError:
            if connection is not None:
                connection.close()
            continue
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            raise RegistryCorrupt(f"{path}: {error}") from error
        if version > len(MIGRATIONS):
            connection.close()
            raise _newer(path, version)
        if not version:
            connection.close()
            return None
        if version < len(MIGRATIONS):
            # Written by an earlier version, and no service of this one has opened it yet.
            connection.close()
            open_writing(path).close()
            return open_reading(path)
        return connection
    raise RegistryCorrupt(f"{path}: cannot be opened")


def set_aside(path: Path) -> Path:
    """Move a damaged database out of the way, its log with it; where it is now. Of one that is gone the log goes."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.stem}.corrupt-{stamp}{path.suffix}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.corrupt-{stamp}-{number}{path.suffix}")
    gone = not path.exists()
    for tail in ("", "-wal", "-shm"):
        found = path.with_name(path.name + tail)
        with contextlib.suppress(FileNotFoundError):
            if gone:
                found.unlink()
            else:
                found.rename(aside.with_name(aside.name + tail))
    return aside


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise _newer(path, version)
    while version < len(MIGRATIONS):
        # Tables and number change together or not at all, and only one process changes them.
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
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
    reason, remedy = f"cannot be opened ({error})", "Free the disk, or look at who may read and write it"
    if path.is_dir():
        reason, remedy = "is a directory", "Move it away; the registry is made anew from the run directories"
    elif "locked" in str(error):
        reason, remedy = "is held by another process", "End it, for example a database browser"
    return ConfigError("registry", str(path), reason, remedy)


def _newer(path: Path, version: int) -> ConfigError:
    reason = f"has schema {version}, and this version of Palaestra knows {len(MIGRATIONS)}"
    return ConfigError("registry", str(path), reason, "Update Palaestra, or move the file away to have it rebuilt")
