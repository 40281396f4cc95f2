"""The commands that open the web page of the run service, and list and test its webhooks."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from palaestra.cli.terminal import JsonOption, format_columns, print_json


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


def webhooks_command(
    test: Annotated[bool, typer.Option("--test", help="Send a test notification to each.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the webhooks for events of runs, or test them.

    Webhooks are a setting of the service, for example webhooks: [{url: https://example.org/hook}] in
    var/training/service.yaml. Exit code 1 if a test failed.
    """
    from palaestra.cli.runs.manage import connect_service, warn_of_changed_settings

    service = connect_service()
    warn_of_changed_settings(service)
    results = service.test_webhooks() if test else []
    statuses = service.webhooks()
    if as_json:
        print_json(results if test else statuses)
    elif not statuses:
        print("No webhooks. Add them to var/training/service.yaml: webhooks: [{url: https://example.org/hook}]")
    elif test:
        tests = [
            ("ok" if result.ok else "FAILED", result.url, f"{result.seconds:.2f} s", result.text) for result in results
        ]
        print("\n".join(format_columns(tests)))
    else:
        titles: tuple[str, ...] = ("URL", "KINDS", "SIGNED", "DELIVERED", "FAILED", "PENDING", "LAST ERROR")
        rows = [
            (
                status.url,
                ", ".join(status.kinds),
                "yes" if status.signed else "no",
                *(f"{number:,}" for number in (status.delivered, status.failed, status.pending)),
                status.last_error,
            )
            for status in statuses
        ]
        print("\n".join(format_columns([titles, *rows], align_right=[False, False, False, True, True, True])))
    if any(not result.ok for result in results):
        raise typer.Exit(1)


def _open_browser(url: str) -> bool:
    """Open a browser if there is a display; a browser for terminals would block the command."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    import webbrowser

    try:
        return webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return False
