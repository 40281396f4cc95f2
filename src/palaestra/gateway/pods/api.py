"""The cluster's API as far as sessions need it: pods, and one config map. The only module that imports `kubernetes`.

The official client brings the credentials and carries the requests; objects stay the plain documents they are on the
wire, so that a manifest reaches the API server as it was written, whatever version of the API either side knows.
Decides nothing: what is answered is raised as `ApiTrouble` or returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp

from palaestra.errors import ConfigError
from palaestra.gateway.pods.config import KubernetesConfig
from palaestra.gateway.pods.refusal import ApiRefused, ApiUnreachable

__all__ = ["ClusterApi"]

CALL = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
"""An API server that is starting takes requests long before it answers them; the next attempt finds it ready."""
WATCH_S = 60
"""How long one watch lasts before it is taken up again: so long a connection that died silently can go unnoticed."""
WATCH = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=WATCH_S + 10.0)
PAGE = 500
"""Objects in one answer to a list."""

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MERGE = "application/merge-patch+json"


class ClusterApi:
    """Requests about one namespace of one cluster."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config, self.namespace = config, config.namespace
        self._client: Any = None
        self._configuration: Any = None

    @property
    def server(self) -> str:
        """Where the API answers."""
        return "" if self._configuration is None else str(self._configuration.host)

    async def open(self) -> None:
        """Find the cluster and the credentials; nothing is sent yet."""
        try:
            client = import_module("kubernetes.aio.client")
        except ModuleNotFoundError as error:
            remedy = "pip install 'palaestra[k8s]'"
            raise ConfigError("gateway.runtime", "kubernetes", f"needs {error.name}", remedy) from None
        self._configuration = client.Configuration()
        await self._load_credentials()
        self._client = client.ApiClient(self._configuration)

    async def close(self) -> None:
        """Let go of every connection."""
        if self._client is not None:
            await self._client.close()

    async def _load_credentials(self) -> None:
        config = import_module("kubernetes.aio.config")
        asked = self._config
        outside = asked.kubeconfig is not None or asked.context is not None
        files = str(asked.kubeconfig or os.environ.get("KUBECONFIG") or Path("~/.kube/config").expanduser())
        place, remedy = "gateway.kubernetes.kubeconfig", "Name a kubeconfig file"
        try:
            if not outside and (_SERVICE_ACCOUNT / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=self._configuration)
                return
            if not any(Path(file).expanduser().is_file() for file in files.split(os.pathsep) if file):
                raise ConfigError(place, files, "there is no such file", remedy)
            await config.load_kube_config(
                config_file=files, context=asked.context, client_configuration=self._configuration, persist_config=False
            )
        except (config.ConfigException, OSError, ValueError) as error:
            reason = f"cannot be used ({' '.join(str(error).split())})"
            raise ConfigError(place, files, reason, remedy) from None

    async def pods(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Every pod with these labels, and the moment this was true."""
        return await self._listed("pods", selector)

    @contextlib.asynccontextmanager
    async def watched_pods(
        self, selector: str, version: str
    ) -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
        """What happens to them from that moment on, as it happens: a kind and an object; ends after a while."""
        query = {
            "labelSelector": selector, "resourceVersion": version, "watch": "true", "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        async with self._answer("GET", self._path("pods"), query=query, timeout=WATCH) as response:
            yield _events(response)

    async def pod(self, name: str) -> dict[str, Any]:
        """One pod."""
        return await self._call("GET", self._path("pods", name))

    async def create_pod(self, document: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Make a pod, or only ask whether it could be made."""
        return await self._call("POST", self._path("pods"), body=document, query={"dryRun": "All"} if dry_run else {})

    async def delete_pod(self, name: str, uid: str | None) -> None:
        """Delete a pod, and no other one of its name; its manifest says with how much grace."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self._call("DELETE", self._path("pods", name), body=body)

    async def patch_pod(self, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change a pod by a merge patch."""
        return await self._call("PATCH", self._path("pods", name), body=change, content_type=_MERGE)

    async def config_maps(self, selector: str) -> list[dict[str, Any]]:
        """Every config map with these labels."""
        return (await self._listed("configmaps", selector))[0]

    async def create_config_map(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Make a config map."""
        return await self._call("POST", self._path("configmaps"), body=document)

    async def delete_config_map(self, name: str) -> None:
        """Delete a config map."""
        await self._call("DELETE", self._path("configmaps", name))

    def _path(self, *parts: str) -> str:
        return "/".join((f"/api/v1/namespaces/{self.namespace}", *parts))

    async def _listed(self, kind: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        query = {"labelSelector": selector, "limit": str(PAGE)}
        found: list[dict[str, Any]] = []
        while True:
            page = await self._call("GET", self._path(kind), query=query)
            found += page["items"]
            following = page["metadata"].get("continue")
            if not following:
                return found, page["metadata"]["resourceVersion"]
            query = {**query, "continue": following}

    async def _call(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        async with self._answer(method, path, **how) as response:
            with _unreachable():
                answer: dict[str, Any] = json.loads(await response.read())
                return answer

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None,
        content_type: str = "application/json", timeout: aiohttp.ClientTimeout = CALL,
    ) -> AsyncIterator[aiohttp.ClientResponse]:  # fmt: skip
        """The answer to one request, if it is a good one. Credentials that are no longer valid are read anew, once."""
        for renewed in (False, True):
            headers = {"Accept": "application/json", "Content-Type": content_type}
            with _unreachable():
                asked = await self._client.param_serialize(
                    method, path, query_params=list((query or {}).items()), header_params=headers,
                    body=None if body is None else dict(body), auth_settings=["BearerToken"],
                )  # fmt: skip
                response = (await self._client.call_api(*asked, _request_timeout=timeout)).response
            try:
                if response.status < 300:
                    yield response
                    return
                with _unreachable():
                    said = await response.read()
                if response.status != 401 or renewed:
                    raise _refusal(response.status, _document(said), response.headers.get("Retry-After"))
            finally:
                response.close()
            # If there is nothing new to read, the second refusal is the answer.
            with contextlib.suppress(ConfigError):
                await self._load_credentials()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    with _unreachable():
        async for line in _lines(response.content.iter_any()):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise _refusal(int(event["object"].get("code", 500)), event["object"], None)
            yield event["type"], event["object"]


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines, however long: a pod with many annotations is longer than what aiohttp takes for a line."""
    held: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if line := b"".join([*held, end]):
                yield line
            held = []
        held.append(rest)
    if line := b"".join(held):
        yield line


@contextlib.contextmanager
def _unreachable() -> Iterator[None]:
    """Whatever breaks a connection, under one name."""
    try:
        yield
    except TimeoutError:
        raise ApiUnreachable("no answer in time") from None
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise ApiUnreachable(" ".join(str(error).split()) or type(error).__name__) from None


def _document(said: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": said[:500].decode(errors="replace")}


def _refusal(status: int, said: Mapping[str, Any], retry_after: str | None) -> ApiRefused:
    asked = (said.get("details") or {}).get("retryAfterSeconds") or retry_after
    try:
        wait = None if asked is None else float(asked)
    except ValueError:
        wait = None
    message = " ".join(str(said.get("message") or "").split())
    return ApiRefused(status, str(said.get("reason") or ""), message or "no message", wait)
