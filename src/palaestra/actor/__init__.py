"""Acting: collectors that fill rollouts, in turn with the learner or behind its back, and evaluation."""

from palaestra.actor.async_config import AsyncConfig
from palaestra.actor.collector import Collector, Episode
from palaestra.actor.evaluation import Evaluation, evaluate
from palaestra.actor.source import Segment, Source

__all__ = ["AsyncConfig", "Collector", "Episode", "Evaluation", "Segment", "Source", "evaluate"]
