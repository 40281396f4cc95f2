"""The two arrows between actor and learner: experience one way, versioned weights the other."""

from palaestra.transport.publisher import SameMemory, WeightPublisher
from palaestra.transport.queue import SegmentQueue
from palaestra.transport.source import Batch, Episode, ExperienceSource, Progress, State
from palaestra.transport.weights import BoardPublisher, WeightBoard

__all__ = [
    "Batch",
    "BoardPublisher",
    "Episode",
    "ExperienceSource",
    "Progress",
    "SameMemory",
    "SegmentQueue",
    "State",
    "WeightBoard",
    "WeightPublisher",
]
