"""Acting: collectors that fill rollouts synchronously or in the background, and evaluation."""

from palaestra.actor.asynchronous import AsyncConfig, AsynchronousSource
from palaestra.actor.collector import Collector
from palaestra.actor.evaluation import Evaluation, evaluate
from palaestra.actor.synchronous import SynchronousSource

__all__ = ["AsyncConfig", "AsynchronousSource", "Collector", "Evaluation", "SynchronousSource", "evaluate"]
