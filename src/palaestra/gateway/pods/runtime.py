"""`KubernetesRuntime`: one new pod per session, created from the manifest of its type.

Every pod has the gateway's labels, an owner and a deadline, so that the next gateway finds it, the cluster deletes it
with its owner, and it ends on its own if both fail. Inside the cluster the owner is the gateway's own pod. Elsewhere it
is a config map, which an operator can delete to delete all pods of a gateway that died.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway.config import KubernetesConfig
from palaestra.gateway.pods.api import ApiError, ApiStatusError, ClusterApi, config_error, session_failure
from palaestra.gateway.pods.controller import PodController
from palaestra.gateway.pods.manifest import SessionManifest, build_pod
from palaestra.gateway.pods.status import GATEWAY, INSTANCE, MANAGED_BY, NAME, SESSION, TYPE, Pod
from palaestra.gateway.pods.warm_pool import WarmPod, WarmPool
from palaestra.gateway.runtime import Address, LostCallback

_log = logging.getLogger(__name__)

MANAGER = "palaestra-gateway"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class _PodSession:
    """A session and its pod."""

    def __init__(self, pod_name: str) -> None:
        self.pod_name = pod_name
        self.open = False
        """`create` has returned it, so its end is reported."""
        self.ended: str | None = None
        """Why it ended, if that was before `create` returned."""


class KubernetesRuntime:
    """A `Runtime` of pods in a Kubernetes cluster."""

    def __init__(
        self,
        config: KubernetesConfig,
        manifests: Mapping[str, SessionManifest],
        *,
        warm: int = 0,
        environment: Mapping[str, str] | None = None,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._config, self._manifests, self._new_id = config, dict(manifests), new_id
        self._environment = dict(environment or {})
        self._instance = new_id()
        self._labels = {
            NAME: "palaestra-session",
            MANAGED_BY: MANAGER,
            GATEWAY: config.name,
            INSTANCE: self._instance,
        }
        self._selector = f"{MANAGED_BY}={MANAGER},{GATEWAY}={config.name}"
        self._api = ClusterApi(config)
        self._controller = PodController(
            self._api, selector=self._selector, instance=self._instance, on_ended=self._on_pod_ended
        )
        self._warm_pool = WarmPool(
            tuple(self._manifests),
            warm,
            max_age_s=config.lifetime_s,
            create=self._create_warm_pod,
            delete=self._controller.delete_in_background,
        )
        self._sessions: dict[str, _PodSession] = {}
        self._config_map: str | None = None
        """Name of the config map that owns the pods, outside the cluster."""
        self._owner: dict[str, str] = {}
        self._on_lost: LostCallback = lambda session_id, reason: None
        self.losses = 0

    @property
    def session_types(self) -> Sequence[str]:
        """The types that have manifests."""
        return tuple(self._manifests)

    async def start(self, on_lost: LostCallback) -> None:
        """Connect to the cluster, delete what an earlier gateway left in it, and begin to watch pods.

        `ConfigError` when the cluster cannot be reached, refuses access, or does not accept a manifest.
        """
        self._on_lost = on_lost
        await self._api.open()
        operation = "list pods"
        try:
            await self._controller.start()
            operation = "get pods"
            owner = await find_own_pod(self._api, self._environment)
            operation = "create configmaps"
            self._owner = owner or await self._create_owner()
            operation = "create pods"
            await asyncio.gather(*map(self._check_manifest, self._manifests.values()))
        except ApiError as error:
            raise config_error(error, operation, self._api.namespace, self._api.server) from None
        await self._delete_leftovers()
        self._warm_pool.start()

    async def create(self, session_id: str, session_type: str) -> Address:
        """Take a pod of the warm pool, or create one."""
        manifest = self._manifests[session_type]
        try:
            while (warm := self._warm_pool.take(session_type)) is not None:
                session = self._sessions[session_id] = _PodSession(warm.pod.name)
                try:
                    claimed = await self._claim(warm, manifest, session_id)
                except BaseException:
                    self._controller.delete_in_background(warm.pod.name)
                    raise
                if claimed:
                    return self._finish_opening(session, warm.pod, manifest)
                self._controller.delete_in_background(warm.pod.name)
            session = self._sessions[session_id] = _PodSession(f"session-{session_id}")
            return self._finish_opening(
                session, await self._create_pod(manifest, session.pod_name, session_id), manifest
            )
        except BaseException:
            # The controller deletes its pod; if that fails, the pod stays listed by its label.
            self._sessions.pop(session_id, None)
            raise

    async def delete(self, session_id: str) -> None:
        """Delete its pod and wait until it is gone."""
        session = self._sessions.get(session_id)
        name = session.pod_name if session is not None else self._find_pod(session_id)
        if name is not None:
            await self._controller.delete_pod(name)
        if self._sessions.get(session_id) is session:
            self._sessions.pop(session_id, None)

    async def list(self) -> Mapping[str, Address]:
        """Sessions in the informer's cache, without the warm pool and pods that are being deleted."""
        addresses = {}
        names = {session.pod_name: session_id for session_id, session in self._sessions.items()}
        for pod in self._controller.cache:
            session_id = names.get(pod.name, pod.session_id)
            if session_id is not None and pod.name not in self._controller.pending_deletions:
                addresses[session_id] = self._address(pod)
        return addresses

    def counts(self) -> Mapping[str, int]:
        """The number of pods by state. `ready` is always 1, and `watched` is 0 while the API server does not answer.

        Sessions survive an outage of the API server, so it does not make the gateway unhealthy.
        """
        opened = sum(session.open for session in self._sessions.values())
        return {
            "ready": 1,
            "pods": opened,
            "spare": self._warm_pool.ready,
            "starting": len(self._sessions) - opened + self._warm_pool.starting,
            "restarted": self._warm_pool.replaced,
            "lost": self.losses,
            "watched": int(self._controller.informer.connected),
        }

    async def stop(self) -> None:
        """Delete every pod, then their owner."""
        await self._warm_pool.stop()
        await self._controller.stop()
        self._sessions.clear()
        if self._config_map is not None:
            await self._delete_config_map(self._config_map)
        await self._api.close()

    async def _create_owner(self) -> dict[str, str]:
        """Create the config map that owns the pods, and return the owner reference to it."""
        name = f"palaestra-{self._config.name}-{self._instance}"
        text = "Owns the session pods of a palaestra gateway outside the cluster. Deleting it deletes them."
        metadata = {"name": name, "labels": {**self._labels, NAME: MANAGER}}
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"purpose": text}}
        created = await self._api.create_config_map(document)
        self._config_map = name
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": created["metadata"]["uid"]}

    async def _delete_config_map(self, name: str) -> None:
        try:
            await self._api.delete_config_map(name)
        except ApiError as error:
            if not isinstance(error, ApiStatusError) or error.status != 404:
                _log.warning("config map %s is left in namespace %s: %s", name, self._api.namespace, error)

    async def _check_manifest(self, manifest: SessionManifest) -> None:
        """Check with a dry run that the cluster accepts a manifest, so that errors are reported at the start."""
        try:
            await self._api.create_pod(self._document(manifest, f"session-try-{self._new_id()}"), dry_run=True)
        except ApiStatusError as error:
            failure = session_failure(error, "create pods", self._api.namespace)
            if failure.reason == "manifest_rejected":
                place = f"gateway.kubernetes.manifests.{manifest.session_type}"
                reason = f"the cluster does not accept it ({error.message})"
                raise ConfigError(place, manifest.place, reason) from None
            if failure.reason != "quota_exceeded":
                raise

    async def _delete_leftovers(self) -> None:
        """Delete pods of earlier gateways of this name; what cannot be deleted yet stays listed and is tried again."""
        left = [pod.name for pod in self._controller.cache if pod.instance != self._instance]
        if left:
            _log.warning("an earlier gateway was killed: deleting %d of its pods", len(left))
        results = await asyncio.gather(*map(self._controller.delete_pod, left), return_exceptions=True)
        for failure in results:
            if isinstance(failure, SessionFailed):
                _log.warning("%s", failure)
            elif failure is not None:
                raise failure
        if self._config_map is not None:
            try:
                config_maps = await self._api.list_config_maps(self._selector)
            except ApiError as error:
                _log.warning("config maps of earlier gateways may be left: %s", error)
                return
            for document in config_maps:
                if document["metadata"]["labels"].get(INSTANCE) != self._instance:
                    await self._delete_config_map(document["metadata"]["name"])

    def _document(self, manifest: SessionManifest, name: str, session_id: str | None = None) -> dict[str, Any]:
        labels = {**self._labels, TYPE: manifest.session_type}
        # A pod of the warm pool may wait for a lifetime before the session's begins.
        lifetime_s = self._config.lifetime_s * (2 if session_id is None else 1)
        if session_id is not None:
            labels[SESSION] = session_id
        return build_pod(manifest, name=name, labels=labels, owner=self._owner, lifetime_s=lifetime_s)

    async def _create_pod(self, manifest: SessionManifest, name: str, session_id: str | None) -> Pod:
        document = self._document(manifest, name, session_id)
        limits = {"ready_s": self._config.ready_s, "unschedulable_s": self._config.unschedulable_s}
        return await self._controller.create_pod(document, **limits)

    async def _create_warm_pod(self, session_type: str) -> Pod:
        return await self._create_pod(self._manifests[session_type], f"session-{self._new_id()}", None)

    async def _claim(self, warm: WarmPod, manifest: SessionManifest, session_id: str) -> bool:
        """Assign a warm pod to a session and set its deadline; False when it died or was claimed by another gateway."""
        age_s = asyncio.get_running_loop().time() - warm.requested_at
        # A deadline counts from the pod's start and can only be shortened.
        longest = self._document(manifest, warm.pod.name)["spec"]["activeDeadlineSeconds"]
        deadline = min(math.ceil(age_s) + self._config.lifetime_s, longest)

        def build_patch(pod: Pod) -> dict[str, Any] | None:
            if pod.session_id not in (None, session_id):
                return None
            metadata = {"uid": pod.uid, "resourceVersion": pod.version, "labels": {SESSION: session_id}}
            return {"metadata": metadata, "spec": {"activeDeadlineSeconds": deadline}}

        return await self._controller.patch_pod(warm.pod.name, build_patch)

    def _finish_opening(self, session: _PodSession, pod: Pod, manifest: SessionManifest) -> Address:
        if session.ended is not None:
            raise SessionFailed("session_lost", session.ended)
        session.open = True
        return Address(pod.ip, manifest.port)

    def _find_pod(self, session_id: str) -> str | None:
        return next((pod.name for pod in self._controller.cache if pod.session_id == session_id), None)

    def _address(self, pod: Pod) -> Address:
        manifest = self._manifests.get(pod.session_type)
        # A pod that has no address yet.
        return Address(pod.ip or "0.0.0.0", self._config.port if manifest is None else manifest.port)

    def _on_pod_ended(self, pod_name: str, reason: str) -> None:
        if self._warm_pool.discard(pod_name):
            return
        for session_id, session in self._sessions.items():
            if session.pod_name == pod_name:
                session.ended = reason
                if session.open:
                    del self._sessions[session_id]
                    self.losses += 1
                    self._on_lost(session_id, reason)
                return


async def find_own_pod(api: ClusterApi, environment: Mapping[str, str]) -> dict[str, str] | None:
    """The owner reference of the pod we run in; None outside of pods and in another namespace than the sessions.

    The cluster deletes pods whose owner does not exist, so the owner is looked up first.
    """
    name, uid = environment.get("POD_NAME"), environment.get("POD_UID")
    if not name or not uid or _read_own_namespace(environment) not in (None, api.namespace):
        return None
    try:
        actual_uid = (await api.get_pod(name))["metadata"]["uid"]
    except ApiStatusError as error:
        if error.status != 404:
            raise
        actual_uid = None
    if actual_uid != uid:
        reason = f"there is no pod {name!r} of that uid in namespace {api.namespace!r}"
        raise ConfigError("POD_UID", uid, reason, "Set POD_NAME and POD_UID from metadata.name and metadata.uid")
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def _read_own_namespace(environment: Mapping[str, str]) -> str | None:
    if "POD_NAMESPACE" in environment:
        return environment["POD_NAMESPACE"]
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return None
