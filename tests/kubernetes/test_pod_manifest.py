"""Manifests of session pods: what is refused before anything starts, and what a pod is made of."""

import copy
import subprocess
import sys

import pytest
import yaml
from tests.kubernetes.conftest import manifest_document

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.gateway import GatewayConfig
from palaestra.gateway.config import KubernetesConfig
from palaestra.gateway.pods.manifest import build_pod, check_manifest, read_manifests


def config(**settings):
    return KubernetesConfig.model_validate(settings)


def changed(path, value=None):
    """The manifest with one thing different, or without it."""
    document = copy.deepcopy(manifest_document())
    *parts, last = path
    inner = document
    for part in parts:
        inner = inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([manifest_document()], "m.yaml: kind = 'list': is not a Pod"),
        ("text", "m.yaml: kind = 'str': is not a Pod"),
        (changed(["kind"], "Deployment"), "m.yaml: kind = 'Deployment': is not a Pod"),
        (changed(["kind"], "List"), "m.yaml: kind = 'List': is not a Pod"),
        (changed(["spec"]), "m.yaml: spec = None: is not a mapping"),
        (changed(["spec", "containers"], []), "m.yaml: spec.containers = []: holds no container"),
        (changed(["spec", "containers", 0, "image"]), "m.yaml: spec.containers[0].image = None: required"),
        (changed(["spec", "containers", 0, "readinessProbe"]), "m.yaml: spec.containers[0].readinessProbe = None"),
        (changed(["spec", "containers", 0, "resources"]), "spec.containers[0].resources.requests.cpu = None"),
        (changed(["spec", "containers", 0, "resources", "limits"]), "spec.containers[0].resources.limits.memory"),
        (changed(["spec", "containers", 0, "ports"], [{"containerPort": "http"}]), "containerPort = 'http'"),
        (changed(["spec", "restartPolicy"], "Always"), "spec.restartPolicy = 'Always'"),
        (changed(["spec", "activeDeadlineSeconds"], "5m"), "m.yaml: spec.activeDeadlineSeconds = '5m'"),
        (changed(["metadata"], {"labels": None}), "m.yaml: metadata: labels = None: is not a mapping"),
        (changed(["metadata"], {"namespace": "other"}), "metadata.namespace = 'other'"),
    ],
)
def test_a_manifest_no_session_can_be_made_from_is_refused_with_its_file_and_field(document, message):
    with pytest.raises(ConfigError) as caught:
        check_manifest(document, "browser", "m.yaml", config())
    assert message in str(caught.value)


def test_files_are_read_one_pod_each(tmp_path):
    one, two, broken = tmp_path / "one.yaml", tmp_path / "two.yaml", tmp_path / "broken.yaml"
    one.write_text("# the one\n---\n" + yaml.safe_dump(manifest_document()))
    two.write_text("---\n".join([yaml.safe_dump(manifest_document())] * 2))
    broken.write_text("{")
    assert set(read_manifests(config(manifests={"desktop": one}))) == {"desktop"}
    for path, message in (
        (two, "holds 2 documents"),
        (broken, "is not YAML"),
        (tmp_path / "no.yaml", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read_manifests(config(manifests={"desktop": path}))
        assert caught.value.place == "gateway.kubernetes.manifests.desktop"


def test_the_first_port_of_the_session_is_where_it_answers():
    at_9000 = changed(["spec", "containers", 0, "ports"], [{"containerPort": 9000}, {"containerPort": 5900}])
    assert check_manifest(at_9000, "browser", "m.yaml", config()).port == 9000
    without = changed(["spec", "containers", 0, "ports"])
    assert check_manifest(without, "browser", "m.yaml", config(port=8123)).port == 8123


def test_the_manifest_that_comes_along_is_a_session_without_any_power():
    (manifest,) = read_manifests(config(image="registry.example/session:7")).values()
    assert (manifest.session_type, manifest.port) == ("browser", 8000)
    spec = manifest.document["spec"]
    (session,) = spec["containers"]
    assert session["image"] == "registry.example/session:7"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    power = session["securityContext"]
    assert (power["allowPrivilegeEscalation"], power["capabilities"]) == (False, {"drop": ["ALL"]})
    assert power["readOnlyRootFilesystem"] is True


def test_an_image_beside_manifests_of_ones_own_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Name the image in your manifests"):
        read_manifests(config(image="x", manifests={"browser": tmp_path / "m.yaml"}))


def test_a_pod_is_its_manifest_with_the_gateways_word_on_life_and_ownership():
    document = manifest_document()
    document["metadata"]["labels"] = {"team": "lab", "palaestra.dev/session": "forged"}
    document["spec"] |= {"automountServiceAccountToken": True, "activeDeadlineSeconds": 50}
    before = copy.deepcopy(document)
    manifest = check_manifest(document, "browser", "m.yaml", config())
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "g", "uid": "u"}

    made = build_pod(manifest, name="session-1", labels={"palaestra.dev/session": "1"}, owner=owner, lifetime_s=600)

    assert made["metadata"]["name"] == "session-1"
    assert made["metadata"]["labels"] == {"team": "lab", "palaestra.dev/session": "1"}
    assert made["metadata"]["ownerReferences"] == [owner]
    assert made["spec"]["activeDeadlineSeconds"] == 50
    assert made["spec"]["restartPolicy"] == "Never"
    assert made["spec"]["automountServiceAccountToken"] is False
    assert document == before


def test_the_configuration_names_what_is_wrong_in_it():
    for settings, message in (
        ({"runtime": "docker"}, "gateway.runtime = 'docker'"),
        ({"kubernetes": {"namespce": "x"}}, "Did you mean 'namespace'?"),
        ({"kubernetes": {"name": "My Gateway"}}, "gateway.kubernetes.name = 'My Gateway'"),
        ({"kubernetes": {"manifests": {"no good": "m.yaml"}}}, "session type 'no good'"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_section(GatewayConfig, settings, place="gateway")
        assert message in str(caught.value)


def test_a_gateway_on_this_machine_does_not_load_the_client_and_one_for_a_cluster_says_how_to_get_it():
    code = """
import asyncio, sys
import palaestra.gateway.serving
from palaestra.errors import ConfigError
from palaestra.gateway.pods.api import ClusterApi
from palaestra.gateway.config import KubernetesConfig
assert "kubernetes" not in sys.modules
sys.modules["kubernetes"] = None
try:
    asyncio.run(ClusterApi(KubernetesConfig()).open())
except ConfigError as error:
    sys.exit(0 if "pip install 'palaestra[k8s]'" in str(error) else str(error))
sys.exit("not refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
