"""A real API server for tests, with its etcd and its controller manager, on free loopback ports.

Everything it starts it also ends, and it writes below one directory only. Every address stays the same when the API
server is killed and started again, so that clients meet the same cluster.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

CACHE = Path(os.environ.get("PALAESTRA_KUBERNETES_BIN") or Path.home() / ".cache" / "palaestra" / "kubernetes")
BUILD = Path(__file__).with_name("build.sh")
# With the default set, pods would be collected whose node is not registered, and ours has none.
CONTROLLERS = "garbagecollector,namespace,resourcequota,serviceaccount"


def free_ports(count):
    """Free ports; all held at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class ControlPlane:
    """A cluster without nodes."""

    def __init__(self, directory, binaries=CACHE):
        self.directory, self.binaries = Path(directory), Path(binaries)
        self.etcd_port, self.peer_port, self.port, self.manager_port = free_ports(4)
        self.server = f"https://127.0.0.1:{self.port}"
        self.tokens = {"admin": secrets.token_hex(16), "gateway": secrets.token_hex(16)}
        self._processes = {}
        self._logs = []

    def start(self):
        """Until the API server says that it is ready."""
        subprocess.run([str(BUILD), str(self.binaries)], check=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_keys()
        etcd = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        self._start(
            "etcd", shutil.which("etcd"), "--data-dir", "etcd", "--listen-client-urls", etcd,
            "--advertise-client-urls", etcd, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self.start_api()
        self._start(
            "manager", self.binaries / "kube-controller-manager", "--kubeconfig", self.kubeconfig("admin"),
            "--controllers", CONTROLLERS, "--leader-elect=false", "--port=0", "--bind-address=127.0.0.1",
            f"--secure-port={self.manager_port}", "--cert-dir=manager-certs",
            "--service-account-private-key-file=sa.key", "--kube-api-qps=200", "--kube-api-burst=200",
            "--concurrent-resource-quota-syncs=2",
        )  # fmt: skip

    def start_api(self):
        """Start the API server, also a second time."""
        self._start(
            "api", self.binaries / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--secure-port={self.port}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            "--cert-dir=certs", "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=sa.pub", "--service-account-signing-key-file=sa.key",
            "--token-auth-file=tokens.csv", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/24",
            "--endpoint-reconciler-type=none",
            # etcd forgets history only when a test says so.
            "--etcd-compaction-interval=0",
        )  # fmt: skip
        self._until_ready()

    def kill_api(self):
        """As a crash would end it."""
        self._end("api", signal.SIGKILL)

    def stop(self):
        """End everything, newest first, and see it end."""
        for name in reversed(list(self._processes)):
            self._end(name, signal.SIGKILL)
        for log in self._logs:
            log.close()
        self._logs = []

    def compact(self):
        """Make etcd forget everything before now, so that no watch can resume from there."""
        revision = int(self._etcd("/v3/kv/range", {"key": "AA=="})["header"]["revision"])
        self._etcd("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def kubeconfig(self, user):
        """The file with which a user gets in; verified against the server's own certificate."""
        path = self.directory / f"{user}.kubeconfig"
        cluster = {"server": self.server, "certificate-authority": str(self.directory / "certs" / "apiserver.crt")}
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        }))  # fmt: skip
        path.chmod(0o600)
        return path

    def _write_keys(self):
        key, public = self.directory / "sa.key", self.directory / "sa.pub"
        if not key.exists():
            subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
            subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
        rows = [f'{self.tokens["admin"]},admin,admin,"system:masters"', f"{self.tokens['gateway']},gateway,gateway"]
        (self.directory / "tokens.csv").write_text("\n".join(rows) + "\n")

    def _start(self, name, *command):
        log = (self.directory / f"{name}.log").open("ab")
        self._logs.append(log)
        self._processes[name] = subprocess.Popen(
            [str(part) for part in command], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def _end(self, name, number):
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait()

    def _until_ready(self):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        asked = urllib.request.Request(f"{self.server}/readyz")
        asked.add_header("Authorization", f"Bearer {self.tokens['admin']}")
        end = time.monotonic() + 120
        while True:
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended: {(self.directory / f'{name}.log').read_text()[-3000:]}"
            try:
                with urllib.request.urlopen(asked, context=context, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            assert time.monotonic() < end, (self.directory / "api.log").read_text()[-3000:]
            time.sleep(0.05)

    def _etcd(self, path, body):
        url = f"http://127.0.0.1:{self.etcd_port}{path}"
        with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=10) as answer:
            return json.loads(answer.read())
