"""`Memory`: results that are costly to make, the least recently asked for forgotten first when there is no room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Memory"]

V = TypeVar("V")


class Memory(Generic[V]):
    """A bounded store; safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self.hits = self.misses = 0
        self._held: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """What is held under the key."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, size_bytes: int) -> None:
        """Hold a value, if it fits at all."""
        with self._lock:
            if size_bytes > self.capacity_bytes or key in self._held:
                return
            self._held[key] = value, size_bytes
            self.used_bytes += size_bytes
            while self.used_bytes > self.capacity_bytes:
                _, (_, freed) = self._held.popitem(last=False)
                self.used_bytes -= freed

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self.used_bytes = 0
