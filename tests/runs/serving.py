"""The run service for tests: a process as the command line starts it, or a thread of the test, which is faster."""

import asyncio
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading

from palaestra.files.atomic import read_json
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.client.client import TrainerService
from palaestra.runs.service.server import ServiceConfig, serve

SETTINGS = {"min_free_disk_mb": 0, "max_running": 8, "alarm_every_s": 0.1}


@contextlib.contextmanager
def service(home, **settings):
    """A service process; yields what it prints when it is ready."""
    process = _start_service(home, settings)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextlib.contextmanager
def killed_service(home, **settings):
    """A client of a service process that gets SIGKILL at the end."""
    process = _start_service(home, {"max_running": 16, **settings})
    try:
        ready = json.loads(process.stdout.readline())
        assert "url" in ready, ready
        yield TrainerService(home)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _start_service(home, settings):
    command = [sys.executable, "-m", "palaestra.runs.service.server", json.dumps({**SETTINGS, **settings})]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


@contextlib.contextmanager
def service_thread(home, **settings):
    """The same service in a thread, without signal handling; yields its address."""
    config = ServiceConfig(**{**SETTINGS, **settings})
    ready = queue.Queue()

    async def body():
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(config, home, lambda facts: ready.put((facts["url"], loop, stop)), stop)

    def run():
        try:
            asyncio.run(body())
        except BaseException as error:
            ready.put(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    result = ready.get(timeout=60)
    if isinstance(result, BaseException):
        raise result
    url, loop, stop = result
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive(), "the service did not end"


def end_service(home):
    """Stop a service that was started automatically, and wait until it is gone."""
    identity = ProcessIdentity.from_json(read_json(home.endpoint))
    if identity is None or not identity.is_alive():
        return
    watched = os.pidfd_open(identity.pid)
    try:
        signal.pidfd_send_signal(watched, signal.SIGTERM)
        assert select.select([watched], [], [], 30)[0], "the service did not end"
    finally:
        os.close(watched)
