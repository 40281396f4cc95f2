"""Acting: collectors that fill rollouts, and evaluation on environments of its own."""

from palaestra.actor.collector import Collector, Episode

__all__ = ["Collector", "Episode"]
