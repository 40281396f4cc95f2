"""The trajectory viewer: one HTML file with the screens, replies and actions of a model.

The data is in inert `<script type="application/json">` blocks, one per trajectory and one per picture, which are parsed
when shown, so a page with a thousand episodes opens quickly. The content security policy allows one script, by its
hash: nothing that a model wrote can run, and nothing is loaded from a network. If the file would become too large, the
pictures are stored in a directory next to it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from palaestra.errors import ConfigError
from palaestra.experience.trajectory import Trajectory, Turn
from palaestra.experience.trajectory_archive import picture_file_name
from palaestra.experience.turn_credit import EpisodeCredit

MAX_BYTES = 256 * 2**20
"""Maximum size of a file with pictures inside; browsers open larger files slowly."""
SEARCHABLE = 2_000
"""Number of characters of the model's text that the list can search."""
TokenTexts = Callable[[Sequence[int]], Sequence[str]]
"""Maps token ids to their texts."""


@dataclass(frozen=True)
class ViewedEpisode:
    """An episode and what is known about it beyond its trajectory."""

    trajectory: Trajectory
    label: str = ""
    """Name of the policy that played it, if the page shows several."""
    credit: EpisodeCredit | None = None
    """Advantage and value of each turn, if it was learned from."""

    @property
    def key(self) -> str:
        """Name of the episode in the address of the page; unique if ids are unique for each label."""
        return episode_key(self.trajectory.episode_id, self.label)


def episode_key(episode_id: str, label: str = "") -> str:
    """Name of an episode in the address of a page."""
    return f"{label}:{episode_id}" if label else episode_id


def viewer_link(page: str, *, key: str = "", task: str = "", label: str = "", unsolved: bool = False) -> str:
    """The address of an episode in a page, or of its first episode of a task, of a label, or that was not solved."""
    if key:
        return f"{quote(page)}#{quote(key, safe='')}"
    filters = {"task": task, "label": label, "outcome": "unsolved" if unsolved else ""}
    return f"{quote(page)}#?{urlencode({name: value for name, value in filters.items() if value}, quote_via=quote)}"


@dataclass(frozen=True)
class ViewerFile:
    """A written page."""

    path: Path
    trajectories: int
    pictures: int
    bytes: int
    """Size of the file without its directory."""
    picture_directory: Path | None
    """Directory of the pictures; None if they are inside the file."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def write_viewer(
    trajectories: Iterable[Trajectory | ViewedEpisode],
    path: Path,
    *,
    title: str = "Trajectories",
    texts: TokenTexts | None = None,
    max_bytes: int = MAX_BYTES,
) -> ViewerFile:
    """Write the page for these trajectories in one pass.

    The page opens on the first episode that was not solved; with two labels, on the first one that the policy of the
    first label solved and the other one did not, if there is any. `texts` maps token ids to texts; without it tokens
    are shown by number. Pictures are stored next to the file if it would exceed `max_bytes` with them; with 0 always.
    """
    beside = path.with_name(f"{path.stem}_pictures")
    _check_output(path, beside)
    # In the same directory, so that the files can be renamed into place.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        working = Path(temporary)
        with (working / "page").open("w", encoding="utf-8", errors="replace") as out:
            page = _Page(out, title, working / "pictures", Vocabulary(texts))
            for one in trajectories:
                page.add(one if isinstance(one, ViewedEpisode) else ViewedEpisode(one))
            inside = page.end(beside=beside.name, max_bytes=max_bytes)
        if beside.is_dir():
            shutil.rmtree(beside)
        if not inside:
            os.replace(page.directory, beside)
        size = (working / "page").stat().st_size
        os.replace(working / "page", path)
    return ViewerFile(path, len(page.rows), len(page.places), size, None if inside else beside)


def _check_output(path: Path, beside: Path) -> None:
    """Raise `ConfigError` if the path cannot be written, or if the pictures would replace other files."""
    if path.is_dir():
        raise ConfigError("output", str(path), "is a directory", "Name a file, such as trajectories.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written ({error.strerror})") from None
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("output", str(path), "cannot be written (no permission)")
    if beside.exists() and not (beside.is_dir() and all(_is_picture(file.name) for file in beside.iterdir())):
        reason = f"its pictures would go to {beside}, where something else is"
        raise ConfigError("output", str(path), reason, "Choose another name")


def _is_picture(name: str) -> bool:
    stem, _, kind = name.rpartition(".")
    return len(stem) == 64 and kind in ("png", "jpeg", "webp", "bin")


class Vocabulary:
    """Distinct token texts. Without a tokenizer, texts are the token ids."""

    def __init__(self, texts: TokenTexts | None = None) -> None:
        self._texts = texts
        self._places: dict[str, int] = {}
        self.by_id = texts is None

    def places(self, ids: Sequence[int]) -> list[int]:
        """Indices of these tokens' texts in `words`."""
        texts = [str(token) for token in ids] if self._texts is None else list(self._texts(ids))
        if len(texts) != len(ids):
            raise ValueError(f"{len(ids)} tokens were given {len(texts)} texts: each needs one.")
        return [self._places.setdefault(text, len(self._places)) for text in texts]

    @property
    def words(self) -> list[str]:
        """The texts by index."""
        return list(self._places)


class _Page:
    """A page being written: text to the file, pictures to a directory until the total size is known."""

    def __init__(self, out: IO[str], title: str, directory: Path, vocabulary: Vocabulary) -> None:
        directory.mkdir()
        self._out, self._title, self.directory, self._vocabulary = out, title, directory, vocabulary
        self.rows: list[dict[str, Any]] = []
        self.places: dict[str, int] = {}
        self._files: list[str] = []
        self._encoded_bytes = 0
        digest = base64.b64encode(hashlib.sha256(_asset("viewer.js").encode()).digest()).decode()
        # A page opened from disk has no origin, so file: is needed.
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data: file: 'self'"
        )
        top = _asset("viewer.html").replace("{{style}}", _asset("viewer.css")).replace("{{policy}}", policy)
        out.write(top.replace("{{title}}", escape(title)))

    def add(self, episode: ViewedEpisode) -> None:
        trajectory = episode.trajectory
        for sha, data in trajectory.pictures.items():
            if sha not in self.places:
                self.places[sha] = len(self._files)
                self._files.append(picture_file_name(data))
                (self.directory / self._files[-1]).write_bytes(data)
                self._encoded_bytes += (len(data) + 2) // 3 * 4 + 64
        details = episode_json(trajectory, self._vocabulary, self.places)
        if episode.credit is not None:
            details["credit"] = episode.credit.to_json()
        self._out.write(_block(f"t{len(self.rows)}", details))
        self.rows.append(list_row(trajectory) | {"key": episode.key, "label": episode.label})

    def end(self, *, beside: str, max_bytes: int) -> bool:
        """Finish the page; returns whether the pictures are inside."""
        out = self._out
        facts: dict[str, Any] = {"title": self._title, "episodes": self.rows}
        facts |= {"words": self._vocabulary.words, "by_id": self._vocabulary.by_id}
        facts |= {"pictures": [name.rpartition(".")[2] for name in self._files], "beside": "", "files": []}
        script = f"<script>{_asset('viewer.js')}</script>\n"
        text_bytes = out.tell() + len(_block("facts", facts)) + len(script.encode())
        inside = text_bytes + self._encoded_bytes <= max_bytes
        if inside:
            for place, name in enumerate(self._files):
                encoded = base64.b64encode((self.directory / name).read_bytes()).decode()
                out.write(f'<script type="text/plain" id="p{place}">{encoded}</script>\n')
        else:
            facts |= {"beside": beside, "files": self._files}
        out.write(f"{_block('facts', facts)}{script}</body>\n</html>\n")
        return inside


def _block(name: str, document: Mapping[str, Any]) -> str:
    # JSON in browsers has no NaN, so it becomes a string.
    clean = json.loads(json.dumps(document, default=str), parse_constant=str)
    # Without "<", the data cannot contain an end tag or a comment.
    text = json.dumps(clean, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _asset(name: str) -> str:
    return (files("palaestra.evaluation") / "assets" / name).read_text(encoding="utf-8")


def list_row(trajectory: Trajectory) -> dict[str, Any]:
    """The row of an episode in the list, as plain JSON."""
    task = trajectory.task
    written = "\n".join(turn.text for turn in trajectory.turns)
    return {
        "id": trajectory.episode_id,
        # Episodes of one group, or of one task, parameters and seed, can be shown side by side.
        "siblings": trajectory.group
        or json.dumps([task.get(name) for name in ("task", "params", "seed")], default=str),
        "task": str(task.get("task", "")),
        "seed": task.get("seed"),
        "outcome": trajectory.outcome.value,
        "reward": trajectory.total_reward(),
        "steps": len(trajectory),
        "versions": list(trajectory.versions),
        "seconds": trajectory.seconds,
        "reason": trajectory.reason,
        "instruction": str(task.get("instruction", "")),
        "written": written[:SEARCHABLE],
    }


def episode_json(trajectory: Trajectory, vocabulary: Vocabulary, places: Mapping[str, int]) -> dict[str, Any]:
    """The details of an episode as plain JSON. `places` maps pictures to indices; -1: not stored."""
    task = trajectory.task
    return {
        "params": task.get("params") or {},
        **{name: task.get(name) for name in ("step_limit", "width", "height")},
        "group": trajectory.group,
        "attempt": trajectory.attempt,
        "session": trajectory.session_id,
        "temperature": trajectory.temperature,
        "codec": trajectory.codec,
        "started_at": trajectory.started_at,
        "detail": dict(trajectory.detail),
        "last": places.get(trajectory.last_picture, -1) if trajectory.last_picture else None,
        "turns": [_turn_json(turn, vocabulary, places) for turn in trajectory.turns],
    }


def _turn_json(turn: Turn, vocabulary: Vocabulary, places: Mapping[str, int]) -> dict[str, Any]:
    return {
        "pictures": [places.get(sha, -1) for sha in turn.pictures],
        "sizes": [list(size) for size in turn.image_sizes],
        "prompt": _run_lengths(vocabulary.places(turn.prompt_ids.tolist())),
        "tokens": vocabulary.places(turn.token_ids.tolist()),
        "log_probs": [round(number, 4) if math.isfinite(number) else None for number in turn.log_probs.tolist()],
        "versions": _run_lengths(turn.versions.tolist()),
        "text": turn.text,
        "action": None if turn.action is None else dict(turn.action),
        "words": "" if turn.action is None else describe_action(turn.action),
        "unreadable": turn.unreadable,
        "reward": turn.reward,
    }


def _run_lengths(numbers: Iterable[int]) -> list[list[int]]:
    """Run-length encoding: a picture is hundreds of equal tokens in a prompt."""
    return [[int(number), sum(1 for _ in group)] for number, group in groupby(numbers)]


def describe_action(action: Mapping[str, Any]) -> str:
    """A description of the action; an unknown kind is shown with its values."""
    kind, button = str(action.get("kind")), action.get("button", "left")
    at = f" at {_point(action['at'])}" if action.get("at") is not None else ""
    if kind == "click":
        held = "".join(f"{key}+" for key in action.get("held") or ())
        times = {2: "double ", 3: "triple "}.get(action.get("times", 1), "")
        return f"{held}{times}{'' if button == 'left' else f'{button} '}click{at or ' where the pointer is'}"
    if kind == "drag":
        path = " → ".join(_point(point) for point in action.get("path") or [])
        return f"drag {'' if button == 'left' else f'({button}) '}{path}"
    if kind == "scroll":
        ways = ((int(action.get("dy", 0)), "down", "up"), (int(action.get("dx", 0)), "right", "left"))
        parts = (f"{more if amount > 0 else less} {abs(amount)}" for amount, more, less in ways if amount)
        return f"scroll {' and '.join(parts)}{at}"
    if kind == "terminate":
        return "declare it done" if action.get("success") else "give up"
    words = {
        "move": f"move to{at.removeprefix(' at')}",
        "type": f"type {action.get('text')!r}",
        "press": f"press {'+'.join(map(str, action.get('keys') or ()))}",
        "wait": f"wait {action.get('seconds')} s",
        "answer": f"answer {action.get('text')!r}",
    }
    return words.get(kind) or f"{kind} { ({key: value for key, value in action.items() if key != 'kind'}) }"


def _point(point: Sequence[Any]) -> str:
    return f"({', '.join(map(str, point))})"
