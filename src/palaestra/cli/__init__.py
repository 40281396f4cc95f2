"""The `palaestra` command. Each command imports what it needs when it runs, so that `--help` is fast."""

from palaestra.cli.app import main

__all__ = ["main"]
