"""`palaestra demos`: record, import, list and show demonstrations for supervised fine-tuning of UI agents."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, format_columns, print_json, sanitize_line, shorten
from palaestra.errors import ConfigError
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.experience.demonstrations import Demonstrations
    from palaestra.train.demonstrations.record import RecordingSummary
    from palaestra.train.screen_config import ScreenRunConfig

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of demonstrations.")]
OutputOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Directory to create, or to add to if it was made for the same model.")
]
ModelOption = Annotated[
    str, typer.Option(metavar="NAME", help="Model to write the tokens of, if no configuration is given.")
]


def record_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG_OR_TASKS",
            help="UI configuration (file or packaged name), or tasks such as click_target/button,data_entry/form.",
        ),
    ],
    output: OutputOption,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Override, such as model.history=2.", show_default=False),
    ] = None,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Episodes to play, evenly over the tasks.")] = 100,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the choice of training seeds.")] = 0,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Concurrent browser pages.")] = 4,
    model: ModelOption = "tiny",
    as_json: JsonOption = False,
) -> None:
    """Play the oracles of tasks and write the successes.

    Plays on training seeds only. Runs a browser in this process: session servers and gateways have no oracles.
    """
    config = _read_config(source, model, overrides or [], output)
    import asyncio

    from palaestra.cli.datasets.progress import show_progress
    from palaestra.train.demonstrations.record import record_oracles
    from palaestra.train.held_out import build_policy

    policy = build_policy(config)
    with show_progress("Recording", "episodes") as update:
        playing = record_oracles(
            config,
            policy,
            output,
            episodes=episodes,
            seed=seed,
            workers=workers,
            on_finished=lambda finished: update(finished, episodes),
        )
        try:
            summary = asyncio.run(playing)
        except KeyboardInterrupt:
            _print_kept(output)
            raise
    _print_summary(summary, output, as_json)


def import_command(
    episodes: Annotated[
        list[str], typer.Argument(metavar="EPISODE", help="Recorded play: its id, a prefix of it, or its directory.")
    ],
    output: OutputOption,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="CONFIG", help="UI configuration whose model imitates them.")
    ] = None,
    model: ModelOption = "tiny",
    as_json: JsonOption = False,
) -> None:
    """Write recorded plays of a person as demonstrations.

    Keeps plays of screen tasks that the person solved, without actions of a policy.
    """
    from palaestra.runs.play.episode import EpisodeReader, open_episode

    home = Home.default()
    readers = [
        EpisodeReader(Path(name)) if (Path(name) / "episode.json").is_file() else open_episode(home, name)
        for name in episodes
    ]
    tasks = ",".join(dict.fromkeys(reader.record.env_id for reader in readers if "/" in reader.record.env_id))
    config = _read_config(config_file or tasks, model, [], output)
    from palaestra.train.demonstrations.plays import import_plays
    from palaestra.train.held_out import build_policy

    _print_summary(import_plays(config, build_policy(config), readers, output), output, as_json)


def list_command(
    directory: DirectoryArgument,
    task: Annotated[str, typer.Option(metavar="TEXT", help="Only tasks whose name contains this text.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List demonstrations, oldest first."""
    entries = [entry for entry in _open_directory(directory).entries if task in entry.task]
    if as_json:
        print_json([entry.facts() for entry in entries])
        return
    rows = [(entry.task, str(entry.seed), f"{entry.steps}", shorten(entry.instruction, 60)) for entry in entries]
    if rows:
        titles = ("TASK", "SEED", "STEPS", "INSTRUCTION")
        print(sanitize_table(format_columns([titles, *rows], align_right=(False, True, True, False))))


def show_command(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Show the tasks of demonstrations, and their model."""
    demonstrations = _open_directory(directory)
    steps: dict[str, list[int]] = {}
    for entry in demonstrations.entries:
        steps.setdefault(entry.task, []).append(entry.steps)
    tasks = {name: {"demonstrations": len(own), "steps": sum(own)} for name, own in sorted(steps.items())}
    if as_json:
        facts = {"directory": str(directory), "demonstrations": len(demonstrations), "tasks": tasks}
        print_json({**facts, "fingerprint": demonstrations.fingerprint, **demonstrations.manifest})
        return
    rows = [
        (name, str(own["demonstrations"]), f"{own['steps'] / own['demonstrations']:.1f}") for name, own in tasks.items()
    ]
    titles = ("TASK", "DEMONSTRATIONS", "MEAN STEPS")
    print(sanitize_table(format_columns([titles, *rows], align_right=(False, True, True))))
    details = [("total", str(len(demonstrations)))]
    details += [(key, demonstrations.about.get(key, "")) for key in ("model", "source")]
    details += [(key, demonstrations.prompt_format.get(key, "")) for key in ("codec", "history", "picture_rule")]
    details.append(("fingerprint", demonstrations.fingerprint[:12]))
    print("\n" + sanitize_table(format_columns([(key, str(value)) for key, value in details])))


def sanitize_table(lines: list[str]) -> str:
    """Lines without control characters."""
    return "\n".join(map(sanitize_line, lines))


def _read_config(source: str, model: str, overrides: list[str], output: Path) -> ScreenRunConfig:
    """The configuration in a file, or one for the named tasks and model."""
    from palaestra.config.file import apply_overrides, is_ui_config
    from palaestra.config.packaged import find_packaged, read_config
    from palaestra.extras import UI_AGENTS, require_extras

    require_extras("UI agents", "vlm", "ui", only=UI_AGENTS)
    from palaestra.train.screen_config import screen_config_from

    is_file = Path(source).suffix in (".yaml", ".yml", ".json") or Path(source).is_file()
    if is_file or find_packaged(source) is not None:
        data: Mapping[str, Any] = read_config(source).data
        if not is_ui_config(data):
            raise ConfigError("CONFIG_OR_TASKS", source, "is not a configuration of a UI agent", "It needs a model")
    elif source and "/" not in source:
        reason = "is neither a file, a packaged configuration nor a task"
        raise ConfigError("CONFIG_OR_TASKS", source, reason, "Write tasks as suite/name, such as miniwob/click-test")
    else:
        data = {"model": {"name": model}, "tasks": [{"task": name} for name in source.split(",") if name]}
    data = apply_overrides(dict(data), overrides)
    # A configuration for supervised learning may name a directory that does not exist yet.
    return screen_config_from({**data, "demonstrations": {"path": str(output)}})


def _open_directory(directory: Path) -> Demonstrations:
    """The demonstrations in a directory, after a warning about each file that cannot be read."""
    from palaestra.experience.demonstrations import Demonstrations

    demonstrations = Demonstrations(directory, place="DIR")
    for file, reason in demonstrations.damaged.items():
        print(sanitize_line(f"warning: {file} is skipped: {reason}"), file=sys.stderr)
    return demonstrations


def _print_kept(output: Path) -> None:
    """After an interruption: how many demonstrations the directory holds."""
    from palaestra.experience.demonstrations import MANIFEST, Demonstrations

    if (output / MANIFEST).is_file():
        text = f"{output} holds {len(Demonstrations(output))} demonstrations; repeat the command to add more."
        print(sanitize_line(text), file=sys.stderr)


def _print_summary(summary: RecordingSummary, output: Path, as_json: bool) -> None:
    written = sum(summary.written.values())
    if as_json:
        print_json({"directory": str(output), **summary.to_json()})
    else:
        lines = [f"{task}: {count} written" for task, count in sorted(summary.written.items())]
        lines += [
            f"{task}: {count} not kept ({reason}{': ' + summary.details[reason] if reason in summary.details else ''})"
            for (task, reason), count in sorted(summary.dropped.items())
        ]
        lines.append(f"{written} demonstrations written to {output}")
        print(sanitize_table(lines))
    if not written:
        raise typer.Exit(1)
