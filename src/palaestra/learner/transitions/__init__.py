"""Learning from transitions: off-policy and offline algorithms, and the learner that applies them."""

from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionConfig
from palaestra.learner.transitions.dqn import DQN
from palaestra.learner.transitions.learner import TransitionLearner

__all__ = ["DQN", "StepLoss", "TransitionAlgorithm", "TransitionConfig", "TransitionLearner"]
