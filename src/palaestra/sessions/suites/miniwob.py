"""`miniwob/*`: the pages of the `miniwob` package, with five changes that make them suitable for training.

The raw reward counts, because the page's own reward decays with time and every act takes half a second of page time.
The page's time limit is disabled, because episodes have a step limit. The display of the last reward is hidden, because
it reveals answers. An episode begins at the reset. Scripts and style sheets are inlined into the page. Solved means a
raw reward of 1.

Inlining takes 5 % less processor time for a session of one act: every request of a page passes through all processes of
the browser and ours, and a page with jQuery UI makes twelve of them. Scripts run in the same order; images of style
sheets are there at once, instead of sometimes after the first frame.
"""

from __future__ import annotations

import base64
import importlib.util
import mimetypes
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from palaestra.errors import SessionRefused
from palaestra.sessions.screen import Size
from palaestra.sessions.suite import STEP_LIMIT_SCHEMA, PageRequest, PageResponse, Task, parse_params
from palaestra.sessions.suites.oracles import build_oracle
from palaestra.sessions.task import TaskProgress

Read = Callable[[str], bytes | None]
"""Returns the file at a path of the page's origin, or None."""

_SCRIPT = re.compile(rb'<script src="([^":?#]+)"></script>')
_SHEET = re.compile(rb'<link rel="stylesheet"(?: type="text/css")? href="([^":?#]+)">')
_URL = re.compile(rb"""url\((["']?)([^"'():?#]+)\1\)""")
_ENDS_SCRIPT = re.compile(rb"</script|<!--", re.IGNORECASE)
_ENDS_STYLE = re.compile(rb"</style", re.IGNORECASE)

STEP_LIMIT = 10
STEP_LIMITS = {"chase-circle": 20}
"""Pages that need more steps: this one ends after 9.9 s of page time, of which an act takes 0.507."""

_ORACLES = resources.files("palaestra.sessions.suites").joinpath("miniwob_oracles.js").read_text("utf-8")
ORACLE_PAGES = tuple(re.findall(r"^  '([a-z0-9-]+)'[:(]", _ORACLES, re.MULTILINE))
"""Names of the pages that have an oracle."""

DRAWN_WHILE_LOADING = frozenset({"click-menu-2"})
"""Pages that choose what they show while they load, and not when the episode begins."""

_INSTRUCTION = (
    "Another wording of the instruction. {1}, {2}, ... stand for the quoted parts of the page's own, in order. The bar "
    "on the page, which shows the page's own instruction, is hidden."
)
_HIDE_BAR = "Hide the bar that shows the instruction on the page. Its place stays empty."
_QUOTED = re.compile(r'"([^"]*)"')

_BEGIN = """(() => {
  core.EPISODE_MAX_TIME = 1e9;
  core.startEpisode();
  Math.seedrandom(SEED);
  core.setDataMode && core.setDataMode('train');
  core.startEpisodeReal();
  const style = document.createElement('style');
  style.textContent = '#reward-display,#click-canvas,#sync-task-cover{display:none!important}HIDDEN';
  document.head.appendChild(style);
  const text = core.getUtterance();
  return typeof text === 'string' ? text : text.utterance;
})()"""


class MiniWob:
    """The suite."""

    name = "miniwob"

    @cached_property
    def root(self) -> Path | None:
        """Directory of the package's pages; None when it is not installed."""
        spec = importlib.util.find_spec("miniwob")
        return Path(spec.origin).parent / "html" if spec is not None and spec.origin else None

    @cached_property
    def _names(self) -> tuple[str, ...]:
        if self.root is None:
            return ()
        return tuple(sorted(path.stem for path in (self.root / "miniwob").glob("*.html")))

    def names(self) -> Sequence[str]:
        """The name of every page; empty when the package is not installed."""
        return self._names

    def parameters(self, name: str) -> dict[str, Any]:
        """JSON Schema of the parameters."""
        return {
            "step_limit": {**STEP_LIMIT_SCHEMA, "default": STEP_LIMITS.get(name, STEP_LIMIT)},
            "instruction": {"type": "string", "default": "", "description": _INSTRUCTION},
            "hide_bar": {"type": "boolean", "default": False, "description": _HIDE_BAR},
        }

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The page as a task."""
        limit = STEP_LIMITS.get(name, STEP_LIMIT)
        given = parse_params(params, step_limit=(int, limit), instruction=(str, ""), hide_bar=(bool, False))
        if given["step_limit"] < 1:
            raise SessionRefused("bad_params", "params.step_limit: must be at least 1.", status=422)
        assert self.root is not None
        return _MiniWobPage(self.root, name, seed, **given)


class _MiniWobPage(Task):
    screen = Size(160, 210)
    reward_range = (-1.0, 1.0)
    probe = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON]"

    def __init__(
        self, root: Path, name: str, seed: int, *, step_limit: int, instruction: str = "", hide_bar: bool = False
    ) -> None:
        self._root, self.step_limit, self._wording = root, step_limit, instruction
        hidden = "#query{visibility:hidden!important}" if hide_bar or instruction else ""
        self.begin = _BEGIN.replace("SEED", str(seed)).replace("HIDDEN", hidden)
        self.entry = f"/miniwob/{name}.html"
        self.oracle = _build_page_oracle(name)
        self.preload_key = None if name in DRAWN_WHILE_LOADING else (root, name)

    def serve(self, request: PageRequest) -> PageResponse | None:
        """Files of the package, and the page itself with its resources inlined."""
        path = request.path.partition("?")[0]
        body = _read_page(self._root, path) if path == self.entry else _read_file(self._root, path)
        return None if body is None else PageResponse(body, mimetypes.guess_type(path)[0] or "application/octet-stream")

    def instruction(self, begin_value: Any) -> str:
        """The text of the page's yellow bar, or the wording of the parameter with the quoted parts of that text."""
        text = " ".join(str(begin_value).split())
        return _reword(self._wording, text) if self._wording else text

    def judge(self, probe_value: Any) -> TaskProgress:
        """The page's own verdict, before it is scaled by time."""
        done, raw, reason = probe_value
        return TaskProgress(float(raw), bool(done), bool(done) and float(raw) == 1.0, detail={"reason": reason})


def _build_page_oracle(name: str) -> str | None:
    if name not in ORACLE_PAGES:
        return None
    return build_oracle(f"{_ORACLES}\nreturn WOB_DONE_GLOBAL ? null : PAGES['{name}'](utterance());")


@lru_cache(maxsize=256)
def _read_page(root: Path, path: str) -> bytes | None:
    page = _read_file(root, path)
    return None if page is None else inline_resources(page, path, lambda other: _read_file(root, other))


def _read_file(root: Path, path: str) -> bytes | None:
    file = (root / path.lstrip("/")).resolve()
    return file.read_bytes() if file.is_relative_to(root.resolve()) and file.is_file() else None


def inline_resources(page: bytes, path: str, read: Read) -> bytes:
    """The page at `path` with its scripts, style sheets and their images inlined where that is possible."""

    def inline_script(match: re.Match[bytes]) -> bytes:
        body = read(_resolve(path, match[1]))
        if body is None or not _can_inline(body, _ENDS_SCRIPT):
            return match[0]
        return b"<script>" + body + b"</script>"

    def inline_sheet(match: re.Match[bytes]) -> bytes:
        where = _resolve(path, match[1])
        body = read(where)
        if body is None or not _can_inline(body, _ENDS_STYLE):
            return match[0]
        return b"<style>" + _URL.sub(lambda url: _inline_image(url, where, read), body) + b"</style>"

    return _SHEET.sub(inline_sheet, _SCRIPT.sub(inline_script, page))


def _can_inline(body: bytes, end: re.Pattern[bytes]) -> bool:
    # The encoding of a file that is not ASCII may differ from the page's.
    return body.isascii() and not end.search(body)


def _inline_image(match: re.Match[bytes], sheet: str, read: Read) -> bytes:
    where = _resolve(sheet, match[2])
    body = read(where)
    if body is None:
        return b'url("' + where.encode() + b'")'
    media_type = mimetypes.guess_type(where)[0] or "application/octet-stream"
    return b'url("data:' + media_type.encode() + b";base64," + base64.b64encode(body) + b'")'


def _resolve(path: str, relative: bytes) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), relative.decode("latin-1")))


def _reword(wording: str, instruction: str) -> str:
    """The wording with the quoted parts of an instruction; refuses one that names a part which is not there."""
    parts = _QUOTED.findall(instruction)

    def part(match: re.Match[str]) -> str:
        number = int(match[1])
        if not 1 <= number <= len(parts):
            text = f"params.instruction: has {match[0]}, and {instruction!r} has {len(parts)} quoted parts."
            raise SessionRefused("bad_params", text, status=422)
        return str(parts[number - 1])

    return re.sub(r"\{(\d+)\}", part, wording)
