"""The command that opens the web page of the run service."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from palaestra.cli.terminal import JsonOption, print_json


def open_command(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run id or a unique prefix of it.", show_default=False),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Open the web page of the run service.

    Prints an address that works once, within ten minutes, and gives one browser access for reading. With a display, a
    browser is opened. On a server, forward the port of the address: ssh -L PORT:127.0.0.1:PORT HOST.
    """
    from palaestra.cli.runs.manage import connect_service

    url = connect_service().create_web_link(run)
    is_opened = not no_browser and not as_json and _open_browser(url)
    if as_json:
        print_json({"url": url})
    else:
        print(url)
        if is_opened:
            print("A browser was opened; the address does not work a second time.", file=sys.stderr)


def _open_browser(url: str) -> bool:
    """Open a browser if there is a display; a browser for terminals would block the command."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    import webbrowser

    try:
        return webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return False
