"""The run service as a process: the state directory's lock, the supervisor and the HTTP port, held together.

`python -m palaestra.runs.service.server '{"idle_exit_s": 900}'` prints one JSON line:
the address once it answers, or the reason why it cannot start.
SIGTERM and SIGINT end it in order; the runs go on, and the next service adopts them.
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
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from palaestra import __version__
from palaestra.errors import ConfigError, PalaestraError, ServiceUnreachable
from palaestra.files.atomic import write_json
from palaestra.files.home import Home
from palaestra.http.hosts import AllowedHosts, exposure_warning, reachable_host
from palaestra.http.server import listen, serve_in_background, socket_url
from palaestra.processes.procfs import ProcessIdentity
from palaestra.redaction import Redactor
from palaestra.runs.checkpoints.import_checkpoint import detach_from_runs
from palaestra.runs.reader import RunReader
from palaestra.runs.runners.registry import add_installed_runners, registered_runners
from palaestra.runs.service.app import build_api
from palaestra.runs.service.auth import AuthMiddleware
from palaestra.runs.service.config import ServiceConfig, service_config
from palaestra.runs.store.lock import ServiceLock
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.video.checkpoint_recorder import CheckpointRecorder
from palaestra.runs.wire import error_to_json

__all__ = ["ServiceConfig", "main", "run_service", "serve", "service_config"]

_LOOK_EVERY_S = 1.0
_LOG_BYTES = 10 << 20
_LOGS_KEPT = 3

_log = logging.getLogger("palaestra.runs.service.server")


_Told: TypeAlias = Callable[[Mapping[str, object]], None]


def run_service(config: ServiceConfig, home: Home, told: _Told) -> None:
    """Serve on the main thread until a signal or idleness ends it."""

    async def until_signalled() -> None:
        async with _signals() as stop:
            await serve(config, home, told, stop)

    asyncio.run(until_signalled())


async def serve(config: ServiceConfig, home: Home, told: _Told, stop: asyncio.Event) -> None:
    """Serve until told to stop or idle; `told` hears where, as soon as requests are answered."""
    with (
        ServiceLock(home) as lock,
        _logging(home, config.log_level),
        listen(config.host, config.port, "service.port") as sock,
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
        catching_up: asyncio.Task[None] | None = None
        try:
            report = await supervisor.start()
            _log.info("version %s at %s; %s", __version__, url, report)
            # Beside the work: thousands of directories take seconds, and a resume finds its checkpoint without a row.
            catching_up = asyncio.create_task(_catch_up(catalogue, home, closing))
            app = build_api(supervisor, RunReader(home), registry, tensorboards, closing)
            auth = AuthMiddleware(app, token, AllowedHosts(config.host, config.allowed_hosts))
            async with serve_in_background(auth, sock) as serving:
                lock.publish_url(url)
                me = ProcessIdentity.of(os.getpid())
                write_json(
                    home.endpoint,
                    {"schema": 1, "url": url, "version": __version__, **(asdict(me) if me else {})},
                    mode=0o600,
                )
                told({"url": url, "pid": os.getpid(), **({"warning": warning} if warning else {})})

                def idle() -> bool:
                    in_use = tensorboards.in_use or catalogue.busy
                    return not in_use and _idle(config, supervisor, auth)

                try:
                    await _until(stop, serving, idle)
                finally:
                    home.endpoint.unlink(missing_ok=True)
                    closing.set()
        finally:
            closing.set()
            if catching_up is not None:
                await catching_up
            await supervisor.close()
            await asyncio.to_thread(catalogue.close)
            await asyncio.to_thread(tensorboards.close)
            registry.close()
            _log.info("ended; runs go on")


async def _catch_up(catalogue: CheckpointRecorder, home: Home, closing: asyncio.Event) -> None:
    try:
        for checkpoint_id in await asyncio.to_thread(detach_from_runs, home):
            _log.info("checkpoint %s has files of its own now", checkpoint_id)
        await asyncio.to_thread(catalogue.add_missing, home, closing.is_set)
    except Exception:  # noqa: BLE001 - the service must not fall over a directory that cannot be read
        _log.exception("some checkpoints could not be catalogued")


def read_token(home: Home) -> str:
    """What clients must send, made when there is none. `ConfigError` when others could have read it."""
    try:
        descriptor = os.open(home.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if home.token.stat().st_mode & 0o077:
            reason, remedy = "can be read by others", "Delete it; the next start makes a new one"
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
    """The process: one JSON line on standard output, then silence until it ends."""

    def told(facts: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    try:
        home = Home.default()
        given = json.loads(arguments[0]) if arguments else {}
        run_service(service_config(home, given), home, told)
    except PalaestraError as error:
        told({"error": error_to_json(error)})
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:
        # Who waits for our first line must hear why there is none; the traceback goes where stderr leads.
        why = f"the run service ended with a fault of its own ({type(error).__name__}: {error})"
        with contextlib.suppress(OSError):  # whoever started us may have left long ago
            told({"error": error_to_json(ServiceUnreachable(why))})
        raise
    return 0


async def _until(stop: asyncio.Event, serving: asyncio.Task[None], idle: Callable[[], bool]) -> None:
    asked = asyncio.create_task(stop.wait())
    try:
        while not idle():
            done, _ = await asyncio.wait((asked, serving), timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
        _log.info("nothing to do any more")
    finally:
        asked.cancel()


def _idle(config: ServiceConfig, supervisor: Supervisor, auth: AuthMiddleware) -> bool:
    return config.idle_exit_s is not None and supervisor.idle and auth.idle_s() > config.idle_exit_s


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Hiding(logging.Formatter):
    """Writes no secret, wherever in a record or a traceback it stands."""

    def __init__(self, redact: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


@contextlib.contextmanager
def _logging(home: Home, level: str) -> Iterator[None]:
    """Everything that is logged goes to service.log, which is turned over before it grows."""
    path = home.service / "service.log"
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=_LOGS_KEPT, delay=True)
    handler.setFormatter(_Hiding(Redactor.from_environment(os.environ)))
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


def _quietly() -> Any:
    # Whoever started us reads one line and leaves; what libraries warn about belongs into the log.
    logging.captureWarnings(True)
    warnings.simplefilter("default")


if __name__ == "__main__":
    _quietly()
    sys.exit(main(sys.argv[1:]))
