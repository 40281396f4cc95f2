"""Where an answer stops thinking and where its call is, for models that think in `<think>` and call in `<tool_call>`.

Models draft calls while they think, so only a call after `</think>` counts if there is one. Some forget to close their
thinking before the call, and some close it after the call and say nothing more: then the one call there is counts.
"""

from __future__ import annotations

from palaestra.policy.codecs.json_text import object_at
from palaestra.policy.codecs.reading import Refusal

__all__ = ["CALL", "CALL_END", "call_start", "without_marks"]

CALL, CALL_END = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"


def call_start(text: str) -> int:
    """Where the mark of the call that counts begins; `Refusal` (`no_action`) when there is none."""
    end = _thinking_end(text)
    start = text.find(CALL, end or 0)
    if start >= 0:
        return start
    if end is None or CALL not in text[:end]:
        raise Refusal("no_action", f"the answer has no {CALL}")
    return _call_at_the_end(text, end)


def without_marks(thought: str) -> str:
    """What was thought, without the marks around it."""
    return thought.replace(_THINK, "").replace(_THINK_END, "").strip()


def _thinking_end(text: str) -> int | None:
    """Just behind the mark that ends the thinking; a mark inside the text of a call is none."""
    at, end = 0, text.find(_THINK_END)
    while end >= 0:
        call = text.find(CALL, at, end)
        at = text.find(CALL_END, call) if call >= 0 else -1
        if at < 0 or (at > end and not _is_call(text[call + len(CALL) : at])):
            return end + len(_THINK_END)
        if at > end:
            end = text.find(_THINK_END, at)
    return None


def _is_call(text: str) -> bool:
    try:
        object_at(text, 0)
    except Refusal:
        return False
    return True


def _call_at_the_end(text: str, end: int) -> int:
    thinking = text[: end - len(_THINK_END)].rstrip()
    if thinking.count(CALL) == 1 and thinking.endswith(CALL_END) and not text[end:].strip():
        return thinking.index(CALL)
    raise Refusal("no_action", f"{CALL} stands in the thinking alone, and no call follows {_THINK_END}")
