"""Acting: collectors that fill rollouts, in turn with the learner or behind its back."""

from palaestra.actor.async_config import AsyncConfig
from palaestra.actor.collector import Collector, Episode
from palaestra.actor.source import Segment, Source

__all__ = ["AsyncConfig", "Collector", "Episode", "Segment", "Source"]
