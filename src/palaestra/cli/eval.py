"""`palaestra eval`: evaluate a run or checkpoint, alone or against another."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from palaestra.cli.terminal import JsonOption, print_json
from palaestra.errors import ConfigError
from palaestra.files.checkpoint import checkpoint_kind, read_state
from palaestra.files.home import Home
from palaestra.files.run_directory import find_checkpoint

if TYPE_CHECKING:
    from palaestra.evaluation.play import Evaluation

_PROGRESS_EVERY_S = 0.1
_RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run id, run directory or checkpoint.", show_default=False),
]
_SampleOption = Annotated[
    bool | None,
    typer.Option(
        "--sample/--greedy",
        help="Sample actions, or take the most likely. Default: greedy; UI agents: as configured.",
    ),
]
_TasksOption = Annotated[
    str, typer.Option(metavar="TASK,...", help="UI agents: tasks, comma-separated. Default: those of the run.")
]
_DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N. Default: auto; UI agents: the training device."),
]


def eval_command(
    run: _RunArgument = None,
    episodes: Annotated[int, typer.Option(metavar="N", help="Number of episodes.")] = 100,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="First seed; UI agents: counted from the first held-out one. Default: seeds that training never uses.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare with this run or checkpoint on the same seeds.")
    ] = None,
    checkpoint: Annotated[Literal["best", "latest"], typer.Option(help="Which checkpoint of a run.")] = "best",
    sample: _SampleOption = None,
    deployed: Annotated[
        str | None, typer.Option(metavar="ENV", help="Evaluate the checkpoint that is deployed in ENV.")
    ] = None,
    tasks: _TasksOption = "",
    samples: Annotated[int, typer.Option(metavar="N", help="UI agents: attempts per task, for pass@k.")] = 1,
    video: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the first episode to a .webm or .mp4 file.")
    ] = None,
    frames: Annotated[int, typer.Option(metavar="N", help="Maximum number of frames of the video.")] = 200,
    long: Annotated[bool, typer.Option("--long", help="Allow more than 200 frames.")] = False,
    device: _DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a policy or UI agent on held-out seeds.

    Reports the mean return or success rate with a 95 % confidence interval.
    """
    for option, number in (("--episodes", episodes), ("--samples", samples)):
        if number < 1:
            raise ConfigError(option, number, "must be at least 1")

    from palaestra.train.config import MAX_SEED

    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise ConfigError("--seed", seed, f"must lie between 0 and {MAX_SEED}")
    run = _name_or_deployed(run, deployed)
    root = Home.default().runs
    path = find_checkpoint(run, root, which=checkpoint)
    other = find_checkpoint(against, root, which=checkpoint) if against is not None else None
    on_screens = checkpoint_kind(path) == "screens"
    if video is not None:
        _check_video(video, frames, long=long, on_screens=on_screens)
    if on_screens:
        from palaestra.api.screen_evaluation import evaluate_on_screens
        from palaestra.cli.datasets.progress import show_progress

        report = evaluate_on_screens(
            path,
            other,
            episodes=episodes,
            first=seed or 0,
            tasks=tasks,
            greedy=None if sample is None else not sample,
            samples=samples,
            device=device,
            show_progress=partial(show_progress, only_on_terminal=True),
        )
        print_json(report.document) if as_json else print("\n".join([*report.lines, *report.file_lines()]))
        return
    if tasks or samples > 1:
        raise ConfigError("--tasks", tasks, "is only for UI agents", "Leave it out")
    evaluate = partial(_evaluate, episodes=episodes, seed=seed, deterministic=not sample, device=device or "auto")
    evaluation = evaluate(path)
    document: dict[str, Any] = {"checkpoint": str(path), **evaluation.to_json(), **_score_facts(path, evaluation)}
    if other is not None:
        document |= _compare(evaluation, other, evaluate(other))
    if video is not None:
        from palaestra.cli.eval_video import record_episode

        document["video"] = record_episode(path, video, frames=frames, seed=seed, deterministic=not sample)
    if as_json:
        print_json(document)
        return
    _print_evaluation(document, run, against, video)
    _print_cut_off_hint(path, evaluation)


def _evaluate(path: Path, *, episodes: int, **options: Any) -> Evaluation:
    """Evaluate a checkpoint, with a progress bar on a terminal."""
    from palaestra.cli.datasets.progress import show_progress
    from palaestra.train import evaluate_checkpoint

    with show_progress(f"Evaluating {path.name}", "episodes", only_on_terminal=True) as update:
        shown = 0.0

        def report(finished: int, steps: int) -> None:
            nonlocal shown
            # After every step of fast environments the display would take longer than the steps.
            if time.monotonic() - shown > _PROGRESS_EVERY_S:
                update(finished, episodes, f"{steps:,} steps")
                shown = time.monotonic()

        return evaluate_checkpoint(path, episodes=episodes, on_progress=report, **options)


def _compare(evaluation: Evaluation, path: Path, baseline: Evaluation) -> dict[str, Any]:
    """The evaluation of another checkpoint, and the mean difference to it, episode by episode."""
    from palaestra.intervals import confidence_interval

    gaps = tuple(a - b for a, b in zip(evaluation.returns, baseline.returns, strict=True))
    interval = confidence_interval(gaps)
    return {
        "against": {"checkpoint": str(path), **baseline.to_json(), **_score_facts(path, baseline)},
        "difference": {"mean": sum(gaps) / len(gaps), "ci95": interval and list(interval)},
    }


def _score_facts(path: Path, evaluation: Evaluation) -> dict[str, Any]:
    """The normalised score, if the checkpoint was trained on a dataset with reference scores."""
    from palaestra.experience.datasets.scores import normalize_score

    dataset = (read_state(path) or {}).get("about", {}).get("dataset") or {}
    score = normalize_score(evaluation.mean_return, dataset.get("random_score"), dataset.get("expert_score"))
    return {} if score is None else {"normalized_score": score}


def _print_evaluation(document: dict[str, Any], run: str, against: str | None, video: Path | None) -> None:
    print(_format_evaluation(run, document))
    if video is not None:
        clip = document["video"]
        print(f"{video}: {clip['frames']} frames; recording made the episode {clip['slowdown']:.1f} times slower")
    if against is not None:
        gap = document["difference"]
        print(_format_evaluation(against, document["against"]))
        print(f"difference {gap['mean']:+.2f} ({_format_interval(gap['ci95'], '+.2f')})")


def _print_cut_off_hint(path: Path, evaluation: Evaluation) -> None:
    """Tell how many episodes reached the limit of evaluations, in an environment without one of its own."""
    from palaestra.env.make import EPISODE_LIMIT

    own_limit = (read_state(path) or {}).get("about", {}).get("config", {}).get("env", {}).get("max_episode_steps")
    count = sum(length >= EPISODE_LIMIT for length in evaluation.lengths)
    if count and own_limit is None:
        print(
            f"{count} of {len(evaluation.lengths)} episodes were cut off after {EPISODE_LIMIT:,} steps. If episodes "
            "can go on forever, train with a limit, which evaluations use as well: env.max_episode_steps=500"
        )


def _name_or_deployed(run: str | None, deployed: str | None) -> str:
    """The name that was given, or the path of the checkpoint that is deployed in an environment."""
    if deployed is None and run is not None:
        return run
    if deployed is None or run is not None:
        raise ConfigError("RUN_OR_CHECKPOINT", run, "give either this or --deployed", "palaestra eval --help")
    from palaestra.runs.checkpoints.deploy import get_deployment

    deployment = get_deployment(Home.default(), deployed)
    if deployment is None:
        remedy = "Deploy one with: palaestra checkpoints deploy"
        raise ConfigError("--deployed", deployed, "nothing is deployed there", remedy)
    return deployment.path


def _check_video(video: Path, frames: int, *, long: bool, on_screens: bool) -> None:
    from palaestra.runs.video.encoder import check_video_file

    if on_screens:
        remedy = "View episodes of UI agents with: palaestra trajectories view"
        raise ConfigError("--video", str(video), "is not available for UI agents", remedy)
    check_video_file(video, frames, long=long)


def _format_evaluation(name: str, report: dict[str, Any]) -> str:
    success = ""
    if "success_rate" in report:
        least, most = (100 * share for share in report["success_ci95"])
        success = f"success rate {100 * report['success_rate']:.1f} % (95 % interval {least:.1f} to {most:.1f}), "
    normalized = f", normalised score {report['normalized_score']:.1f}" if "normalized_score" in report else ""
    spread = _format_interval(report["ci95"], ".2f")
    if report["ci95"] is not None:
        spread += f"; standard deviation {report['std_return']:.2f}; {report['episodes']} episodes"
    return f"{name}: {success}mean return {report['mean_return']:.2f} ({spread}){normalized}"


def _format_interval(interval: list[float] | None, form: str) -> str:
    if interval is None:
        return "one episode, no interval"
    return f"95 % interval {interval[0]:{form}} to {interval[1]:{form}}"
