"""A trajectory as the viewer's page shows it: plain JSON, actions in words, tokens by their place in one vocabulary.

Nothing here is HTML. Whatever a model wrote stays text to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from palaestra.experience.trajectory import Trajectory, Turn

__all__ = ["TokenTexts", "Vocabulary", "action_words", "listed", "record"]

TokenTexts = Callable[[Sequence[int]], Sequence[str]]
"""Token ids to the text of each."""

SEARCHED = 2_000
"""How many characters of what a model wrote the list can be searched by."""


class Vocabulary:
    """Every token text once. Without a tokenizer the texts are the ids themselves."""

    def __init__(self, texts: TokenTexts | None = None) -> None:
        self._texts = texts
        self._places: dict[str, int] = {}
        self.by_id = texts is None

    def places(self, ids: Sequence[int]) -> list[int]:
        """Where the texts of these tokens stand in `words`."""
        ids = [int(token) for token in ids]
        found = [str(token) for token in ids] if self._texts is None else list(self._texts(ids))
        if len(found) != len(ids):
            raise ValueError(f"{len(ids)} tokens were given {len(found)} texts: each needs one.")
        return [self._places.setdefault(text, len(self._places)) for text in found]

    @property
    def words(self) -> list[str]:
        """The texts, in order of their places."""
        return list(self._places)


def listed(trajectory: Trajectory) -> dict[str, Any]:
    """What the list of episodes shows and is searched by."""
    task = trajectory.task
    written = "\n".join(turn.text for turn in trajectory.turns)
    return {
        "id": trajectory.episode_id, "task": str(task.get("task", "")), "seed": task.get("seed"),
        "outcome": trajectory.outcome.value, "reward": trajectory.total_reward(), "steps": len(trajectory),
        "versions": list(trajectory.versions), "seconds": trajectory.seconds, "reason": trajectory.reason,
        "instruction": str(task.get("instruction", "")), "written": written[:SEARCHED],
    }  # fmt: skip


def record(trajectory: Trajectory, vocabulary: Vocabulary, places: Mapping[str, int]) -> dict[str, Any]:
    """Everything else. `places` says where each picture stands; one that is not there was never kept."""
    task = trajectory.task
    return {
        "params": task.get("params") or {}, "step_limit": task.get("step_limit"), "width": task.get("width"),
        "height": task.get("height"), "group": trajectory.group, "attempt": trajectory.attempt,
        "session": trajectory.session_id, "temperature": trajectory.temperature, "codec": trajectory.codec,
        "started_at": trajectory.started_at, "detail": dict(trajectory.detail),
        "last": places.get(trajectory.last_picture, -1) if trajectory.last_picture else None,
        "turns": [_turn(turn, vocabulary, places) for turn in trajectory.turns],
    }  # fmt: skip


def _turn(turn: Turn, vocabulary: Vocabulary, places: Mapping[str, int]) -> dict[str, Any]:
    return {
        "pictures": [places.get(sha, -1) for sha in turn.pictures], "sizes": [list(size) for size in turn.image_sizes],
        "prompt": _runs(vocabulary.places(turn.prompt_ids.tolist())),
        "tokens": vocabulary.places(turn.token_ids.tolist()),
        "log_probs": [round(number, 4) if math.isfinite(number) else None for number in turn.log_probs.tolist()],
        "versions": _runs(turn.versions.tolist()), "text": turn.text,
        "action": None if turn.action is None else dict(turn.action),
        "words": "" if turn.action is None else action_words(turn.action),
        "unreadable": turn.unreadable, "reward": turn.reward,
    }  # fmt: skip


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Number and how often in a row: a picture is hundreds of equal tokens in a prompt."""
    return [[int(number), sum(1 for _ in group)] for number, group in groupby(numbers)]


def action_words(action: Mapping[str, Any]) -> str:
    """The action in words; what is unknown is named, not hidden."""
    kind = str(action.get("kind"))
    at = f" at {_point(action['at'])}" if action.get("at") is not None else ""
    held = "".join(f"{key}+" for key in action.get("held") or ())
    if kind == "click":
        times = {2: "double ", 3: "triple "}.get(action.get("times", 1), "")
        button = action.get("button", "left")
        return f"{held}{times}{'' if button == 'left' else f'{button} '}click{at or ' where the pointer is'}"
    if kind == "drag":
        path = action.get("path") or []
        button = action.get("button", "left")
        return f"drag {'' if button == 'left' else f'({button}) '}{' → '.join(_point(point) for point in path)}"
    if kind == "scroll":
        return f"scroll {_wheel(int(action.get('dx', 0)), int(action.get('dy', 0)))}{at}"
    if kind == "terminate":
        return "declare it done" if action.get("success") else "give up"
    words = {
        "move": f"move to{at.removeprefix(' at')}", "type": f"type {action.get('text')!r}",
        "press": f"press {'+'.join(map(str, action.get('keys') or ()))}", "wait": f"wait {action.get('seconds')} s",
        "answer": f"answer {action.get('text')!r}",
    }  # fmt: skip
    return words.get(kind) or f"{kind} { ({key: value for key, value in action.items() if key != 'kind'}) }"


def _wheel(dx: int, dy: int) -> str:
    ways = ((dy, "down", "up"), (dx, "right", "left"))
    return " and ".join(f"{more if amount > 0 else less} {abs(amount)}" for amount, more, less in ways if amount)


def _point(point: Sequence[Any]) -> str:
    return f"({', '.join(map(str, point))})"
