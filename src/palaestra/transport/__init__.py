"""The two arrows between actor and learner: experience one way, versioned weights the other."""

from palaestra.transport.queue import SegmentQueue
from palaestra.transport.weights import WeightBoard

__all__ = ["SegmentQueue", "WeightBoard"]
