"""`palaestra serve`, `palaestra gateway` and `palaestra doctor`: the servers, and a check of this machine."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.terminal import JsonOption, print_json, sanitize_line
from palaestra.extras import GATEWAY, SERVER, require_extras
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.runs.runner import Finding

_ConfigOption = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON file with the same keys.")]


def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Such as port=8710 max_running=4 retention.keep_last=100."),
    ] = None,
    config: _ConfigOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the running service, and wait until it exits.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the run service in the foreground.

    `palaestra runs start` starts a service in the background if none is running. That service exits when it is idle.
    Both read var/training/service.yaml. Runs continue when the service exits, and the next service adopts them.
    """
    home = Home.default()
    if stop:
        from palaestra.runs.client.connect import stop_service

        pid = stop_service(home)
        if as_json:
            print_json({"ended": pid})
        else:
            print(f"No service runs for {home.path}." if pid is None else _describe_exit(home))
        return
    require_extras("the run service", "serve", only=SERVER)
    from palaestra.config.file import read_settings
    from palaestra.runs.config import service_config
    from palaestra.runs.service.server import run_service

    def announce(facts: Mapping[str, object]) -> None:
        if facts.get("warning"):
            print(f"warning: {facts['warning']}.", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps({**facts, "state": str(home.path), "token_file": str(home.token)}), flush=True)
        else:
            log = home.service / "service.log"
            print(f"Serving runs of {home.path} at {facts['url']}", flush=True)
            print(f"Token in {home.token}, log in {log}. Press Ctrl-C to exit; runs continue.", flush=True)

    run_service(service_config(home, read_settings(config, settings or [])), home, announce)
    print(_describe_exit(home), file=sys.stderr)


def _describe_exit(home: Home) -> str:
    """That the service has exited, and how many runs go on without it."""
    from palaestra.runs.phase import Phase
    from palaestra.runs.reader import RunReader

    active = len(RunReader(home).runs(phases=[phase for phase in Phase if phase.has_process]))
    continuing = "" if not active else "; 1 run continues" if active == 1 else f"; {active} runs continue"
    return f"The service has exited{continuing}."


def gateway(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as port=8701 max_sessions=8.")
    ] = None,
    config: _ConfigOption = None,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Require no token (loopback addresses only).")] = False,
) -> None:
    """Serve browser sessions for UI agents over HTTP.

    Clients send a token. It comes from token_file or $PALAESTRA_GATEWAY_TOKEN; if neither is given, a token is created
    in a file that only you can read. A client can use only the sessions that it opened. The operator's token, created
    beside the other one, can use and close every session.
    """
    require_extras("the gateway", "ui", only=GATEWAY)
    from palaestra.config import parse_section
    from palaestra.config.file import read_settings
    from palaestra.gateway import GatewayConfig, serve_gateway
    from palaestra.gateway.config import OPERATOR_TOKEN_VARIABLE, TOKEN_VARIABLE

    data = read_settings(config, settings or [])
    if anonymous:
        data["allow_anonymous"] = True
    parsed = parse_section(GatewayConfig, data, place="gateway")
    if not (parsed.allow_anonymous or parsed.token_file or TOKEN_VARIABLE in os.environ):
        parsed = parsed.model_copy(update={"token_file": _create_token("gateway.token")})
        print(f"Token in {parsed.token_file}", file=sys.stderr)
        if not (parsed.operator_token_file or OPERATOR_TOKEN_VARIABLE in os.environ):
            parsed = parsed.model_copy(update={"operator_token_file": _create_token("gateway-operator.token")})
            print(f"Operator's token in {parsed.operator_token_file}", file=sys.stderr)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    serve_gateway(parsed)


def _create_token(name: str) -> Path:
    """A token file; an existing one is kept, so that clients keep working after a restart."""
    path = Home.default().base / "var" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    return path


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine, and print a fix for each problem.

    Exit code 1 if something does not work.
    """
    from palaestra.runs.service.doctor import examine

    findings = examine(Home.default())
    if as_json:
        print_json(findings)
    else:
        print("\n".join(format_findings(findings)))
    if any(finding.level == "refused" for finding in findings):
        raise typer.Exit(1)


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """One line per finding, with the remedy below it."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        text = sanitize_line(" ".join(finding.text.split()))
        lines.append(f"{finding.level:<8} {finding.check:<{width}}  {text}")
        if finding.remedy and finding.level != "ok":
            lines.append(f"{'':<8} {'':<{width}}  → {localize_commands(finding.remedy)}")
    return lines
