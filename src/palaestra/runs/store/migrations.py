"""How the registry's tables came to be as they are. The number of a step is the schema it starts from."""

from __future__ import annotations

__all__ = ["MIGRATIONS"]

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
)
