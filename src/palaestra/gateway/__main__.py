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
    """Serve with these settings; 2 when they are refused."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        serve_gateway(parse_section(GatewayConfig, _settings(arguments), place="gateway"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _settings(arguments: Sequence[str]) -> dict[str, Any]:
    """The file's settings with the arguments' on top; a dot in a key goes one section deeper."""
    settings: dict[str, Any] = {}
    if arguments[:1] == ["--config"]:
        settings, arguments = _from_file(arguments[1:2]), arguments[2:]
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


def _from_file(named: Sequence[str]) -> dict[str, Any]:
    if not named:
        raise ConfigError("--config", None, "names no file")
    try:
        document = yaml.safe_load(Path(named[0]).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("--config", named[0], f"cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(document, dict):
        raise ConfigError("--config", named[0], "is not a mapping of settings")
    return document


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
