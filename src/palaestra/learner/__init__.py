"""Learning: algorithms, returns as pure functions, and the learners that apply them. Imports no actor."""

from palaestra.learner.algorithm import Algorithm, Learner, RolloutAlgorithm
from palaestra.learner.batch import evaluate_actions, flatten_rollout
from palaestra.learner.ppo import PPO, PPOConfig
from palaestra.learner.registry import build_algorithm
from palaestra.learner.returns import gae, vtrace

__all__ = [
    "PPO",
    "Algorithm",
    "Learner",
    "PPOConfig",
    "RolloutAlgorithm",
    "build_algorithm",
    "evaluate_actions",
    "flatten_rollout",
    "gae",
    "vtrace",
]
