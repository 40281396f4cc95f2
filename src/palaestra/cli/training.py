"""`palaestra train`: a configuration, overrides, and a run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import strict_json
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.files.run_directory import Attempt, RunDirectory
    from palaestra.train import TrainingResult

__all__ = ["train_command"]


def train_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A YAML or JSON file, then overrides such as algorithm.learning_rate=1e-3. "
            "With --resume the file may be left out.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[Path] | None, typer.Option("--config", metavar="CONFIG", help="The file, if it is not the first argument.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run (id, start of an id, or directory).")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="With --resume: checkpoint to resume from (name or path). Default: the newest."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same as trainer.seed=N.")] = None,
    num_steps: Annotated[
        int | None,
        typer.Option(help="Same as trainer.total_timesteps=N; for screens, trainer.num_training_steps=N."),
    ] = None,
    cluster_host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Same as environment.cluster_host=HOST, for screens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document about the run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    warm_start: Annotated[
        Path | None, typer.Option(metavar="CHECKPOINT", help="Begin with the weights of a checkpoint.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Fill an attempt that the run service prepared.", hidden=True)
    ] = None,
    attempt: Annotated[int, typer.Option(help="Which attempt --into means.", hidden=True)] = 1,
    check: Annotated[
        bool, typer.Option(help="Try configuration and environment, print what they are, train nothing.", hidden=True)
    ] = False,
) -> None:
    """Train a policy as a configuration says.

    The run appears under var/training/runs/ (or $PALAESTRA_HOME). Ctrl-C saves a checkpoint and leaves.
    """
    path, words = _config_and_overrides(list(arguments or []), config or [])
    _check_options(path, resume, checkpoint, warm_start)
    if quiet:
        words.append("telemetry.progress=false")

    from palaestra.config.file import apply_overrides, read_config_file
    from palaestra.files.home import Home
    from palaestra.files.run_directory import Attempt, RunDirectory

    root = Home.default().runs
    run = RunDirectory.find(resume, root) if resume is not None else None
    if run is not None and run.is_supervised and into is None:
        # The service would not list an attempt that it did not start, and its own next attempt would collide with it.
        raise ConfigError("--resume", run.run_id, "is a run of the run service", run.resume_command)
    if path is not None:
        data, given = read_config_file(path, Path("configs/ppo")), path.read_text(encoding="utf-8")
    else:
        assert run is not None
        data, given = run.read_config(), ""
    data = _with_options(apply_overrides(data, words), num_steps, cluster_host)
    if check:
        _check(data, seed)
        return
    start = run.get_checkpoint(checkpoint) if run is not None and checkpoint is not None else None
    prepared = None if into is None else Attempt(into.resolve() / f"attempt_{attempt}")
    outcome = _train(data, seed, root, given, run, start, prepared, warm_start)
    _report(outcome, as_json)
    if outcome.interrupted:
        raise typer.Exit(130)


def _check_options(path: Path | None, resume: str | None, checkpoint: str | None, warm_start: Path | None) -> None:
    """Refuse options that contradict each other."""
    if path is None and resume is None:
        raise ConfigError(
            "CONFIG", None, "no configuration file given", "Try: palaestra train configs/ppo/cartpole.yaml"
        )
    if checkpoint is not None and resume is None:
        raise ConfigError("--checkpoint", checkpoint, "is only for a resume", "Add --resume RUN, or use --warm-start")
    if warm_start is not None and resume is not None:
        reason = "a resumed run has the weights of its own checkpoint"
        raise ConfigError("--warm-start", str(warm_start), reason, "Leave it out, or start a new run without --resume")


def _config_and_overrides(words: list[str], configs: list[Path]) -> tuple[Path | None, list[str]]:
    """The file, given first or as --config, and the key=value words."""
    if words and "=" not in words[0]:
        configs = [Path(words.pop(0)), *configs]
    if len(configs) > 1:
        raise ConfigError("--config", str(configs[-1]), f"{configs[0]} was given already", "Give one of them")
    stray = [word for word in words if "=" not in word]
    if stray:
        raise ConfigError("argument", stray[0], "is not key=value", "Write for example trainer.total_timesteps=50000")
    return next(iter(configs), None), words


def _with_options(data: dict[str, Any], num_steps: int | None, cluster_host: str | None) -> dict[str, Any]:
    """The configuration with what options say in place of keys."""
    from palaestra.config.file import is_ui_config, set_value

    if cluster_host is not None:
        if not is_ui_config(data):
            raise ConfigError("--cluster-host", cluster_host, "is for a model on screens", "Leave it out")
        set_value(data, "environment.cluster_host", cluster_host)
    if num_steps is not None and is_ui_config(data):
        set_value(data, "trainer.num_training_steps", num_steps)
    elif num_steps is not None:
        set_value(data, "trainer.total_timesteps", num_steps)
        set_value(data, "trainer.iterations", None)  # the same length counted otherwise
    return data


def _train(
    data: dict[str, Any],
    seed: int | None,
    root: Path,
    given: str,
    run: RunDirectory | None,
    checkpoint: Path | None,
    into: Attempt | None,
    warm_start: Path | None,
) -> TrainingResult:
    """Train as the data says: a model on screens, or a policy in an environment."""
    from palaestra.config.file import is_ui_config
    from palaestra.files.run_directory import new_run_id

    if is_ui_config(data):
        if find_spec("transformers") is None:
            raise ConfigError(
                "model", data["model"], "transformers is not installed", "pip install 'palaestra[vlm,ui]'"
            )
        from palaestra.train.screen_config import screen_config_from
        from palaestra.train.screens import train_screens

        wanted = screen_config_from(data, seed=seed)
        return train_screens(
            wanted, root=root, run_id=new_run_id(wanted.name), given=given, argv=sys.argv, resume=run,
            checkpoint=checkpoint, into=into, warm_start=warm_start,
        )  # fmt: skip
    from palaestra.train import config_from, train

    config = config_from(data, seed=seed)
    name = config.name or config.env.id.split(":")[-1]
    return train(
        config, root=root, run_id=new_run_id(name), given=given, argv=sys.argv, resume=run,
        checkpoint=checkpoint, into=into, warm_start=warm_start,
    )  # fmt: skip


def _check(data: dict[str, Any], seed: int | None) -> None:
    from palaestra.cli.train_check import check_config

    try:
        print(strict_json(check_config(data, seed=seed)))
    except ConfigError as error:
        # The caller is a program, which needs the parts rather than the sentence.
        parts = {"place": error.place, "value": error.value, "reason": error.reason, "remedy": error.remedy}
        print(strict_json({"refused": parts}))
        raise typer.Exit(2) from None


def _report(outcome: TrainingResult, as_json: bool) -> None:
    run = outcome.run
    if as_json:
        document = {
            "run_id": run.run_id,
            "run_dir": str(run.path),
            "steps": outcome.steps,
            "interrupted": outcome.interrupted,
            "checkpoint": str(outcome.checkpoint),
            "final": {key: value if value == value else None for key, value in outcome.final.items()},
        }
        print(strict_json(document))
        return
    if "trajectories_learned" in outcome.final:
        _report_screens(outcome)
        return
    mean = outcome.final.get("episode_return")
    score = f", mean return of the last episodes {mean:.1f}" if mean is not None else ""
    print(f"{'Stopped' if outcome.interrupted else 'Done'} after {outcome.steps:,} steps{score}.")
    print(f"Run {run.run_id} in {run.path}")
    if outcome.interrupted:
        print(f"Resume with: {run.resume_command}")
    else:
        print(f"Evaluate with: palaestra eval {run.run_id} --episodes 100")


def _report_screens(outcome: TrainingResult) -> None:
    run, rate = outcome.run, outcome.final.get("success_rate")
    score = f", {100 * rate:.0f} % of the last batch solved" if rate is not None else ""
    print(f"{'Stopped' if outcome.interrupted else 'Done'} after {outcome.steps:,} episodes{score}.")
    print(f"Run {run.run_id} in {run.path}")
    if outcome.interrupted:
        print(f"Resume with: {run.resume_command}")
    else:
        print(f"Evaluate with: palaestra eval {run.run_id} --episodes 200")
        print(f"Look at it with: palaestra trajectories view {run.run_id}")
