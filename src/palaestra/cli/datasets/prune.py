"""`palaestra datasets prune`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaestra.cli.datasets.read import find_row, list_rows
from palaestra.cli.terminal import JsonOption, YesOption, format_bytes, print_json
from palaestra.errors import ConfigError
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.experience.datasets import DatasetSummary


def prune_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="DATASET", help="Datasets to remove.")] = None,
    max_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Remove the least recently used until the rest fits into this size, such as 5GB. "
            "Default: $PALAESTRA_DATASETS_MAX_SIZE.",
        ),
    ] = "",
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Remove those that were not used for this long, such as 30d or 12h.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove datasets and incomplete downloads to free disk space.

    Datasets that a queued or running run uses are kept, and so are downloads in progress.
    """
    from palaestra.cli.runs.manage import confirm
    from palaestra.cli.runs.read import query
    from palaestra.experience.datasets.disk_space import parse_age, parse_size, read_size_limit, select_expired
    from palaestra.experience.datasets.incomplete_downloads import is_downloading
    from palaestra.runs.datasets import find_users

    root = Home.default().datasets
    size_limit = parse_size(max_size, "--max-size") if max_size else None if names else read_size_limit()
    age_limit = parse_age(older_than, "--older-than") if older_than else None
    if names and (max_size or older_than):
        option, limit = ("--max-size", max_size) if max_size else ("--older-than", older_than)
        raise ConfigError(
            option, limit, f"datasets are named too ({', '.join(names)})", "Give names or limits, not both"
        )
    if not names and size_limit is None and age_limit is None:
        remedy = "Give datasets, or --max-size or --older-than, or set PALAESTRA_DATASETS_MAX_SIZE"
        raise ConfigError("datasets prune", names or [], "nothing to remove is given", remedy)
    rows = list_rows(root)
    users = query(lambda reader: find_users(reader, [row for row in rows if row.state != "incomplete"]))
    if names:
        chosen = {find_row(name, rows, users).dataset_id for name in names}
        expired = [row for row in rows if row.dataset_id in chosen]
    else:
        downloads = {row.dataset_id for row in rows if row.state == "incomplete"}
        in_use = {*users, *(name for name in downloads if is_downloading(root, name))}
        expired = select_expired(rows, max_size=size_limit, older_than=age_limit, now=time.time(), in_use=in_use)
    ids, size = [row.dataset_id for row in expired], sum(row.size_bytes for row in expired)
    if expired and not dry_run:
        confirm(f"remove {', '.join(ids)} ({format_bytes(size)})", yes)
        for row in expired:
            _remove_row(root, row)
    kept = sorted(set(users) - set(ids))
    if as_json:
        print_json({"removed": ids, "bytes": size, "dry_run": dry_run, "in_use": {name: users[name] for name in kept}})
        return
    verb = "would be removed" if dry_run else "removed"
    print(
        "\n".join(f"{row.dataset_id} {verb} ({format_bytes(row.size_bytes)})" for row in expired)
        or "Nothing to remove."
    )


def _remove_row(root: Path, row: DatasetSummary) -> None:
    from palaestra.experience.datasets import delete_dataset
    from palaestra.experience.datasets.incomplete_downloads import delete_download

    (delete_download if row.state == "incomplete" else delete_dataset)(root, row.dataset_id)
