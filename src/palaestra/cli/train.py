"""`palaestra train`: train as a configuration file and overrides say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.terminal import (
    ConfigArgument,
    JsonOption,
    OverridesArgument,
    format_columns,
    print_json,
    sanitize_line,
)
from palaestra.errors import ConfigError
from palaestra.extras import UI_AGENTS, require_extras
from palaestra.files.home import Home
from palaestra.intervals import format_return

if TYPE_CHECKING:
    from palaestra.train import TrainingResult


_ConfigOption = Annotated[
    list[str] | None, typer.Option("--config", metavar="CONFIG", help="Configuration, as an option.")
]


def train_command(
    config_file: ConfigArgument = None,
    overrides: OverridesArgument = None,
    config: _ConfigOption = None,
    list_configs: Annotated[bool, typer.Option("--list", help="List the packaged configurations, and exit.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume a run (id, unique prefix of it, or directory), without CONFIG."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="With --resume: checkpoint name or path. Default: the newest."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed; same as trainer.seed=N.")] = None,
    num_steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Same as trainer.total_timesteps=N; UI agents: trainer.num_training_steps=N."),
    ] = None,
    cluster_host: Annotated[
        str | None, typer.Option(metavar="HOST", help="UI agents: same as environment.cluster_host=HOST.")
    ] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")] = False,
    warm_start: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Start from the weights of this checkpoint or run.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Run directory that the run service prepared.", hidden=True)
    ] = None,
    attempt: Annotated[int, typer.Option(help="With --into: number of the attempt.", hidden=True)] = 1,
    check: Annotated[
        bool, typer.Option(help="Check the configuration and the environment without training.", hidden=True)
    ] = False,
) -> None:
    """Train a policy or a UI agent.

    CONFIG is a packaged configuration (palaestra train cartpole), an environment with default settings (palaestra train
    CartPole-v1) or a file of your own. The run is stored in var/training/runs/, below $PALAESTRA_HOME if it is set.
    Ctrl-C saves a checkpoint and exits.
    """
    if list_configs:
        _print_configs(as_json)
        return
    words = [*([config_file] if config_file is not None else []), *(overrides or [])]
    name, words = _split_config_and_overrides(words, config or [])
    _check_options(name, resume, checkpoint, warm_start)
    if quiet:
        words.append("telemetry.progress=false")

    from palaestra.api.training import run_config
    from palaestra.config.packaged import read_config
    from palaestra.files.run_directory import Attempt, RunDirectory, find_checkpoint

    root = Home.default().runs
    run = RunDirectory.find(resume, root) if resume is not None else None
    if run is not None and run.is_supervised and into is None:
        # The service would not list an attempt that it did not start, and its own next attempt would collide with it.
        raise ConfigError("--resume", run.run_id, "is a run of the run service", run.resume_command)
    source = read_config(name) if name is not None else None
    if source is not None:
        data, text = source.apply_overrides(words), source.text
    else:
        assert run is not None
        data, text = _override_resumed(run.read_config(), words, run.run_id), ""
    data = _apply_options(data, num_steps, cluster_host)
    if check:
        _print_check(data, seed)
        return
    start = run.get_checkpoint(checkpoint) if run is not None and checkpoint is not None else None
    place = None if into is None else Attempt(into.resolve() / f"attempt_{attempt}")
    weights = find_checkpoint(warm_start, root) if warm_start is not None else None
    if source is not None and source.path is None and not quiet:
        _print_defaults_notice(data, seed)
    result = run_config(data, seed, root=root, given=text, resume=run, checkpoint=start, into=place, warm_start=weights)
    if os.environ.get("RANK", "0") == "0":  # under torchrun one process speaks for all
        _print_result(result, as_json)
    if result.interrupted:
        raise typer.Exit(130)


def _print_configs(as_json: bool) -> None:
    from textwrap import shorten

    from palaestra.config.packaged import CONFIGS, describe_config, packaged_configs

    entries = [
        {"name": name, "group": str(path.parent.relative_to(CONFIGS)), "description": describe_config(path)}
        | {"path": str(path)}
        for name, path in packaged_configs().items()
    ]
    if as_json:
        print_json(entries)
        return
    rows = [[entry["name"], entry["group"], shorten(entry["description"], 110, placeholder=" …")] for entry in entries]
    print("\n".join(format_columns([["NAME", "GROUP", "DESCRIPTION"], *rows])))
    print(localize_commands(f"\nTrain one with: palaestra train NAME. The files are in {CONFIGS.resolve()}"))


def _print_defaults_notice(data: dict[str, Any], seed: int | None) -> None:
    """Tell that default settings are used, and which packaged configurations train in this environment.

    Checks the configuration first, so that the error is printed alone if it is refused.
    """
    from palaestra.config.packaged import configs_for
    from palaestra.env.make import raise_if_unknown
    from palaestra.train.config import config_from

    env = config_from(data, seed=seed).env
    raise_if_unknown(env)
    names = configs_for(env.id)
    tuned = f"; tuned ones: palaestra train {' or '.join(names)}" if names else ""
    print(localize_commands(f"{sanitize_line(env.id)} with default settings{tuned}"), file=sys.stderr)


def _split_config_and_overrides(words: list[str], configs: list[str]) -> tuple[str | None, list[str]]:
    """The configuration, given first or as --config, and the key=value words."""
    if words and "=" not in words[0]:
        configs = [words.pop(0), *configs]
    if len(configs) > 1:
        raise ConfigError("--config", configs[-1], f"{configs[0]} was given already", "Give one of them")
    invalid = next((word for word in words if "=" not in word), None)
    if invalid is not None:
        raise ConfigError("argument", invalid, "is not key=value", "Write for example trainer.total_timesteps=50000")
    return next(iter(configs), None), words


def _check_options(name: str | None, resume: str | None, checkpoint: str | None, warm_start: str | None) -> None:
    """Refuse options that contradict each other."""
    if name is None and resume is None:
        raise ConfigError("CONFIG", None, "no configuration given", "Try: palaestra train cartpole")
    if checkpoint is not None and resume is None:
        raise ConfigError("--checkpoint", checkpoint, "requires --resume", "Add --resume RUN, or use --warm-start")
    if warm_start is not None and resume is not None:
        reason = "a resumed run has the weights of its own checkpoint"
        raise ConfigError("--warm-start", warm_start, reason, "Leave it out, or start a new run without --resume")


def _override_resumed(data: dict[str, Any], words: list[str], run_id: str) -> dict[str, Any]:
    """The configuration of a resumed run with overrides.

    Another algorithm is refused, before the settings of this one are taken for those of the other one.
    """
    from palaestra.config.file import apply_overrides

    algorithm = data.get("algorithm")
    trained_with = algorithm.get("name") if isinstance(algorithm, dict) else None
    requested = [word.partition("=")[2] for word in words if word.startswith("algorithm.name=")]
    if requested and requested[-1] != trained_with:
        remedy = "Leave it out, or start a new run with a configuration"
        raise ConfigError("algorithm.name", requested[-1], f"run {run_id} learns with {trained_with}", remedy)
    return apply_overrides(data, words)


def _apply_options(data: dict[str, Any], num_steps: int | None, cluster_host: str | None) -> dict[str, Any]:
    """The configuration with the keys that options set."""
    from palaestra.api.training import set_length
    from palaestra.config.file import is_ui_config, set_value

    if cluster_host is not None:
        if not is_ui_config(data):
            raise ConfigError("--cluster-host", cluster_host, "is only for UI agents", "Leave it out")
        set_value(data, "environment.cluster_host", cluster_host)
    if num_steps is not None:
        set_length(data, num_steps)
    return data


def _print_check(data: dict[str, Any], seed: int | None) -> None:
    try:
        print_json(check_config(data, seed=seed))
    except ConfigError as error:
        # The caller is a program, which needs the parts rather than the sentence.
        parts = {"place": error.place, "value": error.value, "reason": error.reason, "remedy": error.remedy}
        print_json({"refused": parts})
        raise typer.Exit(2) from None


def check_config(data: Mapping[str, Any], *, seed: int | None = None) -> dict[str, Any]:
    """The resolved configuration and the names that a run is listed by, found without training.

    Builds one environment and its policy, so that everything that `train` refuses is refused here; writes nothing.
    Raises `ConfigError` for what cannot be trained. The run service calls this before a launch.
    """
    from palaestra.config.file import is_ui_config

    return _check_screens(data, seed) if is_ui_config(data) else _check_environment(data, seed)


def _check_environment(data: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    import gymnasium

    from palaestra.runs.process.probe import signature
    from palaestra.telemetry.config import check_telemetry
    from palaestra.train.config import config_from
    from palaestra.train.trainer import Trainer, build_trainer
    from palaestra.train.transitions import build_transition_training

    config = config_from(data, seed=seed)
    check_telemetry(config.telemetry)
    # One environment is enough; hundreds in worker processes would only take longer.
    changes = {"num_envs": 1} | ({"vectorization": "in_process"} if config.env.vectorization == "workers" else {})
    single = config.model_copy(update={"env": config.env.model_copy(update=changes)})
    trainer = build_transition_training(single) if config.experience == "transitions" else build_trainer(single)
    try:
        if isinstance(trainer, Trainer):
            length, ring = config.rollout_length, config.trainer.buffer_size
            trainer.training.check_memory(length, ring, num_envs=config.env.num_envs)
        env_signature = signature(trainer.env, config.env.id)
    finally:
        trainer.env.close()
    limit, spec = config.env.max_episode_steps, gymnasium.registry.get(config.env.id)
    if spec is not None:
        env_signature |= {"entry_point": str(spec.entry_point or "")}
        limit = limit or spec.max_episode_steps
    return {
        "resolved": config.to_json(),
        "env_id": config.env.id,
        "algorithm": config.algorithm["name"],
        "total_steps": config.total_timesteps,
        "env_signature": env_signature | {"max_episode_steps": limit},
        "offline_dataset": {} if isinstance(trainer, Trainer) else trainer.about().get("dataset", {}),
    }


def _check_screens(data: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    require_extras("UI agents", "vlm", "ui", only=UI_AGENTS)
    from palaestra.policy.device import choose_device
    from palaestra.telemetry.config import check_telemetry
    from palaestra.train.screen_config import screen_config_from

    config = screen_config_from(data, seed=seed)
    check_telemetry(config.telemetry)
    choose_device(config.model.device, place="model.device")
    return {
        "resolved": config.to_json(),
        "env_id": config.tasks[0].task,
        "algorithm": config.algorithm["name"],
        "total_steps": None,
        "env_signature": {"env_id": config.tasks[0].task, "tasks": [choice.task for choice in config.tasks]},
    }


def _print_result(result: TrainingResult, as_json: bool) -> None:
    run, final = result.run, result.final
    if as_json:
        print_json(
            {
                "run_id": run.run_id,
                "run_dir": str(run.path),
                "steps": result.steps,
                "interrupted": result.interrupted,
                "checkpoint": str(result.checkpoint),
                "final": {key: value if value == value else None for key, value in final.items()},
            }
        )
        return
    on_screens = "trajectories_learned" in final
    imitates = "demonstration_epochs" in final
    unit, score = "demonstrations" if imitates else "episodes" if on_screens else "steps", ""
    if on_screens and final.get("success_rate") is not None:
        score = f", success rate of the last batch {100 * final['success_rate']:.0f} %"
    elif not on_screens and final.get("episode_return") is not None:
        score = f", mean return of the last episodes {format_return(final['episode_return'])}"
    print(f"{'Stopped' if result.interrupted else 'Done'} after {result.steps:,} {unit}{score}.")
    if not on_screens and final.get("episodes") == 0 and not result.interrupted:
        print("No episode ended, so there is no return. If episodes can go on forever, set env.max_episode_steps=500")
    print(f"Run {run.run_id} in {run.path}")
    if result.interrupted:
        print(localize_commands(f"Resume with: {run.resume_command}"))
    else:
        episodes = 200 if on_screens else 100
        print(localize_commands(f"Evaluate with: palaestra eval {run.run_id} --episodes {episodes}"))
    if on_screens and not imitates and not result.interrupted:
        print(localize_commands(f"View episodes with: palaestra trajectories view {run.run_id}"))
