"""A real service process for tests: started as the command line starts it, ended in order."""

import contextlib
import json
import os
import signal
import subprocess
import sys

from palaestra.proc import ProcessIdentity
from palaestra.runs.durable import read_json

SETTINGS = {"min_free_disk_mb": 0, "max_running": 8, "alarm_every_s": 0.1}


@contextlib.contextmanager
def service(home, **settings):
    """A service, and what it said when it answered."""
    command = [sys.executable, "-m", "palaestra.runs.service", json.dumps({**SETTINGS, **settings})]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def end_service(home):
    """End whatever service was started by itself, and wait until it is gone."""
    told = read_json(home.endpoint)
    identity = ProcessIdentity.read(told)
    if identity is None or not identity.lives():
        return
    watched = os.pidfd_open(identity.pid)
    try:
        signal.pidfd_send_signal(watched, signal.SIGTERM)
        os.set_blocking(watched, True)
        import select

        assert select.select([watched], [], [], 30)[0], "the service did not end"
    finally:
        os.close(watched)
