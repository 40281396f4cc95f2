"""The Python client of the run service, which it starts automatically.

    service = TrainerService()
    run_id = service.start_run("cartpole")
    for line in service.stream_log(run_id):
        ...

Every method sends one request, blocks, and may be called from any thread. Streams reconnect and continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from palaestra.errors import ConfigError
from palaestra.runs.client.catalogue_requests import CatalogueRequests
from palaestra.runs.client.checkpoint_requests import CheckpointRequests
from palaestra.runs.client.file_requests import FileRequests
from palaestra.runs.client.metric_requests import MetricRequests
from palaestra.runs.client.requests import SLOW_TIMEOUT_S, quote, quote_path
from palaestra.runs.client.run_requests import RunRequests
from palaestra.runs.client.sweep_requests import SweepRequests
from palaestra.runs.play.state import EpisodeRecord, EpisodeStep, PlayRecord
from palaestra.runs.wire import from_json

if TYPE_CHECKING:
    from palaestra.runs.client.play import PlayConnection
    from palaestra.runs.machine import MachineUsage
    from palaestra.runs.notifications.webhooks import WebhookStatus, WebhookTest
    from palaestra.runs.play.spec import PlaySpec
    from palaestra.runs.presets import Preset

_STEPS_PER_PAGE = 10_000
"""The service sends no more steps of an episode at once."""


class TrainerService(RunRequests, SweepRequests, MetricRequests, CheckpointRequests, FileRequests, CatalogueRequests):
    """The run service of a state directory, or the one at a URL."""

    def machine(self) -> MachineUsage:
        """Usage of the service's machine, its queue, and the service itself."""
        from palaestra.runs.machine import MachineUsage

        return from_json(MachineUsage, self.request("GET", "/machine"))

    def webhooks(self) -> list[WebhookStatus]:
        """The configured webhooks, and what was sent to them since the service started."""
        from palaestra.runs.notifications.webhooks import WebhookStatus

        return [from_json(WebhookStatus, row) for row in self.request("GET", "/webhooks")]

    def test_webhooks(self) -> list[WebhookTest]:
        """Send a test notification to every webhook, with one try each, and wait for the answers."""
        from palaestra.runs.notifications.webhooks import WebhookTest

        return [from_json(WebhookTest, row) for row in self.request("POST", "/webhooks/test", {})]

    def presets(self, kind: str | None = None) -> list[Preset]:
        """Named values of forms of a kind (default: of all kinds), such as `train/cleanrl/dqn`."""
        from palaestra.runs.presets import Preset

        return [from_json(Preset, row) for row in self.request("GET", "/presets", kind=kind)]

    def save_preset(self, kind: str, name: str, values: Mapping[str, object]) -> Preset:
        """Create or replace a preset."""
        from palaestra.runs.presets import Preset

        return from_json(Preset, self.request("PUT", _preset_path(kind, name), {"values": dict(values)}))

    def delete_preset(self, kind: str, name: str) -> Preset:
        """Delete a preset."""
        from palaestra.runs.presets import Preset

        return from_json(Preset, self.request("DELETE", _preset_path(kind, name)))

    def start_play(self, spec: PlaySpec) -> PlayRecord:
        """Start a play; returns when its environment is ready."""
        return from_json(PlayRecord, self.request("POST", "/play", {"spec": spec.model_dump(mode="json")}))

    def plays(self) -> list[PlayRecord]:
        """The plays of the service, newest first."""
        return [from_json(PlayRecord, row) for row in self.request("GET", "/play")]

    def stop_play(self, play_id: str) -> PlayRecord:
        """End a play."""
        return from_json(PlayRecord, self.request("DELETE", f"/play/{quote(play_id)}"))

    def open_play(self, play_id: str) -> PlayConnection:
        """Watch and control a play."""
        from palaestra.runs.client.play import PlayConnection  # needs the package websockets

        return PlayConnection(self._endpoint(False), play_id)

    def activate_checkpoint(
        self, play_id: str, checkpoint: str, *, deterministic: bool = True, consent: str = ""
    ) -> PlayRecord:
        """Load a policy into a play, in the background; the state of the play reports the result."""
        body = {"checkpoint": checkpoint, "deterministic": deterministic, "consent": consent}
        return from_json(PlayRecord, self.request("POST", f"/play/{quote(play_id)}/policy", body))

    def episodes(self, *, env: str | None = None, play: str | None = None) -> list[EpisodeRecord]:
        """Recorded episodes, newest first."""
        return [from_json(EpisodeRecord, row) for row in self.request("GET", "/episodes", env=env, play=play)]

    def episode_steps(self, episode_id: str, first: int = 0, count: int | None = None) -> list[EpisodeStep]:
        """The steps of an episode; step 0 is its beginning."""
        path, steps = f"/episodes/{quote(episode_id)}/steps", list[EpisodeStep]()
        while count is None or len(steps) < count:
            size = _STEPS_PER_PAGE if count is None else min(_STEPS_PER_PAGE, count - len(steps))
            rows = self.request("GET", path, first=first + len(steps), count=size)
            steps += (from_json(EpisodeStep, row) for row in rows)
            if len(rows) < size:
                break
        return steps

    def episode_picture(self, episode_id: str, step: int) -> bytes:
        """The picture of a step, or the last one before it."""
        return self.read_bytes(f"/episodes/{quote(episode_id)}/pictures/{step}")

    def export_episode(self, episode_id: str) -> bytes:
        """An episode as a video in WebM format."""
        return self.read_bytes(f"/episodes/{quote(episode_id)}/video", timeout_s=SLOW_TIMEOUT_S)

    def delete_episode(self, episode_id: str) -> EpisodeRecord:
        """Delete a recorded episode."""
        return from_json(EpisodeRecord, self.request("DELETE", f"/episodes/{quote(episode_id)}"))


def _preset_path(kind: str, name: str) -> str:
    if "/" in name:
        # The service would take the part before it for a part of the kind.
        raise ConfigError("preset", name, "the name contains a slash", "Choose a name without one")
    return f"/presets/{quote_path(kind)}/{quote(name)}"
