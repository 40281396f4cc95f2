"""Policies: networks that act and value, their action distributions, and how they are stored and compiled."""

from palaestra.policy.actor_critic import Acted, ActorCritic, PolicyConfig
from palaestra.policy.build import build_policy
from palaestra.policy.distribution import Distribution
from palaestra.policy.storage import load_policy, save_policy

__all__ = ["Acted", "ActorCritic", "Distribution", "PolicyConfig", "build_policy", "load_policy", "save_policy"]
