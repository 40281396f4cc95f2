"""Sessions in a cluster: one fresh pod per session, made from the manifest of its type.

Everything carries the gateway's labels and an owner, so that it is found by the next start, removed with its owner, and
ended by its deadline if both fail. What is known about pods comes from one watch; nothing is asked twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway.pods.api import ClusterApi
from palaestra.gateway.pods.config import KubernetesConfig
from palaestra.gateway.pods.fleet import Fleet
from palaestra.gateway.pods.manifest import SessionManifest, pod_document
from palaestra.gateway.pods.owner import MapOwner, pod_owner
from palaestra.gateway.pods.refusal import ApiRefused, ApiTrouble, as_config_error, as_failure
from palaestra.gateway.pods.spares import Spare, SparePods
from palaestra.gateway.pods.status import GATEWAY, INSTANCE, MANAGED_BY, NAME, SESSION, TYPE, Pod
from palaestra.gateway.runtime import Address, LostCallback

__all__ = ["KubernetesRuntime"]

_log = logging.getLogger(__name__)

MANAGER = "palaestra-gateway"


class _Carried:
    """A session and the pod that carries it."""

    def __init__(self, pod_name: str) -> None:
        self.pod_name = pod_name
        self.open = False
        """Whoever asked for it has it, and is to be told if it ends."""
        self.ended: str | None = None
        """Why, if it ended before that."""


class KubernetesRuntime:
    """A `Runtime` of pods."""

    def __init__(
        self, config: KubernetesConfig, manifests: Mapping[str, SessionManifest], *, warm: int = 0,
        environment: Mapping[str, str] | None = None, new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:  # fmt: skip
        self._config, self._manifests, self._new_id = config, dict(manifests), new_id
        self._environment = dict(environment or {})
        self._instance = new_id()
        self._labels = {
            NAME: "palaestra-session", MANAGED_BY: MANAGER, GATEWAY: config.name, INSTANCE: self._instance,
        }  # fmt: skip
        self._selector = f"{MANAGED_BY}={MANAGER},{GATEWAY}={config.name}"
        self._api = ClusterApi(config)
        self._fleet = Fleet(self._api, selector=self._selector, instance=self._instance, over=self._ended)
        self._spares = SparePods(
            tuple(self._manifests), warm, fresh_s=config.lifetime_s, make=self._make_spare, bury=self._fleet.bury
        )
        self._carried: dict[str, _Carried] = {}
        self._map_owner: MapOwner | None = None
        self._owner: dict[str, str] = {}
        self._lost: LostCallback = lambda session_id, reason: None
        self.losses = 0

    @property
    def session_types(self) -> Sequence[str]:
        """What there are manifests for."""
        return tuple(self._manifests)

    async def start(self, lost: LostCallback) -> None:
        """Find the cluster, remove what an earlier gateway left in it, and begin to listen.

        `ConfigError` when the cluster cannot be reached, does not let us in, or does not accept a manifest.
        """
        self._lost = lost
        await self._api.open()
        doing = "list pods"
        try:
            await self._fleet.start()
            doing = "get pods"
            owner = await pod_owner(self._api, self._environment)
            doing = "create configmaps"
            self._owner = owner or await self._own()
            doing = "create pods"
            await asyncio.gather(*map(self._try_manifest, self._manifests.values()))
        except ApiTrouble as trouble:
            raise as_config_error(trouble, doing, self._api.namespace, self._api.server) from None
        await self._sweep()
        self._spares.start()

    async def create(self, session_id: str, session_type: str) -> Address:
        """A spare pod of the type, or a new one."""
        manifest = self._manifests[session_type]
        try:
            while (spare := self._spares.take(session_type)) is not None:
                carried = self._carried[session_id] = _Carried(spare.pod.name)
                try:
                    claimed = await self._claim(spare, manifest, session_id)
                except BaseException:
                    self._fleet.bury(spare.pod.name)
                    raise
                if claimed:
                    return self._opened(carried, spare.pod, manifest)
                self._fleet.bury(spare.pod.name)
            carried = self._carried[session_id] = _Carried(f"session-{session_id}")
            return self._opened(carried, await self._make(manifest, carried.pod_name, session_id), manifest)
        except BaseException:
            # Its pod is removed by whoever made it; if that failed, its label keeps it on the list.
            self._carried.pop(session_id, None)
            raise

    async def delete(self, session_id: str) -> None:
        """Remove its pod and wait until it is gone."""
        carried = self._carried.get(session_id)
        name = carried.pod_name if carried is not None else self._labelled(session_id)
        if name is not None:
            await self._fleet.remove(name)
        if self._carried.get(session_id) is carried:
            self._carried.pop(session_id, None)

    async def list(self) -> Mapping[str, Address]:
        """What our watch shows; spares, and what is being removed after its end, are no sessions."""
        found = {}
        names = {carried.pod_name: session_id for session_id, carried in self._carried.items()}
        for pod in self._fleet.table:
            session_id = names.get(pod.name, pod.session_id)
            if session_id is not None and pod.name not in self._fleet.buried:
                found[session_id] = self._address(pod)
        return found

    def facts(self) -> Mapping[str, int]:
        """The cluster counts as the one thing that is ready; the others count pods, but for `watched`.

        An API server that does not answer for a while (`watched` is 0 then) takes no session along, so it does not
        make the gateway unfit.
        """
        opened = sum(carried.open for carried in self._carried.values())
        return {
            "ready": 1, "pods": opened, "spare": self._spares.ready,
            "starting": len(self._carried) - opened + self._spares.starting, "restarted": self._spares.replaced,
            "lost": self.losses, "watched": int(self._fleet.watch.hears),
        }  # fmt: skip

    async def stop(self) -> None:
        """Remove every pod, and the owner after them."""
        await self._spares.stop()
        await self._fleet.stop()
        self._carried.clear()
        if self._map_owner is not None:
            await self._map_owner.remove()
        await self._api.close()

    async def _own(self) -> dict[str, str]:
        name = f"palaestra-{self._config.name}-{self._instance}"
        owner = MapOwner(self._api, name, {**self._labels, NAME: MANAGER}, self._selector)
        reference = await owner.create()
        self._map_owner = owner
        return reference

    async def _try_manifest(self, manifest: SessionManifest) -> None:
        """Ask whether a pod could be made, so that what is never accepted is said at the start."""
        try:
            await self._api.create_pod(self._document(manifest, f"session-try-{self._new_id()}"), dry_run=True)
        except ApiRefused as trouble:
            failure = as_failure(trouble, "create pods", self._api.namespace)
            if failure.reason == "manifest_rejected":
                place = f"gateway.kubernetes.manifests.{manifest.session_type}"
                reason = f"the cluster does not accept it ({trouble.message})"
                raise ConfigError(place, manifest.place, reason) from None
            if failure.reason != "quota_exceeded":
                raise

    async def _sweep(self) -> None:
        """Remove what gateways of our name left; what cannot be removed yet stays listed and is tried again."""
        left = [pod.name for pod in self._fleet.table if pod.instance != self._instance]
        if left:
            _log.warning("an earlier gateway was killed: removing %d of its pods", len(left))
        done = await asyncio.gather(*map(self._fleet.remove, left), return_exceptions=True)
        for failure in done:
            if isinstance(failure, SessionFailed):
                _log.warning("%s", failure)
            elif failure is not None:
                raise failure
        if self._map_owner is not None:
            try:
                await self._map_owner.sweep()
            except ApiTrouble as trouble:
                _log.warning("owners of earlier gateways may be left: %s", trouble)

    def _document(self, manifest: SessionManifest, name: str, session_id: str | None = None) -> dict[str, Any]:
        labels = {**self._labels, TYPE: manifest.session_type}
        # A spare may wait for a lifetime before its own begins.
        lifetime_s = self._config.lifetime_s * (2 if session_id is None else 1)
        if session_id is not None:
            labels[SESSION] = session_id
        return pod_document(manifest, name=name, labels=labels, owner=self._owner, lifetime_s=lifetime_s)

    async def _make(self, manifest: SessionManifest, name: str, session_id: str | None) -> Pod:
        document = self._document(manifest, name, session_id)
        limits = {"ready_s": self._config.ready_s, "unschedulable_s": self._config.unschedulable_s}
        return await self._fleet.make(document, **limits)

    async def _make_spare(self, session_type: str) -> Pod:
        return await self._make(self._manifests[session_type], f"session-{self._new_id()}", None)

    async def _claim(self, spare: Spare, manifest: SessionManifest, session_id: str) -> bool:
        """Give a spare its session and the rest of its life; False when it died, or is somebody else's."""
        age_s = asyncio.get_running_loop().time() - spare.made_at
        # A deadline counts from the pod's start and can be brought forward only.
        longest = self._document(manifest, spare.pod.name)["spec"]["activeDeadlineSeconds"]
        deadline = min(math.ceil(age_s) + self._config.lifetime_s, longest)

        def claim(pod: Pod) -> dict[str, Any] | None:
            if pod.session_id not in (None, session_id):
                return None
            metadata = {"uid": pod.uid, "resourceVersion": pod.version, "labels": {SESSION: session_id}}
            return {"metadata": metadata, "spec": {"activeDeadlineSeconds": deadline}}

        return await self._fleet.change(spare.pod.name, claim)

    def _opened(self, carried: _Carried, pod: Pod, manifest: SessionManifest) -> Address:
        if carried.ended is not None:
            raise SessionFailed("session_lost", carried.ended)
        carried.open = True
        return Address(pod.ip, manifest.port)

    def _labelled(self, session_id: str) -> str | None:
        return next((pod.name for pod in self._fleet.table if pod.session_id == session_id), None)

    def _address(self, pod: Pod) -> Address:
        manifest = self._manifests.get(pod.session_type)
        # One that has no address yet answers nowhere.
        return Address(pod.ip or "0.0.0.0", self._config.port if manifest is None else manifest.port)

    def _ended(self, pod_name: str, reason: str) -> None:
        if self._spares.died(pod_name):
            return
        for session_id, carried in self._carried.items():
            if carried.pod_name == pod_name:
                carried.ended = reason
                if carried.open:
                    del self._carried[session_id]
                    self.losses += 1
                    self._lost(session_id, reason)
                return
