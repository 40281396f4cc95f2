"""`palaestra eval`: how good a run or checkpoint is, alone or against another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from palaestra.cli.terminal import strict_json
from palaestra.errors import ConfigError
from palaestra.files.checkpoint import checkpoint_kind
from palaestra.files.home import Home
from palaestra.files.run_directory import find_checkpoint

if TYPE_CHECKING:
    from palaestra.evaluation import Evaluation

__all__ = ["evaluate_command"]


def evaluate_command(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run id, run directory or checkpoint.", show_default=False),
    ] = None,
    episodes: Annotated[int, typer.Option(help="Exactly this many episodes.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Where episodes start; by default seeds never trained on.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Also play OTHER on the same seeds and compare.")
    ] = None,
    checkpoint: Annotated[Literal["best", "latest"], typer.Option(help="Which one of a run.")] = "best",
    sample: Annotated[
        bool | None,
        typer.Option(
            "--sample/--greedy",
            help="Draw actions, or take the likeliest. By default the likeliest; models on screens as their run says.",
        ),
    ] = None,
    deployed: Annotated[
        str | None, typer.Option(metavar="ENV", help="Play what is deployed in ENV, instead of naming a checkpoint.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Screens: tasks separated by commas; by default the run's own.")] = "",
    samples: Annotated[int, typer.Option(help="Screens: times each task is played, for pass@k.")] = 1,
    video: Annotated[Path | None, typer.Option(help="Also film its first episode: clip.webm, or clip.mp4.")] = None,
    frames: Annotated[int, typer.Option(help="Maximum number of frames of the video.")] = 200,
    long: Annotated[bool, typer.Option("--long", help="Allow more than 200 frames.")] = False,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N. Default: auto; models on screens: as trained.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Play a trained policy on fresh environments, or held-out tasks, and report how it did with a 95 % interval."""
    for name, number in (("--episodes", episodes), ("--samples", samples)):
        if number < 1:
            raise ConfigError(name, number, "must be at least 1")

    from palaestra.train import evaluate_checkpoint
    from palaestra.train.config import MAX_SEED

    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise ConfigError("--seed", seed, f"must lie between 0 and {MAX_SEED}")
    run = _named(run, deployed)
    root = Home.default().runs
    path = find_checkpoint(run, root, which=checkpoint)
    other = find_checkpoint(against, root, which=checkpoint) if against is not None else None
    screens = checkpoint_kind(path) == "screens"
    if video is not None:
        _check_video(video, frames, long=long, screens=screens)
    if screens:
        from palaestra.cli.evaluating_ui import evaluate_screens

        greedy = None if sample is None else not sample
        evaluate_screens(
            path, other, episodes=episodes, first=seed or 0, tasks=tasks, greedy=greedy, samples=samples,
            device=device, as_json=as_json,
        )  # fmt: skip
        return
    if tasks or samples > 1:
        raise ConfigError("--tasks", tasks, "means something for models on screens alone", "Leave it out")
    play = partial(evaluate_checkpoint, episodes=episodes, seed=seed, deterministic=not sample, device=device or "auto")
    found = play(path)
    document: dict[str, Any] = {"checkpoint": str(path), **found.to_json()}
    if other is not None:
        rival = play(other)
        document["against"] = {"checkpoint": str(other), **rival.to_json()}
        document["difference"] = _difference(found, rival)
    if video is not None:
        from palaestra.cli.filming import film

        document["video"] = film(path, video, frames=frames, seed=seed, deterministic=not sample)
    if as_json:
        print(strict_json(document))
        return
    _print_report(document, run, against, video)


def _print_report(document: dict[str, Any], run: str, against: str | None, video: Path | None) -> None:
    print(_sentence(run, document))
    if video is not None:
        clip = document["video"]
        print(f"{video}: {clip['frames']} frames; filming made it {clip['slowdown']:.1f} times slower")
    if against is not None:
        gap = document["difference"]
        print(_sentence(against, document["against"]))
        print(f"difference {gap['mean']:+.2f} (95 % interval {gap['ci95'][0]:+.2f} to {gap['ci95'][1]:+.2f})")


def _named(run: str | None, deployed: str | None) -> str:
    """What to play: what was named, or what is deployed in an environment."""
    if deployed is None and run is not None:
        return run
    if deployed is None or run is not None:
        raise ConfigError("RUN_OR_CHECKPOINT", run, "give one of it and --deployed", "palaestra eval --help")
    from palaestra.runs.checkpoints.deploying import deployed as deployed_in

    now = deployed_in(Home.default(), deployed)
    if now is None:
        raise ConfigError("--deployed", deployed, "nothing is deployed there", "palaestra checkpoints deploy does that")
    return now.path


def _check_video(video: Path, frames: int, *, long: bool, screens: bool) -> None:
    from palaestra.runs.video.encoder import check_video_file

    if screens:
        raise ConfigError("--video", str(video), "films environments", "palaestra trajectories shows screens")
    check_video_file(video, frames, long=long)


def _sentence(name: str, report: dict[str, Any]) -> str:
    low, high = report["ci95"]
    solved = ""
    if "success_rate" in report:
        least, most = (100 * share for share in report["success_ci95"])
        solved = f"solved {100 * report['success_rate']:.1f} % (95 % interval {least:.1f} to {most:.1f}), "
    return (
        f"{name}: {solved}mean return {report['mean_return']:.2f} (95 % interval {low:.2f} to {high:.2f}; "
        f"standard deviation {report['std_return']:.2f}; {report['episodes']} episodes)"
    )


def _difference(a: Evaluation, b: Evaluation) -> dict[str, Any]:
    from palaestra.evaluation.statistics import confidence_interval

    gaps = tuple(x - y for x, y in zip(a.returns, b.returns, strict=True))
    return {"mean": sum(gaps) / len(gaps), "ci95": list(confidence_interval(gaps))}
