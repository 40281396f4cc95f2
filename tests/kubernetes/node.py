"""A whole Kubernetes of one node on this machine, from the binaries that `build.sh --node` makes. Debian 12, root.

    python tests/kubernetes/node.py up       # images, control plane, node; prints the KUBECONFIG to use
    python tests/kubernetes/node.py images   # build the images again and give them to the node
    python tests/kubernetes/node.py down     # nothing is left but the directory
    python tests/kubernetes/node.py clean    # nor that

Everything lies in one directory. Pods, API server and kubelet meet on a bridge that no other machine reaches. There is
no kube-proxy: the address of the `kubernetes` service is the API server's own, other services have none, and nothing
enforces a NetworkPolicy. For tests: every process that reaches the bridge may talk to the kubelet.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template

import node_images

HERE = Path(__file__).parent
BRIDGE, NODE_IP, POD_NETWORK = "palaestra0", "10.88.200.1", "10.88.200.0/24"
SERVICE_IP, SERVICE_NETWORK = "10.96.0.1", "10.96.0.0/16"
KUBELET_PORT = 10350
NODE = "node1"
SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
"""What kubelet and the bridge plugin set for the whole machine; put back by `down`."""
OUTSIDE = ("/var/lib/kubelet", "/var/log/pods", "/var/log/containers", "/var/lib/cni")
"""Where kubelet and its plugins write regardless of their settings; removed by `down` if they were not there before."""
CGROUPS = Path("/sys/fs/cgroup")


class Node:
    """One node and its control plane in a directory."""

    def __init__(self, state: Path, binaries: Path) -> None:
        self.state, self.binaries = state, binaries
        self.kubeconfig = state / "kubeconfig.yaml"
        self._before = state / "before.json"

    def up(self) -> None:
        """Start everything that does not run yet, and return when the node is ready."""
        self.state.mkdir(parents=True, exist_ok=True)
        if not self._before.exists():
            self._remember()
        self._bridge()
        self._settings()
        self._start_control_plane()
        self._start("containerd", ["containerd", "--config", self.state / "containerd.toml"])
        self._until("containerd", lambda: self._ctr("version") is not None)
        if self._ctr("images", "list", "-q") == "":
            self.load()
        self._start("kubelet", [
            self.binaries / "kubelet", "--kubeconfig", self.kubeconfig, "--config", self.state / "kubelet.yaml",
            "--container-runtime=remote", f"--container-runtime-endpoint=unix://{self.state}/containerd.sock",
            f"--root-dir={self.state}/kubelet", f"--cert-dir={self.state}/kubelet-certs",
            f"--hostname-override={NODE}", f"--node-ip={NODE_IP}",
        ])  # fmt: skip
        self._until("kubelet", lambda: self.kubectl("get", f"node/{NODE}", quiet=True) is not None)
        self.kubectl("wait", f"node/{NODE}", "--for=condition=Ready", "--timeout=120s", quiet=True)

    def load(self) -> dict[str, int]:
        """Build the images and give them to the node."""
        sizes = node_images.make_images(self.state)
        podman, archive = node_images.Podman(self.state), self.state / "image.tar"
        for name in sizes:
            if name != node_images.BASE:
                archive.unlink(missing_ok=True)
                podman("save", "--quiet", "--output", archive, name)
                subprocess.run(self._ctr_command("images", "import", str(archive)), check=True)
        archive.unlink(missing_ok=True)
        return sizes

    def kubectl(self, *arguments: str, quiet: bool = False) -> str | None:
        """What kubectl says; None when it fails and may."""
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), *arguments]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode and not quiet:
            raise RuntimeError(f"{' '.join(command)}: {found.stderr}")
        return None if found.returncode else found.stdout

    def _start_control_plane(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
        if self._pid("etcd") is None:
            (self.state / "etcd.url").write_text(client)
        client = (self.state / "etcd.url").read_text()
        self._start("etcd", [
            "etcd", "--data-dir", self.state / "etcd", "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer, "--unsafe-no-fsync", "--log-level", "warn",
        ])  # fmt: skip
        self._start("api", [
            self.binaries / "kube-apiserver", f"--etcd-servers={client}", "--secure-port=443",
            f"--bind-address={SERVICE_IP}", f"--advertise-address={SERVICE_IP}", f"--cert-dir={self.state}/api-certs",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.state}/sa.pub",
            f"--service-account-signing-key-file={self.state}/sa.key", f"--token-auth-file={self.state}/tokens.csv",
            "--authorization-mode=RBAC", f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--kubelet-preferred-address-types=InternalIP", "--allow-privileged=true",
        ])  # fmt: skip
        self._until("api", lambda: self.kubectl("get", "--raw", "/readyz", quiet=True) == "ok")
        shared = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0", "--bind-address=127.0.0.1")
        controllers, scheduler = _free_ports(2)
        self._start("controllers", [
            self.binaries / "kube-controller-manager", *shared, f"--secure-port={controllers}",
            f"--service-account-private-key-file={self.state}/sa.key", f"--cert-dir={self.state}/controllers-certs",
            f"--root-ca-file={self.state}/api-certs/apiserver.crt",
        ])  # fmt: skip
        self._start("scheduler", [
            self.binaries / "kube-scheduler", *shared, f"--secure-port={scheduler}",
            f"--cert-dir={self.state}/scheduler-certs",
        ])  # fmt: skip

    def _bridge(self) -> None:
        if (Path("/sys/class/net") / BRIDGE).exists():
            return
        for command in (
            ("link", "add", BRIDGE, "type", "bridge"), ("addr", "add", f"{NODE_IP}/24", "dev", BRIDGE),
            ("addr", "add", f"{SERVICE_IP}/32", "dev", BRIDGE), ("link", "set", BRIDGE, "up"),
        ):  # fmt: skip
            subprocess.run(["ip", *command], check=True)

    def _settings(self) -> None:
        if self.kubeconfig.exists():
            return
        token = secrets.token_hex(16)
        values = {
            "state": self.state, "node_ip": NODE_IP, "kubelet_port": KUBELET_PORT, "bridge": BRIDGE,
            "pod_network": POD_NETWORK, "service_ip": SERVICE_IP, "token": token,
        }  # fmt: skip
        (self.state / "cni").mkdir(exist_ok=True)
        for source in (HERE / "node.d").iterdir():
            target = self.state / ("cni" if source.suffix == ".conflist" else ".") / source.name
            target.touch(mode=0o600)
            target.write_text(Template(source.read_text()).substitute(values))
        (self.state / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        key, public = self.state / "sa.key", self.state / "sa.pub"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, stderr=subprocess.DEVNULL)
        subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, stderr=subprocess.DEVNULL)

    def _start(self, name: str, command: list[str | Path]) -> None:
        if self._pid(name) is not None:
            return
        with (self.state / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.state,
                start_new_session=True,
            )  # fmt: skip
        (self.state / f"{name}.pid").write_text(json.dumps([process.pid, _born(process.pid)]))

    def _pid(self, name: str) -> int | None:
        """The process, if it is still the one that was started."""
        try:
            pid, born = json.loads((self.state / f"{name}.pid").read_text())
        except FileNotFoundError:
            return None
        return int(pid) if _born(pid) == born else None

    def _until(self, name: str, ready: Callable[[], bool], within_s: float = 120.0) -> None:
        end = time.monotonic() + within_s
        while not ready():
            if self._pid(name) is None or time.monotonic() > end:
                tail = (self.state / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} did not get ready; its log ends with\n{tail}")
            time.sleep(0.1)

    def _stop(self, name: str, grace_s: float = 20.0) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            pid, end = self._pid(name), time.monotonic() + grace_s
            if pid is None:
                break
            os.kill(pid, number)
            while self._pid(name) is not None and time.monotonic() < end:
                time.sleep(0.05)
        (self.state / f"{name}.pid").unlink(missing_ok=True)

    def _ctr_command(self, *arguments: str) -> list[str]:
        return ["ctr", "--address", str(self.state / "containerd.sock"), "--namespace", "k8s.io", *arguments]

    def _ctr(self, *arguments: str) -> str | None:
        found = subprocess.run(self._ctr_command(*arguments), capture_output=True, text=True, check=False)
        return None if found.returncode else found.stdout

    def down(self) -> None:
        """End every process, mount, interface and cgroup; harmless when repeated."""
        if self._pid("api") is not None and self._pid("kubelet") is not None:
            self.kubectl("delete", "pods", "--all", "--all-namespaces", "--grace-period=0", "--force", quiet=True)
        for name in ("kubelet", "scheduler", "controllers", "api"):
            self._stop(name)
        if self._pid("containerd") is not None:
            for container in (self._ctr("tasks", "list", "-q") or "").split():
                self._ctr("tasks", "delete", "--force", container)
            for container in (self._ctr("containers", "list", "-q") or "").split():
                self._ctr("containers", "delete", container)
        for name in ("containerd", "etcd"):
            self._stop(name)
        for pid in _shims(self.state):
            os.kill(pid, signal.SIGKILL)
        _unmount_below(self.state)
        if (Path("/sys/class/net") / BRIDGE).exists():
            subprocess.run(["ip", "link", "delete", BRIDGE], check=True)
        _remove_cgroups()
        self._put_back()
        # Another control plane has other keys; what the old one signed is worth nothing to it.
        for left in ("etcd", "kubelet", "cni", "cni-addresses", "containerd/state", "api-certs", "kubelet-certs"):
            shutil.rmtree(self.state / left, ignore_errors=True)
        self.kubeconfig.unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove the directory too, images and all."""
        self.down()
        _unmount_below(self.state)
        shutil.rmtree(self.state)

    def _remember(self) -> None:
        sysctls = {name: (Path("/proc/sys") / name).read_text().strip() for name in SYSCTLS}
        self._before.write_text(json.dumps({"sysctls": sysctls, "there": [p for p in OUTSIDE if Path(p).exists()]}))

    def _put_back(self) -> None:
        if not self._before.exists():
            return
        before = json.loads(self._before.read_text())
        for name, value in before["sysctls"].items():
            (Path("/proc/sys") / name).write_text(value)
        for path in OUTSIDE:
            if path not in before["there"]:
                shutil.rmtree(path, ignore_errors=True)
        self._before.unlink()


def _born(pid: int) -> str | None:
    """When a process started, in ticks since the machine did; None when there is none, or it is dead and unburied."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _shims(state: Path) -> list[int]:
    """What holds containers of ours, should containerd not have ended it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "containerd-shim" in words[0] and f"{state}/containerd.sock" in words:
                found.append(int(entry.name))
    return found


def _unmount_below(directory: Path) -> None:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([point for point in points if Path(point).is_relative_to(directory)]):
        subprocess.run(["umount", "--lazy", point], check=False)


def _remove_cgroups() -> None:
    for parent in CGROUPS.glob("*/k8s.io"):
        for path in sorted((p for p in parent.rglob("*") if p.is_dir()), reverse=True):
            path.rmdir()
        parent.rmdir()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("up", "images", "down", "clean"))
    parser.add_argument("--directory", type=Path, default=Path("/tmp/palaestra-node"))
    parser.add_argument("--binaries", type=Path, default=Path.home() / ".cache/palaestra/kubernetes")
    options = parser.parse_args()
    node = Node(options.directory.resolve(), options.binaries)
    if options.what == "images":
        sys.stdout.write(f"{json.dumps(node.load())}\n")
    elif options.what == "up":
        begin = time.monotonic()
        node.up()
        sys.stderr.write(f"ready after {time.monotonic() - begin:.1f} s\n")
        sys.stdout.write(f"export KUBECONFIG={node.kubeconfig}\n")
    elif options.what == "down":
        node.down()
    else:
        node.clean()


if __name__ == "__main__":
    main()
