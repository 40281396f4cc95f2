"""`palaestra studio`: the desktop window, on this machine's service or on another one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaestra.errors import ConfigError
from palaestra.extras import QT_LIBRARIES, require_extras

if TYPE_CHECKING:
    from palaestra.runs.client.client import TrainerService

_TOKEN_VARIABLE = "PALAESTRA_TOKEN"
_TOKEN_PLACE = "it is in service/token of the state directory there"


def studio(
    connect: Annotated[
        str | None, typer.Option(metavar="URL", help="Run service of another machine, such as http://host:8710.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token of that service.")
    ] = None,
    screenshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw one page into a PNG file and exit.")
    ] = None,
    page: Annotated[str, typer.Option(metavar="NAME", help="Page to show, such as play, runs or episodes.")] = "",
    theme: Annotated[str, typer.Option(metavar="NAME", help="dark, light or system.")] = "",
) -> None:
    """Open the desktop: play, train, and look at runs.

    Starts the run service if there is none. Closing the window stops no run.
    """
    if theme not in ("", "dark", "light", "system"):
        raise ConfigError("--theme", theme, "unknown theme", "Use dark, light or system")
    if screenshot is not None and screenshot.suffix.lower() != ".png":
        raise ConfigError("--screenshot", str(screenshot), "is not a PNG file", "Name it studio.png")
    require_extras("studio", "studio", only=("PySide6", "pyqtgraph", "websockets"))
    _check_display(screenshot is not None)
    with _without_collections():
        service = _find_service(connect, token_file)
        # Before PySide6, which reads the source of every module that is imported after it.
        import palaestra.studio.studio  # noqa: F401

        try:
            from palaestra.studio.qt import application
        except ImportError as error:
            # PySide6 is there, and a library of the system is not.
            raise ConfigError("PySide6", str(error), "cannot be loaded", QT_LIBRARIES) from None
    if screenshot is not None:
        application.take_screenshot(service, screenshot, page or "play", theme or "dark")
        return
    raise typer.Exit(application.run_studio(service, page, theme))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Imports make no garbage, and looking for it takes a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_display(is_screenshot: bool) -> None:
    if os.environ.get("QT_QPA_PLATFORM") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    if is_screenshot:
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
        return
    remedy = (
        "Run it where there is one: palaestra studio --connect http://THIS-MACHINE:PORT (docs/studio.md). "
        "For pictures without a display use --screenshot FILE; for tests QT_QPA_PLATFORM=offscreen"
    )
    raise ConfigError("DISPLAY", "", "there is no display here", remedy)


def _find_service(connect: str | None, token_file: Path | None) -> TrainerService:
    from palaestra.runs.client.client import TrainerService

    if connect is None:
        if token_file is not None:
            raise ConfigError("--token-file", str(token_file), "needs --connect", "Leave it out on this machine")
        service = TrainerService()
        service.request("GET", "/health")
        return service
    service = TrainerService(url=connect, token=_read_token(token_file))
    # The first shows a wrong address at once, the second a wrong token.
    service.check_health()
    service.request("GET", "/runners")
    return service


def _read_token(token_file: Path | None) -> str:
    place, value, token = _TOKEN_VARIABLE, "", os.environ.get(_TOKEN_VARIABLE, "")
    if token_file is not None:
        place, value = "--token-file", str(token_file)
        try:
            token = token_file.read_text(errors="replace").strip()
        except OSError as error:
            raise ConfigError(place, value, f"cannot be read ({error.strerror})") from None
    elif not token:
        remedy = f"Give --token-file, or set {_TOKEN_VARIABLE}; {_TOKEN_PLACE}"
        raise ConfigError(_TOKEN_VARIABLE, "", "the service of another machine needs its token", remedy)
    # Anything else would break the header of the request.
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise ConfigError(place, value, "holds no token", f"Give the right one; {_TOKEN_PLACE}")
    return token
