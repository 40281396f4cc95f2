"""A real sshd on loopback with keys, configuration and known hosts of its own, and links that can be cut."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palaestra.processes.procfs import list_descendants
from palaestra.runs.remote.hosts import HostConfig

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
needs_sshd = pytest.mark.skipif(
    not os.access(SSHD, os.X_OK) or shutil.which("ssh") is None or os.getuid() != 0,
    reason="sshd of OpenSSH is not installed here, or the tests do not run as root",
)


class Sshd:
    """A server that can be ended and started again at the same port, with the same or another host key."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700)
        for name in ("host", "user"):
            self._make_key(name)
        (directory / "authorized").write_text((directory / "user.pub").read_text())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._write_known_hosts()
        (directory / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {directory}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nLogLevel ERROR\nMaxStartups 100\n"
        )
        self._process = None

    @property
    def address(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def remote(self) -> Path:
        """The directory of the host, which is on the same disk here."""
        return self.directory / "there"

    def options(self, key: str = "user") -> tuple[str, ...]:
        known = ("-o", f"UserKnownHostsFile={self.directory}/known_hosts", "-o", "StrictHostKeyChecking=yes")
        return ("-F", "none", "-i", f"{self.directory}/{key}", "-o", "IdentitiesOnly=yes", *known)

    def host(self, **settings) -> HostConfig:
        settings = {"directory": str(self.remote), "min_free_disk_mb": 0, "python": sys.executable, **settings}
        return HostConfig(**{"address": self.address, "ssh_options": self.options(), **settings})

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", self.directory / "sshd_config"], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.01)
        raise AssertionError("sshd does not listen")

    def stop(self) -> None:
        """End the server and all connections; what sessions started in the background goes on."""
        if self._process is not None:
            self.cut_links(listener=True)
            self._process.wait(10)
            self._process = None

    def cut_links(self, *, listener: bool = False) -> int:
        """Kill the processes that serve connections; returns how many."""
        connections = self.connections()
        for pid in [*([self._process.pid] if listener else []), *connections]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(connections)

    def links(self) -> list[int]:
        """The agents that report to a service right now."""
        return [pid for pid in list_descendants(self._process.pid) if b"agent.py" in _read(pid, "cmdline")]

    def connections(self) -> list[int]:
        """The processes that serve connections."""
        return [pid for pid in list_descendants(self._process.pid) if _is_sshd(pid)]

    def change_host_key(self) -> None:
        """Have another key from the next start on."""
        for path in self.directory.glob("host*"):
            path.unlink()
        self._make_key("host")

    def _make_key(self, name: str) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", self.directory / name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def _write_known_hosts(self) -> None:
        kind, key, _ = (self.directory / "host.pub").read_text().split()
        (self.directory / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")


def _is_sshd(pid: int) -> bool:
    return _read(pid, "comm").startswith(b"sshd")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def run_sshd(directory: Path):
    """A started server, ended at the end."""
    server = Sshd(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()
