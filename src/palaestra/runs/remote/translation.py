"""A command that was planned here, as it is executed on another machine: other paths, another interpreter.

Every path of the command that lies in the run, in our package or in the user's project becomes the path of the same
file there. The environment is that of the other machine, with the variables that the runner and the run set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from palaestra.files.run_directory import RunDirectory
from palaestra.runs.remote.hosts import Host
from palaestra.runs.remote.snapshot import PACKAGE_ROOT, CodeSnapshot
from palaestra.runs.runner import AttemptPaths, Finding, LaunchPlan
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

_ALWAYS_SET = frozenset({"OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "PYTHONUNBUFFERED", "PYTHONHASHSEED"})
"""Variables of every trainer, which are sent although the service may have the same ones."""
_RUN_FILES = ("config.yaml", "resolved.json")
"""Files of a run that a trainer reads when it is resumed."""


@dataclass(frozen=True)
class RemoteLayout:
    """Where things are on the other machine."""

    directory: str
    package: str
    """The directory from which `palaestra` is imported there."""
    project: str | None
    python: str
    moved: Mapping[str, str]
    """Checkpoints by their path here."""

    def run(self, run_id: str) -> str:
        """The directory of a run there."""
        return f"{self.directory}/var/training/runs/{run_id}"


def translate_plan(
    plan: LaunchPlan,
    spec: RunSpec,
    host: Host,
    layout: RemoteLayout,
    project: CodeSnapshot | None,
    gpus: tuple[str, ...],
    inherited: Mapping[str, str],
) -> LaunchPlan:
    """The plan for the other machine. `inherited`: the environment of the service, of which nothing is sent unasked."""
    paths = plan.paths
    run = layout.run(paths.run_id)
    attempt = f"{run}/attempt_{paths.attempt}"
    roots = {
        str(paths.run_dir): run,
        str(PACKAGE_ROOT): layout.package,
        # A project that is not sent leaves an empty directory to begin in.
        str(spec.invoked_from): layout.project or f"{attempt}/work",
        **({str(project.root): layout.project} if project is not None and layout.project is not None else {}),
        **layout.moved,
        plan.argv[0]: layout.python,
    }
    translate = _translator(roots)
    sent = {
        name: value
        for name, value in plan.environment.items()
        if inherited.get(name) != value or name in _ALWAYS_SET or name in spec.environment
    }
    there_values = {name: translate(value) for name, value in sent.items()}
    environment = {
        **there_values,
        **host.config.environment,
        **{name: there_values[name] for name in spec.environment},
        **{name: inherited[name] for name in host.config.forward if name in inherited},
        "PALAESTRA_HOME": layout.directory,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    if host.address.kind == "ray" and spec.gpus:
        del environment["CUDA_VISIBLE_DEVICES"]  # Ray sets it on the node
    there = AttemptPaths(paths.run_id, paths.attempt, Path(run), Path(attempt), Path(attempt) / "work")
    return replace(
        plan,
        argv=tuple(translate(word) for word in plan.argv),
        environment=environment,
        cwd=Path(translate(str(plan.cwd))),
        paths=there,
        injected=tuple(replace(one, path=translate(one.path)) for one in plan.injected),
    )


def find_local_paths(plan: LaunchPlan, host: Host) -> Iterator[Finding]:
    """A warning for every word of a translated command that still names a file of this machine."""
    for word in plan.argv[1:]:
        path = word.rpartition("=")[2]
        if PurePosixPath(path).is_absolute() and os.path.exists(path):
            text = f"{path} is a file of this machine and is not sent to {host.name}"
            yield Finding("path", "warning", text, "It must exist there under the same path")


def start_request(run: RunDirectory, plan: LaunchPlan, spec: RunSpec, layout: RemoteLayout) -> JsonObject:
    """What the agent there needs to start the attempt. It holds secrets that are forwarded, and is not stored."""
    files = {name: run.path / name for name in _RUN_FILES}
    return {
        "argv": list(plan.argv),
        "cwd": str(plan.cwd),
        "environment": dict(plan.environment),
        "files": dict(plan.files),
        "run_files": {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()},
        "code": [place for place in (layout.package, layout.project) if place is not None],
        "memory_mb": spec.memory_mb,
        "nice": spec.nice,
    }


def _translator(roots: Mapping[str, str]) -> Callable[[str], str]:
    """Replace local paths in a text, in one pass, the longest first."""
    known = {path: there for path, there in roots.items() if len(PurePosixPath(path).parts) > 1}
    ordered = sorted(known, key=len, reverse=True)
    pattern = re.compile(
        r"(?<![^\s=:,;\"'(])(" + "|".join(map(re.escape, ordered)) + r")(?=$|[/:=,;\"')\s])",
    )
    return lambda text: pattern.sub(lambda match: known[match[1]], text)
