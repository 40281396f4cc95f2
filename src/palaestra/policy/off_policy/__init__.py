"""Policies of algorithms on transitions: their networks, their actions, and learning without autograd."""

from palaestra.policy.off_policy.networks import (
    TRANSITION_POLICIES,
    ClonedActor,
    DeterministicActorCritic,
    ImplicitQ,
    QNetwork,
    SoftActorCritic,
    TransitionPolicy,
)

__all__ = [
    "TRANSITION_POLICIES",
    "ClonedActor",
    "DeterministicActorCritic",
    "ImplicitQ",
    "QNetwork",
    "SoftActorCritic",
    "TransitionPolicy",
]
