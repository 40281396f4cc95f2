"""`palaestra envs`, `tasks`, `runners` and `schema`: list what is available."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, format_columns, print_json
from palaestra.errors import ConfigError
from palaestra.extras import install_command, is_installed

if TYPE_CHECKING:
    from palaestra.runs.runner import Machine, RunnerCapabilities
    from palaestra.runs.spec import RunSpec

_TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="Only names that contain this text.")]
# Capabilities and their column titles, short enough for a terminal.
_COLUMNS = {
    "resume": "resume",
    "warm_start": "warm start",
    "offline_inference": "plays",
    "video": "video",
    "tracking": "W&B",
    "live_beliefs": "beliefs",
    "needs_gpu": "GPU",
    "runs_foreign_code": "consent",
}


def envs(
    contains: _TextArgument = "",
    runner: Annotated[
        str | None, typer.Option(metavar="RUNNER", help="Those that this runner can train in, by group.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="BACKEND", help="Those of this env.backend: gymnasium or envpool.")
    ] = "gymnasium",
    as_json: JsonOption = False,
) -> None:
    """List the environments for env.id, or those of a runner."""
    if backend not in ("gymnasium", "envpool"):
        raise ConfigError("--backend", backend, "no such backend", "Use gymnasium or envpool")
    if runner is not None:
        _print_environments(runner, contains, as_json)
        return
    from palaestra.env.make import known_environments

    entries = [entry for entry in known_environments(backend) if contains.lower() in entry.id.lower()]
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        print(entry.id if entry.installed else f"{entry.id}   needs: {entry.remedy}")


def _print_environments(name: str, contains: str, as_json: bool) -> None:
    from palaestra.runs.runners.catalogues import environments_of
    from palaestra.runs.runners.registry import get_runner

    environments = environments_of(get_runner(name), *_catalogue_arguments(name))
    entries = [info for info in environments if contains.lower() in info.env_id.lower()]
    if as_json:
        print_json(entries)
        return
    rows = [
        (info.env_id, info.group, str(info.max_episode_steps or "–"), info.remedy)
        for info in sorted(entries, key=lambda info: (info.group, info.env_id))
    ]
    rows.insert(0, ("ENVIRONMENT", "GROUP", "STEPS", "NEEDS"))
    print("\n".join(format_columns(rows)) if entries else f"{name} has no such environment.")


def tasks(contains: _TextArgument = "", as_json: JsonOption = False) -> None:
    """List the UI tasks."""
    from palaestra.sessions.suites import suites

    names = [f"{name}/{task}" for name, suite in sorted(suites().items()) for task in suite.names()]
    names = [name for name in names if contains.lower() in name.lower()]
    if as_json:
        print_json(names)
    else:
        print("\n".join(names))
    if not is_installed("miniwob"):
        print(f"130 tasks of MiniWoB need: {install_command('ui')}", file=sys.stderr)


def configuration_sections() -> dict[str, Any]:
    """The classes of the configuration by the name of their section."""
    from palaestra.learner.registry import ALGORITHMS
    from palaestra.train.config import SECTIONS
    from palaestra.train.screen_config import SCREEN_SECTIONS

    ui_algorithms = {f"ui_{name}": cls.config_class for name, cls in ALGORITHMS["trajectories"].items()}
    return {**SECTIONS, **SCREEN_SECTIONS, **ui_algorithms}


def schema(
    name: Annotated[
        str, typer.Argument(metavar="SECTION", help="Such as ppo, env or trainer; run or ui for everything.")
    ] = "",
) -> None:
    """Print the JSON Schema of a configuration section.

    Without a section, list the sections.
    """
    from palaestra.config import suggest_name

    sections = configuration_sections()
    if not name:
        print("\n".join(sections))
        return
    if name not in sections:
        remedy = suggest_name(name, sections, f"Known: {', '.join(sections)}")
        raise ConfigError("schema", name, "no such section", remedy)
    print(json.dumps(sections[name].model_json_schema(), indent=2))


def runners(
    schema: Annotated[
        str | None, typer.Option(metavar="RUNNER", help="Print the JSON Schema of the runner's configuration.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(metavar="SCRIPT", help="With --schema: script or algorithm of the runner.")
    ] = None,
    scripts: Annotated[
        str | None, typer.Option(metavar="RUNNER", help="List the scripts or algorithms of the runner.")
    ] = None,
    prepare: Annotated[
        str | None, typer.Option(metavar="RUNNER", help="Create the Python environment of the runner in advance.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the trainers that runs can use, and their capabilities."""
    from palaestra.runs.runners.registry import broken_runners, get_runner, registered_runners

    if prepare is not None:
        _prepare(prepare, as_json)
        return
    if scripts is not None:
        _print_scripts(scripts, as_json)
        return
    if schema is not None:
        from palaestra.config import parse_section
        from palaestra.runs.spec import RunSpec

        spec = parse_section(RunSpec, {"runner": schema, "script": script})
        print(json.dumps(get_runner(schema).config_schema(spec), indent=2))
        return
    capabilities = {name: runner.capabilities for name, runner in registered_runners().items()}
    broken = broken_runners()
    if as_json:
        print_json({"runners": capabilities, "broken": broken})
        return
    print("\n".join(format_runners(capabilities)))
    for name, reason in broken.items():
        print(f"{name} cannot be loaded: {reason}")


def _prepare(name: str, as_json: bool) -> None:
    import subprocess

    from palaestra.runs.catalogue import RunnerWithPreparation
    from palaestra.runs.runners.registry import get_runner

    runner = get_runner(name)
    if not isinstance(runner, RunnerWithPreparation):
        raise ConfigError("prepare", name, "has no environment of its own", "Its runs need no preparation")
    _, machine = _catalogue_arguments(name)
    if subprocess.run(runner.preparation(machine), check=False).returncode:
        raise typer.Exit(1)
    if as_json:
        print_json({"runner": name, "ready": True})
    else:
        print(f"{name} is ready.")


def _print_scripts(name: str, as_json: bool) -> None:
    from palaestra.runs.runners.catalogues import scripts_of
    from palaestra.runs.runners.registry import get_runner

    infos = scripts_of(get_runner(name), *_catalogue_arguments(name))
    if as_json:
        print_json(infos)
        return
    rows = [["SCRIPT", "ACTIONS", "SAVES", "PLAYS", "WARM START", "DESCRIPTION"]]
    for info in infos:
        flags = ("yes" if flag else "–" for flag in (info.saves_checkpoints, info.plays, info.warm_start))
        text = info.description if info.installed else f"needs: {info.remedy}"
        rows.append([info.name, ", ".join(info.actions) or "–", *flags, text])
    print("\n".join(format_columns(rows)) if infos else f"{name} has no scripts.")


def _catalogue_arguments(name: str) -> tuple[RunSpec, Machine]:
    from palaestra.runs.runner import Machine
    from palaestra.runs.spec import RunSpec, resolve_environment

    environment = dict(os.environ)
    return resolve_environment(RunSpec(runner=name), environment), Machine(environment, free_disk_bytes=0)


def format_runners(capabilities: dict[str, RunnerCapabilities]) -> list[str]:
    """One line per runner, one column per capability, and the external services that it may contact."""
    rows = [["RUNNER", *(title.upper() for title in _COLUMNS.values()), "CONTACTS", "DESCRIPTION"]]
    for name, entry in capabilities.items():
        cells = ["yes" if getattr(entry, key) else "–" for key in _COLUMNS]
        if entry.restarts:
            cells[0] = "again"
        rows.append([name, *cells, ", ".join(entry.external_services) or "–", entry.title])
    return format_columns(rows)
