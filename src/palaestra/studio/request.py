"""`Requests`: what the parts of the studio use to ask the service and to report failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from palaestra.errors import ConfigError, PalaestraError
from palaestra.runs.client.client import TrainerService
from palaestra.studio.feed import ServiceFeed
from palaestra.studio.model.notices import Notices

_T = TypeVar("_T")


def split_error(error: PalaestraError) -> tuple[str, str]:
    """Reason and remedy of an error, each as a sentence."""
    if isinstance(error, ConfigError):
        reason, remedy = error.reason.rstrip("."), error.remedy.rstrip(".")
        return f"{reason[:1].upper()}{reason[1:]}.", f"{remedy}." if remedy else ""
    return str(error), ""


class Requests:
    """Asks the service in the background, and shows a notice when it refuses."""

    def __init__(self, feed: ServiceFeed, notices: Notices) -> None:
        self.feed, self.notices = feed, notices

    @property
    def service_directory(self) -> Path:
        """A directory on the machine of the service: the current one, or one that exists on every machine."""
        return Path("/") if self.feed.service.is_remote else Path.cwd()

    def ask(
        self,
        what: str,
        work: Callable[[TrainerService], _T],
        done: Callable[[_T], None],
        *,
        key: str = "",
        failed: Callable[[PalaestraError], None] | None = None,
    ) -> None:
        """Call `work` in another thread. `what` begins the notice about a failure: `The runs cannot be listed`."""

        def show(error: PalaestraError) -> None:
            reason, remedy = split_error(error)
            # `GET /runs: …` keeps its capitals.
            first = reason[:1] if reason[1:2].isupper() else reason[:1].lower()
            self.notices.add("error", f"{what}: {first}{reason[1:]}", remedy, key=key or what)

        self.feed.request(work, done, failed or show, key=key)
