"""Learning from transitions: off-policy and offline algorithms, and the learner that applies them."""

from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionConfig
from palaestra.learner.transitions.dqn import DQN
from palaestra.learner.transitions.learner import TransitionLearner
from palaestra.learner.transitions.offline import BC, IQL, TD3BC
from palaestra.learner.transitions.sac import SAC

__all__ = [
    "BC",
    "DQN",
    "IQL",
    "SAC",
    "TD3BC",
    "StepLoss",
    "TransitionAlgorithm",
    "TransitionConfig",
    "TransitionLearner",
]
