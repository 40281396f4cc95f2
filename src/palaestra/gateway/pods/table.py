"""Every pod of ours as far as we have heard, and what each piece of news means: a pure table.

    appeared ──▶ ready ──▶ failed ──▶ gone        the middle ones may be missing; only ready can come again

EventBus comes one by one from a watch, or all at once from a list after a time in which nothing was heard. A pod that
failed stays failed, whatever is said about it later; a pod of the same name and another uid is another pod.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from palaestra.gateway.pods.status import Failure, Pod

__all__ = ["Change", "Meaning", "PodTable"]


class Meaning(StrEnum):
    """What a piece of news is about."""

    APPEARED = "appeared"
    CHANGED = "changed"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True)
class Change:
    """What became of a pod, and the pod as it is now; for one that is gone, why."""

    meaning: Meaning
    pod: Pod


_DELETED = Failure("deleted", "its pod was deleted by somebody else")


class PodTable:
    """Pods by name."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}

    def __iter__(self) -> Iterator[Pod]:
        return iter(list(self._pods.values()))

    def get(self, name: str) -> Pod | None:
        """The pod of this name, if there is one."""
        return self._pods.get(name)

    def forget(self, name: str) -> None:
        """It is known to be gone, although nothing was heard of it yet."""
        self._pods.pop(name, None)

    def put(self, pod: Pod) -> list[Change]:
        """A pod is there, and this is how it is now."""
        changes = []
        before = self._pods.get(pod.name)
        if before is not None and before.uid != pod.uid:
            changes += self.drop(pod.name)
            before = None
        if before is not None and before.failure is not None:
            pod = dataclasses.replace(pod, failure=before.failure, ready=False)
        self._pods[pod.name] = pod
        if before is None:
            changes.append(Change(Meaning.APPEARED, pod))
        if pod.failure is not None and (before is None or before.failure is None):
            changes.append(Change(Meaning.FAILED, pod))
        elif pod.ready and (before is None or not before.ready):
            changes.append(Change(Meaning.READY, pod))
        elif before is not None and before != pod:
            changes.append(Change(Meaning.CHANGED, pod))
        return changes

    def drop(self, name: str) -> list[Change]:
        """A pod is no longer there."""
        pod = self._pods.pop(name, None)
        if pod is None:
            return []
        return [Change(Meaning.GONE, dataclasses.replace(pod, ready=False, failure=pod.failure or _DELETED))]

    def replace(self, pods: Iterable[Pod]) -> list[Change]:
        """These are all the pods there are."""
        present = {pod.name: pod for pod in pods}
        changes = []
        for name in [name for name in self._pods if name not in present]:
            changes += self.drop(name)
        for pod in present.values():
            changes += self.put(pod)
        return changes
