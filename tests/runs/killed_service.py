"""A service as a real process that a test kills without warning."""

import contextlib
import json
import os
import subprocess
import sys

from palaestra.runs.client.client import TrainerService

CONFIG = {"min_free_disk_mb": 0, "max_running": 16, "alarm_every_s": 0.1}


@contextlib.contextmanager
def killed_service(home, **config):
    """A client of a service of this state directory, which gets SIGKILL at the end."""
    command = [sys.executable, "-m", "palaestra.runs.service.server", json.dumps({**CONFIG, **config})]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        told = json.loads(process.stdout.readline())
        assert "url" in told, told
        yield TrainerService(home)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
