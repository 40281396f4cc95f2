"""Notifications that wait for delivery, on disk: the next service sends those that this one could not.

`service/notifications/<webhook>/` has one file per notification, named by its number. A notification that was sent in
the moment in which the service was killed is sent again, with the same id.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from palaestra.files.atomic import remove_stale_files, write_json
from palaestra.runs.notifications.notification import Notification

_log = logging.getLogger(__name__)


class Outbox:
    """The undelivered notifications of one webhook."""

    def __init__(self, root: Path, webhook: str) -> None:
        # The address is often a password, so its hash is the name.
        self.directory = root / hashlib.sha256(webhook.encode()).hexdigest()[:16]
        self._paths: dict[str, Path] = {}
        self._number = 0

    def load(self) -> list[Notification]:
        """The notifications that an earlier service left, oldest first. Damaged files are removed.

        A file that cannot be read stays for the next service.
        """
        remove_stale_files(self.directory)
        notifications = []
        for path in sorted(self.directory.glob("*.json")):
            try:
                self._number = max(self._number, int(path.stem) + 1)
                notification = _read_notification(path)
            except OSError as error:
                _log.warning("a notification cannot be read: %s", error)
                continue
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                _log.warning("%s is not a notification and is removed: %r", path, error)
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            self._paths[notification.id] = path
            notifications.append(notification)
        return notifications

    def add(self, notification: Notification) -> None:
        """Keep a notification until `remove`. Without space on the disk, it is lost when the service ends."""
        path = self.directory / f"{self._number:09d}.json"
        self._number += 1
        document = {"schema": 1, "id": notification.id, "kind": notification.kind, "body": notification.body.decode()}
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, document, mode=0o600, durable=False)
        except OSError as error:
            _log.warning("notification %s cannot be stored: %s", notification.id, error)
            return
        self._paths[notification.id] = path

    def remove(self, notification: Notification) -> None:
        """Forget a notification that was delivered or dropped."""
        path = self._paths.pop(notification.id, None)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def _read_notification(path: Path) -> Notification:
    document = json.loads(path.read_bytes())
    texts = [document[key] for key in ("id", "kind", "body")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("id, kind and body must be texts")
    return Notification(texts[0], texts[1], texts[2].encode())


def remove_other_outboxes(root: Path, outboxes: Iterable[Outbox]) -> None:
    """Remove the notifications for webhooks that are no longer in the settings."""
    kept = {outbox.directory for outbox in outboxes}
    for directory in root.iterdir() if root.is_dir() else ():
        if directory not in kept:
            _log.warning("notifications for a webhook that is no longer configured are dropped")
            shutil.rmtree(directory, ignore_errors=True)
