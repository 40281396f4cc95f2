"""`palaestra checkpoints`: what was saved, whether it still holds, taking one in, and making one act."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.runs_table import aligned
from palaestra.cli.terminal import strict_json
from palaestra.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from palaestra.files.home import Home
    from palaestra.runs.record import CheckpointRecord, RunRecord

__all__ = ["checkpoints_app"]

checkpoints_app = typer.Typer(
    help="Checkpoints of all runs, and those that were imported.", no_args_is_help=True, rich_markup_mode=None
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_HEADINGS: tuple[str, ...] = ("CHECKPOINT", "AGENT", "ENV", "STEP", "RETURN", "SIZE", "SAVED", "STATE", "RUN")


@checkpoints_app.command("list")
def list_command(
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only those of this run (id or prefix).")] = None,
    agent: Annotated[str | None, typer.Option(help="Only those of this agent, such as palaestra/ppo.")] = None,
    env: Annotated[str | None, typer.Option(help="Only those for this environment.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="More than the newest 30.")] = False,
    as_json: _Json = False,
) -> None:
    """List checkpoints, newest first."""
    from palaestra.cli.runs_reading import asked
    from palaestra.runs.checkpoints.listing import all_checkpoints

    owner = None if run is None else asked(lambda reading: reading.run(run))
    run_id = None if owner is None else owner.run_id
    found = all_checkpoints(_home(), run_id=run_id, agent_id=agent, env_id=env)
    shown = found if everything or as_json else found[:30]
    if as_json:
        print(strict_json([_data(record) for record in shown]))
        return
    if not found:
        print(f"No checkpoint fits.{_archived_hint(owner)}" if run or agent or env else "No checkpoints yet.")
        return
    print("\n".join(aligned([_HEADINGS, *(_row(record) for record in shown)])))
    if len(found) > len(shown):
        print(f"{len(found) - len(shown)} more with --all")


@checkpoints_app.command("verify")
def verify_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="CHECKPOINT", help="Ids or paths.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint there is.")] = False,
    as_json: _Json = False,
) -> None:
    """Read every byte and compare it with what was saved. Exit code 1 when one differs."""
    from palaestra.runs.checkpoints.hashing import verify
    from palaestra.runs.checkpoints.listing import all_checkpoints, get_checkpoint

    home = _home()
    if bool(names) == everything:
        raise ConfigError("checkpoint", names or [], "nothing to verify is named", "Name ids, or give --all")
    chosen = all_checkpoints(home) if everything else [get_checkpoint(home, name) for name in names or []]
    answers, good = [], True
    for record in chosen:
        verdict = verify(record)
        good &= verdict.fits
        _remember(home, replace(record, verified=verdict.verified))
        answers.append({**_data(record), "fits": verdict.fits, "problem": verdict.problem})
        if not as_json:
            said = f"fits ({_size(record.size_bytes)})" if verdict.fits else f"does not fit: {verdict.problem}"
            print(f"{record.checkpoint_id} {said}")
    if as_json:
        print(strict_json(answers))
    if not good:
        raise typer.Exit(1)


@checkpoints_app.command("import")
def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A checkpoint of palaestra, safetensors, what torch.save wrote, an SB3 zip."
        ),
    ],
    agent: Annotated[str, typer.Option(help="Whose it is, such as cleanrl/dqn.")] = "",
    env: Annotated[str, typer.Option(help="The environment it is for.")] = "",
    step: Annotated[int | None, typer.Option(help="How many environment steps it learned from.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Also if its configuration names code to import.")] = False,
    as_json: _Json = False,
) -> None:
    """Copy a checkpoint from elsewhere, after making sure that it is weights and nothing that would run."""
    from palaestra.runs.checkpoints.importing import Provenance, import_checkpoint, imported
    from palaestra.runs.checkpoints.probing import environment_signature
    from palaestra.runs.store.rebuild import open_registry

    home = _home()
    known = Provenance(agent_id=agent, env_id=env, env_step=step).checked("--agent", "--env", "--step")
    if env:
        known = replace(known, env_signature=environment_signature(env, "--env", needed=False))
    there = {record.sha256: record for record in imported(home)}
    record = import_checkpoint(home, source, known, trusted=trust)
    registry = open_registry(home)
    try:
        registry.put_checkpoint(record)
    finally:
        registry.close()
    if as_json:
        print(strict_json(_data(record)))
    elif record.sha256 in there:
        print(f"{record.checkpoint_id} is known already{_told_anew(there[record.sha256], record)}")
    else:
        print(f"{record.checkpoint_id} imported ({record.format}, {_size(record.size_bytes)}) to {record.path}")


@checkpoints_app.command("deploy")
def deploy_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[CHECKPOINT]", help="Its id or the beginning of it, or its path; not with --back."),
    ] = None,
    env: Annotated[str | None, typer.Option(help="Where it is to act; by default where it was trained.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Bring back what was deployed there before instead.")] = False,
    as_json: _Json = False,
) -> None:
    """Make a checkpoint the one that acts in an environment, once it has played an episode there."""
    from palaestra.runs.checkpoints.deploying import deploy, withdraw
    from palaestra.runs.checkpoints.listing import get_checkpoint
    from palaestra.runs.checkpoints.probing import environment_signature

    home = _home()
    if name is None and not (back and env):
        raise ConfigError("checkpoint", None, "none is named", "Name one, or go back with --back --env ENV")
    record = None if name is None else get_checkpoint(home, name)
    env_id = env or (record.env_id if record is not None else "")
    if not env_id:
        raise CheckpointError("checkpoint", name, "it says no environment", "Give --env")
    if back or record is None:
        now = withdraw(home, env_id)
    else:
        now = deploy(home, record, environment_signature(env_id, "--env", needed=env_id != record.env_id))
    if as_json:
        print(strict_json(None if now is None else asdict(now)))
    elif now is None:
        print(f"Nothing is deployed in {env_id} any more.")
    else:
        played = now.evaluation.get("mean_return")
        tried = f"; its first episode returned {played:g}" if isinstance(played, int | float) else ""
        print(f"{now.checkpoint_id} acts in {now.env_id}{tried}.")


@checkpoints_app.command("deployed")
def deployed_command(as_json: _Json = False) -> None:
    """List what acts in every environment, and what acted there before."""
    from palaestra.runs.checkpoints.deploying import deployments

    found = deployments(_home())
    if as_json:
        print(strict_json([asdict(now) for now in found]))
        return
    rows = [("ENV", "CHECKPOINT", "AGENT", "SINCE", "BEFORE", "STATE")]
    for now in found:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(now.deployed))
        before = str((now.previous or {}).get("checkpoint_id", ""))
        state = "" if Path(now.path).exists() else "gone"
        rows.append((now.env_id, now.checkpoint_id, now.agent_id, since, before, state))
    print("\n".join(aligned(rows)))


def _archived_hint(run: RunRecord | None) -> str:
    if run is None or not run.archived:
        return ""
    return f" {run.run_id} is archived; unpack it with: palaestra runs restore {run.run_id}"


def _home() -> Home:
    from palaestra.files.home import Home

    return Home.default()


def _remember(home: Home, record: CheckpointRecord) -> None:
    """In the registry, if there is one."""
    from palaestra.runs.store.registry import Registry

    if home.registry.exists():
        registry = Registry.open(home.registry)
        try:
            registry.put_checkpoint(record)
        finally:
            registry.close()


def _told_anew(before: CheckpointRecord, now: CheckpointRecord) -> str:
    """What an import has changed on the record of a checkpoint that was there."""
    facts = {"agent": "agent_id", "env": "env_id", "step": "env_step"}
    pairs = {word: (getattr(before, name), getattr(now, name)) for word, name in facts.items()}
    changes = [f"{word} was {old!r} and is now {new!r}" for word, (old, new) in pairs.items() if old != new]
    if changes:
        return f": {', '.join(changes)}"
    return f", with agent {now.agent_id!r}, env {now.env_id!r} and step {now.env_step}; nothing was changed"


def _data(record: CheckpointRecord) -> dict[str, Any]:
    return {**asdict(record), "uri": Path(record.path).as_uri()}


def _row(record: CheckpointRecord) -> tuple[str, ...]:
    mean = record.metrics_digest.get("mean_100")
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    state = "damaged" if (record.verified or 0) < 0 else "verified" if record.verified else ""
    if record.best:
        state = f"best {state}".strip()
    return (
        record.checkpoint_id,
        record.agent_id,
        record.env_id,
        record.shown_step,
        "" if mean is None else f"{mean:.1f}",
        _size(record.size_bytes),
        saved,
        state,
        record.run_id or record.profile,
    )


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
