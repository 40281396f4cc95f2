"""Recorded episodes in the window: those of plays, with replay and export, and those of UI agents, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError, PalaestraError
from palaestra.runs.play.state import EpisodeRecord
from palaestra.studio.model.replay import EpisodesModel, ReplayModel
from palaestra.studio.model.trajectories import TrajectoriesModel
from palaestra.studio.request import Requests, split_error


class EpisodeLibrary:
    """The recorded episodes, and the one that is replayed."""

    def __init__(self, requests: Requests, decode: Callable[[bytes], Any]) -> None:
        self._requests, self._decode = requests, decode
        self.episodes = EpisodesModel()
        self.replay = ReplayModel()

    def refresh(self) -> None:
        """Read the list of episodes."""
        self._requests.ask(
            "The episodes cannot be listed",
            lambda service: service.episodes(),
            self.episodes.set_all,
            key="episodes",
        )

    def open(self, record: EpisodeRecord) -> None:
        """Replay an episode."""
        self.replay.open(record)
        episode_id = record.episode_id
        if record.problem:
            return
        self._requests.ask(
            "The episode cannot be read",
            lambda service: service.episode_steps(episode_id),
            lambda steps: self.replay.set_steps(episode_id, steps),
            key="replay",
            failed=lambda error: self._fail(episode_id, error),
        )

    def load_pictures(self) -> None:
        """Read the pictures that are shown next."""
        record = self.replay.record
        if record is None or self.replay.problem:
            return
        for position in self.replay.pictures_to_load():
            self._read_picture(record.episode_id, position)

    def _read_picture(self, episode_id: str, position: int) -> None:
        step = self.replay.steps[position].report.step
        self._requests.ask(
            "A picture cannot be read",
            lambda service: self._decode(service.episode_picture(episode_id, step)),
            lambda picture: self.replay.set_picture(episode_id, position, picture),
            failed=lambda error: self._fail(episode_id, error),
        )

    def export(self, episode_id: str, path: Path) -> None:
        """Save an episode as a video."""
        self._requests.notices.add("info", "Encoding the video …", key="export")

        def save(service: Any) -> Path:
            data = service.export_episode(episode_id)
            try:
                path.write_bytes(data)
            except OSError as error:
                raise ConfigError("file", str(path), f"cannot be written ({error.strerror})") from None
            return path

        self._requests.ask(
            "The video was not saved",
            save,
            lambda saved: self._requests.notices.add("success", f"The video is in {saved}.", key="export"),
        )

    def delete(self, episode_id: str) -> None:
        """Delete an episode."""

        def finish(_: object) -> None:
            self.episodes.remove(episode_id)
            if self.replay.record is not None and self.replay.record.episode_id == episode_id:
                self.replay.close()

        self._requests.ask("The episode was not deleted", lambda service: service.delete_episode(episode_id), finish)

    def _fail(self, episode_id: str, error: PalaestraError) -> None:
        shown = self.replay.record
        if shown is not None and shown.episode_id == episode_id:
            self.replay.fail(" ".join(split_error(error)).strip())


class TrajectoryBrowser:
    """The trajectories of a run."""

    def __init__(self, requests: Requests, decode: Callable[[bytes], Any]) -> None:
        self._requests, self._decode = requests, decode
        self.model = TrajectoriesModel()

    def show_run(self, run_id: str) -> None:
        """List the episodes of a run."""
        if not self.model.open_run(run_id):
            return
        self.refresh()

    def refresh(self) -> None:
        """Read the list again."""
        run_id = self.model.run_id
        if run_id:
            self._requests.ask(
                "The episodes cannot be listed",
                lambda service: service.trajectories(run_id, limit=500),
                lambda entries: self.model.set_entries(run_id, entries),
                key="trajectories",
                failed=lambda error: self.model.set_entries(run_id, ()),
            )

    def open(self, file: str) -> None:
        """Show an episode."""
        run_id = self.model.run_id
        self.model.open(file)
        self._requests.ask(
            "The episode cannot be read",
            lambda service: service.trajectory(run_id, file),
            lambda document: self.model.set_document(file, document) if self.model.run_id == run_id else None,
            key="trajectory",
        )

    def load_pictures(self) -> None:
        """Read the pictures of the turns that are shown."""
        for file, sha256 in self.model.pictures_to_load():
            self._read_picture(self.model.run_id, file, sha256)

    def _read_picture(self, run_id: str, file: str, sha256: str) -> None:
        self._requests.ask(
            "A picture cannot be read",
            lambda service: self._decode(service.trajectory_picture(run_id, file, sha256)),
            lambda picture: self.model.set_picture(sha256, picture),
        )
