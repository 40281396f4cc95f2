"""Commands that change something: start, stop, resume, put away. They ask the service, and start it when needed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import printable, strict_json
from palaestra.errors import ConfigError, ConsentRequired

if TYPE_CHECKING:
    from palaestra.runs.client.client import Prepared, TrainerService
    from palaestra.runs.record import RunRecord
    from palaestra.runs.spec import RunSpec

__all__ = ["archive", "delete", "drain", "gc", "restore", "resume", "start", "stop", "tensorboard", "watch"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Its id, or how the id begins.", show_default=False)]
Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Their ids, or how the ids begin.", show_default=False)
]
_OPTIONS = {
    "env_id": "env", "stall_after_s": "stall_after", "tags": "tag", "stop_grace_s": "grace", "environment": "set",
}  # fmt: skip


def start(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A YAML or JSON file with the runner's keys, then overrides such as trainer.total_timesteps=50000.",
            show_default=False,
        ),
    ] = None,
    runner: Annotated[str, typer.Option(help="The trainer to run; `palaestra runners` lists them.")] = "palaestra",
    script: Annotated[
        str | None, typer.Option(help="Script of the runner's checkout, or algorithm of a library.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="The environment.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter or virtual environment to run in.")] = None,
    name: Annotated[str, typer.Option(help="Prefix of the run id.")] = "",
    priority: Annotated[int, typer.Option(help="Higher starts sooner (-100 to 100).")] = 0,
    gpus: Annotated[int, typer.Option(help="Number of GPUs to lease for the run.")] = 0,
    memory_mb: Annotated[int | None, typer.Option(help="Memory limit of the run.")] = None,
    nice: Annotated[int, typer.Option(help="CPU niceness of the process (0 to 19; higher yields more).")] = 0,
    warm_start: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Begin with the weights of a checkpoint (id or path).")
    ] = None,
    track: Annotated[str, typer.Option(help="W&B: off, offline or online.")] = "off",
    video: Annotated[bool, typer.Option("--video", help="Record short clips.")] = False,
    tag: Annotated[list[str] | None, typer.Option(help="A word to find it by; may be repeated.")] = None,
    stall_after: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds without output or metrics before the run is marked stalled."),
    ] = 600.0,
    stall_stop: Annotated[bool, typer.Option("--stall-stop", help="Stop the run when it stalls.")] = False,
    grace: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds that a stop waits before the run is killed.")
    ] = None,
    no_episode_steps: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Alarm if no episode finishes within this many steps (0: never)."),
    ] = None,
    thin_every: Annotated[
        int, typer.Option(metavar="STEPS", help="Keep one value of each metric per this many steps.")
    ] = 1,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="An environment variable of the run, not a secret; may be repeated."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Agree to a command that runs foreign code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be executed, and exit.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show the progress of the run until it ends.")] = False,
    as_json: Json = False,
) -> None:
    """Start a run of any trainer. The service starts by itself and outlives the command; so does the run."""
    config, given, stem = _configuration(list(arguments or []), runner)
    spec = _spec(
        runner=runner, script=script, env_id=env, seed=seed, python=python, name=name or stem, priority=priority,
        gpus=gpus, memory_mb=memory_mb, nice=nice, stop_grace_s=grace, thin_every=thin_every,
        no_episode_steps=no_episode_steps,
        environment=_variables(variables or []), warm_start=_weights(warm_start), track=track, video=video,
        tags=tuple(tag or ()), stall_after_s=stall_after, stall_action="stop" if stall_stop else "tell",
        config=config, given=given, invoked_from=Path.cwd(),
    )  # fmt: skip
    service = _service()
    if dry_run:
        _preview(service.prepare_training(spec), as_json)
        return
    record = _submitted(service, spec, yes)
    if follow:
        print(f"{record.run_id} {record.phase}", file=sys.stderr)
        _watched(service, record.run_id, as_json)
    elif as_json:
        _print([record], single=True)
    else:
        print(f"{record.run_id} {record.phase}")
        print(f"Watch it with: palaestra runs watch {record.run_id}", file=sys.stderr)


def watch(run: Run, as_json: Json = False) -> None:
    """Show how a run goes until it is over. Exit code 1 when it did not succeed."""
    (run_id,) = _resolved([run])
    _watched(_service(), run_id, as_json)


def stop(
    runs: Runs,
    grace: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="How long they may take to end by themselves.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Stop runs. Returns when nothing of them lives any more."""
    service = _service()
    _done([service.stop_run(run, grace_s=grace) for run in _resolved(runs)], as_json)


def resume(
    run: Run,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Configuration keys to change, such as trainer.total_timesteps=200000.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Checkpoint to resume from: id, prefix, file name or path. Default: the newest undamaged."),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Resume a run that has ended, from its newest undamaged checkpoint or a given one.

    KEY=VALUE changes its configuration, for example to train for more steps. A damaged checkpoint is skipped, and the
    output says so. A resume that is refused changes nothing.
    """
    values = _changes(changes or [])
    service = _service()
    (run_id,) = _resolved([run])
    path = None if checkpoint is None else _weights(checkpoint)
    try:
        record = service.resume_run(run_id, checkpoint=path, changes=values)
    except ConsentRequired as needed:
        print(needed, file=sys.stderr)
        _agreed("run this foreign code", yes)
        record = service.resume_run(run_id, needed.digest, checkpoint=path, changes=values)
    if as_json:
        _print([record], single=True)
    else:
        reason = f": {record.reason}" if record.reason else ""
        print(printable(f"{record.run_id} {record.phase}, attempt {record.attempt + 1}{reason}"))


def tensorboard(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN...", help="Their ids, or how they begin.", show_default=False)
    ] = None,
    stop_it: Annotated[
        bool, typer.Option("--stop", help="End the one that shows these runs; without runs, all of them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show runs of any trainer in TensorBoard. It ends with the service, or an hour after it was asked for."""
    if not runs and not stop_it:
        raise ConfigError("RUN", None, "no run to show", "palaestra runs list shows them")
    ids = _resolved(runs or [])
    if not stop_it:
        url = _service().ask("POST", "/tools/tensorboard", {"run_ids": ids})["url"]
        print(strict_json({"url": url}) if as_json else url)
        return
    from palaestra.files.home import Home
    from palaestra.runs.client.connect import find_service

    # None is open where no service runs, and none is started to hear that.
    open_there = find_service(Home.default()) is not None
    ended = _service().ask("DELETE", "/tools/tensorboard", run=ids) if open_there else []
    if as_json:
        print(strict_json(ended))
    else:
        print("\n".join(f"{tool['url']} ended" for tool in ended) or "No such TensorBoard is open.")


def archive(runs: Runs, as_json: Json = False) -> None:
    """Pack runs that have ended; `restore` unpacks them."""
    from palaestra.cli.runs_reading import asked

    ids = asked(lambda reading: [reading.paths(run_id).run_id for run_id in _resolved(runs)])
    service = _service()
    _put_away([service.ask("POST", f"/runs/{run}/archive", {}) for run in ids], "archived", as_json)


def restore(runs: Runs, as_json: Json = False) -> None:
    """Unpack archived runs, or bring back deleted ones."""
    service = _service()
    _put_away([service.ask("POST", f"/runs/{_safe(run)}/restore", {}) for run in runs], "restored", as_json)


def delete(runs: Runs, yes: Yes = False, as_json: Json = False) -> None:
    """Throw away runs that have ended. For seven days `restore` brings them back."""
    ids = _resolved(runs)
    _agreed(f"delete {', '.join(ids)}", yes)
    service = _service()
    _put_away([service.ask("DELETE", f"/runs/{run}") for run in ids], "deleted", as_json)


def gc(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this, only say what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Archive and delete what the retention policy lets go. Exit code 1 when something could not be done.

    The policy is part of the service's settings, for example retention: {keep_last: 100} in var/training/service.yaml.
    """
    from palaestra.cli.runs_table import sized
    from palaestra.runs.service.config import settings_changed

    service = _service()
    found = service.ask("POST", "/gc", {"dry_run": not yes})
    changed = settings_changed(service.home)
    if changed:
        print(f"{changed}. End it with: palaestra serve --stop", file=sys.stderr)
    failed = [doom for doom in found if doom.get("failed")]
    total = sized(sum(doom["bytes"] for doom in found if not doom.get("failed")))
    if as_json:
        print(strict_json(found))
    else:
        for line in _doomed(found):
            print(line)
        if not found:
            print("Nothing to do.")
        elif yes:
            print(f"Did {len(found) - len(failed)} of {len(found)}, {total}.")
        else:
            print(f"{total} in all. Nothing was done; --yes does it.")
    for doom in failed:
        print(f"error: {doom['action']} {doom['run_id']}: {doom['failed']}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _doomed(found: list[dict[str, Any]]) -> list[str]:
    """What is done to each run, in columns."""
    from palaestra.cli.runs_table import aligned, sized

    rows = [(doom["action"], doom["run_id"], sized(doom["bytes"]), doom["why"]) for doom in found]
    return aligned(rows, right=[False, False, True]) if rows else []


def drain(
    off: Annotated[bool, typer.Option("--off", help="Start again.")] = False,
    as_json: Json = False,
) -> None:
    """Have the service start nothing new; what runs goes on and what waits keeps its place."""
    state = _service().ask("POST", "/drain", {"on": not off})
    if as_json:
        print(strict_json(state))
    else:
        print("draining: nothing new is started" if state["draining"] else "starting runs again")


def _watched(service: TrainerService, run_id: str, as_json: bool) -> None:
    from palaestra.cli.runs_followed import followed, tracking_lines
    from palaestra.cli.runs_table import one_line
    from palaestra.runs.tools.wandb import tracking_of

    try:
        record = followed(service, run_id)
    except KeyboardInterrupt:
        print(f"{run_id} goes on; stop it with: palaestra runs stop {run_id}", file=sys.stderr)
        raise
    if as_json:
        _print([record], single=True)
    else:
        print(one_line(record))
    for line in tracking_lines(tracking_of(service.home.run(run_id), record.tracking_url)):
        print(line, file=sys.stderr)
    if record.phase != "succeeded":
        raise typer.Exit(1)


def _service() -> TrainerService:
    from palaestra.runs.client.client import TrainerService

    return TrainerService()


def _configuration(words: list[str], runner: str) -> tuple[dict[str, Any], str, str]:
    """The runner's keys from a file and overrides, the file as it was written, and a name for the run."""
    from palaestra.config.file import apply_overrides, read_config_file
    from palaestra.runs.spec import run_name

    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    if path is None and not words and runner == "palaestra":
        remedy = "Try: palaestra runs start configs/ppo/cartpole.yaml"
        raise ConfigError("CONFIG", None, "no configuration file given", remedy)
    examples = Path("configs/ppo") if runner == "palaestra" else None
    data = read_config_file(path, examples) if path is not None else {}
    given = path.read_text(encoding="utf-8") if path is not None else ""
    config = apply_overrides(data, words)
    return config, given, run_name(config.get("name"), path)


def _changes(words: list[str]) -> dict[str, Any]:
    """Values by dotted key."""
    from palaestra.config.file import parse_override

    return dict(map(parse_override, words))


def _variables(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError("--set", word, "is not NAME=VALUE", "Write for example --set OMP_NUM_THREADS=2")
        found[name] = value
    return found


def _spec(**given: Any) -> RunSpec:
    from palaestra.config import parse_section
    from palaestra.runs.spec import RunSpec

    try:
        return parse_section(RunSpec, given)
    except ConfigError as error:
        option = _OPTIONS.get(error.place.partition(".")[0], error.place)
        raise ConfigError(f"--{option.replace('_', '-')}", error.value, error.reason, error.remedy) from None


def _weights(checkpoint: str | None) -> str | None:
    """A path as it is meant here, whatever directory the service is in; an id stays an id."""
    if checkpoint == "":  # as a path it would be the working directory
        raise ConfigError("checkpoint", "", "is empty", "palaestra checkpoints list shows their ids")
    if checkpoint is not None and Path(checkpoint).exists():
        return str(Path(checkpoint).resolve())
    return checkpoint


def _submitted(service: TrainerService, spec: RunSpec, yes: bool) -> RunRecord:
    from palaestra.files.run_directory import new_run_id

    # Named here, so that whoever is interrupted while the service looks at it knows what to stop.
    run_id, digest = new_run_id(spec.name or spec.env_id or spec.script or spec.runner), None
    try:
        return service.submit(spec, run_id=run_id)
    except KeyboardInterrupt:
        _tell_of_interrupted(service, run_id)
        raise
    except ConsentRequired:
        prepared = service.prepare_training(spec)
        _preview(prepared, False, to=sys.stderr)
        _agreed("run this foreign code", yes)
        run_id, digest = prepared.run_id or run_id, prepared.digest
    try:
        return service.submit(spec, digest, run_id)
    except KeyboardInterrupt:
        _tell_of_interrupted(service, run_id)
        raise


def _tell_of_interrupted(service: TrainerService, run_id: str) -> None:
    """The request was sent and goes its way: say what it has become by now, and how to end that."""
    there = service.home.run(run_id).path.is_dir()
    said = f"{run_id} was queued" if there else f"The request was sent, and the service may yet queue it as {run_id}"
    print(f"{said}; stop it with: palaestra runs stop {run_id}", file=sys.stderr)


def _agreed(what: str, yes: bool) -> None:
    """Returns when somebody agreed; `ConfigError` when nobody can be asked, exit 1 when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("--yes", False, f"nobody can be asked whether to {what}", "Add --yes to agree")
    if not typer.confirm(f"{what[:1].upper()}{what[1:]}?", err=True):
        raise typer.Exit(1)


def _preview(prepared: Prepared, as_json: bool, to: Any = None) -> None:
    from palaestra.cli.doctor import finding_lines

    out = to or sys.stdout
    if as_json:
        print(strict_json(prepared._asdict()))
    else:
        for line in finding_lines(prepared.findings):
            print(line, file=out)
        if prepared.command is not None:
            print(f"command  {shlex.join(prepared.command['argv'])}", file=out)
            print(f"in       {prepared.command['cwd']}", file=out)
            for injection in prepared.command["injected"]:
                print(f"injects  {injection['path']} ({injection['why']})", file=out)
            for name, value in prepared.environment.items():
                print(f"sets     {name}={shlex.quote(value)}", file=out)
    if prepared.command is None and to is None:
        raise typer.Exit(2)


def _resolved(names: list[str]) -> list[str]:
    """Whole ids, all of them checked before anything is done to one."""
    from palaestra.cli.runs_reading import asked

    return asked(lambda reading: list(dict.fromkeys(reading.run(name).run_id for name in names)))


def _safe(name: str) -> str:
    from palaestra.files.run_directory import check_run_id

    return check_run_id(name)


def _done(records: list[RunRecord], as_json: bool) -> None:
    from palaestra.cli.runs_table import one_line

    if as_json:
        _print(records)
        return
    for record in records:
        print(one_line(record))


def _put_away(found: list[dict[str, Any]], what: str, as_json: bool) -> None:
    if as_json:
        print(strict_json(found))
        return
    for row in found:
        print(f"{row['run_id']} {what}")


def _print(records: list[RunRecord], *, single: bool = False) -> None:
    from palaestra.runs.wire import to_json

    print(strict_json(to_json(records[0]) if single else [to_json(record) for record in records]))
