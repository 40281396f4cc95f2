"""`ObjectStorePublisher`: weights in the object store of a Ray cluster, by version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palaestra.errors import ExperienceError
from palaestra.transport.ray_cluster import RayCluster, Ref
from palaestra.transport.weights import WeightPublisher


class ObjectStorePublisher(WeightPublisher[Any]):
    """Publishes weights in the object store: one copy per version, which every node fetches once."""

    def __init__(self, cluster: RayCluster, copy: Callable[[Any], Any], *, depth: int = 2) -> None:
        """`copy` turns the learner's weights into arrays that are its own; `depth`: number of versions to keep."""
        self._cluster, self._copy, self._depth = cluster, copy, depth
        self._refs: dict[int, Ref] = {}
        self.on_publish: Callable[[int, Ref], None] = lambda version, ref: None
        """Called with every new version."""

    @property
    def newest(self) -> int:
        """The newest version; -1 before the first."""
        return max(self._refs, default=-1)

    def publish(self, version: int, weights: Any) -> None:
        """Copy the weights to the object store, unless they are not newer."""
        if version <= self.newest:
            return
        self._refs[version] = ref = self._cluster.put(self._copy(weights))
        for old in sorted(self._refs)[: -self._depth]:
            del self._refs[old]  # Ray removes it when no actor needs it
        self.on_publish(version, ref)

    def ref(self, version: int) -> Ref:
        """The reference of a version that is still kept."""
        if version not in self._refs:
            kept = ", ".join(map(str, sorted(self._refs))) or "none"
            raise ExperienceError(f"ObjectStorePublisher.ref: version {version} is not kept (kept: {kept}).")
        return self._refs[version]

    def clear(self) -> None:
        """Forget every version."""
        self._refs.clear()

    def close(self) -> None:
        """Forget every version."""
        self.clear()
