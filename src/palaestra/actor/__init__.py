"""Acting: collectors that fill rollouts, and evaluation on environments of its own."""

from palaestra.actor.collector import Collector, Episode
from palaestra.actor.evaluation import Evaluation, evaluate

__all__ = ["Collector", "Episode", "Evaluation", "evaluate"]
