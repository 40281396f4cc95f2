"""Requests about the files of runs and their recorded screen episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra.runs.client.requests import SLOW_TIMEOUT_S, ServiceRequests, quote, quote_path
from palaestra.runs.wire import from_json

if TYPE_CHECKING:
    from palaestra.runs.artifacts import Artifact


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
