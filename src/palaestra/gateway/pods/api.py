"""The parts of the Kubernetes API that sessions need (pods and one config map), and its errors.

The only module that imports `kubernetes`. The official client loads the credentials and sends the requests; objects
stay plain documents, so that a manifest reaches the API server as it was written, in any version of the API.
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

from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway.config import KubernetesConfig

CALL = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
"""An API server that is starting accepts connections long before it answers, so a short timeout is retried."""
WATCH_S = 60
"""Seconds after which a watch is renewed: the longest that a dead connection goes unnoticed."""
WATCH = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=WATCH_S + 10.0)
PAGE = 500
"""Objects per page of a list."""

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """A request to the Kubernetes API failed."""


class ApiUnreachable(ApiError):
    """No response: the connection was refused or broke, or the request timed out. It may have been performed."""


class ApiStatusError(ApiError):
    """A response with an error status."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s
        super().__init__(f"{status} {reason}: {message}")


class ClusterApi:
    """A client for one namespace of one cluster."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config, self.namespace = config, config.namespace
        self._client: Any = None
        self._configuration: Any = None

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return "" if self._configuration is None else str(self._configuration.host)

    async def open(self) -> None:
        """Load the cluster's address and the credentials; sends no request."""
        try:
            client = import_module("kubernetes.aio.client")
        except ModuleNotFoundError as error:
            remedy = "pip install 'palaestra[k8s]'"
            raise ConfigError("gateway.runtime", "kubernetes", f"needs {error.name}", remedy) from None
        self._configuration = client.Configuration()
        await self._load_credentials()
        self._client = client.ApiClient(self._configuration)

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.close()

    async def _load_credentials(self) -> None:
        config = import_module("kubernetes.aio.config")
        settings = self._config
        is_explicit = settings.kubeconfig is not None or settings.context is not None
        files = str(settings.kubeconfig or os.environ.get("KUBECONFIG") or Path("~/.kube/config").expanduser())
        place, remedy = "gateway.kubernetes.kubeconfig", "Name a kubeconfig file"
        try:
            if not is_explicit and (_SERVICE_ACCOUNT / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=self._configuration)
                return
            if not any(Path(file).expanduser().is_file() for file in files.split(os.pathsep) if file):
                raise ConfigError(place, files, "there is no such file", remedy)
            await config.load_kube_config(
                config_file=files,
                context=settings.context,
                client_configuration=self._configuration,
                persist_config=False,
            )
        except (config.ConfigException, OSError, ValueError) as error:
            reason = f"cannot be used ({' '.join(str(error).split())})"
            raise ConfigError(place, files, reason, remedy) from None

    async def list_pods(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Every pod that matches a label selector, and the resource version of the list."""
        return await self._list("pods", selector)

    @contextlib.asynccontextmanager
    async def watch_pods(self, selector: str, version: str) -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
        """Events (type and object) of these pods after a resource version; ends after `WATCH_S`."""
        query = {
            "labelSelector": selector,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with self._request("GET", self._path("pods"), query=query, timeout=WATCH) as response:
            yield _parse_events(response)

    async def get_pod(self, name: str) -> dict[str, Any]:
        """One pod."""
        return await self._call("GET", self._path("pods", name))

    async def create_pod(self, document: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create a pod, or check with `dry_run` whether it could be created."""
        return await self._call("POST", self._path("pods"), body=document, query={"dryRun": "All"} if dry_run else {})

    async def delete_pod(self, name: str, uid: str | None) -> None:
        """Delete the pod with this uid; its manifest defines the grace period."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self._call("DELETE", self._path("pods", name), body=body)

    async def patch_pod(self, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a merge patch to a pod."""
        return await self._call("PATCH", self._path("pods", name), body=change, content_type=_MERGE)

    async def list_config_maps(self, selector: str) -> list[dict[str, Any]]:
        """Every config map that matches a label selector."""
        return (await self._list("configmaps", selector))[0]

    async def create_config_map(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create a config map."""
        return await self._call("POST", self._path("configmaps"), body=document)

    async def delete_config_map(self, name: str) -> None:
        """Delete a config map."""
        await self._call("DELETE", self._path("configmaps", name))

    def _path(self, *parts: str) -> str:
        return "/".join((f"/api/v1/namespaces/{self.namespace}", *parts))

    async def _list(self, kind: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        query = {"labelSelector": selector, "limit": str(PAGE)}
        items: list[dict[str, Any]] = []
        while True:
            page = await self._call("GET", self._path(kind), query=query)
            items += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"]["resourceVersion"]
            query = {**query, "continue": token}

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self._request(method, path, **options) as response:
            with _as_unreachable():
                document: dict[str, Any] = json.loads(await response.read())
                return document

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout = CALL,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The successful response to a request. Credentials that have expired are reloaded once."""
        for reloaded in (False, True):
            headers = {"Accept": "application/json", "Content-Type": content_type}
            with _as_unreachable():
                request = await self._client.param_serialize(
                    method,
                    path,
                    query_params=list((query or {}).items()),
                    header_params=headers,
                    body=None if body is None else dict(body),
                    auth_settings=["BearerToken"],
                )
                response = (await self._client.call_api(*request, _request_timeout=timeout)).response
            try:
                if response.status < 300:
                    yield response
                    return
                with _as_unreachable():
                    content = await response.read()
                if response.status != 401 or reloaded:
                    raise _status_error(response.status, _parse_document(content), response.headers.get("Retry-After"))
            finally:
                response.close()
            # Without new credentials the second attempt fails and its error is raised.
            with contextlib.suppress(ConfigError):
                await self._load_credentials()


async def _parse_events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    with _as_unreachable():
        async for line in split_lines(response.content.iter_any()):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise _status_error(int(event["object"].get("code", 500)), event["object"], None)
            yield event["type"], event["object"]


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Complete lines of any length: a pod with many annotations exceeds aiohttp's limit of a line."""
    partial: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if line := b"".join([*partial, end]):
                yield line
            partial = []
        partial.append(rest)
    if line := b"".join(partial):
        yield line


@contextlib.contextmanager
def _as_unreachable() -> Iterator[None]:
    """Raise every connection error as `ApiUnreachable`."""
    try:
        yield
    except TimeoutError:
        raise ApiUnreachable("the request timed out") from None
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise ApiUnreachable(" ".join(str(error).split()) or type(error).__name__) from None


def _parse_document(content: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {"message": content[:500].decode(errors="replace")}


def _status_error(status: int, document: Mapping[str, Any], retry_after: str | None) -> ApiStatusError:
    delay = (document.get("details") or {}).get("retryAfterSeconds") or retry_after
    try:
        wait = None if delay is None else float(delay)
    except ValueError:
        wait = None
    message = " ".join(str(document.get("message") or "").split())
    return ApiStatusError(status, str(document.get("reason") or ""), message or "no message", wait)


ROLE = "Grant it with the Role in deploy/"


def is_retryable(error: ApiError) -> bool:
    """Whether the same request may succeed later."""
    return not isinstance(error, ApiStatusError) or error.status == 429 or error.status >= 500


def is_conflict(error: ApiError) -> bool:
    """Whether another writer changed the object, or the quota of an object to be created, in between."""
    return isinstance(error, ApiStatusError) and error.status == 409 and error.reason == "Conflict"


def retry_delay_s(error: ApiError | None, failures: int) -> float:
    """Seconds to wait after this many failures in a row (1 is the first): 0.2 up to 5, or as the server asks."""
    wait = min(5.0, 0.1 * 2.0 ** min(failures, 10))
    return max(wait, error.retry_after_s or 0.0) if isinstance(error, ApiStatusError) else wait


def session_failure(error: ApiError, operation: str, namespace: str) -> SessionFailed:
    """The exception for the gateway's client; `operation` is for example `create pods`."""
    if not isinstance(error, ApiStatusError):
        return SessionFailed("api_unreachable", f"{operation} in namespace {namespace}: {error}")
    text = f"{operation} in namespace {namespace}: {error.message}"
    if error.status == 403 and "exceeded quota" in error.message:
        return SessionFailed("quota_exceeded", f"{text}. Close sessions, or raise the ResourceQuota.")
    if error.status == 403 and "is being terminated" in error.message:
        return SessionFailed("namespace_missing", text)
    if error.status == 403 and error.reason == "Forbidden" and _is_permission_error(error.message):
        return SessionFailed("forbidden", f"{text}. {ROLE}.")
    if error.status == 401:
        return SessionFailed("unauthorized", f"{text}. The credentials are not valid or have expired.")
    if error.status == 404 and "namespaces" in error.message:
        return SessionFailed("namespace_missing", f"{text}. kubectl create namespace {namespace}")
    if error.status in (400, 403, 422):
        # Includes refusals by admission rules (LimitRange, pod security, webhooks).
        return SessionFailed("manifest_rejected", text)
    reason = "api_overloaded" if error.status == 429 else "api_failed"
    return SessionFailed(reason, f"{text} (status {error.status})")


def _is_permission_error(message: str) -> bool:
    return " cannot " in message and "User " in message


def config_error(error: ApiError, operation: str, namespace: str, server: str) -> ConfigError:
    """The exception for the operator who starts a gateway."""
    failure = session_failure(error, operation, namespace)
    if failure.reason == "api_unreachable":
        remedy = "Check kubeconfig and context, and that the API server runs"
        return ConfigError("gateway.kubernetes", server, f"the API server cannot be reached ({error})", remedy)
    return ConfigError("gateway.kubernetes", server, f"{failure.reason}: {failure.detail.rstrip('.')}")
