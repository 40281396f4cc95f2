"""`Revised`: base class of models that views compare with what they last drew."""

from __future__ import annotations


class Revised:
    """A model with a revision. A view that remembers the revision it drew knows whether it has to draw again."""

    def __init__(self) -> None:
        self.revision = 0

    def touch(self) -> None:
        """Count a change."""
        self.revision += 1
