"""Learning from trajectories: rejection sampling, GRPO and PPO on the tokens of a model that operates a screen."""

from palaestra.learner.trajectories.algorithm import (
    TRAJECTORY_ALGORITHMS,
    TrajectoryAlgorithm,
    build_trajectory_algorithm,
)
from palaestra.learner.trajectories.groups import Groups
from palaestra.learner.trajectories.grpo import GRPO
from palaestra.learner.trajectories.policy import TrajectoryPolicy
from palaestra.learner.trajectories.ppo import TrajectoryPPO
from palaestra.learner.trajectories.rejection_sampling import RejectionSampling
from palaestra.learner.trajectories.token_update import UpdateConfig
from palaestra.learner.trajectories.trainer import TrajectoryTrainer

__all__ = [
    "GRPO",
    "TRAJECTORY_ALGORITHMS",
    "Groups",
    "RejectionSampling",
    "TrajectoryAlgorithm",
    "TrajectoryPPO",
    "TrajectoryPolicy",
    "TrajectoryTrainer",
    "UpdateConfig",
    "build_trajectory_algorithm",
]
