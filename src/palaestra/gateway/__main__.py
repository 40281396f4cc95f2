"""`python -m palaestra.gateway [--config FILE] [key=value ...]`: a gateway without the rest of the CLI."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from palaestra.config import parse_section
from palaestra.config.file import read_settings
from palaestra.errors import ConfigError
from palaestra.gateway import GatewayConfig, serve_gateway


def main(arguments: list[str]) -> int:
    """Serve with these settings; the exit code is 2 when they are refused."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    file = None
    try:
        if arguments[:1] == ["--config"]:
            if len(arguments) == 1:
                raise ConfigError("--config", None, "names no file")
            file, arguments = Path(arguments[1]), arguments[2:]
        serve_gateway(parse_section(GatewayConfig, read_settings(file, arguments), place="gateway"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
