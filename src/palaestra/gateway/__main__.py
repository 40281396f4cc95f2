"""`python -m palaestra.gateway [--config FILE] [key=value ...]`: a gateway without the rest of the CLI."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.gateway import GatewayConfig, serve_gateway


def main(arguments: list[str]) -> int:
    """Serve with these settings; the exit code is 2 when they are refused."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        serve_gateway(parse_section(GatewayConfig, _read_settings(arguments), place="gateway"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _read_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Settings of the file, overridden by those of the arguments; `a.b=value` sets `b` in section `a`."""
    settings: dict[str, Any] = {}
    if arguments[:1] == ["--config"]:
        settings, arguments = _read_file(arguments[1:2]), arguments[2:]
    for argument in arguments:
        path, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError("argument", argument, "is not of the form key=value")
        *sections, key = path.split(".")
        section = settings
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError("argument", argument, f"{name} is not a section")
        try:
            section[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"gateway.{path}", value, "is not a YAML value", "Quote it for the shell") from None
    return settings


def _read_file(paths: Sequence[str]) -> dict[str, Any]:
    if not paths:
        raise ConfigError("--config", None, "names no file")
    try:
        document = yaml.safe_load(Path(paths[0]).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("--config", paths[0], f"cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(document, dict):
        raise ConfigError("--config", paths[0], "is not a mapping of settings")
    return document


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
