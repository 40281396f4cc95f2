"""Requests about the files of runs and their recorded screen episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra.runs.client.requests import SLOW_TIMEOUT_S, ServiceRequests, quote, quote_path
from palaestra.runs.wire import from_json

if TYPE_CHECKING:
    from palaestra.runs.artifacts import Artifact
    from palaestra.runs.trajectories import TrajectoryDocument, TrajectorySummary


class FileRequests(ServiceRequests):
    """What the client can do with the files of runs."""

    def artifacts(self, run_id: str, *, kind: str | None = None, limit: int = 10_000) -> list[Artifact]:
        """The files of a run that can be downloaded, by name."""
        from palaestra.runs.artifacts import Artifact

        rows = self.request("GET", f"/runs/{quote(run_id)}/artifacts", None, kind=kind, limit=limit)
        return [from_json(Artifact, row) for row in rows]

    def artifact_bytes(self, run_id: str, name: str) -> bytes:
        """A file by its `name` in the list. Secrets in texts are replaced."""
        return self.read_bytes(f"/runs/{quote(run_id)}/artifacts/{quote_path(name)}", timeout_s=SLOW_TIMEOUT_S)

    def trajectories(
        self,
        run_id: str,
        *,
        kind: str | None = None,
        evaluation: str | None = None,
        attempt: int | None = None,
        task: str | None = None,
        outcome: str | None = None,
        before: str | None = None,
        limit: int = 200,
    ) -> list[TrajectorySummary]:
        """Recorded screen episodes that match all filters, newest first.

        `kind` is `training` or `evaluation`. For the next page, `before` is the `file` of the last one.
        """
        from palaestra.runs.trajectories import TrajectorySummary

        filters = {"kind": kind, "evaluation": evaluation, "attempt": attempt, "task": task, "outcome": outcome}
        path = f"/runs/{quote(run_id)}/trajectories"
        rows = self.request("GET", path, None, **filters, before=before, limit=limit)
        return [from_json(TrajectorySummary, row) for row in rows]

    def trajectory(self, run_id: str, file: str) -> TrajectoryDocument:
        """One screen episode with its turns, by the `file` of its summary."""
        from palaestra.runs.trajectories import TrajectoryDocument

        path = f"/runs/{quote(run_id)}/trajectories/{quote_path(file)}"
        return from_json(TrajectoryDocument, self.request("GET", path))

    def trajectory_picture(self, run_id: str, file: str, sha256: str) -> bytes:
        """A screen of an episode as it was taken, usually PNG."""
        return self.read_bytes(f"/runs/{quote(run_id)}/trajectories/{quote_path(file)}/pictures/{quote(sha256)}")
