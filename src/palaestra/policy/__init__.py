"""Policies: networks that act and value, their action distributions, and how they are stored and compiled."""

from palaestra.policy.actor_critic import ActorCritic, ActResult
from palaestra.policy.build import build_policy
from palaestra.policy.config import PolicyConfig
from palaestra.policy.distribution import Distribution
from palaestra.policy.storage import load_policy, save_policy
from palaestra.policy.vla import VLAPolicy, check_vla_model, load_vla_model

__all__ = [
    "ActResult",
    "ActorCritic",
    "Distribution",
    "PolicyConfig",
    "VLAPolicy",
    "build_policy",
    "check_vla_model",
    "load_policy",
    "load_vla_model",
    "save_policy",
]
