"""Delivers notifications to webhooks, each in a thread of its own.

A receiver that is slow or does not answer delays only its own notifications: the event loop puts them into a queue and
goes on. A notification that no try delivered, or for which the queue has no room, is counted and logged. The others are
on disk until they are delivered, so that the next service sends what waits when this one ends or is killed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from palaestra import __version__
from palaestra.errors import ConfigError, PalaestraError
from palaestra.files.home import Home
from palaestra.runs.notifications.notification import (
    Notification,
    WebhookConfig,
    build_notification,
    build_test_notification,
    find_kind,
)
from palaestra.runs.notifications.outbox import Outbox, remove_other_outboxes
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.wire import API_SCHEMA

_log = logging.getLogger(__name__)
_MAX_QUEUED = 1000
_MAX_WAIT_S = 60.0
_CLOSE_S = 1.0
_REPEATED_ALARM_S = 600.0
"""An alarm that comes and goes is sent once in this time."""
_BUSY = frozenset({408, 425, 429})
"""Answers after which a later try may succeed, besides those of 500 and more."""


@dataclass(frozen=True)
class WebhookStatus:
    """A configured webhook, and what was sent to it since the service started."""

    __pydantic_config__ = API_SCHEMA

    url: str
    """Scheme and host."""
    kinds: tuple[str, ...]
    signed: bool
    delivered: int
    failed: int
    """Notifications that were given up."""
    pending: int
    """Notifications that wait, or are being tried."""
    last_error: str = ""
    """Why the last try failed; empty if it succeeded."""


@dataclass(frozen=True)
class WebhookTest:
    """The result of one test notification."""

    __pydantic_config__ = API_SCHEMA

    url: str
    """Scheme and host."""
    ok: bool
    text: str
    """The answer, or why there is none."""
    seconds: float


class Webhooks:
    """Sends the events of runs to all configured webhooks. Use from one event loop."""

    def __init__(
        self,
        home: Home,
        configs: Sequence[WebhookConfig],
        get_run: Callable[[str], RunRecord],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ConfigError` if the secret of a webhook cannot be read."""
        self._root = home.service / "notifications"
        urls = [config.url for config in configs]
        # Two webhooks may have the same address and different kinds.
        outboxes = [Outbox(self._root, f"{url} {urls[:index].count(url)}") for index, url in enumerate(urls)]
        self._receivers = [
            _Receiver(config, _read_secret(home, config), outbox)
            for config, outbox in zip(configs, outboxes, strict=True)
        ]
        self._get_run, self._clock = get_run, clock
        self._alarms: dict[tuple[str, int, str], float] = {}
        """When an alarm of a run was last sent, by run, attempt and code."""
        self._task: asyncio.Task[None] | None = None

    async def start(self, events: AsyncIterator[tuple[str, RunEvent]]) -> None:
        """Send what the last service left, then what these events call for. Subscribes before it returns."""
        remove_other_outboxes(self._root, [receiver.outbox for receiver in self._receivers])
        for receiver in self._receivers:
            for notification in receiver.outbox.load():
                receiver.add(notification, is_stored=True)
        if self._receivers:
            self._task = asyncio.create_task(self._follow(events))
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop after the events so far. What is being sent gets a second to arrive; the next service sends the rest."""
        if self._task is not None:
            await asyncio.sleep(0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for receiver in self._receivers:
            receiver.request_stop()
        end = time.monotonic() + _CLOSE_S
        for receiver in self._receivers:
            await asyncio.to_thread(receiver.join, end - time.monotonic())

    @property
    def is_busy(self) -> bool:
        """Whether a notification waits to be delivered."""
        return any(receiver.status().pending for receiver in self._receivers)

    def statuses(self) -> list[WebhookStatus]:
        """All webhooks, in the order of the settings."""
        return [receiver.status() for receiver in self._receivers]

    async def test(self) -> list[WebhookTest]:
        """Send a test notification to every webhook, whatever its kinds, with one try each."""
        notification = build_test_notification(f"test:{secrets.token_hex(8)}", self._clock())
        # Threads of its own: receivers that do not answer would occupy those that the supervisor needs.
        threads = ThreadPoolExecutor(max(1, len(self._receivers)), "palaestra-webhook-test")
        loop = asyncio.get_running_loop()
        try:
            tries = (loop.run_in_executor(threads, receiver.test, notification) for receiver in self._receivers)
            return await asyncio.gather(*tries)
        finally:
            threads.shutdown(wait=False)

    async def _follow(self, events: AsyncIterator[tuple[str, RunEvent]]) -> None:
        async for run_id, event in events:
            try:
                self._on_event(run_id, event)
            except Exception:  # noqa: BLE001 - a notification is never worth a run
                _log.exception("%s: a notification could not be built", run_id)

    def _on_event(self, run_id: str, event: RunEvent) -> None:
        kind = find_kind(event)
        if kind is None:
            return
        if kind == "alarm":
            key, now = (run_id, event.attempt, event.code), self._clock()
            if now - self._alarms.get(key, -_REPEATED_ALARM_S) < _REPEATED_ALARM_S:
                return
            self._alarms[key] = now
        else:
            self._alarms = {key: sent for key, sent in self._alarms.items() if key[0] != run_id}
        try:
            notification = build_notification(kind, self._get_run(run_id), event)
        except PalaestraError as error:
            _log.info("%s: no notification: %s", run_id, error)  # deleted meanwhile
            return
        for receiver in self._receivers:
            if kind in receiver.config.kinds:
                receiver.add(notification)


class _Receiver:
    """The queue and the thread of one webhook."""

    def __init__(self, config: WebhookConfig, secret: bytes | None, outbox: Outbox) -> None:
        self.config, self.outbox, self._secret = config, outbox, secret
        self._queue: queue.Queue[Notification | None] = queue.Queue(_MAX_QUEUED)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._delivered = self._failed = self._pending = 0
        self._last_error = ""
        self._lock = threading.Lock()

    def add(self, notification: Notification, *, is_stored: bool = False) -> None:
        """Send a notification soon. Returns at once."""
        if not is_stored:
            self.outbox.add(notification)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="palaestra-webhook", daemon=True)
            self._thread.start()
        with self._lock:
            self._pending += 1
        try:
            self._queue.put_nowait(notification)
        except queue.Full:
            self._finish(notification, f"{_MAX_QUEUED:,} notifications are waiting already")

    def request_stop(self) -> None:
        """End the thread after the current try."""
        self._closing.set()
        if self._thread is not None and not self._queue.full():
            self._queue.put_nowait(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread for a short time."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
        pending = self.status().pending
        if pending:
            _log.info("%s: %d notifications are left to the next service", self.config.shown_url, pending)

    def status(self) -> WebhookStatus:
        """What was sent so far."""
        with self._lock:
            return WebhookStatus(
                self.config.shown_url,
                self.config.kinds,
                self._secret is not None,
                self._delivered,
                self._failed,
                self._pending,
                self._last_error,
            )

    def test(self, notification: Notification) -> WebhookTest:
        """Send a notification now, with one try. Blocks."""
        started = time.monotonic()
        answer = self._send(notification)
        return WebhookTest(self.config.shown_url, answer.ok, answer.text, time.monotonic() - started)

    def _run(self) -> None:
        while not self._closing.is_set():
            notification = self._queue.get()
            if notification is None:
                return
            self._deliver(notification)

    def _deliver(self, notification: Notification) -> None:
        for number in range(1, self.config.max_tries + 1):
            answer = self._send(notification)
            with self._lock:
                self._last_error = "" if answer.ok else answer.text
            if answer.ok:
                return self._finish(notification, "")
            if not answer.may_retry or number == self.config.max_tries:
                return self._finish(notification, answer.text)
            if self._closing.wait(min(_MAX_WAIT_S, 2.0 ** (number - 1))):
                return None
        return None

    def _finish(self, notification: Notification, problem: str) -> None:
        with self._lock:
            self._pending -= 1
            self._delivered += not problem
            self._failed += bool(problem)
        self.outbox.remove(notification)
        if problem:
            _log.warning("%s: notification %s is dropped: %s", self.config.shown_url, notification.id, problem)

    def _send(self, notification: Notification) -> _Answer:
        headers = {"User-Agent": f"palaestra/{__version__}", **notification.headers(self._secret)}
        request = urllib.request.Request(self.config.url, notification.body, headers, method="POST")
        try:
            # The body is not read: it says nothing more, and a receiver may send it slowly and without an end.
            with _open_url(request, timeout=self.config.timeout_s) as response:
                return _Answer(True, f"answered {response.status}")
        except urllib.error.HTTPError as error:
            with error:
                may_retry = error.code >= 500 or error.code in _BUSY
                is_redirect = 300 <= error.code < 400
            remedy = " (a redirect, which is not followed: give the final address)" if is_redirect else ""
            return _Answer(False, f"answered {error.code}{remedy}", may_retry)
        except (OSError, HTTPException, ValueError) as error:
            # The reason of an error may repeat the address.
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            return _Answer(False, reason.replace(self.config.url, self.config.shown_url))


@dataclass(frozen=True)
class _Answer:
    ok: bool
    text: str
    may_retry: bool = True


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would send the body as a GET request, or to a host that the user did not name."""

    def redirect_request(self, *_arguments: Any, **_fields: Any) -> None:
        return None


_open_url = urllib.request.build_opener(_NoRedirect).open


def _read_secret(home: Home, config: WebhookConfig) -> bytes | None:
    if config.secret_file is None:
        return None
    path = config.secret_file
    try:
        path = home.path / path.expanduser()
        secret = path.read_bytes().strip()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte; the home directory of an unknown user
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        remedy = "Create it, for example with: openssl rand -hex 32"
        raise ConfigError("webhooks.secret_file", str(path), reason, remedy) from None
    if not secret:
        raise ConfigError("webhooks.secret_file", str(path), "is empty", "Write the secret into it")
    return secret
