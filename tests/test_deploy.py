"""The images and manifests of `deploy/`, held against the code they carry and against each other, without a cluster."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from string import Template

import pytest
import yaml

from palaestra.config import parse_section
from palaestra.gateway import GatewayConfig
from palaestra.gateway.config import TOKEN_VARIABLE
from palaestra.gateway.pods.manifest import read_manifests
from palaestra.gateway.pods.status import NAME as NAME_LABEL

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OVERLAYS = sorted((DEPLOY / "kubernetes" / "overlays").iterdir())
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))


def documents(kind):
    found = [one for path in BASE.glob("*.yaml") for one in yaml.safe_load_all(path.read_text()) if one]
    return {one["metadata"]["name"]: one for one in found if one.get("kind") == kind}


def settings():
    return parse_section(GatewayConfig, yaml.safe_load((BASE / "gateway.yaml").read_text()), place="gateway")


def gateway_pod():
    return documents("Deployment")["palaestra-gateway"]["spec"]["template"]


def session_pod():
    return read_manifests(settings().kubernetes)["browser"]


def requirements(image):
    lines = (DEPLOY / f"{image}.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def with_what_they_need(names):
    """Every distribution that pip would install for these names, extras apart."""
    found, waiting = set(), list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or version of Python
        found.add(name)
        waiting += [re.match(r"[\w.-]+", line)[0] for line in needed if "extra ==" not in line]
    return found


IMPORT_WITHOUT = """
import importlib.abc, sys
missing = set(sys.argv[2].split())
class Door(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"{name} is not in the image", name=name)
sys.meta_path.insert(0, Door())
__import__(sys.argv[1])
"""


@pytest.mark.parametrize(("image", "module"), [
    ("session", "palaestra.sessions.server.__main__"), ("gateway", "palaestra.gateway.__main__"),
])  # fmt: skip
def test_what_an_image_installs_is_enough_to_import_what_it_runs(image, module):
    there = {"palaestra", *with_what_they_need(requirements(image))}
    assert there.isdisjoint({"torch", "numpy", "gymnasium", "tensordict"})
    missing = {
        name
        for name, distributions in metadata.packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", one).lower() in there for one in distributions)
    }
    assert "torch" in missing
    command = [sys.executable, "-c", IMPORT_WITHOUT, module, " ".join(sorted(missing))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", ["session", "gateway"])
def test_every_package_of_an_image_has_a_pinned_version(image):
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in _constraints() if "==" in line}
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in requirements(image)} <= pinned


def _constraints():
    return (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_numbered_user_who_is_not_root_and_begins_with_an_init(path):
    final = path.read_text().rpartition("FROM ${BASE}")[2]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["/usr/bin/tini", "--", ', final, re.MULTILINE)
    assert "ARG BASE=docker.io/library/debian:" in path.read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_whatever_an_image_copies_is_let_into_its_build(path):
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(pattern) for pattern in let_in), f"{source} is kept out by .dockerignore"


def test_ports_agree_from_the_image_to_the_network_policy():
    gateway, session = settings().port, session_pod().port
    assert f"EXPOSE {gateway}\n" in (DEPLOY / "gateway.Dockerfile").read_text()
    assert f"EXPOSE {session}\n" in (DEPLOY / "session.Dockerfile").read_text()
    container = gateway_pod()["spec"]["containers"][0]
    assert container["ports"][0]["containerPort"] == gateway
    service = documents("Service")["palaestra-gateway"]["spec"]["ports"][0]
    assert (service["port"], service["targetPort"]) == (gateway, container["ports"][0]["name"])
    policies = documents("NetworkPolicy")
    assert policies["palaestra-gateway"]["spec"]["ingress"][0]["ports"][0]["port"] == gateway
    assert policies["palaestra-gateway"]["spec"]["egress"][0]["ports"][0]["port"] == session
    assert policies["palaestra-session"]["spec"]["ingress"][0]["ports"][0]["port"] == session


def test_a_session_reaches_no_host_and_answers_its_gateway_only():
    policies = documents("NetworkPolicy")
    session = policies["palaestra-session"]["spec"]
    assert session["podSelector"]["matchLabels"] == {NAME_LABEL: "palaestra-session"}
    assert (session.get("egress"), session["policyTypes"]) == (None, ["Ingress", "Egress"])
    asking = [one["podSelector"]["matchLabels"] for rule in session["ingress"] for one in rule["from"]]
    assert asking == [{NAME_LABEL: gateway_pod()["metadata"]["labels"][NAME_LABEL]}]
    assert policies["nobody-else"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_a_gateway_may_do_with_pods_what_it_does_and_nothing_else():
    role = documents("Role")["palaestra-gateway"]
    verbs = ["create", "get", "list", "watch", "patch", "delete"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}]
    binding = documents("RoleBinding")["palaestra-gateway"]
    assert [subject["name"] for subject in binding["subjects"]] == [gateway_pod()["spec"]["serviceAccountName"]]
    assert documents("ServiceAccount").keys() == {"palaestra-gateway"}


def test_one_gateway_runs_at_a_time_and_owns_its_sessions():
    spec = documents("Deployment")["palaestra-gateway"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    environment = {one["name"]: one["valueFrom"] for one in gateway_pod()["spec"]["containers"][0]["env"]}
    assert environment["POD_NAME"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert environment["POD_UID"]["fieldRef"]["fieldPath"] == "metadata.uid"
    assert environment[TOKEN_VARIABLE]["secretKeyRef"] == {"name": "palaestra-gateway-token", "key": "token"}
    assert gateway_pod()["spec"]["terminationGracePeriodSeconds"] > settings().drain_s + 20


def test_settings_and_manifests_speak_of_one_namespace():
    [name] = documents("Namespace")
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert settings().kubernetes.namespace == kustomization["namespace"] == name
    listed = {*kustomization["resources"], *kustomization["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert listed == {path.name for path in BASE.iterdir()}


def test_the_example_of_an_image_of_ones_own_is_a_manifest_that_a_gateway_takes():
    own = DEPLOY / "kubernetes" / "overlays" / "own-session"
    given = yaml.safe_load((own / "gateway.yaml").read_text())
    mounted = given["kubernetes"]["manifests"]
    assert set(mounted.values()) <= {f"/etc/palaestra/{path.name}" for path in own.iterdir()}
    given["kubernetes"]["manifests"] = {name: own / Path(path).name for name, path in mounted.items()}
    config = parse_section(GatewayConfig, given, place="gateway")
    assert {name: one.port for name, one in read_manifests(config.kubernetes).items()} == {"simple_data_entry": 8000}


@pytest.mark.parametrize("of", ["gateway", "session"])
def test_pods_satisfy_the_restricted_standard_of_their_namespace(of):
    [namespace] = documents("Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    spec = gateway_pod()["spec"] if of == "gateway" else session_pod().document["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for container in spec["containers"]:
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
    assert all(volume.keys() & {"emptyDir", "configMap"} for volume in spec["volumes"])


def test_no_secret_is_committed():
    for path in DEPLOY.rglob("*.yaml"):
        kinds = [one.get("kind") for one in yaml.safe_load_all(path.read_text()) if isinstance(one, dict)]
        assert "Secret" not in kinds, path


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_overlay_can_be_rendered_without_a_cluster(overlay):
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered = [one for one in yaml.safe_load_all(done.stdout) if one]
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered}
    assert {("Namespace", "palaestra"), ("Deployment", "palaestra-gateway")} <= names
    assert all(one["metadata"].get("namespace") == "palaestra" for one in rendered if one["kind"] != "Namespace")


def test_the_settings_of_the_test_node_are_what_their_programs_read():
    values = dict.fromkeys(("state", "node_ip", "kubelet_port", "bridge", "pod_network", "service_ip", "token"), "x1")
    texts = {
        path.name: Template(path.read_text()).substitute(values)
        for path in (ROOT / "tests" / "kubernetes" / "node.d").iterdir()
    }
    assert tomllib.loads(texts["containerd.toml"])["version"] == 2
    assert json.loads(texts["bridge.conflist"])["plugins"][0]["bridge"] == "x1"
    assert yaml.safe_load(texts["kubelet.yaml"])["kind"] == "KubeletConfiguration"
    assert yaml.safe_load(texts["kubeconfig.yaml"])["current-context"] == "node"
