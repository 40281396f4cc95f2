"""`miniwob/*`: the pages of the `miniwob` package, as they are, with five changes that make them fit for learning.

The raw reward counts (the page's own decays with its clock, of which every act takes half a second); its time limit is
put out of reach, since ours counts steps; the display of the last reward is hidden, since it gives answers away; an
episode begins when we say so; and a page comes in one piece, with the scripts and style sheets it loads, since every
request costs. Solved means a raw reward of 1.
"""

from __future__ import annotations

import importlib.util
import mimetypes
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from palaestra.errors import SessionRefused
from palaestra.sessions.page import PageRequest, PageResponse
from palaestra.sessions.screen import Size
from palaestra.sessions.suite import Task, checked_params
from palaestra.sessions.suites.one_file import in_one_file
from palaestra.sessions.task import Progress

__all__ = ["UNUSABLE", "MiniWob"]

UNUSABLE: dict[str, str] = {}
"""Pages of the package that cannot be a task here, and why; filled from what a browser says of each."""

STEP_LIMIT = 10
STEP_LIMITS = {"chase-circle": 20}
"""Pages that need more steps: this one ends by itself after 9.9 s of page time, of which an act takes 0.507."""

_BEGIN = """(() => {
  core.EPISODE_MAX_TIME = 1e9;
  core.startEpisode();
  Math.seedrandom(SEED);
  core.setDataMode && core.setDataMode('train');
  core.startEpisodeReal();
  const style = document.createElement('style');
  style.textContent = '#reward-display,#click-canvas,#sync-task-cover{display:none!important}';
  document.head.appendChild(style);
  const said = core.getUtterance();
  return typeof said === 'string' ? said : said.utterance;
})()"""


class MiniWob:
    """The suite."""

    name = "miniwob"

    @cached_property
    def root(self) -> Path | None:
        """Where the package keeps its pages; None when it is not installed."""
        found = importlib.util.find_spec("miniwob")
        return Path(found.origin).parent / "html" if found is not None and found.origin else None

    @cached_property
    def _names(self) -> tuple[str, ...]:
        if self.root is None:
            return ()
        return tuple(sorted(path.stem for path in (self.root / "miniwob").glob("*.html") if path.stem not in UNUSABLE))

    def names(self) -> Sequence[str]:
        """Every page that can be a task; none when the package is not installed."""
        return self._names

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The page, to be begun with this seed."""
        given = checked_params(params, step_limit=(int, STEP_LIMITS.get(name, STEP_LIMIT)))
        if given["step_limit"] < 1:
            raise SessionRefused("bad_params", "params.step_limit: must be at least 1.", status=422)
        assert self.root is not None
        return _MiniWobPage(self.root, name, seed, given["step_limit"])


class _MiniWobPage(Task):
    screen = Size(160, 210)
    reward_range = (-1.0, 1.0)
    probe = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON]"

    def __init__(self, root: Path, name: str, seed: int, step_limit: int) -> None:
        self._root, self.step_limit = root, step_limit
        self.begin = _BEGIN.replace("SEED", str(seed))
        self.entry = f"/miniwob/{name}.html"

    def serve(self, request: PageRequest) -> PageResponse | None:
        """Files of the package, and nothing outside it; the page itself with what it loads."""
        path = request.path.partition("?")[0]
        body = _whole_page(self._root, path) if path == self.entry else _file(self._root, path)
        return None if body is None else PageResponse(body, mimetypes.guess_type(path)[0] or "application/octet-stream")

    def told(self, begun: Any) -> str:
        """What the page's yellow bar says."""
        return " ".join(str(begun).split())

    def judge(self, probed: Any) -> Progress:
        """The page's own verdict, before it is scaled by time."""
        done, raw, why = probed
        return Progress(float(raw), bool(done), bool(done) and float(raw) == 1.0, detail={"reason": why})


@lru_cache(maxsize=256)
def _whole_page(root: Path, path: str) -> bytes | None:
    page = _file(root, path)
    return None if page is None else in_one_file(page, path, lambda other: _file(root, other))


def _file(root: Path, path: str) -> bytes | None:
    file = (root / path.lstrip("/")).resolve()
    return file.read_bytes() if file.is_relative_to(root.resolve()) and file.is_file() else None
