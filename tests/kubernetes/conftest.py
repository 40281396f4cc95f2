"""The cluster the tests share: one from $KUBECONFIG, else one that is built and started here."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.kubernetes.control_plane import CACHE, ControlPlane
from tests.kubernetes.kubelet_stand_in import TROUBLE

from palaestra.gateway.config import KubernetesConfig
from palaestra.gateway.pods.manifest import check_manifest
from palaestra.gateway.pods.runtime import KubernetesRuntime

ROOT = Path(__file__).parents[2]


IMAGE = os.environ.get("PALAESTRA_SESSION_IMAGE", "palaestra-session:latest")
"""What a cluster with nodes of its own runs; the stand-in runs the same server without an image."""


def manifest_document(*, trouble="", grace_s=1, image=IMAGE):
    """A pod that the stand-in understands and a real cluster can run."""
    container = {
        "name": "session", "image": image, "imagePullPolicy": "IfNotPresent", "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}},
    }  # fmt: skip
    spec = {"containers": [container], "terminationGracePeriodSeconds": grace_s}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"annotations": {TROUBLE: trouble}}, "spec": spec}


@dataclass
class Cluster:
    """A way in, and what is needed to play with it."""

    kubeconfig: Path
    plane: ControlPlane | None

    def kubectl(self, *arguments, stdin=None, allowed_to_fail=False):
        """What it says, or, if it may fail, its exit code."""
        done = subprocess.run(
            [shutil.which("kubectl") or str(CACHE / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin, capture_output=True, text=True,
        )  # fmt: skip
        if allowed_to_fail:
            return done.returncode
        assert done.returncode == 0, done.stderr
        return done.stdout


@dataclass
class Place:
    """A namespace of one test, with something that runs its pods."""

    cluster: Cluster
    namespace: str
    kubeconfig: Path

    def config(self, **settings):
        return KubernetesConfig(
            **{"kubeconfig": self.kubeconfig, "namespace": self.namespace, "ready_s": 60, **settings}
        )

    def runtime(self, *, warm=0, types=("browser",), environment=None, document=None, **settings):
        config = self.config(**settings)
        documents = {name: document or manifest_document() for name in types}
        manifests = {name: check_manifest(one, name, f"{name}.yaml", config) for name, one in documents.items()}
        return KubernetesRuntime(config, manifests, warm=warm, environment=environment)

    def kubectl(self, *arguments, **how):
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, **how)

    def until_usable(self):
        """The service account that every pod needs is made by a controller, a moment after its namespace."""
        end = time.monotonic() + 60
        while not self.objects("serviceaccounts"):
            assert time.monotonic() < end, "no controller makes the namespace's service account"
            time.sleep(0.05)

    @property
    def port(self):
        return self.cluster.plane.port

    def pods(self):
        return {one["metadata"]["name"]: one for one in self.objects("pods")}

    def carrier(self, session_id):
        """The pod of a session."""
        labelled = self.objects("pods", f"--selector=palaestra.dev/session={session_id}")
        assert len(labelled) == 1
        return labelled[0]

    def pid(self, session_id):
        """The process that the stand-in runs for a session."""
        return int(self.carrier(session_id)["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))

    def objects(self, kind, *options):
        return json.loads(self.kubectl("get", kind, "--output", "json", *options))["items"]

    def apply(self, document):
        self.kubectl("apply", "--filename", "-", stdin=yaml.safe_dump(document))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    given = os.environ.get("KUBECONFIG")
    if given:
        yield Cluster(Path(given), None)
        return
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        plane.start()
        found = Cluster(plane.kubeconfig("admin"), plane)
        with _pods_run(found):
            yield found
    finally:
        plane.stop()


@pytest.fixture
def stand_in(cluster):
    """For tests of faults that only the stand-in can produce."""
    if cluster.plane is None:
        pytest.skip("a real kubelet does not fail on request")


@pytest.fixture
def place(cluster):
    """A fresh namespace; when the test is over, nothing of any gateway may be left in it."""
    namespace = f"palaestra-test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    try:
        found = Place(cluster, namespace, cluster.kubeconfig)
        found.until_usable()
        yield found
        left = [one["metadata"]["name"] for kind in ("pods", "configmaps") for one in found.objects(kind)]
        assert [name for name in left if name != "kube-root-ca.crt"] == []
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@contextlib.contextmanager
def _pods_run(cluster):
    command = [sys.executable, "-m", "tests.kubernetes.kubelet_stand_in", str(cluster.kubeconfig)]
    node = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert node.stdout.readline() == b"ready\n"
        yield
    finally:
        node.stdin.close()
        try:
            assert node.wait(60) == 0
        finally:
            node.kill()
            node.stdout.close()
