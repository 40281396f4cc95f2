"""The code of an attempt: the commit and its changes, or the source files of a directory without a repository.

`code.json` names every file by the hash that git gives its content, so that two runs can be compared file by file.
Contents that git does not have are kept in `files.tar.gz`, the changes as text in `changes.diff`. Time, number of files
and bytes are bounded; what is left out is named. Secrets are replaced, and files that hold them are not read.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import math
import os
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from palaestra.redaction import Redactor
from palaestra.runs.reproducibility.bounded_process import ProcessOutput, run_bounded
from palaestra.runs.wire import JsonObject

GIT = (
    *("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false"),
    # Differences of larger files would take gigabytes of memory.
    *("-c", "core.bigFileThreshold=8m"),
)
_GIT_TIMEOUT_S = 15.0
_WALK_S = 3.0
_HASH_S = 10.0
_MAX_LISTED = 5_000
"""Files that code.json names; of a larger repository only the changed ones."""
_MAX_DIFF_BYTES = 5 << 20
_MAX_FILE_BYTES = 1 << 20
_MAX_KEPT_BYTES = 20 << 20
_MAX_KEPT_FILES = 1_000
_MAX_HASHED_BYTES = 64 << 20
_MAX_LEFT_OUT = 20
_SOURCE_SUFFIXES = frozenset(
    ".py .pyx .pyi .ipynb .sh .bash .yaml .yml .toml .json .cfg .ini .c .cc .cpp .cu .cuh .h .hpp .rs .go .jl .r .R "
    ".lua .js .ts .java .kt .scala .m .pl .rb .asl .gin .proto .cmake .txt .md".split()
)
_SOURCE_NAMES = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt"})
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})
_SECRET_FILES = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
    "*credential*",
    "*secret*",
    ".netrc",
    ".npmrc",
)


@dataclass
class CodeRecord:
    """The code of an attempt, as code.json holds it."""

    kind: str
    """`git`, `files`, or `none` if there is nothing to record."""
    root: str
    version: str = ""
    """Short text that differs when the code differs."""
    commit: str = ""
    branch: str = ""
    subject: str = ""
    remote: str = ""
    changed: dict[str, str] = field(default_factory=dict)
    """Hashes of files that differ from the commit; empty for a file that was removed."""
    untracked: dict[str, str] = field(default_factory=dict)
    """Hashes of new files that git does not ignore."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of all files, if they are not too many."""
    kept: list[str] = field(default_factory=list)
    """Files in files.tar.gz."""
    left_out: list[str] = field(default_factory=list)
    """Files that were not kept, with the reason; the first few."""
    problems: list[str] = field(default_factory=list)
    collected: float = 0.0

    @property
    def description(self) -> str:
        """`1a2b3c4d5e6f (main), 2 files changed`."""
        if self.kind == "none":
            return ""
        if self.kind == "files":
            plural = "s" if len(self.files) != 1 else ""
            return f"{len(self.files):,} file{plural} without a repository ({self.version})"
        count = len(self.changed) + len(self.untracked)
        changes = f", {count} file{'s' if count != 1 else ''} changed" if count else ""
        return f"{self.commit[:12]}{f' ({self.branch})' if self.branch else ''}{changes}"


def collect_code(
    root: Path,
    directory: Path,
    *,
    excluded: Path,
    redact: Redactor,
    has_script: bool = True,
    closing: threading.Event | None = None,
    clock: Callable[[], float] = time.time,
) -> CodeRecord:
    """Record the code below a directory, without our state directory (`excluded`), and keep what git does not have.

    Writes changes.diff and files.tar.gz into `directory`; the caller stores the record. Outside a repository files are
    recorded only beside a script (`has_script`), and without those below in directories such as `/` and the home.
    """
    collector = _Collector(directory, excluded, redact, closing or threading.Event())
    record = collector.collect_git(root)
    if record is None:
        record = collector.collect_files(root) if has_script else CodeRecord("none", str(root))
    record.collected = clock()
    return record


def hash_content(data: bytes) -> str:
    """The hash that git gives a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Collector:
    def __init__(self, directory: Path, excluded: Path, redact: Redactor, closing: threading.Event) -> None:
        self._directory, self._excluded, self._redact, self._closing = directory, excluded, redact, closing
        self._deadline = time.monotonic() + _HASH_S

    def collect_git(self, start: Path) -> CodeRecord | None:
        """The record of a repository; None outside of one, and without git."""
        top_level = self._git(start, "rev-parse", "--show-toplevel")
        if top_level is None or top_level.returncode != 0:
            return None
        top = Path(os.fsdecode(top_level.data.rstrip(b"\n")))
        record = CodeRecord("git", str(top))
        head = self._git(top, "log", "-1", "--format=%H%x00%s", "HEAD")
        if head is not None and head.returncode == 0:
            record.commit, _, record.subject = head.data.decode("utf-8", "replace").strip().partition("\0")
        record.subject = self._redact(record.subject)[:200]
        record.branch = self._read_line(top, "symbolic-ref", "-q", "--short", "HEAD")
        record.remote = self._redact(self._read_line(top, "config", "--get", "remote.origin.url"))
        self._list_changes(top, record)
        listed = self._git(top, "ls-files", "-s", "-z", max_bytes=_MAX_LISTED * 200)
        entries = listed.data.split(b"\0")[:-1] if listed is not None and listed.is_complete else []
        if len(entries) <= _MAX_LISTED:
            tracked = (os.fsdecode(entry).partition("\t") for entry in entries)
            record.files = {name: words.split()[1] for words, _, name in tracked}
            record.files |= record.changed | record.untracked
            record.files = {name: digest for name, digest in record.files.items() if digest}
        self._write_diff(top, record)
        self._keep(top, [*record.changed, *record.untracked], record)
        changes = _digest({**record.changed, **record.untracked})
        dirty = f"+{changes[:8]}" if record.changed or record.untracked else ""
        record.version = f"{record.commit[:12] or 'no-commit'}{dirty}"
        return record

    def collect_files(self, root: Path) -> CodeRecord:
        """The record of the source files below a directory."""
        record = CodeRecord("files", str(root))
        names = sorted(self._walk(root, record))
        for name in names[:_MAX_LISTED]:
            digest = self._hash(root / name, record, name)
            if digest:
                record.files[name] = digest
        if not record.files:
            return CodeRecord("none", str(root), problems=record.problems)
        self._keep(root, list(record.files), record)
        record.version = f"files-{_digest(record.files)[:12]}"
        return record

    def _list_changes(self, top: Path, record: CodeRecord) -> None:
        words = ("status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames")
        status = self._git(top, *words, "--", ".", *self._exclusion(top), max_bytes=1 << 20)
        if status is None or status.returncode != 0:
            record.problems.append("git status took too long or listed too many files")
        entries = [] if status is None else os.fsdecode(status.data).split("\0")[:-1]
        for entry in entries[:_MAX_LISTED]:
            name, is_new = entry[3:], entry.startswith("??")
            path = top / name
            if is_new and is_secret(name):
                _leave_out(record, name, "may hold secrets")
            elif is_new:
                record.untracked[name] = self._hash(path, record, name)
            else:
                record.changed[name] = self._hash(path, record, name) if path.is_file() else ""

    def _write_diff(self, top: Path, record: CodeRecord) -> None:
        if not record.changed or not record.commit:
            return
        words = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
        # By name, not by pattern: patterns of git distinguish upper and lower case, and know no exceptions.
        secrets = [f":(exclude,top,literal){name}" for name in record.changed if is_secret(name)]
        diff = self._git(top, *words, *self._exclusion(top), *secrets, max_bytes=_MAX_DIFF_BYTES)
        if diff is None:
            return
        if not diff.is_complete:
            record.problems.append(f"changes.diff holds the first {len(diff.data):,} bytes of the changes")
        text = self._redact(diff.data.decode("utf-8", "replace"))
        (self._directory / "changes.diff").write_text(text, encoding="utf-8")

    def _keep(self, root: Path, names: list[str], record: CodeRecord) -> None:
        """Pack the contents of files, with secrets replaced, within the limits."""
        total, packed = 0, io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in names:
                reason, data = self._read(root / name, name)
                if not reason and (len(record.kept) >= _MAX_KEPT_FILES or total + len(data) > _MAX_KEPT_BYTES):
                    reason = "the limit of kept files is reached"
                if reason:
                    if reason != "was removed":
                        _leave_out(record, name, reason)
                    continue
                information = tarfile.TarInfo(name)
                information.size = len(data)
                archive.addfile(information, io.BytesIO(data))
                record.kept.append(name)
                total += len(data)
        if record.kept:
            (self._directory / "files.tar.gz").write_bytes(packed.getvalue())

    def _read(self, path: Path, name: str) -> tuple[str, bytes]:
        """Why a file is not kept, else its content with secrets replaced."""
        if is_secret(name):
            return "may hold secrets", b""
        if self._closing.is_set():
            return "the service was stopped", b""
        try:
            if path.is_symlink() or not path.is_file():
                return ("is a link" if path.is_symlink() else "was removed"), b""
            if path.stat().st_size > _MAX_FILE_BYTES:
                return f"is larger than {_MAX_FILE_BYTES >> 20} MB", b""
            data = path.read_bytes()
        except OSError as error:
            return f"cannot be read ({error.strerror})", b""
        if b"\0" in data[:8192]:
            return "is not text", b""
        try:
            return "", self._redact(data.decode("utf-8")).encode()
        except UnicodeDecodeError:
            return "is not UTF-8", b""

    def _hash(self, path: Path, record: CodeRecord, name: str) -> str:
        """The hash of a file; its size and time for one that is too large to be read."""
        try:
            status = path.stat()
            if path.is_symlink():
                return hash_content(os.fsencode(os.readlink(path)))
            if not path.is_file():
                return ""
            if status.st_size > _MAX_HASHED_BYTES or time.monotonic() > self._deadline or self._closing.is_set():
                _leave_out(record, name, "was not hashed: too large, or no time left")
                return f"size-{status.st_size}-{status.st_mtime_ns}"
            return hash_content(path.read_bytes())
        except OSError:
            return ""

    def _walk(self, root: Path, record: CodeRecord) -> Iterator[str]:
        """Source files below a directory, those near the top first."""
        deadline, count, pending = time.monotonic() + _WALK_S, 0, [root]
        is_broad = root.resolve() in {Path("/"), Path.home(), Path(tempfile.gettempdir()).resolve()}
        while pending:
            directory = pending.pop(0)
            try:
                entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                if time.monotonic() > deadline or count >= _MAX_LISTED or self._closing.is_set():
                    record.problems.append(f"only the first {count:,} files were found in {_WALK_S:.0f} s")
                    return
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    if not is_broad and entry.name[0] != "." and entry.name not in _SKIPPED and path != self._excluded:
                        pending.append(path)
                elif entry.is_file(follow_symlinks=False) and not is_secret(entry.name):
                    is_source = path.suffix in _SOURCE_SUFFIXES or entry.name in _SOURCE_NAMES
                    if is_source and _file_size(entry) <= _MAX_FILE_BYTES:
                        count += 1
                        yield str(path.relative_to(root))

    def _exclusion(self, top: Path) -> list[str]:
        try:
            return [f":(exclude,top,literal){self._excluded.resolve().relative_to(top)}"]
        except ValueError:
            return []

    def _read_line(self, top: Path, *words: str) -> str:
        output = self._git(top, *words)
        return "" if output is None or output.returncode != 0 else output.data.decode("utf-8", "replace").strip()

    def _git(self, root: Path, *words: str, max_bytes: int = 1 << 16) -> ProcessOutput | None:
        return run_bounded(
            (*GIT, "-C", str(root), *words),
            max_bytes=max_bytes,
            timeout_s=_GIT_TIMEOUT_S,
            environment=git_environment(),
            closing=self._closing,
        )


def read_kept_file(directory: Path, name: str) -> bytes | None:
    """The content of a file in files.tar.gz; None if it is not there."""
    try:
        with tarfile.open(directory / "files.tar.gz", "r:gz") as archive:
            file = archive.extractfile(name)
            return None if file is None else file.read(_MAX_FILE_BYTES * 2)
    except (OSError, KeyError, tarfile.TarError, EOFError):
        return None


def code_from_json(data: JsonObject) -> CodeRecord:
    """The record of a code.json; wrong or unknown fields are left out."""
    record = CodeRecord(str(data.get("kind", "none")), str(data.get("root", "")))
    for name, default in vars(record).items():
        value = data.get(name, default)
        if isinstance(value, type(default)):
            setattr(record, name, value)
    return record


def _digest(files: dict[str, str]) -> str:
    text = "\n".join(f"{name}\0{digest}" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _file_size(entry: os.DirEntry[str]) -> float:
    """Infinite for a file that is gone."""
    try:
        return entry.stat().st_size
    except OSError:
        return math.inf


def git_environment() -> dict[str, str]:
    """Variables for git in a repository that is named on its command line."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    return environment


def is_secret(name: str) -> bool:
    """Whether a file of this name may hold secrets."""
    base = os.path.basename(name).lower()
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in _SECRET_FILES) and not base.endswith(".py")


def _leave_out(record: CodeRecord, name: str, reason: str) -> None:
    if len(record.left_out) < _MAX_LEFT_OUT:
        record.left_out.append(f"{name}: {reason}")
