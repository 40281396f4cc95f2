"""The connections between actor and learner: experience in one direction, versioned weights in the other."""

from palaestra.transport.queue import SegmentQueue
from palaestra.transport.source import Batch, EpisodeStats, ExperienceSource, SavedState, TrainingProgress
from palaestra.transport.weights import BoardPublisher, SharedWeights, WeightBoard, WeightPublisher

__all__ = [
    "Batch",
    "BoardPublisher",
    "EpisodeStats",
    "ExperienceSource",
    "SavedState",
    "SegmentQueue",
    "SharedWeights",
    "TrainingProgress",
    "WeightBoard",
    "WeightPublisher",
]
