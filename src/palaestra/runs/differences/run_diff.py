"""How two runs differ: configuration, code, packages, machine and variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaestra.files.run_directory import Attempt
from palaestra.redaction import Redactor
from palaestra.runs.comparison import find_differences, read_configuration
from palaestra.runs.reader import RunReader
from palaestra.runs.reproducibility.bounded_process import run_bounded
from palaestra.runs.reproducibility.code_record import GIT, CodeRecord, git_environment, is_secret, read_kept_file
from palaestra.runs.reproducibility.environment_record import EnvironmentRecord
from palaestra.runs.reproducibility.source_recorder import SourceRecord, read_source
from palaestra.runs.wire import API_SCHEMA, JsonObject

_MACHINE = ("python", "executable", "platform", "host", "cpu", "cores", "memory_mb", "gpus")
_PER_RUN = frozenset({"TMPDIR", "PALAESTRA_LOG", "PALAESTRA_RUN", "PALAESTRA_ATTEMPT", "CUDA_VISIBLE_DEVICES"})
"""Variables that differ between any two runs."""
_MAX_TEXT_BYTES = 2 << 20
_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class FileDifference:
    """A source file that differs."""

    __pydantic_config__ = API_SCHEMA

    name: str
    change: str
    """`added`, `removed` or `changed`, from the first run to the second."""
    text: str = ""
    """The unified difference; empty if the content of one side is not available."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """How the second of two runs differs from the first. Lists hold one value for each."""

    __pydantic_config__ = API_SCHEMA

    runs: tuple[str, str]
    configuration: dict[str, list[Any]]
    command: list[list[str]] = field(default_factory=list)
    """Both command lines, if they differ."""
    code: dict[str, list[Any]] = field(default_factory=dict)
    """Commit, branch and version, as far as they differ."""
    files: tuple[FileDifference, ...] = ()
    packages: dict[str, list[Any]] = field(default_factory=dict)
    """Versions by package; null where it is not installed."""
    machine: dict[str, list[Any]] = field(default_factory=dict)
    variables: dict[str, list[Any]] = field(default_factory=dict)
    """Environment variables, with secrets redacted."""
    missing: tuple[str, ...] = ()
    """What could not be compared, and why."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        parts = (self.configuration, self.command, self.code, self.files, self.packages, self.machine, self.variables)
        return not any(parts)


def diff_runs(reader: RunReader, first: str, second: str) -> RunDifference:
    """Compare the newest attempts of two runs by their ids, or prefixes of them. Secrets are redacted."""
    redact = Redactor.from_environment(os.environ)
    records = [reader.run(name) for name in (first, second)]
    directories = [reader.paths(record.run_id) for record in records]
    attempts = [run.attempt(max(1, record.attempt)) for run, record in zip(directories, records, strict=True)]
    configurations = [read_configuration(run, attempt) for run, attempt in zip(directories, attempts, strict=True)]
    commands = [reader.document(record.run_id, "command") for record in records]
    words = [_normalize(command.get("argv"), attempt) for command, attempt in zip(commands, attempts, strict=True)]
    variables = [_read_variables(command) for command in commands]
    sources = [read_source(attempt) for attempt in attempts]
    unknown = [record.run_id for record, source in zip(records, sources, strict=True) if source is None]
    missing = [f"{run_id}: its code was not recorded" for run_id in unknown]
    empty = SourceRecord(CodeRecord("none", ""), EnvironmentRecord())
    one, other = (source or empty for source in sources)
    is_complete = None not in sources
    return RunDifference(
        runs=(records[0].run_id, records[1].run_id),
        configuration=find_differences(configurations),
        command=words if words[0] != words[1] else [],
        code=find_differences([_describe_code(one.code), _describe_code(other.code)]) if is_complete else {},
        files=_diff_files(one.code, other.code, attempts, redact) if is_complete else (),
        packages=find_differences([_read_packages(attempt) for attempt in attempts]) if is_complete else {},
        machine=find_differences([_describe_machine(one), _describe_machine(other)]) if is_complete else {},
        variables=find_differences(variables) if all(variables) else {},
        missing=(*missing, *(problem for source in (one, other) for problem in source.code.problems)),
    )


def _normalize(argv: object, attempt: Attempt) -> list[str]:
    """The words of a command, without the paths of its own run."""
    words = [str(word) for word in argv] if isinstance(argv, list) else []
    run = str(attempt.path.parent)
    return [word.replace(str(attempt.path), "ATTEMPT").replace(run, "RUN") for word in words]


def _read_variables(command: JsonObject) -> JsonObject:
    environment = command.get("environment")
    items = environment.items() if isinstance(environment, dict) else ()
    return {str(name): value for name, value in items if name not in _PER_RUN}


def _describe_code(code: CodeRecord) -> JsonObject:
    return {name: getattr(code, name) for name in ("kind", "root", "commit", "branch", "version")}


def _describe_machine(source: SourceRecord) -> JsonObject:
    return {name: getattr(source.environment, name) for name in _MACHINE}


def _read_packages(attempt: Attempt) -> JsonObject:
    try:
        lines = (attempt.source / "packages.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    packages = {}
    for line in lines:
        name, equals, version = line.partition("==")
        if not equals:
            name, _, version = line.partition(" @ ")
        if not line.startswith("#"):
            packages[name.strip()] = version.strip()
    return packages


def _diff_files(
    one: CodeRecord, other: CodeRecord, attempts: list[Attempt], redact: Redactor
) -> tuple[FileDifference, ...]:
    before, after = _list_files(one, other), _list_files(other, one)
    differences = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name, "") == after.get(name, ""):
            continue
        change = "added" if not before.get(name) else "removed" if not after.get(name) else "changed"
        texts = [_read_text(code, attempt, name, redact) for code, attempt in zip((one, other), attempts, strict=True)]
        differences.append(FileDifference(name, change, _format_unified(name, *texts)))
    return tuple(differences)


def _list_files(code: CodeRecord, other: CodeRecord) -> Mapping[str, str]:
    """Hashes by name. Of repositories that are too large to be listed, only changed files are known."""
    if code.files and other.files:
        return code.files
    return {**code.changed, **code.untracked}


def _read_text(code: CodeRecord, attempt: Attempt, name: str, redact: Redactor) -> str | None:
    """The content of a file in a run; empty if it has none, None if it is not available."""
    digest = {**code.files, **code.changed, **code.untracked}.get(name, "")
    if not digest and code.files:
        return ""
    if is_secret(name):
        return None
    data = read_kept_file(attempt.source, name)
    if data is None and code.kind == "git" and Path(code.root).is_dir():
        place = digest or f"{code.commit}:{name}"
        output = run_bounded(
            (*GIT, "-C", code.root, "cat-file", "blob", place),
            max_bytes=_MAX_TEXT_BYTES,
            timeout_s=_GIT_TIMEOUT_S,
            environment=git_environment(),
        )
        data = output.data if output is not None and output.is_complete and output.returncode == 0 else None
    if data is None or b"\0" in data:
        return None
    # A file that was kept is redacted already; one of the repository is not.
    return redact(data.decode("utf-8", "replace"))


def _format_unified(name: str, before: str | None, after: str | None) -> str:
    if before is None or after is None:
        return ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", lineterm="")
    return "\n".join(lines)
