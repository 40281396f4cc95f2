"""The `palaestra` command. Each command imports what it needs when it runs, so that `--help` is fast."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command, see `palaestra.cli.app`."""
    try:
        # Imported here, because Ctrl-C during the import must not print a traceback, either.
        from palaestra.cli.app import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        ranks = sys.modules.get("palaestra.transport.ranks")  # only a training imports it
        if ranks is not None and ranks.launched_by_torchrun() and isinstance(end.code, int):
            ranks.end_process(end.code)
        raise
