"""The process of the run service: the lock of the state directory, the supervisor and the HTTP server.

`python -m palaestra.runs.service.server '{"idle_exit_s": 900}'` prints one JSON line:
the URL once it answers, or the reason why it cannot start.
SIGTERM and SIGINT shut it down; runs continue, and the next service adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import logging.handlers
import os
import secrets
import signal
import socket
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TypeAlias

from palaestra import __version__
from palaestra.errors import ConfigError, PalaestraError, ServiceUnreachable
from palaestra.files.atomic import write_json
from palaestra.files.home import Home
from palaestra.http.hosts import AllowedHosts, exposure_warning, reachable_host
from palaestra.http.server import listen, serve_in_background, socket_url
from palaestra.processes.procfs import ProcessIdentity
from palaestra.redaction import Redactor
from palaestra.runs.archive.schedule import RetentionSchedule
from palaestra.runs.checkpoints.import_checkpoint import detach_from_runs
from palaestra.runs.config import ServiceConfig, service_config
from palaestra.runs.notifications.webhooks import Webhooks
from palaestra.runs.play.plays import Plays
from palaestra.runs.play.policy_planner import PolicyPlanner
from palaestra.runs.reader import RunReader
from palaestra.runs.runners.registry import add_installed_runners, registered_runners
from palaestra.runs.service.app import build_api
from palaestra.runs.service.auth import AuthMiddleware
from palaestra.runs.service.web.access import WebAccess
from palaestra.runs.store.lock import ServiceLock
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.sweeps.controller import SweepController
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.video.record_video import CheckpointRecorder
from palaestra.runs.wire import error_to_json

_PORT = "service.port"
_IDLE_CHECK_S = 1.0
_MAX_LOG_BYTES = 10 << 20
_LOG_BACKUPS = 3

_log = logging.getLogger("palaestra.runs.service.server")
_Announce: TypeAlias = Callable[[Mapping[str, object]], None]


def run_service(config: ServiceConfig, home: Home, announce: _Announce) -> None:
    """Serve on the main thread until a signal arrives or the service is idle."""

    async def serve_until_signal() -> None:
        async with _stop_signals() as stop:
            await serve(config, home, announce, stop)

    asyncio.run(serve_until_signal())


async def serve(config: ServiceConfig, home: Home, announce: _Announce, stop: asyncio.Event) -> None:
    """Serve until `stop` is set or the service is idle; calls `announce` with the URL once requests are answered."""
    with (
        ServiceLock(home) as lock,
        _log_to_file(home, config.log_level),
        _open_socket(config) as sock,
    ):
        token = read_token(home)
        url = socket_url(reachable_host(config.host), sock)
        warning = exposure_warning(config.host, sock.getsockname()[1])
        if warning:
            _log.warning("%s", warning)
        registry = await asyncio.to_thread(open_registry, home)
        catalogue = CheckpointRecorder(registry, home)
        runners = registered_runners()
        supervisor = Supervisor(
            home, registry, runners, config, catalogue=catalogue, add_installed=add_installed_runners
        )
        tensorboards, closing = TensorBoards(home), asyncio.Event()
        policies = PolicyPlanner(home, supervisor.planner.get_runner)
        plays = Plays(home, policies.plan, idle_timeout_s=config.play_idle_s)
        sweeps = SweepController(home, supervisor)
        retention = RetentionSchedule(home, config.retention.every_h, lambda: supervisor.gc(dry_run=False))
        webhooks = Webhooks(home, config.webhooks, supervisor.get_run)
        cataloguing: asyncio.Task[None] | None = None
        try:
            # Before the supervisor: the end of a run that ended without a service is an event of its adoption.
            await webhooks.start(supervisor.stream_events())
            report = await supervisor.start()
            _log.info("version %s at %s; %s", __version__, url, report)
            await sweeps.start()
            retention.start()
            # In the background: thousands of directories take seconds, and a resume finds checkpoints without rows.
            cataloguing = asyncio.create_task(_catalogue_checkpoints(catalogue, home, closing))
            access = WebAccess(token)
            app = build_api(
                supervisor, RunReader(home), registry, tensorboards, plays, sweeps, closing, access, retention, webhooks
            )
            auth = AuthMiddleware(app, token, AllowedHosts(config.host, config.allowed_hosts), access)
            async with serve_in_background(auth, sock, websockets=True) as serving:
                lock.publish_url(url)
                identity = ProcessIdentity.of(os.getpid())
                endpoint = {"schema": 1, "url": url, "version": __version__, **(asdict(identity) if identity else {})}
                write_json(home.endpoint, endpoint, mode=0o600)
                announce({"url": url, "pid": os.getpid(), **({"warning": warning} if warning else {})})

                def is_idle() -> bool:
                    if config.idle_exit_s is None or tensorboards.running() or catalogue.busy or not supervisor.idle:
                        return False
                    if plays.num_running or sweeps.is_busy or retention.is_busy or webhooks.is_busy:
                        return False
                    return auth.idle_s() > config.idle_exit_s

                try:
                    await _wait_for_end(stop, serving, is_idle)
                finally:
                    home.endpoint.unlink(missing_ok=True)
                    closing.set()
                    # Ends the sockets of their clients, for which the server would wait.
                    await plays.close()
        finally:
            closing.set()
            if cataloguing is not None:
                await cataloguing
            await retention.close()
            await sweeps.close()
            await supervisor.close()
            # After the supervisor: the end of a run that it still recorded is not an event of the next adoption.
            await webhooks.close()
            await asyncio.to_thread(catalogue.close)
            await asyncio.to_thread(tensorboards.close)
            registry.close()
            _log.info("ended; runs continue")


def _open_socket(config: ServiceConfig) -> socket.socket:
    """A listening socket on the port of the settings, or on a free one if that is the default and in use."""
    try:
        return listen(config.host, config.port, _PORT)
    except ConfigError as error:
        if error.place != _PORT or "port" in config.model_fields_set:
            raise
        _log.info("port %d is in use; a free one is chosen", config.port)
        return listen(config.host, 0, _PORT)


async def _catalogue_checkpoints(catalogue: CheckpointRecorder, home: Home, closing: asyncio.Event) -> None:
    try:
        for checkpoint_id in await asyncio.to_thread(detach_from_runs, home):
            _log.info("checkpoint %s was copied out of its run", checkpoint_id)
        await asyncio.to_thread(catalogue.add_missing, home, closing.is_set)
    except Exception:  # noqa: BLE001 - an unreadable directory must not end the service
        _log.exception("some checkpoints could not be catalogued")


def read_token(home: Home) -> str:
    """The token of the service, created if there is none. `ConfigError` when other users can read the file."""
    try:
        descriptor = os.open(home.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if home.token.stat().st_mode & 0o077:
            reason, remedy = "can be read by others", "Delete it; the next start creates a new one"
            raise ConfigError("token file", str(home.token), reason, remedy) from None
        token = home.token.read_text().strip()
        if len(token) >= 32:
            return token
        home.token.unlink()
        return read_token(home)
    token = secrets.token_hex(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def main(arguments: list[str]) -> int:
    """Run the service; writes one JSON line to standard output."""

    def announce(status: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(status) + "\n")
        sys.stdout.flush()

    try:
        home = Home.default()
        settings = json.loads(arguments[0]) if arguments else {}
        run_service(service_config(home, settings), home, announce)
    except PalaestraError as error:
        announce({"error": error_to_json(error)})
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:
        # The client waits for the first line; the traceback goes to standard error.
        why = f"the run service failed ({type(error).__name__}: {error})"
        with contextlib.suppress(OSError):  # the client may have exited
            announce({"error": error_to_json(ServiceUnreachable(why))})
        raise
    return 0


async def _wait_for_end(stop: asyncio.Event, serving: asyncio.Task[None], is_idle: Callable[[], bool]) -> None:
    stopping = asyncio.create_task(stop.wait())
    try:
        while not is_idle():
            tasks = (stopping, serving)
            done, _ = await asyncio.wait(tasks, timeout=_IDLE_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
        _log.info("idle; shutting down")
    finally:
        stopping.cancel()


@contextlib.asynccontextmanager
async def _stop_signals() -> AsyncIterator[asyncio.Event]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _RedactingFormatter(logging.Formatter):
    """Redacts secrets in messages and tracebacks."""

    def __init__(self, redact: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


@contextlib.contextmanager
def _log_to_file(home: Home, level: str) -> Iterator[None]:
    """Log to service.log, with rotation."""
    path = home.service / "service.log"
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_MAX_LOG_BYTES, backupCount=_LOG_BACKUPS, delay=True)
    handler.setFormatter(_RedactingFormatter(Redactor.from_environment(os.environ)))
    root = logging.getLogger("palaestra")
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


if __name__ == "__main__":
    # The client reads one line only; warnings of libraries belong in the log.
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    sys.exit(main(sys.argv[1:]))
