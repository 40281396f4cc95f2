"""`palaestra checkpoints`: list, verify, import and deploy checkpoints."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, format_bytes, format_columns, print_json
from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.home import Home
from palaestra.intervals import format_return

if TYPE_CHECKING:
    from palaestra.runs.record import CheckpointRecord, RunRecord

_CHECKPOINT_HELP = "Checkpoint id, a unique prefix of it, or a path."
_HEADINGS: tuple[str, ...] = ("CHECKPOINT", "AGENT", "ENV", "STEP", "RETURN", "SIZE", "SAVED", "STATE", "RUN")


def list_command(
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only checkpoints of this run.")] = None,
    agent: Annotated[str | None, typer.Option(metavar="AGENT", help="Only this agent, such as palaestra/ppo.")] = None,
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Only this environment.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all, not only the newest 30.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List checkpoints, newest first."""
    from palaestra.cli.runs.read import query
    from palaestra.runs.checkpoints.catalogue import list_checkpoints

    owner = None if run is None else query(lambda reader: reader.run(run))
    run_id = None if owner is None else owner.run_id
    records = list_checkpoints(Home.default(), run_id=run_id, agent_id=agent, env_id=env)
    shown = records if everything or as_json else records[:30]
    if as_json:
        print_json([_record_data(record) for record in shown])
        return
    if not records:
        print(f"No matching checkpoint.{_archived_hint(owner)}" if run or agent or env else "No checkpoints yet.")
        return
    print("\n".join(format_columns([_HEADINGS, *(_record_row(record) for record in shown)])))
    if len(records) > len(shown):
        print(f"{len(records) - len(shown)} more with --all")


def verify_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify all checkpoints.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify the SHA-256 of checkpoints.

    Exit code 1 if one does not match.
    """
    from palaestra.runs.checkpoints.catalogue import get_checkpoint, list_checkpoints
    from palaestra.runs.checkpoints.files import verify

    home = Home.default()
    if bool(names) == everything:
        raise ConfigError("checkpoint", names or [], "nothing to verify", "Give checkpoint ids, or --all")
    selected = list_checkpoints(home) if everything else [get_checkpoint(home, name) for name in names or []]
    results, all_match = [], True
    for record in selected:
        verdict = verify(record)
        all_match &= verdict.fits
        _update_registry(home, replace(record, verified=verdict.verified_time))
        results.append({**_record_data(record), "fits": verdict.fits, "problem": verdict.problem})
        if not as_json:
            text = (
                f"verified ({format_bytes(record.size_bytes)})"
                if verdict.fits
                else f"does not match: {verdict.problem}"
            )
            print(f"{record.checkpoint_id} {text}")
    if as_json:
        print_json(results)
    if not all_match:
        raise typer.Exit(1)


def import_command(
    source: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Checkpoint of palaestra, safetensors file, torch.save file or SB3 zip."),
    ],
    agent: Annotated[str, typer.Option(metavar="AGENT", help="Agent that it belongs to, such as cleanrl/dqn.")] = "",
    env: Annotated[str, typer.Option(metavar="ENV", help="Environment that it was trained in.")] = "",
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Number of environment steps that it was trained for.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Accept a configuration that names code, and keep the objects of an SB3 zip."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Import a checkpoint file.

    Files that could execute code when loaded are refused.
    """
    from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
    from palaestra.runs.checkpoints.signature import probe_environment
    from palaestra.runs.store.rebuild import list_imported, open_registry

    home = Home.default()
    known = Provenance(agent_id=agent, env_id=env, env_step=step).validate("--agent", "--env", "--step")
    if env:
        known = replace(known, env_signature=probe_environment(env, "--env", required=False))
    existing = {record.sha256: record for record in list_imported(home)}
    record = import_checkpoint(home, source, known, trusted=trust)
    with closing(open_registry(home)) as registry:
        registry.put_checkpoint(record)
    if as_json:
        print_json(_record_data(record))
    elif record.sha256 in existing:
        print(f"{record.checkpoint_id} was imported already{_format_changes(existing[record.sha256], record)}")
    else:
        print(f"{record.checkpoint_id} imported ({record.format}, {format_bytes(record.size_bytes)}) to {record.path}")


def deploy_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT_HELP),
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="ENV", help="Environment. Default: the one that it was trained in.")
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="Go back to the previous deployment in --env.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Deploy a checkpoint in its environment.

    It plays one test episode first.
    """
    from palaestra.runs.checkpoints.catalogue import get_checkpoint
    from palaestra.runs.checkpoints.deploy import deploy, withdraw
    from palaestra.runs.checkpoints.signature import probe_environment

    home = Home.default()
    if name is None and not (back and env):
        raise ConfigError("checkpoint", None, "no checkpoint given", "Give one, or go back with --back --env ENV")
    record = None if name is None else get_checkpoint(home, name)
    env_id = env or (record.env_id if record is not None else "")
    if not env_id:
        raise CheckpointError("checkpoint", name, "its environment is unknown", "Give --env")
    if back or record is None:
        deployment = withdraw(home, env_id)
    else:
        deployment = deploy(home, record, probe_environment(env_id, "--env", required=env_id != record.env_id))
    if as_json:
        print_json(deployment)
    elif deployment is None:
        print(f"Nothing is deployed in {env_id} now.")
    else:
        score = deployment.evaluation.get("mean_return")
        first = f"; return of its first episode {score:g}" if isinstance(score, int | float) else ""
        print(f"{deployment.checkpoint_id} is deployed in {deployment.env_id}{first}.")


def deployed_command(as_json: JsonOption = False) -> None:
    """List the current and previous deployment of every environment."""
    from palaestra.runs.checkpoints.deploy import list_deployments

    current = list_deployments(Home.default())
    if as_json:
        print_json(current)
        return
    rows = [("ENV", "CHECKPOINT", "AGENT", "SINCE", "BEFORE", "STATE")]
    for deployment in current:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(deployment.deployed))
        before = str((deployment.previous or {}).get("checkpoint_id", ""))
        state = "" if Path(deployment.path).exists() else "missing"
        rows.append((deployment.env_id, deployment.checkpoint_id, deployment.agent_id, since, before, state))
    print("\n".join(format_columns(rows)))


def _archived_hint(run: RunRecord | None) -> str:
    if run is None or not run.archived:
        return ""
    return f" {run.run_id} is archived; restore it with: palaestra runs restore {run.run_id}"


def _update_registry(home: Home, record: CheckpointRecord) -> None:
    """Write the record to the registry, if there is one."""
    from palaestra.runs.store.registry import Registry

    if home.registry.exists():
        with closing(Registry.open(home.registry)) as registry:
            registry.put_checkpoint(record)


def _format_changes(before: CheckpointRecord, now: CheckpointRecord) -> str:
    """The changes that a repeated import made to the record of a checkpoint."""
    facts = {"agent": "agent_id", "env": "env_id", "step": "env_step"}
    pairs = {word: (getattr(before, name), getattr(now, name)) for word, name in facts.items()}
    changes = [f"{word} was {old!r} and is now {new!r}" for word, (old, new) in pairs.items() if old != new]
    if changes:
        return f": {', '.join(changes)}"
    return f", with agent {now.agent_id!r}, env {now.env_id!r} and step {now.env_step}; nothing changed"


def _record_data(record: CheckpointRecord) -> dict[str, Any]:
    return {**asdict(record), "uri": Path(record.path).as_uri()}


def _record_row(record: CheckpointRecord) -> tuple[str, ...]:
    mean = record.metrics_digest.get("mean_100")
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    state = "damaged" if (record.verified or 0) < 0 else "verified" if record.verified else ""
    if record.best:
        state = f"best {state}".strip()
    return (
        record.checkpoint_id,
        record.agent_id,
        record.env_id,
        record.step_text,
        "" if mean is None else format_return(mean),
        format_bytes(record.size_bytes),
        saved,
        state,
        record.run_id or record.profile,
    )
