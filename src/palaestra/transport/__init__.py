"""The two arrows between actor and learner: experience one way, versioned weights the other."""

from palaestra.transport.publisher import SameMemory, WeightPublisher
from palaestra.transport.queue import SegmentQueue
from palaestra.transport.source import Batch, EpisodeStats, ExperienceSource, SavedState, TrainingProgress
from palaestra.transport.weights import BoardPublisher, WeightBoard

__all__ = [
    "Batch",
    "BoardPublisher",
    "EpisodeStats",
    "ExperienceSource",
    "SameMemory",
    "SavedState",
    "SegmentQueue",
    "TrainingProgress",
    "WeightBoard",
    "WeightPublisher",
]
