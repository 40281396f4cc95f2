"""Episodes of UI agents from the window: the list of a run, and one episode turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palaestra.studio.model.trajectories import TrajectoriesModel
from palaestra.studio.request import Requests


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
            lambda document: self.model.set_document(file, document),
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
