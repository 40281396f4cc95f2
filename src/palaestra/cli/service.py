"""`palaestra serve`: the run service in the foreground."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["serve"]


def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="For example port=8710 max_running=4 retention.keep_last=100."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON with the same keys.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say where as one JSON document.")] = False,
) -> None:
    """Serve runs until interrupted. Runs go on without it, and the next service adopts them.

    You need not: `palaestra runs start` starts a service by itself, which leaves when there is nothing to do. Keys in
    var/training/service.yaml hold for both.
    """
    from palaestra.document import overridden, read_document
    from palaestra.runs.layout import Home
    from palaestra.runs.service import run_service, service_config

    given: dict[str, Any] = dict(overridden(read_document(config) if config is not None else {}, settings or []))
    home = Home.default()

    def told(facts: Mapping[str, object]) -> None:
        if as_json:
            print(json.dumps({**facts, "state": str(home.path), "token_file": str(home.token)}), flush=True)
        else:
            print(f"Serving runs of {home.path} at {facts['url']}", flush=True)
            print(
                f"Token in {home.token}, log in {home.service / 'service.log'}. Ctrl-C leaves; runs go on.", flush=True
            )

    run_service(service_config(home, given), home, told)
    print("The service has ended; runs go on.", file=sys.stderr)
