"""The run service for tests: a process as the command line starts it, or, quicker, a thread of the test's own."""

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
from palaestra.runs.service.server import ServiceConfig, serve

SETTINGS = {"min_free_disk_mb": 0, "max_running": 8, "alarm_every_s": 0.1}


@contextlib.contextmanager
def service(home, **settings):
    """A service process, and what it said when it answered."""
    command = [sys.executable, "-m", "palaestra.runs.service.server", json.dumps({**SETTINGS, **settings})]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextlib.contextmanager
def service_thread(home, **settings):
    """The same service in a thread: all of it but the signals. Its address."""
    config = ServiceConfig(**{**SETTINGS, **settings})
    said = queue.Queue()

    async def body():
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(config, home, lambda facts: said.put((facts["url"], loop, stop)), stop)

    def run():
        try:
            asyncio.run(body())
        except BaseException as error:
            said.put(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    heard = said.get(timeout=60)
    if isinstance(heard, BaseException):
        raise heard
    url, loop, stop = heard
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive(), "the service did not end"


def end_service(home):
    """End whatever service was started by itself, and wait until it is gone."""
    identity = ProcessIdentity.from_json(read_json(home.endpoint))
    if identity is None or not identity.is_alive():
        return
    watched = os.pidfd_open(identity.pid)
    try:
        signal.pidfd_send_signal(watched, signal.SIGTERM)
        assert select.select([watched], [], [], 30)[0], "the service did not end"
    finally:
        os.close(watched)
