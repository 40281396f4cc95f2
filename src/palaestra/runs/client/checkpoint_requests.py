"""Requests about checkpoints and clips."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.errors import CheckpointError
from palaestra.runs.client.requests import SLOW_TIMEOUT_S, ServiceRequests, quote, quote_path
from palaestra.runs.record import CheckpointRecord, CheckpointVerification
from palaestra.runs.wire import from_json

if TYPE_CHECKING:
    from palaestra.runs.checkpoints.deploy import Deployment
    from palaestra.runs.video.clip import NamedClip


class CheckpointRequests(ServiceRequests):
    """What the client can do with checkpoints and clips."""

    def checkpoints(self, **filters: object) -> list[CheckpointRecord]:
        """Checkpoints that match the filters `run`, `agent` and `env`, newest first."""
        return [from_json(CheckpointRecord, row) for row in self.request("GET", "/checkpoints", None, **filters)]

    def verify_checkpoint(self, checkpoint_id: str) -> CheckpointVerification:
        """Read every byte of a checkpoint and compare its hash with the saved one."""
        path = f"/checkpoints/{quote(checkpoint_id)}/verify"
        return from_json(CheckpointVerification, self.request("POST", path))

    def checkpoint_bytes(self, checkpoint_id: str) -> bytes:
        """A checkpoint: the bytes of its file, or a tar of its directory. `CheckpointError` if they are damaged."""
        from palaestra.runs.artifacts import CONTENT_SHA256

        path = f"/checkpoints/{quote(checkpoint_id)}/bytes"
        data, headers = self.read_file(path, timeout_s=SLOW_TIMEOUT_S)
        if hashlib.sha256(data).hexdigest() != headers.get(CONTENT_SHA256):
            reason, remedy = "its bytes do not have its SHA-256: it was changed or damaged", "Use another checkpoint"
            raise CheckpointError("checkpoint", checkpoint_id, reason, remedy)
        return data

    def import_checkpoint(
        self, path: Path | str, *, agent_id: str = "", env_id: str = "", env_step: int | None = None
    ) -> CheckpointRecord:
        """Copy a checkpoint from the service's machine, after checking that it holds only weights and no code."""
        body = {"path": str(path), "agent_id": agent_id, "env_id": env_id, "env_step": env_step}
        return from_json(CheckpointRecord, self.request("POST", "/checkpoints/import", body))

    def deployments(self) -> list[Deployment]:
        """The current deployment of every environment."""
        from palaestra.runs.checkpoints.deploy import Deployment

        return [from_json(Deployment, row) for row in self.request("GET", "/deployments")]

    def deploy(self, checkpoint_id: str, env_id: str | None = None) -> Deployment:
        """Deploy a checkpoint in an environment (default: its own), after it has played an episode there."""
        from palaestra.runs.checkpoints.deploy import Deployment

        path = f"/checkpoints/{quote(checkpoint_id)}/deploy"
        return from_json(Deployment, self.request("POST", path, {"env_id": env_id}))

    def withdraw(self, env_id: str) -> Deployment | None:
        """Restore the previous deployment of an environment; None when there was none."""
        from palaestra.runs.checkpoints.deploy import Deployment

        previous = self.request("POST", "/deployments/back", {"env_id": env_id})
        return None if previous is None else from_json(Deployment, previous)

    def videos(self, run_id: str) -> list[NamedClip]:
        """The clips of a run, newest first."""
        from palaestra.runs.video.clip import NamedClip

        return [from_json(NamedClip, row) for row in self.request("GET", f"/runs/{quote(run_id)}/videos")]

    def video_bytes(self, run_id: str, name: str) -> bytes:
        """The file of a clip, by its `name` in the list."""
        return self.read_bytes(f"/runs/{quote(run_id)}/videos/{quote_path(name)}")

    def record_video(self, run_id: str, checkpoint_id: str | None = None, *, frames: int = 200) -> NamedClip:
        """Play a checkpoint (default: the newest) and record a clip. Returns when the clip is complete."""
        from palaestra.runs.video.clip import NamedClip

        body = {"checkpoint_id": checkpoint_id, "frames": frames}
        return from_json(NamedClip, self.request("POST", f"/runs/{quote(run_id)}/videos", body))
