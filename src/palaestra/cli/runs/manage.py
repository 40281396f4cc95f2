"""Commands that change existing runs: stop, edit, archive, restore, delete, gc, drain, and TensorBoard.

They use the run service, and start it if needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.runs.read import query
from palaestra.cli.terminal import (
    JsonOption,
    RunArgument,
    RunsArgument,
    YesOption,
    format_bytes,
    format_columns,
    format_time,
    print_json,
    sanitize_line,
)
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.runs.archive.schedule import RetentionReport
    from palaestra.runs.client.client import TrainerService


def connect_service() -> TrainerService:
    """A client of the run service, which is started if none is running."""
    from palaestra.runs.client.client import TrainerService

    return TrainerService()


def resolve_runs(names: list[str]) -> list[str]:
    """The full ids of all runs; any unknown name is an error before anything is changed."""
    return query(lambda reader: list(dict.fromkeys(reader.run(name).run_id for name in names)))


def confirm(action: str, yes: bool) -> None:
    """Ask the user; exit code 1 if the answer is no, `ConfigError` without a terminal to ask on."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("--yes", False, f"confirmation is required to {action}", "Add --yes to confirm")
    if not typer.confirm(f"{action[:1].upper()}{action[1:]}?", err=True):
        raise typer.Exit(1)


def stop(
    runs: RunsArgument,
    grace: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds to wait before the run is killed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop runs, and wait until their processes have ended."""
    from palaestra.cli.runs.table import format_outcome

    service = connect_service()
    records = [service.stop_run(run, grace_s=grace) for run in resolve_runs(runs)]
    if as_json:
        print_json(records)
    else:
        print("\n".join(format_outcome(record) for record in records))


def edit(
    run: RunArgument,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the run; empty removes it.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Replace the tags; may be given several times.")
    ] = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Remove all tags.")] = False,
    notes: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Notes about the run; empty removes them, - reads stdin.")
    ] = None,
    favorite: Annotated[
        bool | None,
        typer.Option("--favorite/--no-favorite", help="Mark the run, so that no retention policy removes it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Change title, tags and notes of a run; mark favorites."""
    if no_tags and tags:
        raise ConfigError("--no-tags", True, "contradicts --tag", "Use one of them")
    if name is None and notes is None and favorite is None and not tags and not no_tags:
        remedy = "Add --name, --tag, --no-tags, --notes or --favorite"
        raise ConfigError("runs edit", run, "nothing to change is given", remedy)
    (run_id,) = resolve_runs([run])
    text = sys.stdin.read() if notes == "-" else notes
    new_tags = [] if no_tags else tags or None
    changed = connect_service().update_run(run_id, name=name, tags=new_tags, notes=text, favorite=favorite)
    if as_json:
        print_json(changed)
    else:
        print(f"{changed.run_id} changed")


def tensorboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run id or a unique prefix of it.", show_default=False),
    ] = None,
    should_stop: Annotated[
        bool, typer.Option("--stop", help="Stop the TensorBoard of these runs; without RUN, all.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Open runs in TensorBoard.

    Prints its address. TensorBoard exits with the service, or one hour after the last request for it.
    """
    if not runs and not should_stop:
        raise ConfigError("RUN", None, "no run given", "List runs with: palaestra runs list")
    ids = resolve_runs(runs or [])
    if not should_stop:
        url = connect_service().request("POST", "/tools/tensorboard", {"run_ids": ids})["url"]
        if as_json:
            print_json({"url": url})
        else:
            print(url)
        return
    from palaestra.files.home import Home
    from palaestra.runs.client.connect import find_service

    # Without a service there is no TensorBoard, and no reason to start a service.
    is_running = find_service(Home.default()) is not None
    stopped = connect_service().request("DELETE", "/tools/tensorboard", run=ids) if is_running else []
    if as_json:
        print_json(stopped)
    else:
        print("\n".join(f"{tool['url']} stopped" for tool in stopped) or "No such TensorBoard is running.")


def archive(runs: RunsArgument, as_json: JsonOption = False) -> None:
    """Compress ended runs.

    `palaestra runs restore` unpacks them.
    """
    ids = query(lambda reader: [reader.paths(run_id).run_id for run_id in resolve_runs(runs)])
    service = connect_service()
    _print_changed([service.request("POST", f"/runs/{run}/archive", {}) for run in ids], "archived", as_json)


def restore(runs: RunsArgument, as_json: JsonOption = False) -> None:
    """Restore archived or deleted runs."""
    from palaestra.files.run_directory import check_run_id

    service = connect_service()
    restored = [service.request("POST", f"/runs/{check_run_id(run)}/restore", {}) for run in runs]
    _print_changed(restored, "restored", as_json)


def delete(runs: RunsArgument, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Delete ended runs.

    For seven days, `palaestra runs restore` brings them back.
    """
    ids = resolve_runs(runs)
    confirm(f"delete {', '.join(ids)}", yes)
    service = connect_service()
    _print_changed([service.request("DELETE", f"/runs/{run}") for run in ids], "deleted", as_json)


def _print_changed(rows: list[dict[str, Any]], change: str, as_json: bool) -> None:
    if as_json:
        print_json(rows)
    else:
        print("\n".join(f"{row['run_id']} {change}" for row in rows))


def gc(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Apply the changes; without it, only list them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Archive and delete runs by the retention policy.

    The policy is a setting of the service, for example retention: {keep_last: 100} in var/training/service.yaml. With
    every_h in it, the service applies it automatically, and this command shows the last time. Exit code 1 if a change
    failed.
    """
    service = connect_service()
    warn_of_changed_settings(service)
    report = service.retention_report()
    entries = service.request("POST", "/gc", {"dry_run": not yes})
    failed = [entry for entry in entries if entry.get("failed")]
    total = format_bytes(sum(entry["bytes"] for entry in entries if not entry.get("failed")))
    if as_json:
        print_json(entries)
    elif not entries:
        print("Nothing to do.")
    else:
        rows = [(entry["action"], entry["run_id"], format_bytes(entry["bytes"]), entry["why"]) for entry in entries]
        print("\n".join(format_columns(rows, align_right=[False, False, True])))
        if yes:
            print(f"Applied {len(entries) - len(failed)} of {len(entries)}, {total}.")
        else:
            print(f"{total} in total. Nothing was changed; use --yes to apply.")
    if not as_json:
        _print_report(report)
    for entry in failed:
        print(f"error: {entry['action']} {entry['run_id']}: {entry['failed']}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def warn_of_changed_settings(service: TrainerService) -> None:
    """Warn when the running service uses older settings than `service.yaml` has."""
    from palaestra.runs.service.doctor import changed_settings_warning

    changed = changed_settings_warning(service.home)
    if changed:
        print(f"{changed}. Stop it with: palaestra serve --stop", file=sys.stderr)


def _print_report(report: RetentionReport) -> None:
    if report.last is not None:
        counts = f"{report.num_actions} actions, {report.num_failed} failed, {format_bytes(report.bytes)}"
        outcome = sanitize_line(f"failed: {report.error}") if report.error else counts
        print(f"Last applied automatically: {format_time(report.last)} ({outcome}).")
        rows = [(action.action, action.run_id, action.failed or action.why) for action in report.actions]
        print("\n".join(f"  {line}" for line in format_columns(rows)) + "\n" if rows else "", end="")
    if report.every_h is not None:
        print(f"Applied automatically every {report.every_h:g} h; next: {format_time(report.next)}.")


def drain(
    off: Annotated[bool, typer.Option("--off", help="Start queued runs again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop starting queued runs.

    Running runs continue, and queued runs keep their places.
    """
    state = connect_service().request("POST", "/drain", {"on": not off})
    if as_json:
        print_json(state)
    else:
        print("draining: no new runs are started" if state["draining"] else "not draining: queued runs are started")
