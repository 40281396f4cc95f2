"""Learning: algorithms, returns as pure functions, and the learners that apply them. Imports no actor."""

from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.batch import evaluate_actions, flatten_rollout
from palaestra.learner.ppo import PPO, PPOConfig
from palaestra.learner.protocol import Algorithm, Learner
from palaestra.learner.returns import gae, vtrace
from palaestra.learner.table import build_algorithm

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
