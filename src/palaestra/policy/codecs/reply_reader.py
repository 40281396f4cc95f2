"""`ReplyReader`: the replies of one episode, read in order, by the model family's codec.

An agent reads with it while it plays, and a learner reads again with it what was recorded: both come to the same
actions or the recording is not what was played. It remembers where the pointer is, which some grammars refer to.
"""

from __future__ import annotations

from palaestra.policy.codecs.codec import ActionCodec, Decoded, Understood
from palaestra.policy.codecs.frame import Frame, ImageRule
from palaestra.sessions.action import Click, Drag, Move, Point, Scroll, UiAction
from palaestra.sessions.screen import Size

__all__ = ["ReplyReader"]


class ReplyReader:
    """Reads the replies of one episode."""

    def __init__(self, codec: ActionCodec, rule: ImageRule) -> None:
        self._codec, self._rule = codec, rule
        self._pointer: Point | None = None

    def frame(self, screen: Size) -> Frame:
        """How the model sees a screen of this size, with the pointer where the replies so far have left it."""
        return self._rule.frame(screen, pointer=self._pointer)

    def read(self, text: str, frame: Frame) -> Decoded:
        """What the next reply says."""
        decoded = self._codec.decode(text, frame)
        if isinstance(decoded, Understood):
            self._pointer = _pointer_after(decoded.action, self._pointer)
        return decoded


def _pointer_after(action: UiAction, before: Point | None) -> Point | None:
    if isinstance(action, Click | Move | Scroll) and action.at is not None:
        return action.at
    return action.path[-1] if isinstance(action, Drag) else before
