"""Learning: PPO, returns as pure functions, the trainer that collects and learns, and its checkpoints."""

from palaestra.learner.algorithm import ALGORITHMS, build_algorithm
from palaestra.learner.checkpoint import Checkpoint, read_checkpoint
from palaestra.learner.ppo import PPO, PPOConfig
from palaestra.learner.returns import explained_variance, gae, vtrace
from palaestra.learner.trainer import Trainer

__all__ = [
    "ALGORITHMS",
    "PPO",
    "Checkpoint",
    "PPOConfig",
    "Trainer",
    "build_algorithm",
    "explained_variance",
    "gae",
    "read_checkpoint",
    "vtrace",
]
