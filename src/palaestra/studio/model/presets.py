"""Named sets of values of a form."""

from __future__ import annotations

from collections.abc import Sequence

from palaestra.runs.presets import Preset
from palaestra.studio.model.revision import Revised


class PresetsModel(Revised):
    """The presets of each kind that has been read."""

    def __init__(self) -> None:
        super().__init__()
        self._presets: dict[str, tuple[Preset, ...]] = {}

    def set_all(self, kind: str, presets: Sequence[Preset]) -> None:
        """The presets of a kind have arrived."""
        self._presets[kind] = tuple(presets)
        self.touch()

    def names(self, kind: str) -> list[str]:
        """The names of the presets of a kind."""
        return [preset.name for preset in self._presets.get(kind, ())]

    def get(self, kind: str, name: str) -> Preset | None:
        """A preset by its name."""
        return next((preset for preset in self._presets.get(kind, ()) if preset.name == name), None)
