"""Learning from trajectories: rejection sampling, GRPO, PPO and imitation, on the tokens of a model on a screen."""

from palaestra.learner.trajectories.algorithm import Loss, TrajectoryAlgorithm
from palaestra.learner.trajectories.built_in import GRPO, PolicyGradient, RejectionSampling, TrajectoryPPO
from palaestra.learner.trajectories.learner import TrajectoryLearner
from palaestra.learner.trajectories.policy import TrajectoryPolicy
from palaestra.learner.trajectories.supervised import Supervised
from palaestra.learner.trajectories.update import UpdateConfig

__all__ = [
    "GRPO",
    "Loss",
    "PolicyGradient",
    "RejectionSampling",
    "Supervised",
    "TrajectoryAlgorithm",
    "TrajectoryLearner",
    "TrajectoryPPO",
    "TrajectoryPolicy",
    "UpdateConfig",
]
