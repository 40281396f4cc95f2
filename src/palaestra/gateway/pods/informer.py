"""`PodInformer` lists and watches the gateway's pods; `PodCache` holds their last known state.

    appeared ──▶ changed ──▶ … ──▶ gone        a pod that failed stays failed

A watch that ends is resumed at its resource version. Pods are listed again only when the cluster no longer has that
version, or keeps refusing it. While the API server cannot be reached, the cache does not change.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from palaestra.gateway.pods.api import ApiError, ApiStatusError, ClusterApi, retry_delay_s
from palaestra.gateway.pods.status import Failure, Pod, read_pod

_log = logging.getLogger(__name__)

RELIST_AFTER = 3
"""Refusals in a row after which pods are listed again instead of resuming the watch."""
QUICK_S = 1.0
"""A watch that ends sooner and without an event counts as a failure."""


class ChangeKind(StrEnum):
    """What changed about a pod."""

    APPEARED = "appeared"
    CHANGED = "changed"
    GONE = "gone"


@dataclass(frozen=True)
class PodChange:
    """A change of a pod and its new state; for a pod that is gone, with the reason as its failure."""

    kind: ChangeKind
    pod: Pod


_DELETED = Failure("deleted", "its pod was deleted by another client")


class PodCache:
    """The last known pods by name.

    A pod that failed stays failed, also when its status changes later. A pod with the same name and another uid is
    another pod.
    """

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}

    def __iter__(self) -> Iterator[Pod]:
        return iter(list(self._pods.values()))

    def get(self, name: str) -> Pod | None:
        """The pod of this name, if it exists."""
        return self._pods.get(name)

    def forget(self, name: str) -> None:
        """Remove a pod that is known to be gone without reporting a change."""
        self._pods.pop(name, None)

    def update(self, pod: Pod) -> list[PodChange]:
        """Store the current state of a pod and return what changed."""
        changes = []
        before = self._pods.get(pod.name)
        if before is not None and before.uid != pod.uid:
            changes += self.remove(pod.name)
            before = None
        if before is not None and before.failure is not None:
            pod = dataclasses.replace(pod, failure=before.failure, ready=False)
        self._pods[pod.name] = pod
        if before != pod:
            changes.append(PodChange(ChangeKind.APPEARED if before is None else ChangeKind.CHANGED, pod))
        return changes

    def remove(self, name: str) -> list[PodChange]:
        """Remove a pod that was deleted and return what changed."""
        pod = self._pods.pop(name, None)
        if pod is None:
            return []
        return [PodChange(ChangeKind.GONE, dataclasses.replace(pod, ready=False, failure=pod.failure or _DELETED))]

    def replace(self, pods: Iterable[Pod]) -> list[PodChange]:
        """Replace all pods and return what changed."""
        present = {pod.name: pod for pod in pods}
        changes = []
        for name in [name for name in self._pods if name not in present]:
            changes += self.remove(name)
        for pod in present.values():
            changes += self.update(pod)
        return changes


class PodListener(Protocol):
    """Receives what an informer finds out."""

    def on_list_begin(self) -> None:
        """A list is about to be requested; pods created from here on may be missing from it."""

    def on_list(self, pods: Sequence[Pod]) -> None:
        """All pods that exist."""

    def on_event(self, pod: Pod, *, deleted: bool) -> None:
        """A pod was added, changed or deleted."""


@dataclass(frozen=True)
class WatchRetry:
    """How to continue after a watch has ended."""

    relist: bool
    wait_s: float


def plan_retry(error: ApiError | None, failures: int) -> WatchRetry:
    """How to continue after a watch ended, normally or with an error; `failures` in a row include this one."""
    if error is None:
        return WatchRetry(relist=False, wait_s=retry_delay_s(None, failures) if failures > 1 else 0.0)
    if isinstance(error, ApiStatusError) and error.status == 410:
        return WatchRetry(relist=True, wait_s=retry_delay_s(error, failures) if failures > 1 else 0.0)
    return WatchRetry(isinstance(error, ApiStatusError) and failures >= RELIST_AFTER, retry_delay_s(error, failures))


class PodInformer:
    """Reports the pods that match a label selector to a listener."""

    def __init__(self, api: ClusterApi, selector: str, listener: PodListener) -> None:
        self._api, self._selector, self._listener = api, selector, listener
        self._version: str | None = None
        self.relists = 0
        self.connected = True
        """False while the API server does not answer."""

    async def start(self) -> None:
        """List once; raises `ApiError`."""
        await self._list()

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            failure: ApiError | None = None
            started_at, before = clock(), self._version
            try:
                if self._version is None:
                    await self._list()
                    self.relists += 1
                await self._watch()
            except ApiError as error:
                failure = error
            except (KeyError, TypeError, AttributeError) as error:
                # A proxy in between may send unexpected documents; the informer must keep running.
                failure = ApiStatusError(500, "Unreadable", f"a response could not be parsed ({error!r})")
            self._update_connected(failure)
            progressed = self._version not in (None, before) or (failure is None and clock() - started_at > QUICK_S)
            failures = 0 if progressed else failures + 1
            retry = plan_retry(failure, failures + 1 if progressed else failures)
            if retry.relist:
                self._version = None
            await asyncio.sleep(retry.wait_s)

    async def _list(self) -> None:
        self._listener.on_list_begin()
        documents, version = await self._api.list_pods(self._selector)
        self._listener.on_list([read_pod(document) for document in documents])
        self._version = version

    async def _watch(self) -> None:
        assert self._version is not None
        async with self._api.watch_pods(self._selector, self._version) as events:
            self._update_connected(None)
            async for event_type, document in events:
                self._version = document["metadata"]["resourceVersion"]
                if event_type != "BOOKMARK":
                    self._listener.on_event(read_pod(document), deleted=event_type == "DELETED")

    def _update_connected(self, error: ApiError | None) -> None:
        # 410 (Gone) is the normal response after a long interruption: list again.
        connected = error is None or (isinstance(error, ApiStatusError) and error.status == 410)
        if self.connected and not connected:
            _log.warning("the Kubernetes API does not answer (%s); sessions continue, trying again", error)
        if connected and not self.connected:
            _log.warning("the Kubernetes API answers again")
        self.connected = connected
