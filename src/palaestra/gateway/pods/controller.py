"""`PodController` creates the pods of one gateway, waits until they are ready, and deletes them.

It knows nothing about sessions. A pod that fails while it starts is deleted. A pod that fails later is reported once
and deleted. A pod that appears although its creation was given up is deleted as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from palaestra.errors import SessionFailed
from palaestra.gateway.pods.api import (
    ApiError,
    ApiStatusError,
    ClusterApi,
    is_conflict,
    is_retryable,
    retry_delay_s,
    session_failure,
)
from palaestra.gateway.pods.informer import ChangeKind, PodCache, PodChange, PodInformer
from palaestra.gateway.pods.status import Failure, Pod

_log = logging.getLogger(__name__)

OUTAGE_S = 30.0
"""Seconds a request is retried while the API server does not answer; a restart of it takes 5 to 10."""
DELETION_TIMEOUT_S = 30.0
"""Seconds from an accepted deletion until the pod must be gone; beyond it the deletion is requested again."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that stopping may take. Pods that are left end with their owner or at their deadline."""

T = TypeVar("T")


class _PodState:
    """One pod that this controller created or deletes."""

    def __init__(self, pod: Pod | None = None) -> None:
        self.pod = pod
        self.uid = None if pod is None else pod.uid
        self.gone = False
        self.in_use = False
        """It was ready and is in use, so its end is reported."""
        self.deleting = False
        """This controller deletes it."""
        self.expected = False
        """It was created before the current list was requested, so the list must contain it."""
        self.changed = asyncio.Event()


def readiness_failure(
    pod: Pod | None, *, waited_s: float, ready_s: float, unschedulable_for_s: float | None, unschedulable_s: float
) -> Failure | None:
    """Why to give up a pod that is not ready yet; None to keep waiting."""
    if pod is not None and unschedulable_for_s is not None and unschedulable_for_s >= unschedulable_s:
        return Failure("unschedulable", f"no node took the pod within {unschedulable_s:g} s: {pod.unschedulable}")
    if waited_s >= ready_s:
        state = "it was not seen" if pod is None else pod.waiting_for
        return Failure("ready_timeout", f"the pod was not ready within {ready_s:g} s: {state}")
    return None


class PodController:
    """Pods of one label selector. `on_ended` is called with the name of a pod in use that ended, and the reason."""

    def __init__(self, api: ClusterApi, *, selector: str, instance: str, on_ended: Callable[[str, str], None]) -> None:
        self._api, self._instance, self._on_ended = api, instance, on_ended
        self.cache = PodCache()
        self.informer = PodInformer(api, selector, self)
        self._pods: dict[str, _PodState] = {}
        self._pending_deletions: dict[str, asyncio.Task[None]] = {}
        self._cleanups: set[asyncio.Task[None]] = set()
        self._informing: asyncio.Task[None] | None = None
        self._num_creating = 0
        self._none_creating = asyncio.Event()
        self._closing = False

    @property
    def pending_deletions(self) -> frozenset[str]:
        """Names of pods that are deleted in the background."""
        return frozenset(self._pending_deletions)

    async def start(self) -> None:
        """List the existing pods and begin to watch them."""
        await self.informer.start()
        self._informing = asyncio.create_task(self.informer.run())

    async def stop(self) -> None:
        """Delete every pod of this instance and stop watching."""
        self._closing = True
        await _cancel(*self._pending_deletions.values(), *self._cleanups)
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self._wait_for_creations()
                names = {*self._pods, *(pod.name for pod in self.cache if pod.instance == self._instance)}
                results = await asyncio.gather(*map(self.delete_pod, sorted(names)), return_exceptions=True)
            left = [str(result) for result in results if isinstance(result, BaseException)]
        except TimeoutError:
            left = [f"they were not gone within {SHUTDOWN_TIMEOUT_S:g} s"]
        if left:
            _log.warning("pods may be left until their owner or their deadline ends them: %s", "; ".join(left))
        if self._informing is not None:
            await _cancel(self._informing)

    async def create_pod(self, document: Mapping[str, Any], *, ready_s: float, unschedulable_s: float) -> Pod:
        """Create a pod and wait until it is ready.

        `SessionFailed` when that fails; the pod is deleted then, or stays in the cache if it cannot be deleted.
        """
        name = document["metadata"]["name"]
        state = self._pods[name] = _PodState()
        self._num_creating += 1
        try:
            await self._create(state, document)
            await self._wait_until_ready(state, ready_s, unschedulable_s)
        except BaseException:
            await self._clean_up(name)
            raise
        finally:
            self._num_creating -= 1
            if not self._num_creating:
                self._none_creating.set()
        assert state.pod is not None
        state.in_use = True
        return state.pod

    async def patch_pod(self, name: str, build_patch: Callable[[Pod], Mapping[str, Any] | None]) -> bool:
        """Apply a merge patch to a pod in use; returns whether it was applied.

        `build_patch` is called with the last known state, again after each conflict with another writer, and returns
        None when the pod is no longer suitable.
        """
        state = self._pods.get(name)
        while state is not None and state.pod is not None and state.pod.failure is None and not state.gone:
            seen, patch = state.pod, build_patch(state.pod)
            if patch is None:
                return False
            try:
                await self._retry(lambda patch=patch: self._api.patch_pod(name, patch))  # type: ignore[misc]
                return True
            except ApiError as error:
                if isinstance(error, ApiStatusError) and error.status == 404:
                    return False
                if not is_conflict(error):
                    raise session_failure(error, "patch pods", self._api.namespace) from None
            # The informer will receive what the other writer changed, such as the status by the kubelet.
            await self._wait_for_newer(state, seen)
        return False

    async def delete_pod(self, name: str) -> None:
        """Delete a pod and wait until it is gone. `SessionFailed` when it may still exist."""
        state = self._pods.setdefault(name, _PodState(self.cache.get(name)))
        state.deleting = True
        try:
            await self._retry(lambda: self._api.delete_pod(name, state.uid))
        except ApiError as error:
            # 409: the pod of this name is another one (its uid differs).
            if not isinstance(error, ApiStatusError) or error.status not in (404, 409):
                raise session_failure(error, f"delete pod {name}", self._api.namespace) from None
        else:
            await self._wait_until_gone(name, state)
        state.gone = True
        state.changed.set()
        if self._pods.get(name) is state:
            del self._pods[name]
        self.cache.forget(name)

    def delete_in_background(self, name: str) -> None:
        """Delete a pod in the background, retrying until it is gone."""
        if name not in self._pending_deletions:
            task = self._pending_deletions[name] = asyncio.create_task(self._delete_until_gone(name))
            task.add_done_callback(lambda _: self._pending_deletions.pop(name, None))

    def on_list_begin(self) -> None:
        """See `PodListener`."""
        for state in self._pods.values():
            state.expected = state.uid is not None and not state.gone

    def on_list(self, pods: Sequence[Pod]) -> None:
        """See `PodListener`. Expected pods that are not listed are gone, even if no list ever had them."""
        present = {pod.name: pod.uid for pod in pods}
        missing = [
            (name, state) for name, state in self._pods.items() if state.expected and present.get(name) != state.uid
        ]
        for change in self.cache.replace(pods):
            self._apply(change)
        for name, state in missing:
            if not state.gone:
                state.gone = True
                self._report_end(name, state, "its pod was deleted by another client")

    def on_event(self, pod: Pod, *, deleted: bool) -> None:
        """See `PodListener`."""
        if deleted and self.cache.get(pod.name) is not None:
            # The last state of a pod often has more detail, such as how its container exited.
            for change in self.cache.update(pod):
                self._apply(change)
        for change in self.cache.remove(pod.name) if deleted else self.cache.update(pod):
            self._apply(change)

    def _apply(self, change: PodChange) -> None:
        pod, state = change.pod, self._pods.get(change.pod.name)
        if state is None:
            if change.kind is ChangeKind.APPEARED and pod.instance == self._instance:
                _log.warning("deleting pod %s, which appeared after its creation was given up", pod.name)
                self.delete_in_background(pod.name)
            return
        if state.uid not in (None, pod.uid):
            return
        state.uid, state.pod = pod.uid, pod
        state.gone = state.gone or change.kind is ChangeKind.GONE
        if pod.failure is not None:
            self._report_end(pod.name, state, pod.failure.text)
        state.changed.set()

    def _report_end(self, name: str, state: _PodState, reason: str) -> None:
        state.changed.set()
        if state.in_use and not state.deleting:
            state.deleting = True
            self._on_ended(name, reason)
            self.delete_in_background(name)

    async def _create(self, state: _PodState, document: Mapping[str, Any]) -> None:
        try:
            created = await self._retry(lambda: self._api.create_pod(document), retry_conflicts=True)
        except ApiStatusError as error:
            # The name is unique: an earlier attempt, whose response was lost, created it.
            if error.status != 409 or error.reason != "AlreadyExists":
                raise session_failure(error, "create pods", self._api.namespace) from None
        except ApiError as error:
            raise session_failure(error, "create pods", self._api.namespace) from None
        else:
            state.uid = created["metadata"]["uid"]

    async def _wait_until_ready(self, state: _PodState, ready_s: float, unschedulable_s: float) -> None:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        stuck_since: float | None = None
        while True:
            pod, now = state.pod, clock()
            if state.gone or (pod is not None and pod.failure is not None):
                failure = (pod.failure if pod is not None else None) or Failure("deleted", "its pod was deleted")
                raise SessionFailed(failure.reason, failure.text)
            if pod is not None and pod.ready:
                return
            if self._closing:
                raise SessionFailed("stopping", "the gateway is stopping")
            stuck_since = None if pod is None or pod.unschedulable is None else stuck_since or now
            stuck_s = None if stuck_since is None else now - stuck_since
            timeout = readiness_failure(
                pod,
                waited_s=now - started_at,
                ready_s=ready_s,
                unschedulable_for_s=stuck_s,
                unschedulable_s=unschedulable_s,
            )
            if timeout is not None:
                raise SessionFailed(timeout.reason, timeout.text)
            left = ready_s - (now - started_at)
            await _wait_for_change(state, left if stuck_s is None else min(left, unschedulable_s - stuck_s))

    async def _wait_for_newer(self, state: _PodState, than: Pod) -> None:
        """Wait until a newer version of a pod is known."""
        try:
            async with asyncio.timeout(OUTAGE_S):
                while state.pod is not None and state.pod.version == than.version and not state.gone:
                    state.changed.clear()
                    await state.changed.wait()
        except TimeoutError:
            text = f"pod {than.name} was changed by another client, and no event arrived for {OUTAGE_S:g} s"
            raise SessionFailed("api_unreachable", text) from None

    async def _wait_until_gone(self, name: str, state: _PodState) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + DELETION_TIMEOUT_S
        while not state.gone:
            if clock() >= end:
                text = f"pod {name} was deleted and still exists after {DELETION_TIMEOUT_S:g} s"
                raise SessionFailed("delete_timeout", text)
            await _wait_for_change(state, end - clock())

    async def _clean_up(self, name: str) -> None:
        """Delete a pod whose creation failed, also when the caller is cancelled a second time."""
        task = asyncio.create_task(self._try_delete(name))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    async def _try_delete(self, name: str) -> None:
        try:
            await self.delete_pod(name)
        except SessionFailed as failure:
            _log.warning("%s; the next reconciliation tries again", failure)

    async def _delete_until_gone(self, name: str) -> None:
        failures = 0
        while True:
            try:
                await self.delete_pod(name)
            except SessionFailed as failure:
                failures += 1
                _log.warning("%s; trying again", failure)
                await asyncio.sleep(retry_delay_s(None, failures))
            else:
                return

    async def _wait_for_creations(self) -> None:
        """Make pending creations fail and wait for them: an abandoned request could still create a pod."""
        while self._num_creating:
            self._none_creating.clear()
            for state in self._pods.values():
                state.changed.set()
            await self._none_creating.wait()

    async def _retry(self, request: Callable[[], Awaitable[T]], *, retry_conflicts: bool = False) -> T:
        """Send a request, retrying for up to `OUTAGE_S` while the API server is busy or unreachable."""
        clock = asyncio.get_running_loop().time
        end, failures = clock() + OUTAGE_S, 0
        while True:
            try:
                return await request()
            except ApiError as error:
                failures += 1
                wait = retry_delay_s(error, failures)
                again = is_retryable(error) or (retry_conflicts and is_conflict(error))
                if not again or clock() + wait > end:
                    raise
                await asyncio.sleep(wait)


async def _wait_for_change(state: _PodState, timeout_s: float) -> None:
    """Wait for the next change of the pod, or for the timeout."""
    state.changed.clear()
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await state.changed.wait()
    except TimeoutError:
        return


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
