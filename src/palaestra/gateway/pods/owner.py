"""Who owns a gateway's pods, so that the cluster removes them when the gateway is gone.

Inside the cluster it is the gateway's own pod. Elsewhere it is a config map that the gateway makes for itself: nothing
in the cluster notices a gateway outside of it die, but whoever deletes the map, or the next gateway, clears the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.gateway.pods.api import ClusterApi
from palaestra.gateway.pods.refusal import ApiRefused, ApiTrouble
from palaestra.gateway.pods.status import INSTANCE

__all__ = ["MapOwner", "pod_owner"]

_log = logging.getLogger(__name__)

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def pod_owner(api: ClusterApi, environment: Mapping[str, str]) -> dict[str, str] | None:
    """The reference to the pod we run in; None when we run in none, or in another namespace than the sessions.

    An owner that does not exist would have every pod deleted as soon as it is made, so it is looked up first.
    """
    name, uid = environment.get("POD_NAME"), environment.get("POD_UID")
    if not name or not uid or _own_namespace(environment) not in (None, api.namespace):
        return None
    try:
        found = (await api.pod(name))["metadata"]["uid"]
    except ApiRefused as trouble:
        if trouble.status != 404:
            raise
        found = None
    if found != uid:
        reason = f"there is no pod {name!r} of that uid in namespace {api.namespace!r}"
        raise ConfigError("POD_UID", uid, reason, "Set POD_NAME and POD_UID from metadata.name and metadata.uid")
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def _own_namespace(environment: Mapping[str, str]) -> str | None:
    if "POD_NAMESPACE" in environment:
        return environment["POD_NAMESPACE"]
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return None


class MapOwner:
    """A config map that stands for a gateway outside the cluster."""

    def __init__(self, api: ClusterApi, name: str, labels: Mapping[str, str], selector: str) -> None:
        self._api, self._name, self._labels, self._selector = api, name, dict(labels), selector

    async def create(self) -> dict[str, str]:
        """Make it; the reference to it."""
        text = "Owns the session pods of a palaestra gateway outside the cluster. Deleting it deletes them."
        metadata = {"name": self._name, "labels": self._labels}
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"purpose": text}}
        made = await self._api.create_config_map(document)
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": self._name, "uid": made["metadata"]["uid"]}

    async def sweep(self) -> None:
        """Remove those that gateways before us left."""
        for one in await self._api.config_maps(self._selector):
            if one["metadata"]["labels"].get(INSTANCE) != self._labels[INSTANCE]:
                await self._delete(one["metadata"]["name"])

    async def remove(self) -> None:
        """Remove our own."""
        await self._delete(self._name)

    async def _delete(self, name: str) -> None:
        try:
            await self._api.delete_config_map(name)
        except ApiTrouble as trouble:
            if not isinstance(trouble, ApiRefused) or trouble.status != 404:
                _log.warning("config map %s is left in namespace %s: %s", name, self._api.namespace, trouble)
