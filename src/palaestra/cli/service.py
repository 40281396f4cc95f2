"""`palaestra serve`: the run service in the foreground."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from palaestra.files.home import Home

__all__ = ["serve"]


def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="For example port=8710 max_running=4 retention.keep_last=100."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON with the same keys.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the service that runs, and wait until it is gone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say where as one JSON document.")] = False,
) -> None:
    """Serve runs until interrupted. Runs go on without it, and the next service adopts them.

    You need not: `palaestra runs start` starts a service by itself, which leaves when there is nothing to do. Keys in
    var/training/service.yaml hold for both.
    """
    from palaestra.config.file import apply_overrides, read_config_file
    from palaestra.files.home import Home

    if stop:
        _end(Home.default(), as_json)
        return
    from palaestra.runs.service.server import run_service, service_config

    given: dict[str, Any] = dict(
        apply_overrides(read_config_file(config) if config is not None else {}, settings or [])
    )
    home = Home.default()

    def told(facts: Mapping[str, object]) -> None:
        if facts.get("warning"):
            print(f"warning: {facts['warning']}.", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps({**facts, "state": str(home.path), "token_file": str(home.token)}), flush=True)
        else:
            print(f"Serving runs of {home.path} at {facts['url']}", flush=True)
            print(
                f"Token in {home.token}, log in {home.service / 'service.log'}. Ctrl-C leaves; runs go on.", flush=True
            )

    run_service(service_config(home, given), home, told)
    print("The service has ended; runs go on.", file=sys.stderr)


def _end(home: Home, as_json: bool) -> None:
    from palaestra.runs.client.connect import end_service

    pid = end_service(home)
    if as_json:
        print(json.dumps({"ended": pid}))
    else:
        print(f"No service runs for {home.path}." if pid is None else "The service has ended; runs go on.")
