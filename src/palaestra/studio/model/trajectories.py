"""Episodes of UI agents: the list of a run, one episode turn by turn, and the other episodes of its group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from palaestra.runs.trajectories import TrajectoryDocument, TrajectorySummary, TrajectoryTurn
from palaestra.studio.model.revision import Revised

_MAX_PICTURES = 40
"""Pictures that are kept; a decoded screen takes about four megabytes."""
_MAX_DOCUMENTS = 8


class TrajectoriesModel(Revised):
    """What is known of the trajectories of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id = ""
        self._clear()

    def _clear(self) -> None:
        self.is_loaded = False
        self.search = ""
        self.file = ""
        """The episode that is shown."""
        self.turn = 0
        self._entries: tuple[TrajectorySummary, ...] = ()
        self._documents: dict[str, TrajectoryDocument] = {}
        self._pictures: OrderedDict[str, Any] = OrderedDict()
        self._requested: set[str] = set()

    def open_run(self, run_id: str) -> bool:
        """Show the episodes of a run; whether it is another one."""
        if run_id == self.run_id:
            return False
        self.run_id = run_id
        self._clear()
        self.touch()
        return True

    def set_entries(self, run_id: str, entries: Sequence[TrajectorySummary]) -> None:
        """The list has arrived."""
        if run_id == self.run_id:
            self._entries, self.is_loaded = tuple(entries), True
            self.touch()

    def __len__(self) -> int:
        return len(self._entries)

    def set_search(self, text: str) -> None:
        """Filter the list."""
        if text != self.search:
            self.search = text
            self.touch()

    def visible(self) -> list[TrajectorySummary]:
        """The episodes that match the search, newest first."""
        words = self.search.lower().split()
        return [
            entry
            for entry in self._entries
            if all(word in f"{entry.task} {entry.outcome} {entry.instruction} {entry.seed}".lower() for word in words)
        ]

    def open(self, file: str) -> None:
        """Show an episode."""
        if file != self.file:
            self.file, self.turn = file, 0
            self.touch()

    def set_document(self, file: str, document: TrajectoryDocument) -> None:
        """An episode has arrived."""
        self._documents.pop(file, None)
        self._documents[file] = document
        if len(self._documents) > _MAX_DOCUMENTS:
            del self._documents[next(iter(self._documents))]
        self.seek(self.turn)
        self.touch()

    @property
    def document(self) -> TrajectoryDocument | None:
        """The episode that is shown; None until it has arrived."""
        return self._documents.get(self.file)

    @property
    def entry(self) -> TrajectorySummary | None:
        """The summary of the episode that is shown."""
        return next((entry for entry in self._entries if entry.file == self.file), None)

    def group(self) -> list[TrajectorySummary]:
        """The episodes of the group of the one that is shown, in their order."""
        shown = self.entry
        if shown is None or not shown.group:
            return []
        return sorted((entry for entry in self._entries if entry.group == shown.group), key=lambda one: one.file)

    def seek(self, turn: int) -> None:
        """Show another turn."""
        count = len(self.turns)
        wanted = max(0, min(turn, count - 1)) if count else 0
        if wanted != self.turn:
            self.turn = wanted
            self.touch()

    @property
    def turns(self) -> Sequence[TrajectoryTurn]:
        """The turns of the episode that is shown."""
        document = self.document
        return () if document is None else document.turns

    def picture(self, sha256: str) -> Any:
        """A picture that has arrived; None otherwise."""
        return self._pictures.get(sha256)

    def set_picture(self, sha256: str, picture: Any) -> None:
        """A picture has arrived."""
        self._pictures[sha256] = picture
        while len(self._pictures) > _MAX_PICTURES:
            old, _ = self._pictures.popitem(last=False)
            self._requested.discard(old)
        self.touch()

    def pictures_to_load(self, limit: int = 4) -> list[tuple[str, str]]:
        """File and hash of the next pictures to request, those nearest to the turn that is shown first."""
        turns = self.turns
        nearest = sorted(range(len(turns)), key=lambda index: abs(index - self.turn))
        wanted = list(dict.fromkeys(screen for index in nearest if (screen := screen_of(turns[index]))))
        # More than can be kept would push each other out for ever.
        wanted = wanted[:_MAX_PICTURES]
        missing = [sha256 for sha256 in wanted if sha256 not in self._requested][:limit]
        self._requested |= set(missing)
        return [(self.file, sha256) for sha256 in missing]


def screen_of(turn: TrajectoryTurn) -> str:
    """Hash of the screen that a turn replies to; empty without one."""
    return turn.pictures[-1].sha256 if turn.pictures else ""
