"""`palaestra datasets create`, `import` and `download`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.datasets.progress import show_progress
from palaestra.cli.datasets.read import DATASET_HELP, DatasetArgument, describe_dataset, print_result
from palaestra.cli.terminal import JsonOption, print_json
from palaestra.errors import ConfigError
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.experience.datasets.scores import MissingScores

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
        checkpoint=find_policy(checkpoint, home, "--checkpoint") if checkpoint else None,
        recordings=recordings,
        trust=trust,
        deterministic=not stochastic,
        noise=noise,
        random_share=random_share,
        seed=seed,
        score_episodes=score_episodes,
        expert_checkpoint=find_policy(expert_checkpoint, home, "--expert-checkpoint") if expert_checkpoint else None,
        expert_score=expert_score,
    )
    unit, total = ("steps", amount.steps) if amount.steps else ("episodes", amount.episodes)
    with stop_on_signals(), show_progress("collecting", unit) as update:
        dataset = collect_dataset(home, plan, lambda steps, n: update(steps if unit == "steps" else n, total or 0))
    print_result(dataset, as_json, "created")


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C in the block, so that nothing is left behind; exit code 130."""
    wanted = (signal.SIGTERM, signal.SIGHUP)
    # An ignored signal (nohup) stays ignored.
    caught = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    if "render_mode" in kwargs:
        reason = "render_mode opens a window or draws pictures, which no dataset holds"
        raise ConfigError("--env-kwargs", text, reason, "Leave render_mode out")
    return kwargs


def import_command(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="HDF5 file in D4RL's layout, or a Minari directory.")],
    dataset_id: Annotated[str, typer.Option("--id", metavar="DATASET", help=DATASET_HELP)] = "",
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
        with stop_on_signals():
            dataset = import_minari(root, source, dataset_id, scores=scores)
        print_result(dataset, as_json, "imported")
        return
    if not dataset_id or not env:
        missing = "--env" if dataset_id else "--id"
        raise ConfigError(
            missing, "", "required for an HDF5 file and not given", "See: palaestra datasets import --help"
        )
    from palaestra.env.make import EnvConfig
    from palaestra.train.collection.create import import_file

    with stop_on_signals():
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
        print_json(describe_dataset(report.dataset) | counts)
        return
    print_result(report.dataset, as_json, "imported")
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
    with stop_on_signals(), show_progress(f"downloading {dataset_id}", "bytes") as update:
        dataset = download_dataset(Home.default().datasets, dataset_id, report=update, scores=scores)
    print_result(dataset, as_json, "downloaded")


def _missing_scores(random: float | None, expert: float | None, episodes: int | None, seed: int) -> MissingScores:
    """The scores that the options give to data whose metadata has none."""
    from palaestra.experience.datasets.scores import MissingScores

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
