"""The pods of one gateway: made and watched until they are ready, lent out, and removed until they are gone.

Knows nothing of sessions. Whatever it made it answers for: what fails on the way is removed, what fails after it was
lent out is told once and removed, and what appears although its making was given up is removed as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from palaestra.errors import SessionFailed
from palaestra.gateway.pods.api import ClusterApi
from palaestra.gateway.pods.refusal import ApiRefused, ApiTrouble, as_failure, collided, retry_in_s, worth_retrying
from palaestra.gateway.pods.status import Failure, Pod
from palaestra.gateway.pods.table import Change, Meaning, PodTable
from palaestra.gateway.pods.watch import PodWatch

__all__ = ["Fleet", "verdict"]

_log = logging.getLogger(__name__)

OUTAGE_S = 30.0
"""How long an API server that does not answer is waited for, with somebody waiting for us: a restart takes 5 to 10."""
REMOVAL_S = 30.0
"""From a granted deletion to the pod's end; one that takes longer has to be asked for again."""
FAREWELL_S = 20.0
"""How long stopping may take; the owner and the deadline of what is left end it then."""

T = TypeVar("T")


class _Ward:
    """One pod that somebody here waits or answers for."""

    def __init__(self, pod: Pod | None = None) -> None:
        self.pod = pod
        self.uid = None if pod is None else pod.uid
        self.gone = False
        self.lent = False
        """It was ready and given to somebody, who is to be told if it ends."""
        self.removing = False
        """Its end is our own doing."""
        self.expected = False
        """It was made before the list was asked for that is under way."""
        self.news = asyncio.Event()


def verdict(
    pod: Pod | None, *, waited_s: float, ready_s: float, unschedulable_for_s: float | None, unschedulable_s: float
) -> Failure | None:
    """Whether it is time to give up a pod that is not ready yet, and why."""
    if pod is not None and unschedulable_for_s is not None and unschedulable_for_s >= unschedulable_s:
        return Failure("unschedulable", f"no node took the pod within {unschedulable_s:g} s: {pod.unschedulable}")
    if waited_s >= ready_s:
        state = "nothing was heard of it" if pod is None else pod.waiting_for
        return Failure("ready_timeout", f"the pod was not ready within {ready_s:g} s: {state}")
    return None


class Fleet:
    """Pods with one set of labels. `over` is called with the name of a lent pod that ended, and the reason."""

    def __init__(self, api: ClusterApi, *, selector: str, instance: str, over: Callable[[str, str], None]) -> None:
        self._api, self._instance, self._over = api, instance, over
        self.table = PodTable()
        self.watch = PodWatch(api, selector, self)
        self._wards: dict[str, _Ward] = {}
        self._burials: dict[str, asyncio.Task[None]] = {}
        self._undoing: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._making = 0
        self._all_made = asyncio.Event()
        self._closing = False

    @property
    def buried(self) -> frozenset[str]:
        """Names of pods that are being removed without anybody waiting for it."""
        return frozenset(self._burials)

    async def start(self) -> None:
        """List what is there, then go on listening."""
        await self.watch.begin()
        self._following = asyncio.create_task(self.watch.follow())

    async def stop(self) -> None:
        """Remove every pod of this instance, and listen no more."""
        self._closing = True
        await _ended(*self._burials.values(), *self._undoing)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._give_up_making()
                names = {*self._wards, *(pod.name for pod in self.table if pod.instance == self._instance)}
                done = await asyncio.gather(*map(self.remove, sorted(names)), return_exceptions=True)
            left = [str(result) for result in done if isinstance(result, BaseException)]
        except TimeoutError:
            left = [f"they were not gone within {FAREWELL_S:g} s"]
        if left:
            _log.warning("pods may be left until their owner or their deadline ends them: %s", "; ".join(left))
        if self._following is not None:
            await _ended(self._following)

    async def make(self, document: Mapping[str, Any], *, ready_s: float, unschedulable_s: float) -> Pod:
        """A pod that is ready, lent out from here on. `SessionFailed` when it cannot be had; then nothing is left
        of it, or, if it cannot be removed either, the table goes on naming it.
        """
        name = document["metadata"]["name"]
        ward = self._wards[name] = _Ward()
        self._making += 1
        try:
            await self._create(ward, document)
            await self._until_ready(ward, ready_s, unschedulable_s)
        except BaseException:
            await self._undone(name)
            raise
        finally:
            self._making -= 1
            if not self._making:
                self._all_made.set()
        assert ward.pod is not None
        ward.lent = True
        return ward.pod

    async def change(self, name: str, change: Callable[[Pod], Mapping[str, Any] | None]) -> bool:
        """Change a lent pod as it was last seen, by a patch that names that version; whether it was changed.

        `change` is asked again when somebody else wrote in between, and gives None when the pod is no longer fit.
        """
        ward = self._wards.get(name)
        while ward is not None and ward.pod is not None and ward.pod.failure is None and not ward.gone:
            seen, patch = ward.pod, change(ward.pod)
            if patch is None:
                return False
            try:
                await self._insist(lambda patch=patch: self._api.patch_pod(name, patch))  # type: ignore[misc]
                return True
            except ApiTrouble as trouble:
                if isinstance(trouble, ApiRefused) and trouble.status == 404:
                    return False
                if not collided(trouble):
                    raise as_failure(trouble, "patch pods", self._api.namespace) from None
            # Whatever was written, such as its status by the kubelet, is on its way to us.
            await self._newer(ward, seen)
        return False

    async def remove(self, name: str) -> None:
        """Remove a pod and wait until it is gone. `SessionFailed` when it may still be there."""
        ward = self._wards.setdefault(name, _Ward(self.table.get(name)))
        ward.removing = True
        try:
            await self._insist(lambda: self._api.delete_pod(name, ward.uid))
        except ApiTrouble as trouble:
            # 409: there is one of this name, and it is another one than ours.
            if not isinstance(trouble, ApiRefused) or trouble.status not in (404, 409):
                raise as_failure(trouble, f"delete pod {name}", self._api.namespace) from None
        else:
            await self._until_gone(name, ward)
        ward.gone = True
        ward.news.set()
        if self._wards.get(name) is ward:
            del self._wards[name]
        self.table.forget(name)

    def bury(self, name: str) -> None:
        """Remove a pod with nobody waiting, and keep trying."""
        if name not in self._burials:
            task = self._burials[name] = asyncio.create_task(self._bury(name))
            task.add_done_callback(lambda _: self._burials.pop(name, None))

    def listing(self) -> None:
        """See `Listener`."""
        for ward in self._wards.values():
            ward.expected = ward.uid is not None and not ward.gone

    def listed(self, pods: Sequence[Pod]) -> None:
        """See `Listener`. What we made and is not on the list is gone, even if we never saw it on one."""
        present = {pod.name: pod.uid for pod in pods}
        missing = [
            (name, ward) for name, ward in self._wards.items() if ward.expected and present.get(name) != ward.uid
        ]
        for change in self.table.replace(pods):
            self._take(change)
        for name, ward in missing:
            if not ward.gone:
                ward.gone = True
                self._tell(name, ward, "its pod was deleted by somebody else")

    def heard(self, pod: Pod, *, deleted: bool) -> None:
        """See `Listener`."""
        if deleted and self.table.get(pod.name) is not None:
            # The last word on a pod often says more than the one before, such as how its container ended.
            for change in self.table.put(pod):
                self._take(change)
        for change in self.table.drop(pod.name) if deleted else self.table.put(pod):
            self._take(change)

    def _take(self, change: Change) -> None:
        pod, ward = change.pod, self._wards.get(change.pod.name)
        if ward is None:
            if change.meaning is Meaning.APPEARED and pod.instance == self._instance:
                _log.warning("pod %s appeared although nobody waits for it, and is removed", pod.name)
                self.bury(pod.name)
            return
        if ward.uid not in (None, pod.uid):
            return
        ward.uid, ward.pod = pod.uid, pod
        ward.gone = ward.gone or change.meaning is Meaning.GONE
        if pod.failure is not None:
            self._tell(pod.name, ward, pod.failure.text)
        ward.news.set()

    def _tell(self, name: str, ward: _Ward, reason: str) -> None:
        ward.news.set()
        if ward.lent and not ward.removing:
            ward.removing = True
            self._over(name, reason)
            self.bury(name)

    async def _create(self, ward: _Ward, document: Mapping[str, Any]) -> None:
        try:
            made = await self._insist(lambda: self._api.create_pod(document), collisions=True)
        except ApiRefused as trouble:
            # The name is ours alone: it was made by a request whose answer got lost.
            if trouble.status != 409 or trouble.reason != "AlreadyExists":
                raise as_failure(trouble, "create pods", self._api.namespace) from None
        except ApiTrouble as trouble:
            raise as_failure(trouble, "create pods", self._api.namespace) from None
        else:
            ward.uid = made["metadata"]["uid"]

    async def _until_ready(self, ward: _Ward, ready_s: float, unschedulable_s: float) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        stuck_since: float | None = None
        while True:
            pod, now = ward.pod, clock()
            if ward.gone or (pod is not None and pod.failure is not None):
                failure = (pod.failure if pod is not None else None) or Failure("deleted", "its pod was deleted")
                raise SessionFailed(failure.reason, failure.text)
            if pod is not None and pod.ready:
                return
            if self._closing:
                raise SessionFailed("stopping", "the gateway is stopping")
            stuck_since = None if pod is None or pod.unschedulable is None else stuck_since or now
            stuck_s = None if stuck_since is None else now - stuck_since
            given_up = verdict(
                pod, waited_s=now - begun, ready_s=ready_s, unschedulable_for_s=stuck_s,
                unschedulable_s=unschedulable_s,
            )  # fmt: skip
            if given_up is not None:
                raise SessionFailed(given_up.reason, given_up.text)
            left = ready_s - (now - begun)
            await _heard(ward, left if stuck_s is None else min(left, unschedulable_s - stuck_s))

    async def _newer(self, ward: _Ward, than: Pod) -> None:
        """Wait until something else is known of a pod than was."""
        try:
            async with asyncio.timeout(OUTAGE_S):
                while ward.pod is not None and ward.pod.version == than.version and not ward.gone:
                    ward.news.clear()
                    await ward.news.wait()
        except TimeoutError:
            text = f"pod {than.name} was changed, and nothing was heard of it for {OUTAGE_S:g} s"
            raise SessionFailed("api_unreachable", text) from None

    async def _until_gone(self, name: str, ward: _Ward) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + REMOVAL_S
        while not ward.gone:
            if clock() >= end:
                text = f"pod {name} was deleted and is still there after {REMOVAL_S:g} s"
                raise SessionFailed("delete_timeout", text)
            await _heard(ward, end - clock())

    async def _undone(self, name: str) -> None:
        """Undo, also when whoever waits for it is cancelled a second time."""
        task = asyncio.create_task(self._undo(name))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        await asyncio.shield(task)

    async def _undo(self, name: str) -> None:
        try:
            await self.remove(name)
        except SessionFailed as failure:
            _log.warning("%s; whoever lists it will try again", failure)

    async def _bury(self, name: str) -> None:
        failures = 0
        while True:
            try:
                await self.remove(name)
            except SessionFailed as failure:
                failures += 1
                _log.warning("%s; trying again", failure)
                await asyncio.sleep(retry_in_s(None, failures))
            else:
                return

    async def _give_up_making(self) -> None:
        """Wait until nothing is half made: a request whose answer nobody awaits could still make a pod."""
        while self._making:
            self._all_made.clear()
            for ward in self._wards.values():
                ward.news.set()
            await self._all_made.wait()

    async def _insist(self, doing: Callable[[], Awaitable[T]], *, collisions: bool = False) -> T:
        """Try again while the API server is busy or away, but not for longer than it takes to come back."""
        clock = asyncio.get_running_loop().time
        end, failures = clock() + OUTAGE_S, 0
        while True:
            try:
                return await doing()
            except ApiTrouble as trouble:
                failures += 1
                wait = retry_in_s(trouble, failures)
                again = worth_retrying(trouble) or (collisions and collided(trouble))
                if not again or clock() + wait > end:
                    raise
                await asyncio.sleep(wait)


async def _heard(ward: _Ward, within_s: float) -> None:
    """Returns when there is news of the pod, or the time is over."""
    ward.news.clear()
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            await ward.news.wait()
    except TimeoutError:
        return


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
