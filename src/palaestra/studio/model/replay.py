"""Recorded episodes: the list, and one episode that is replayed step by step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from palaestra.runs.play.state import EpisodeRecord, EpisodeStep
from palaestra.studio.model.revision import Revised

_MAX_PICTURES = 100
"""Pictures that are kept; a decoded one takes about a megabyte, that of a screen four."""
_AHEAD = 24
"""Pictures that are loaded before they are shown."""
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)


class EpisodesModel(Revised):
    """The recorded episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = False
        self.search = ""
        self._records: tuple[EpisodeRecord, ...] = ()

    def set_all(self, records: Sequence[EpisodeRecord]) -> None:
        """The list has arrived."""
        self._records, self.is_loaded = tuple(records), True
        self.touch()

    def remove(self, episode_id: str) -> None:
        """An episode was deleted."""
        self._records = tuple(one for one in self._records if one.episode_id != episode_id)
        self.touch()

    def set_search(self, text: str) -> None:
        """Filter the list."""
        if text != self.search:
            self.search = text
            self.touch()

    def __len__(self) -> int:
        return len(self._records)

    def visible(self) -> list[EpisodeRecord]:
        """The episodes that match the search, newest first."""
        words = self.search.lower().split()
        return [
            one
            for one in self._records
            if all(
                word in f"{one.episode_id} {one.env_id} {one.policy} {one.mode} {one.outcome}".lower() for word in words
            )
        ]


class ReplayModel(Revised):
    """One episode, the step that is shown, and the pictures that have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self._clear()

    def _clear(self) -> None:
        self.record: EpisodeRecord | None = None
        self.steps: tuple[EpisodeStep, ...] = ()
        self.position = 0
        self.is_playing = False
        self.speed = 1.0
        self.problem = ""
        self._pictures: OrderedDict[int, Any] = OrderedDict()
        self._requested: set[int] = set()
        self._elapsed = 0.0

    def open(self, record: EpisodeRecord) -> None:
        """Show an episode; its steps arrive later."""
        self._clear()
        self.record = record
        self.problem = record.problem
        self.touch()

    def close(self) -> None:
        """Show no episode."""
        self._clear()
        self.touch()

    def set_steps(self, episode_id: str, steps: Sequence[EpisodeStep]) -> None:
        """The steps have arrived."""
        if self.record is not None and self.record.episode_id == episode_id:
            self.steps = tuple(steps)
            self.seek(self.position)
            self.touch()

    def fail(self, text: str) -> None:
        """The episode cannot be read."""
        self.problem, self.is_playing = text, False
        self.touch()

    @property
    def step(self) -> EpisodeStep | None:
        """The step that is shown."""
        return self.steps[self.position] if self.position < len(self.steps) else None

    def seek(self, position: int) -> None:
        """Show another step."""
        wanted = max(0, min(position, len(self.steps) - 1))
        if wanted != self.position:
            self.position = wanted
            self.touch()

    def toggle(self) -> None:
        """Play or pause; at the end, play from the beginning."""
        if not self.is_playing and self.position >= len(self.steps) - 1:
            self.position = 0
        self.is_playing = not self.is_playing and len(self.steps) > 1
        self._elapsed = 0.0
        self.touch()

    def set_speed(self, speed: float) -> None:
        """Change the pace."""
        self.speed = speed
        self.touch()

    def advance(self, seconds: float) -> None:
        """Let time pass while the replay is running."""
        if not self.is_playing or self.record is None:
            return
        self._elapsed += seconds * self.speed * self.record.fps
        whole = int(self._elapsed)
        if whole:
            self._elapsed -= whole
            self.seek(self.position + whole)
            if self.position >= len(self.steps) - 1:
                self.is_playing = False
                self.touch()

    def picture(self) -> Any:
        """The picture of the step that is shown, or the last one before it that has arrived; None without one."""
        for position in range(self.position, -1, -1):
            if position in self._pictures:
                self._pictures.move_to_end(position)
                return self._pictures[position]
            if self.steps and self.steps[position].has_picture:
                return None
        return None

    def set_picture(self, episode_id: str, position: int, picture: Any) -> None:
        """A picture has arrived."""
        if self.record is None or self.record.episode_id != episode_id:
            return
        self._pictures[position] = picture
        while len(self._pictures) > _MAX_PICTURES:
            old, _ = self._pictures.popitem(last=False)
            self._requested.discard(old)
        if position <= self.position:
            self.touch()

    def pictures_to_load(self, limit: int = 4) -> list[int]:
        """The next pictures to request: that of the step that is shown first, then those ahead of it."""
        wanted = [*range(self.position, min(self.position + _AHEAD, len(self.steps)))]
        if self.steps and not self.steps[self.position].has_picture:
            earlier = next((p for p in range(self.position, -1, -1) if self.steps[p].has_picture), None)
            wanted = [*([] if earlier is None else [earlier]), *wanted]
        missing = [p for p in wanted if self.steps[p].has_picture and p not in self._requested]
        self._requested |= set(missing[:limit])
        return missing[:limit]
