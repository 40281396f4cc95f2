"""The settings of webhooks, and the JSON body of a notification. Pure: `webhooks` delivers it."""

from __future__ import annotations

import hashlib
import hmac
import os
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator

from palaestra.config import Section
from palaestra.redaction import Redactor, redact_secrets
from palaestra.runs.phase import END_EVENTS, Phase, PhaseEvent
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.wire import JsonObject, to_json
from palaestra.strict_json import dump_json

NotificationKind: TypeAlias = Literal["ended", "failed", "alarm"]

SIGNATURE_HEADER = "X-Palaestra-Signature"
_ENDS = frozenset({*END_EVENTS, PhaseEvent.LAUNCH_REFUSED})


class WebhookConfig(Section):
    """An address that receives notifications about runs."""

    url: str = Field(max_length=2000)
    """Where notifications are sent by POST; `http` or `https`. Logs and responses show its host only."""
    kinds: tuple[NotificationKind, ...] = Field(default=("ended", "failed", "alarm"), min_length=1)
    """What is sent: `ended` when a run succeeded or was stopped, `failed` when it ended in any other way, `alarm` when
    one is raised, such as `stalled`."""
    secret_file: Path | None = None
    """File with the secret that signs the body (HMAC-SHA256); relative to the state directory. Null: no signature."""
    timeout_s: float = Field(default=10.0, gt=0, le=60)
    """Seconds in which the receiver has to answer."""
    max_tries: int = Field(default=8, ge=1, le=20)
    """Tries of one notification, 1, 2, 4, … up to 60 seconds apart; it is dropped after the last."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        parts = urllib.parse.urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is not an http or https address")
        if not value.isascii() or not value.isprintable() or any(character in value for character in ' \\"<>'):
            raise ValueError("has characters that an address must quote")
        if "@" in parts.netloc:
            # It would be taken as a part of the host, and reported with it.
            raise ValueError("has a user name or password, which is not sent: use secret_file to sign notifications")
        _ = parts.port  # `ValueError` if it is not a number, or too large
        return value

    @property
    def shown_url(self) -> str:
        """Scheme and host: path and query of many receivers are a password."""
        parts = urllib.parse.urlsplit(self.url)
        host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{host}{port}" + ("/…" if parts.path.strip("/") or parts.query else "")


@dataclass(frozen=True)
class Notification:
    """One notification, ready to be sent."""

    id: str
    """The same for every try, so that a receiver can ignore repetitions."""
    kind: str
    body: bytes

    def headers(self, secret: bytes | None) -> dict[str, str]:
        """Headers of the request, with the signature of the body if there is a secret."""
        headers = {"Content-Type": "application/json", "X-Palaestra-Delivery": self.id}
        if secret is not None:
            headers[SIGNATURE_HEADER] = f"sha256={hmac.new(secret, self.body, hashlib.sha256).hexdigest()}"
        return headers


def find_kind(event: RunEvent) -> NotificationKind | None:
    """The kind of notification that an event causes, if any."""
    if event.kind == "alarm":
        return "alarm"
    if event.kind not in _ENDS or not event.phase.has_ended:
        return None
    return "ended" if event.phase in (Phase.SUCCEEDED, Phase.STOPPED) else "failed"


def build_notification(kind: str, record: RunRecord, event: RunEvent) -> Notification:
    """The notification about an event of a run. Secrets are replaced."""
    reason = event.reason if event.reason and event.reason != str(event.phase) else ""
    what = f"alarm {event.code}" if kind == "alarm" else str(event.phase)
    name = f"{record.name} ({record.run_id})" if record.name else record.run_id
    document = {
        "kind": kind,
        "text": f"{name}: {what}: {reason}" if reason else f"{name}: {what}",
        "time": event.time,
        "run": to_json(record),
        "event": to_json(event),
    }
    return _encode(f"{record.run_id}:{event.seq}", document)


def build_test_notification(notification_id: str, now: float) -> Notification:
    """A notification that is about no run."""
    text = "A test notification of the Palaestra run service."
    return _encode(notification_id, {"kind": "test", "text": text, "time": now, "run": None, "event": None})


def _encode(notification_id: str, document: JsonObject) -> Notification:
    redacted = _map_texts(redact_secrets(document), Redactor.from_environment(os.environ))
    text = dump_json({"schema": 1, "id": notification_id, **redacted})
    return Notification(notification_id, str(document["kind"]), text.encode())


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value
