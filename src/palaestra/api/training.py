"""`train`: a run from an environment, a configuration or an earlier run, in one call."""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from palaestra.api.environments import environment_section
from palaestra.api.event_loop import call_outside_event_loop, has_event_loop
from palaestra.api.trained_run import EnvFactory, TrainedRun, load
from palaestra.config.file import is_ui_config, set_value
from palaestra.config.packaged import read_config, set_default_rollout_length
from palaestra.errors import ConfigError
from palaestra.extras import UI_AGENTS, require_extras
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory, new_run_id
from palaestra.telemetry.progress import can_redraw

if TYPE_CHECKING:
    from palaestra.train.run import RunCallback, TrainingResult


def train(
    what: str | os.PathLike[str] | Mapping[str, Any] | EnvFactory | TrainedRun,
    *,
    steps: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    callback: RunCallback | Sequence[RunCallback] | None = None,
    progress: bool | None = None,
    warm_start: TrainedRun | str | os.PathLike[str] | None = None,
    policy: Any = None,
) -> TrainedRun:
    """Train, and return the run with its best policy.

    `what`: the id of a Gymnasium environment, a class or function that makes one, a configuration (the name of a
    packaged one, a path, or a dictionary; of an environment or of tasks on screens), or a run to continue. `steps`:
    steps in the environment in total; for tasks on screens, updates. `settings`: configuration keys with dots, such as
    `{"algorithm.learning_rate": 1e-3}` (docs/configuration.md). `name`: beginning of the id of a new run. `callback`:
    called after every update with its metrics; returning False ends the training. `progress`: show one line of
    progress; by default in a notebook and on a terminal. `warm_start`: a run or checkpoint to take the weights from.
    `policy`: a model that replaces the one of a configuration for screens.

    Ctrl-C finishes the update, saves a checkpoint and returns the run.
    """
    request = _read_request(what)
    if request.resume is not None and name is not None:
        reason = f"run {request.resume.run_id} is continued and keeps its id"
        remedy = "Leave it out, or train a new run from its weights: palaestra.train(…, warm_start=run)"
        raise ConfigError("train(name)", name, reason, remedy)
    data = _apply_settings(request.data, settings or {}, name, only_environment=request.only_environment)
    if steps is not None:
        set_length(data, steps)
    line = _choose_progress(data, progress)
    stop = threading.Event()
    options: dict[str, Any] = {
        "root": Home.default().runs,
        "given": request.given or _dump(data),
        "resume": request.resume,
        "callback": _combine(callback, stop),
        "progress_line": line,
    }
    if warm_start is not None:
        options["warm_start"] = _find_weights(warm_start)
    if policy is not None:
        options["policy"] = policy
    if not is_ui_config(data):
        if policy is not None:
            remedy = "Name your network in policy.name, or use palaestra.Trainer"
            raise ConfigError("train(policy)", type(policy).__name__, "replaces a model for screens only", remedy)
        result = run_config(data, seed, **options)
    else:
        result = call_outside_event_loop(lambda: run_config(data, seed, **options), request_stop=stop.set)
    checkpoint = result.run.best_checkpoint() or result.checkpoint
    return TrainedRun(checkpoint, env=request.env, interrupted=result.interrupted or stop.is_set())


class _Request(NamedTuple):
    """The first argument of `train` as a configuration."""

    data: dict[str, Any]
    given: str = ""
    """The text of a configuration file."""
    resume: RunDirectory | None = None
    env: Mapping[str, Any] | None = None
    only_environment: bool = False


def _read_request(what: Any) -> _Request:
    if isinstance(what, TrainedRun):
        directory = what.directory
        if directory is None:
            remedy = "Train a new run from its weights: palaestra.train(…, warm_start=run)"
            raise ConfigError("train(run)", str(what.checkpoint), "is a copy of a checkpoint without its run", remedy)
        if directory.is_supervised:
            # The service would not list an attempt that it did not start.
            reason = "is a run of the run service"
            raise ConfigError("train(run)", directory.run_id, reason, f"Continue it with: {directory.resume_command}")
        data = directory.read_config()
        if what.env:
            data["env"] = {**data["env"], **what.env}
        return _Request(data, resume=directory, env=what.env)
    if isinstance(what, Mapping):
        return _Request(copy.deepcopy(dict(what)), only_environment=what.keys() == {"env"})
    if isinstance(what, str | os.PathLike):
        import gymnasium

        word = os.fspath(what)
        if word in gymnasium.registry:
            return _Request({"env": {"id": word}}, only_environment=True)  # an id need not end in a version
        source = read_config(word)
        return _Request(source.data, given=source.text, only_environment=source.path is None)
    return _Request({"env": environment_section(what)}, only_environment=True)


def _apply_settings(
    data: dict[str, Any], settings: Mapping[str, Any], name: str | None, *, only_environment: bool
) -> dict[str, Any]:
    """The configuration with the settings, and with a rollout length if nothing but an environment was given."""
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        remedy = "Give a dictionary with the keys of a configuration: settings={'algorithm.learning_rate': 1e-3}"
        raise ConfigError("train(settings)", settings, "is not a dictionary with text as keys", remedy)
    for key, value in settings.items():
        set_value(data, key, copy.deepcopy(value))
    if name is not None:
        data["experiment_name" if is_ui_config(data) else "name"] = name
    if only_environment:
        set_default_rollout_length(data)
    return data


def set_length(data: dict[str, Any], steps: int) -> None:
    """Set the length of a run: steps in the environment, gradient steps offline, updates of models on screens."""
    if is_ui_config(data):
        set_value(data, "trainer.num_training_steps", steps)
        return
    trainer = data.get("trainer") or {}
    is_offline = trainer.get("updates") is not None and trainer.get("total_timesteps") is None
    set_value(data, "trainer.updates" if is_offline else "trainer.total_timesteps", steps)
    set_value(data, "trainer.iterations", None)  # the same length in another unit


def run_config(data: dict[str, Any], seed: int | None, **options: Any) -> TrainingResult:
    """Train a model on screens or a policy, depending on the configuration; both take the same options."""
    if is_ui_config(data):
        require_extras("UI agents", "vlm", "ui", only=UI_AGENTS)
        from palaestra.train.screen_config import screen_config_from
        from palaestra.train.screens import train_screens

        screen_config = screen_config_from(data, seed=seed)
        return train_screens(screen_config, run_id=new_run_id(screen_config.name), argv=sys.argv, **options)
    from palaestra.train import config_from
    from palaestra.train.vector import train as train_vector

    config = config_from(data, seed=seed)
    stem = config.name or config.env.id.split(":")[-1]
    return train_vector(config, run_id=new_run_id(stem), argv=sys.argv, **options)


def _choose_progress(data: dict[str, Any], progress: bool | None) -> TextIO | None:
    """Set `telemetry.progress`, and return the stream for one line of progress.

    A notebook shows standard error as an error, so the line goes to standard output there.
    """
    in_notebook = has_event_loop() and "ipykernel" in sys.modules
    line = sys.stdout if in_notebook else sys.stderr if can_redraw(sys.stderr) else None
    configured = (data.get("telemetry") or {}).get("progress")
    shown = line is not None and configured is not False if progress is None else progress
    set_value(data, "telemetry.progress", shown)
    return line


def _combine(callback: Any, stop: threading.Event) -> Callable[[dict[str, float]], bool]:
    """One callback of all of them, which also ends the training after a request to stop."""
    several = [] if callback is None else list(callback) if isinstance(callback, Sequence) else [callback]
    for one in several:
        if not callable(one):
            remedy = "Give a function of one argument, the metrics of the update, or a list of such functions"
            raise ConfigError("train(callback)", one, f"has type {type(one).__name__}, which cannot be called", remedy)

    def call_all(metrics: dict[str, float]) -> bool:
        # All of them, also after one has ended the training: each may keep the metrics.
        answers = [one(dict(metrics)) for one in several]
        # A comparison with a mean of numpy gives its own type; other results, such as those of write(), mean nothing.
        return not (stop.is_set() or any(isinstance(answer, bool | np.bool_) and not answer for answer in answers))

    return call_all


def _find_weights(source: TrainedRun | str | os.PathLike[str]) -> Path:
    if isinstance(source, TrainedRun):
        return source.checkpoint
    return load(source).checkpoint


def _dump(data: Mapping[str, Any]) -> str:
    """The configuration as YAML, for the run directory."""
    import yaml

    plain = json.loads(json.dumps(data, default=str))
    return str(yaml.safe_dump(plain, sort_keys=False))
