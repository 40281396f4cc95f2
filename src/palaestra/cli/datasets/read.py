"""`palaestra datasets list`, `show` and `verify`, and how the other commands show datasets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.terminal import (
    JsonOption,
    format_bytes,
    format_columns,
    format_time,
    print_json,
    sanitize_line,
    shorten,
)
from palaestra.errors import ConfigError, DatasetError
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.experience.datasets import Dataset, DatasetSummary

DATASET_HELP = "Dataset id, such as pendulum/medium-v0."
_TITLES = ("DATASET", "ENV", "STEPS", "EPISODES", "RANDOM", "EXPERT", "SIZE", "LAST USED", "STATE")
_ALIGN_RIGHT = (False, False, True, True, True, True, True, False, False)

DatasetArgument = Annotated[str, typer.Argument(metavar="DATASET", help=DATASET_HELP, show_default=False)]


def list_command(
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Only data of this environment.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List datasets and whether their files were verified.

    Interrupted downloads are listed as incomplete.
    """
    rows = [row for row in list_rows(Home.default().datasets) if env in (None, row.env_id)]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if not rows:
        hint = "No datasets yet. Make one: palaestra datasets create pendulum/random-v0 --env Pendulum-v1 --steps 20000"
        print("No matching dataset." if env else localize_commands(hint))
        return
    print("\n".join(format_columns([_TITLES, *map(_format_row, rows)], _ALIGN_RIGHT)))
    for row in rows:
        if row.problem:
            print(sanitize_line(f"{row.dataset_id}: {row.problem}"), file=sys.stderr)


def show_command(dataset: DatasetArgument, as_json: JsonOption = False) -> None:
    """Verify a dataset and show its metadata."""
    from palaestra.experience.datasets import find_dataset

    match = find_dataset(dataset, Home.default().datasets, mark_used=False)
    if as_json:
        print_json(describe_dataset(match))
        return
    print("\n".join(format_columns([(title, text) for title, text in _get_fields(match) if text])))


def verify_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="DATASET", help=DATASET_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify all datasets.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the files of datasets with their SHA-256 digests.

    Exit code 1 if a file does not match.
    """
    from palaestra.experience.datasets import find_dataset, list_datasets

    root = Home.default().datasets
    if bool(names) == everything:
        raise ConfigError("dataset", names or [], "nothing to verify", "Give dataset ids, or --all")
    rows, results = list_datasets(root), []
    selected = rows if everything else [find_row(name, rows) for name in dict.fromkeys(names or ())]
    for name in [row.dataset_id for row in selected]:
        try:
            problem, sha256 = "", find_dataset(name, root, mark_used=False).sha256
        except DatasetError as error:
            problem, sha256 = f"{error.reason}. {error.remedy}", ""
        results.append({"dataset_id": name, "fits": not problem, "problem": problem, "sha256": sha256})
        if not as_json:
            print(sanitize_line(f"{name} {problem and 'does not match: '}{problem or 'verified'}"))
    if as_json:
        print_json(results)
    if not all(result["fits"] for result in results):
        raise typer.Exit(1)


def list_rows(root: Path) -> list[DatasetSummary]:
    """Datasets and incomplete downloads, sorted by id."""
    from palaestra.experience.datasets import list_datasets
    from palaestra.experience.datasets.incomplete_downloads import list_downloads

    return sorted((*list_datasets(root), *list_downloads(root)), key=lambda row: row.dataset_id)


def find_row(
    name: str, rows: list[DatasetSummary], users: Mapping[str, list[str]] = MappingProxyType({})
) -> DatasetSummary:
    """The row of a dataset; `DatasetError` if there is none, or if one of `users`, runs by dataset, uses it."""
    from palaestra.config import suggest_name

    row = next((row for row in rows if row.dataset_id == name), None)
    if row is None:
        remedy = suggest_name(name, [row.dataset_id for row in rows], "palaestra datasets list shows all")
        raise DatasetError("dataset", name, "there is none of this name", remedy)
    if name in users:
        raise DatasetError("dataset", name, f"run {users[name][0]} uses it", "Stop the run first")
    return row


def print_result(dataset: Dataset, as_json: bool, verb: str) -> None:
    """Print a dataset that was made: as one line, or as JSON."""
    if as_json:
        print_json(describe_dataset(dataset))
        return
    amounts = f"{_count(dataset.total_steps, 'step')} in {_count(dataset.total_episodes, 'episode')}"
    amounts += f" of {dataset.env_id or 'an unknown environment'}"
    scores = f"random score {_format_score(dataset.random_score)}, expert score {_format_score(dataset.expert_score)}"
    print(sanitize_line(f"{dataset.dataset_id} {verb}: {amounts}; {scores}"))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """The JSON data of a dataset."""
    from palaestra.experience.datasets.spaces import space_to_json

    keys = ("dataset_id", "env_id", "total_steps", "total_episodes", "random_score", "expert_score", "sha256", "about")
    spaces = {name: space_to_json(getattr(dataset, name)) for name in ("observation_space", "action_space")}
    return {key: getattr(dataset, key) for key in keys} | {"path": str(dataset.path), **spaces, "state": "verified"}


def _get_fields(dataset: Dataset) -> list[tuple[str, str]]:
    facts = [(key.replace("_", " "), str(value)) for key, value in dataset.about.items() if value not in (None, {}, "")]
    return [
        ("dataset", dataset.dataset_id),
        ("env", dataset.env_id),
        ("steps", f"{dataset.total_steps:,}"),
        ("episodes", f"{dataset.total_episodes:,}"),
        ("observation", shorten(str(dataset.observation_space), 120)),
        ("action", shorten(str(dataset.action_space), 120)),
        ("random score", _format_score(dataset.random_score)),
        ("expert score", _format_score(dataset.expert_score)),
        *((title, shorten(text, 120)) for title, text in facts),
        ("sha256", dataset.sha256),
        ("directory", str(dataset.path)),
        ("state", "verified"),
    ]


def _format_row(row: DatasetSummary) -> tuple[str, ...]:
    return (
        row.dataset_id,
        shorten(row.env_id, 40),
        f"{row.total_steps:,}",
        f"{row.total_episodes:,}",
        _format_score(row.random_score),
        _format_score(row.expert_score),
        format_bytes(row.size_bytes),
        format_time(row.last_used)[:16],
        "not verified" if row.state == "unverified" else row.state,
    )


def _format_score(score: float | None) -> str:
    return "unknown" if score is None else f"{score:,.1f}"
