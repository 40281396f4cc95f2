"""Palaestra trains agents: an actor-learner core, a run service and a studio.

The names below are imported on first use, so that importing the root or an operations package never loads torch.
docs/python.md shows how to use `train`, `evaluate` and `load`; docs/coming-from.md maps the names to other libraries.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.actor.pool import ActorPool
    from palaestra.actor.task_runner import TaskRunner
    from palaestra.api.evaluation import evaluate
    from palaestra.api.trained_run import TrainedRun, load
    from palaestra.env import as_vector_env
    from palaestra.experience import Rollout, RolloutBuffer, VLABuffer, combine_rollouts
    from palaestra.experience.trajectory import Trajectory
    from palaestra.learner import PPO
    from palaestra.learner.trajectories import GRPO, RejectionSampling
    from palaestra.policy import ActorCritic, VLAPolicy, load_vla_model
    from palaestra.policy.vlm import VLMPolicy
    from palaestra.specifications.collation import collate_trajectories
    from palaestra.specifications.ppo_trainer import PPOTrainer
    from palaestra.train import Trainer, load_config

__version__ = "0.1.0"

__all__ = [
    "GRPO",
    "PPO",
    "ActorCritic",
    "ActorPool",
    "PPOTrainer",
    "RejectionSampling",
    "Rollout",
    "RolloutBuffer",
    "TaskRunner",
    "TrainedRun",
    "Trainer",
    "Trajectory",
    "VLABuffer",
    "VLAPolicy",
    "VLMPolicy",
    "__version__",
    "as_vector_env",
    "collate_trajectories",
    "combine_rollouts",
    "evaluate",
    "load",
    "load_config",
    "load_vla_model",
    "train",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ActorCritic": "policy",
        "ActorPool": "actor.pool",
        "GRPO": "learner.trajectories",
        "PPO": "learner",
        "PPOTrainer": "specifications",
        "RejectionSampling": "learner.trajectories",
        "Rollout": "experience",
        "RolloutBuffer": "experience",
        "TaskRunner": "actor.task_runner",
        "TrainedRun": "api",
        "Trainer": "train",
        "Trajectory": "experience.trajectory",
        "VLABuffer": "experience",
        "VLAPolicy": "policy",
        "VLMPolicy": "policy.vlm",
        "as_vector_env": "env",
        "collate_trajectories": "specifications.collation",
        "combine_rollouts": "experience",
        "evaluate": "api",
        "load": "api",
        "load_config": "train",
        "load_vla_model": "policy",
        "train": "",
    },
)
