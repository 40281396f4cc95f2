"""`palaestra gateway`: sessions for actors, on this machine, with no configuration needed."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["gateway"]


def gateway(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example port=8701 max_sessions=8.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON with the same keys.")] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Require no token. Only on a loopback address.")
    ] = False,
) -> None:
    """Open, lease, proxy and reap browser sessions over HTTP until interrupted.

    Clients send a token. It comes from token_file or $PALAESTRA_GATEWAY_TOKEN; if neither is given, a token is created
    in a file that only you can read. A client can use only the sessions that it opened. The operator's token, created
    beside the other one, can use and close every session.
    """
    from palaestra.config import parse_section
    from palaestra.config.file import apply_overrides, read_config_file
    from palaestra.gateway import GatewayConfig, serve_gateway
    from palaestra.gateway.config import OPERATOR_TOKEN_VARIABLE, TOKEN_VARIABLE

    given: dict[str, Any] = dict(
        apply_overrides(read_config_file(config) if config is not None else {}, settings or [])
    )
    if anonymous:
        given["allow_anonymous"] = True
    asked = parse_section(GatewayConfig, given, place="gateway")
    if not (asked.allow_anonymous or asked.token_file or TOKEN_VARIABLE in os.environ):
        asked = asked.model_copy(update={"token_file": _own_token("gateway.token")})
        print(f"Token in {asked.token_file}", file=sys.stderr)
        if not (asked.operator_token_file or OPERATOR_TOKEN_VARIABLE in os.environ):
            asked = asked.model_copy(update={"operator_token_file": _own_token("gateway-operator.token")})
            print(f"Operator's token in {asked.operator_token_file}", file=sys.stderr)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    serve_gateway(asked)


def _own_token(name: str) -> Path:
    """A token that outlives restarts, so that clients need not be told again."""
    path = Path(os.environ.get("PALAESTRA_HOME") or Path.cwd()) / "var" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    return path
