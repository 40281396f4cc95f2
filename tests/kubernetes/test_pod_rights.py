"""What the API server refuses: quota, rights, namespaces, manifests. Real refusals, reported with the remedy."""

import asyncio

import pytest
from tests.kubernetes.carried import answers, carried, until
from tests.kubernetes.conftest import Place, manifest_document
from tests.kubernetes.control_plane import free_ports

from palaestra.errors import ConfigError, SessionFailed

pytestmark = pytest.mark.kubernetes

RIGHTS = {"pods": ["create", "get", "list", "watch", "patch", "delete"], "configmaps": ["create", "list", "delete"]}


def grant(place, **rights):
    """Let the user `gateway` do this in the namespace, and nothing else."""
    rules = [{"apiGroups": [""], "resources": [name], "verbs": verbs} for name, verbs in rights.items()]
    kind, group = {"apiVersion": "rbac.authorization.k8s.io/v1"}, "rbac.authorization.k8s.io"
    place.apply({**kind, "kind": "Role", "metadata": {"name": "gateway"}, "rules": rules})
    subject = {"kind": "User", "name": "gateway", "apiGroup": group}
    role = {"kind": "Role", "name": "gateway", "apiGroup": group}
    place.apply(
        {**kind, "kind": "RoleBinding", "metadata": {"name": "gateway"}, "subjects": [subject], "roleRef": role}
    )


def may(place, verb, what):
    done = place.kubectl("auth", "can-i", verb, what, "--as", "gateway", "--quiet", allowed_to_fail=True)
    return done == 0


@pytest.fixture
def limited(cluster, place):
    """The same place for a user without rights."""
    if cluster.plane is None:
        pytest.skip("needs a user of its own, which only our own API server has")
    return Place(cluster, place.namespace, cluster.plane.kubeconfig("gateway"))


def test_a_full_quota_is_reported_as_such_and_room_in_it_is_used(place):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}

    async def body():
        place.apply(quota)
        await until(lambda: place.objects("resourcequotas")[0].get("status", {}).get("hard"))
        async with carried(place) as (runtime, _):
            await runtime.create("one", "browser")
            with pytest.raises(SessionFailed) as caught:
                await runtime.create("two", "browser")
            assert caught.value.reason == "quota_exceeded"
            assert "exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1" in caught.value.detail
            assert set(await runtime.list()) == {"one"}
            await runtime.delete("one")
            await until(lambda: place.objects("resourcequotas")[0]["status"]["used"] == {"pods": "0"})
            assert await answers(await runtime.create("three", "browser"))

    asyncio.run(body())


def test_the_documented_rights_are_enough_for_everything(limited):
    async def body():
        grant(limited, **RIGHTS)
        await until(lambda: may(limited, "delete", "configmaps"))
        async with carried(limited, warm=1) as (runtime, _):
            await until(lambda: runtime.counts()["spare"] == 1)
            assert await answers(await runtime.create("one", "browser"))
            await runtime.delete("one")

    asyncio.run(body())


@pytest.mark.parametrize(
    ("what", "verb", "message"),
    [
        ("pods", "list", 'list pods in namespace {}: pods is forbidden: User "gateway" cannot list resource "pods"'),
        ("pods", "create", 'User "gateway" cannot create resource "pods" in API group "" in the namespace "{}"'),
        ("configmaps", "create", 'User "gateway" cannot create resource "configmaps"'),
    ],
)
def test_a_gateway_without_a_right_it_needs_does_not_start_and_says_which(limited, what, verb, message):
    async def body():
        left = {name: [one for one in verbs if (name, one) != (what, verb)] for name, verbs in RIGHTS.items()}
        grant(limited, **left)
        await until(lambda: may(limited, "delete", "configmaps"))
        with pytest.raises(ConfigError) as caught:
            async with carried(limited):
                pass
        assert message.format(limited.namespace) in str(caught.value)
        assert "Role in deploy/" in str(caught.value)

    asyncio.run(body())


def test_a_right_that_is_revoked_later_is_reported_when_a_session_is_opened(limited):
    async def body():
        grant(limited, **RIGHTS)
        await until(lambda: may(limited, "delete", "configmaps"))
        async with carried(limited) as (runtime, lost):
            address = await runtime.create("one", "browser")
            grant(limited, **{**RIGHTS, "pods": [verb for verb in RIGHTS["pods"] if verb != "create"]})
            await until(lambda: not may(limited, "create", "pods"))
            with pytest.raises(SessionFailed) as caught:
                await runtime.create("two", "browser")
            assert caught.value.reason == "forbidden"
            assert "Role in deploy/" in caught.value.detail
            assert await answers(address)
            assert lost.empty

    asyncio.run(body())


def test_a_namespace_that_is_not_there_is_refused_at_the_start(place):
    async def body():
        with pytest.raises(ConfigError, match=r"namespace_missing.*kubectl create namespace nowhere"):
            async with carried(place, namespace="nowhere"):
                pass

    asyncio.run(body())


def test_a_manifest_the_cluster_does_not_accept_is_refused_at_the_start_in_its_own_words(place):
    document = manifest_document()
    document["spec"]["containers"][0]["resources"]["requests"]["memory"] = "2Gi"

    async def body():
        with pytest.raises(ConfigError) as caught:
            async with carried(place, document=document):
                pass
        assert "gateway.kubernetes.manifests.browser = 'browser.yaml'" in str(caught.value)
        assert 'Invalid value: "2Gi": must be less than or equal to memory limit' in str(caught.value)

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
def test_an_api_server_that_is_not_there_is_refused_at_the_start(place, tmp_path):
    (port,) = free_ports(1)
    file = tmp_path / "kubeconfig"
    file.write_text(place.kubeconfig.read_text().replace(f"127.0.0.1:{place.port}", f"127.0.0.1:{port}"))

    async def body():
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*cannot be reached"):
            async with carried(place, kubeconfig=file):
                pass

    asyncio.run(body())
