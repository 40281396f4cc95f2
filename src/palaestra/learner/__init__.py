"""Learning: PPO, returns as pure functions, the trainer that collects and learns, and its checkpoints."""

from palaestra.learner.algorithm import ALGORITHMS, build_algorithm
from palaestra.learner.checkpoint import TrainingCheckpoint, load_checkpoint
from palaestra.learner.ppo import PPO, PPOConfig
from palaestra.learner.returns import explained_variance, gae, vtrace
from palaestra.learner.trainer import Trainer

__all__ = [
    "ALGORITHMS",
    "PPO",
    "PPOConfig",
    "Trainer",
    "TrainingCheckpoint",
    "build_algorithm",
    "explained_variance",
    "gae",
    "load_checkpoint",
    "vtrace",
]
