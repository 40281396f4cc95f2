"""The trajectory viewer: one HTML file that shows what a model saw, wrote and did.

The page carries its data in inert `<script type="application/json">` blocks, one per trajectory and one per picture,
parsed and decoded when somebody looks at them; so a thousand episodes open at once. Its one script is named by hash in
the page's own security policy: nothing that a model wrote can run, and nothing is ever loaded from a network. When the
pictures would make the file too large they lie beside it, in a directory of their own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from palaestra.errors import ConfigError
from palaestra.experience.picture_kind import picture_kind
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.viewer_record import TokenTexts, Vocabulary, listed, record

__all__ = ["MAX_BYTES", "Written", "write_viewer"]

MAX_BYTES = 256 * 2**20
"""Up to this size the pictures are inside the file; browsers take their time with more."""


@dataclass(frozen=True)
class Written:
    """What came of it."""

    path: Path
    trajectories: int
    pictures: int
    bytes: int
    """Of the file alone."""
    picture_directory: Path | None
    """Where the pictures are when they are not inside."""

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        beside = self.picture_directory
        return {
            "path": str(self.path), "trajectories": self.trajectories, "pictures": self.pictures,
            "bytes": self.bytes, "picture_directory": None if beside is None else str(beside),
        }  # fmt: skip


def write_viewer(
    trajectories: Iterable[Trajectory], path: Path, *, title: str = "Trajectories", texts: TokenTexts | None = None,
    max_bytes: int = MAX_BYTES,
) -> Written:  # fmt: skip
    """Write the page for these trajectories, taken one at a time, in one pass.

    `texts` turns token ids into their texts; without it tokens are shown by number. Pictures lie beside the file when
    it would exceed `max_bytes` with them; with 0 they always do.
    """
    beside = path.with_name(f"{path.stem}_pictures")
    _check(path, beside)
    with ExitStack() as stack:
        # In the same directory, so that what is finished can be renamed into place.
        working = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")))
        page = _Page(working, Vocabulary(texts))
        with (working / "page").open("w", encoding="utf-8", errors="replace") as out:
            page.begin(out, title)
            for trajectory in trajectories:
                page.add(out, trajectory)
            inside = page.end(out, title, beside=beside.name, max_bytes=max_bytes)
        if beside.is_dir():
            shutil.rmtree(beside)
        if not inside:
            os.replace(page.pictures, beside)
        size = (working / "page").stat().st_size
        os.replace(working / "page", path)
    return Written(path, page.num_trajectories, len(page.places), size, None if inside else beside)


def _check(path: Path, beside: Path) -> None:
    """Refuse what cannot be written, and what would remove something that is not ours."""
    if path.is_dir():
        raise ConfigError("output", str(path), "is a directory", "Name a file, such as trajectories.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written ({error.strerror})") from None
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("output", str(path), "cannot be written (no permission)")
    strangers = [file.name for file in beside.iterdir() if not _is_picture(file.name)] if beside.is_dir() else []
    if strangers or (beside.exists() and not beside.is_dir()):
        reason = f"its pictures would go to {beside}, where something else is"
        raise ConfigError("output", str(path), reason, "Choose another name")


class _Page:
    """A page being written: text straight to the file, pictures to a directory until their place is known."""

    def __init__(self, working: Path, vocabulary: Vocabulary) -> None:
        self.pictures = working / "pictures"
        self.pictures.mkdir()
        self.places: dict[str, int] = {}
        self.encoded_bytes = 0
        self.num_trajectories = 0
        self._files: list[str] = []
        self._list: list[dict[str, Any]] = []
        self._vocabulary = vocabulary

    def begin(self, out: IO[str], title: str) -> None:
        script = _asset("viewer.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        # A page opened from disk has no origin of its own to name, hence file:.
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data: file: 'self'"
        )
        top = _asset("viewer.html").replace("{{style}}", _asset("viewer.css")).replace("{{policy}}", policy)
        out.write(top.replace("{{title}}", escape(title)))

    def add(self, out: IO[str], trajectory: Trajectory) -> None:
        for sha, data in trajectory.pictures.items():
            self._keep(sha, data)
        self._list.append(listed(trajectory))
        out.write(_block(f"t{self.num_trajectories}", record(trajectory, self._vocabulary, self.places)))
        self.num_trajectories += 1

    def _keep(self, sha: str, data: bytes) -> None:
        if sha in self.places:
            return
        name = f"{hashlib.sha256(data).hexdigest()}.{picture_kind(data)}"
        (self.pictures / name).write_bytes(data)
        self.places[sha] = len(self._files)
        self._files.append(name)
        self.encoded_bytes += (len(data) + 2) // 3 * 4 + 64

    def end(self, out: IO[str], title: str, *, beside: str, max_bytes: int) -> bool:
        """Decide where the pictures go, and finish; whether they went inside."""
        facts, script = _block("facts", self._facts(title, "")), f"<script>{_asset('viewer.js')}</script>\n"
        inside = out.tell() + self.encoded_bytes + len(facts) + len(script.encode()) <= max_bytes
        if inside:
            for place, name in enumerate(self._files):
                encoded = base64.b64encode((self.pictures / name).read_bytes()).decode()
                out.write(f'<script type="text/plain" id="p{place}">{encoded}</script>\n')
        else:
            facts = _block("facts", self._facts(title, beside))
        out.write(f"{facts}{script}</body>\n</html>\n")
        return inside

    def _facts(self, title: str, beside: str) -> dict[str, Any]:
        return {
            "title": title, "episodes": self._list, "words": self._vocabulary.words, "by_id": self._vocabulary.by_id,
            "pictures": [name.rpartition(".")[2] for name in self._files], "beside": beside,
            "files": self._files if beside else [],
        }  # fmt: skip


def _block(name: str, facts: Mapping[str, Any]) -> str:
    # A browser's JSON has no NaN; read back, it becomes the word.
    clean = json.loads(json.dumps(facts, default=str), parse_constant=str)
    # No "<" at all: neither an end tag nor a comment can begin inside the data.
    text = json.dumps(clean, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _asset(name: str) -> str:
    return (files("palaestra.experience") / "assets" / name).read_text(encoding="utf-8")


def _is_picture(name: str) -> bool:
    stem, _, kind = name.rpartition(".")
    return len(stem) == 64 and kind in ("png", "jpeg", "webp", "bin")
