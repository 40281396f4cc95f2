"""A real Ray head with its job server, as a process of the test on free ports."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from palaestra.processes.procfs import list_descendants

START_TIMEOUT_S = 180


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def run_ray_head():
    """The address of a job server; every process of the cluster is ended at the end."""
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    # The sockets of Ray are below this directory, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1"]
        command += ["--num-cpus=2", "--object-store-memory=80000000", f"--temp-dir={directory}"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        with open(Path(directory) / "output", "wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        pids = {process.pid}
        try:
            address = f"http://127.0.0.1:{ports['dashboard-port']}"
            _wait_for(address, process, Path(directory) / "output")
            pids |= list_descendants(process.pid)
            yield address
        finally:
            pids |= list_descendants(process.pid)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(30)


def _wait_for(address, process, output):
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api/version", timeout=5):
            return
        assert process.poll() is None, f"Ray ended: {output.read_text()[-2000:]}"
        assert time.monotonic() < deadline, f"Ray does not answer: {output.read_text()[-2000:]}"
        time.sleep(0.2)
