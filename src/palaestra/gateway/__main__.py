"""`python -m palaestra.gateway [key=value ...]`: a gateway from the command line, without the rest of the CLI."""

from __future__ import annotations

import logging
import sys

import yaml

from palaestra.config import validated
from palaestra.errors import ConfigError
from palaestra.gateway import GatewayConfig, serve_gateway


def main(arguments: list[str]) -> int:
    """Serve with these settings; 2 when they are refused."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = {}
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals:
                raise ConfigError("argument", argument, "is not of the form key=value")
            settings[key] = yaml.safe_load(value)
        serve_gateway(validated(GatewayConfig, settings, place="gateway"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
