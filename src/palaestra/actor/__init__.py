"""Acting: collectors of rollouts, synchronous and asynchronous, and actors that play on screens."""

from palaestra.actor.asynchronous import AsyncConfig, AsynchronousSource
from palaestra.actor.collector import Collector
from palaestra.actor.synchronous import SynchronousSource

__all__ = ["AsyncConfig", "AsynchronousSource", "Collector", "SynchronousSource"]
