"""`palaestra datasets`: list, show, create, import, download, verify and prune datasets to learn from."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.progress import show_progress
from palaestra.cli.terminal import (
    JsonOption,
    YesOption,
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
    from palaestra.experience.datasets.import_data import MissingScores

_DATASET_HELP = "Dataset id, such as pendulum/medium-v0."
_TITLES = ("DATASET", "ENV", "STEPS", "EPISODES", "RANDOM", "EXPERT", "SIZE", "LAST USED", "STATE")
_ALIGN_RIGHT = (False, False, True, True, True, True, True, False, False)

DatasetArgument = Annotated[str, typer.Argument(metavar="DATASET", help=_DATASET_HELP, show_default=False)]
ScoreEpisodesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Episodes to measure an unknown random score. Default: 20 for HDF5 files, otherwise none."
    ),
]
RandomScoreOption = Annotated[
    float | None, typer.Option(metavar="X", help="Random score, if it is known and not in the metadata.")
]
ExpertScoreOption = Annotated[
    float | None, typer.Option(metavar="X", help="Expert score, if it is known and not in the metadata.")
]


def list_command(
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Only data of this environment.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List datasets and whether their files were verified.

    Interrupted downloads are listed as incomplete.
    """
    rows = [row for row in _list_rows(Home.default().datasets) if env in (None, row.env_id)]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if not rows:
        hint = "No datasets yet. Make one: palaestra datasets create pendulum/random-v0 --env Pendulum-v1 --steps 20000"
        print("No matching dataset." if env else hint)
        return
    print("\n".join(format_columns([_TITLES, *map(_format_row, rows)], _ALIGN_RIGHT)))
    for row in rows:
        if row.problem:
            print(sanitize_line(f"{row.dataset_id}: {row.problem}"), file=sys.stderr)


def show_command(dataset: DatasetArgument, as_json: JsonOption = False) -> None:
    """Verify a dataset and show its metadata."""
    from palaestra.experience.datasets import find_dataset

    found = find_dataset(dataset, Home.default().datasets, mark_used=False)
    if as_json:
        print_json(_dataset_data(found))
        return
    print("\n".join(format_columns([(title, text) for title, text in _get_fields(found) if text])))


def verify_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="DATASET", help=_DATASET_HELP)] = None,
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
    selected = rows if everything else [_find_row(name, rows) for name in dict.fromkeys(names or ())]
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


def create_command(
    dataset_id: DatasetArgument,
    env: Annotated[str, typer.Option(metavar="ENV", help="Environment id. Default: that of --checkpoint.")] = "",
    env_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help='Arguments of the environment, such as \'{"map_name": "8x8"}\'.')
    ] = "",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="random (default), or a function package.module:function(observation).")
    ] = "",
    checkpoint: Annotated[
        str, typer.Option(metavar="RUN_OR_CHECKPOINT", help="Collect with the policy of this run or checkpoint.")
    ] = "",
    stochastic: Annotated[
        bool,
        typer.Option("--stochastic", help="Sample the actions of the checkpoint."),
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Allow the code that a checkpoint of another trainer needs to run.")
    ] = False,
    recorded: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EPISODE", help="Id of a recorded episode of a play; may be repeated. all: every one in --env."
        ),
    ] = None,
    noise: Annotated[float, typer.Option(metavar="SHARE", help="Share of random actions (0 to 1).")] = 0.0,
    random_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the data collected by a random policy (0 to 1).")
    ] = 0.0,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Number of steps.")] = None,
    num_episodes: Annotated[int | None, typer.Option(metavar="N", help="Number of whole episodes.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of environments and actions.")] = 0,
    score_episodes: Annotated[
        int, typer.Option(metavar="N", help="Episodes for the reference scores (0: measure none).")
    ] = 20,
    expert_checkpoint: Annotated[
        str, typer.Option(metavar="RUN_OR_CHECKPOINT", help="Measure the expert score with this checkpoint.")
    ] = "",
    expert_score: Annotated[float | None, typer.Option(metavar="X", help="Expert score, if it is known.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Collect a dataset with a policy, or from recorded episodes.

    The same arguments give the same data on the same machine.
    """
    from palaestra.train.collection.collect import Amount
    from palaestra.train.collection.create import CollectionPlan, collect_dataset
    from palaestra.train.collection.foreign import find_policy
    from palaestra.train.collection.recorded import find_recordings

    home = Home.default()
    recordings = find_recordings(home, recorded, env) if recorded else None
    if recordings is not None and (steps is not None or num_episodes is not None):
        raise ConfigError(
            "--recorded", recorded, "recorded episodes are used whole", "Leave out --steps, --num-episodes"
        )
    amount = Amount(steps, num_episodes) if recordings is None else Amount(episodes=len(recordings.readers))
    plan = CollectionPlan(
        dataset_id=dataset_id,
        amount=amount,
        env_id=env,
        env_kwargs=_parse_kwargs(env_kwargs),
        policy=policy or ("" if checkpoint or recorded else "random"),
        checkpoint=find_policy(checkpoint, home) if checkpoint else None,
        recordings=recordings,
        trust=trust,
        deterministic=not stochastic,
        noise=noise,
        random_share=random_share,
        seed=seed,
        score_episodes=score_episodes,
        expert_checkpoint=find_policy(expert_checkpoint, home) if expert_checkpoint else None,
        expert_score=expert_score,
    )
    unit, total = ("steps", amount.steps) if amount.steps else ("episodes", amount.episodes)
    with show_progress("collecting", unit) as update:
        dataset = collect_dataset(home, plan, lambda steps, n: update(steps if unit == "steps" else n, total or 0))
    _print_result(dataset, as_json, "created")


def _parse_kwargs(text: str) -> dict[str, Any] | None:
    from palaestra.strict_json import read_json

    if not text:
        return None
    try:
        kwargs = read_json(text)
        if not isinstance(kwargs, dict):
            raise ValueError(f"it is a {type(kwargs).__name__}")
    except ValueError as error:
        example = 'Write for example {"map_name": "8x8"}'
        raise ConfigError("--env-kwargs", text, f"is not a JSON object ({error})", example) from None
    return kwargs


def import_command(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="HDF5 file in D4RL's layout, or a Minari directory.")],
    dataset_id: Annotated[str, typer.Option("--id", metavar="DATASET", help=_DATASET_HELP)] = "",
    env: Annotated[str, typer.Option(metavar="ENV", help="HDF5 files: environment that the data comes from.")] = "",
    env_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="HDF5 files: arguments of the environment, as a JSON object.")
    ] = "",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random score.")] = 0,
    score_episodes: ScoreEpisodesOption = None,
    random_score: RandomScoreOption = None,
    expert_score: ExpertScoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import data from an HDF5 file or a Minari directory.

    Every step is checked. Nothing in the file is executed, and no other file is read.
    """
    root, kwargs = Home.default().datasets, _parse_kwargs(env_kwargs)
    if source.is_dir():
        from palaestra.experience.datasets.import_data import import_minari

        for place, value in (("--env", env), ("--env-kwargs", env_kwargs)):
            if value:
                raise ConfigError(place, value, "the metadata of a Minari directory has it", "Leave it out")
        scores = _missing_scores(random_score, expert_score, score_episodes, seed)
        _print_result(import_minari(root, source, dataset_id, scores=scores), as_json, "imported")
        return
    if not dataset_id or not env:
        missing = "--env" if dataset_id else "--id"
        raise ConfigError(
            missing, "", "required for an HDF5 file and not given", "See: palaestra datasets import --help"
        )
    from palaestra.env.make import EnvConfig
    from palaestra.train.collection.create import import_file

    report = import_file(
        root,
        source,
        dataset_id,
        EnvConfig(id=env, kwargs=kwargs or {}),
        seed=seed,
        score_episodes=20 if score_episodes is None else score_episodes,
        random_score=random_score,
        expert_score=expert_score,
    )
    if as_json:
        counts = {"steps_read": report.steps_read, "steps_dropped": report.steps_dropped}
        print_json(_dataset_data(report.dataset) | counts)
        return
    _print_result(report.dataset, as_json, "imported")
    if report.steps_dropped:
        reason = "the last steps of episodes whose next observation is not in the file"
        print(f"{report.steps_dropped:,} of {report.steps_read:,} steps were dropped: {reason}", file=sys.stderr)


def download_command(
    dataset_id: DatasetArgument,
    score_episodes: ScoreEpisodesOption = None,
    random_score: RandomScoreOption = None,
    expert_score: ExpertScoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Download a dataset from Minari's remote on Hugging Face.

    An interrupted download continues where it stopped. From another remote (`MINARI_REMOTE`) it starts again.
    """
    from palaestra.experience.datasets.download import download_dataset

    scores = _missing_scores(random_score, expert_score, score_episodes, seed=0)
    with show_progress(f"downloading {dataset_id}", "bytes") as update:
        dataset = download_dataset(Home.default().datasets, dataset_id, report=update, scores=scores)
    _print_result(dataset, as_json, "downloaded")


def _missing_scores(random: float | None, expert: float | None, episodes: int | None, seed: int) -> MissingScores:
    """The scores that the options give to data whose metadata has none."""
    from palaestra.experience.datasets.import_data import MissingScores

    def measure(env_id: str, settings: Mapping[str, Any]) -> float:
        from palaestra.env.make import EnvConfig
        from palaestra.train.collection.create import measure_random_score

        config = EnvConfig(
            id=env_id,
            kwargs=settings.get("env_kwargs") or {},
            max_episode_steps=settings.get("max_episode_steps"),
        )
        return measure_random_score(config, episodes=episodes or 0, seed=seed)

    return MissingScores(random=random, expert=expert, measure_random=measure if episodes else None)


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
    from palaestra.experience.datasets.cache import parse_age, parse_size, read_size_limit, select_expired
    from palaestra.experience.datasets.incomplete_downloads import is_downloading
    from palaestra.runs.datasets import find_users

    root = Home.default().datasets
    size_limit = parse_size(max_size, "--max-size") if max_size else None if names else read_size_limit()
    age_limit = parse_age(older_than, "--older-than") if older_than else None
    if bool(names) == (size_limit is not None or age_limit is not None):
        remedy = "Give datasets, or --max-size or --older-than, or set PALAESTRA_DATASETS_MAX_SIZE"
        raise ConfigError("datasets prune", names or [], "nothing to remove is given", remedy)
    rows = _list_rows(root)
    users = query(lambda reader: find_users(reader, [row for row in rows if row.state != "incomplete"]))
    if names:
        chosen = {_find_row(name, rows, users).dataset_id for name in names}
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


def _list_rows(root: Path) -> list[DatasetSummary]:
    """Datasets and incomplete downloads, sorted by id."""
    from palaestra.experience.datasets import list_datasets
    from palaestra.experience.datasets.incomplete_downloads import list_downloads

    return sorted((*list_datasets(root), *list_downloads(root)), key=lambda row: row.dataset_id)


def _remove_row(root: Path, row: DatasetSummary) -> None:
    from palaestra.experience.datasets import delete_dataset
    from palaestra.experience.datasets.incomplete_downloads import delete_download

    (delete_download if row.state == "incomplete" else delete_dataset)(root, row.dataset_id)


def _find_row(
    name: str, rows: list[DatasetSummary], users: Mapping[str, list[str]] = MappingProxyType({})
) -> DatasetSummary:
    from palaestra.config import suggest_name

    row = next((row for row in rows if row.dataset_id == name), None)
    if row is None:
        remedy = suggest_name(name, [row.dataset_id for row in rows], "palaestra datasets list shows all")
        raise DatasetError("dataset", name, "there is none of this name", remedy)
    if name in users:
        raise DatasetError("dataset", name, f"run {users[name][0]} uses it", "Stop the run first")
    return row


def _print_result(dataset: Dataset, as_json: bool, verb: str) -> None:
    if as_json:
        print_json(_dataset_data(dataset))
        return
    amounts = f"{dataset.total_steps:,} steps in {dataset.total_episodes:,} episodes of {dataset.env_id}"
    scores = f"random score {_format_score(dataset.random_score)}, expert score {_format_score(dataset.expert_score)}"
    print(sanitize_line(f"{dataset.dataset_id} {verb}: {amounts}; {scores}"))


def _dataset_data(dataset: Dataset) -> dict[str, Any]:
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
