"""The names of the specifications, for existing scripts: thin layers over `train`. See docs/coming-from.md."""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.learner.trajectories import RejectionSampling
    from palaestra.specifications.ppo_trainer import PPOTrainer
    from palaestra.specifications.screens import (
        ActorPool,
        Config,
        TaskRunner,
        Trainer,
        VLMWrapper,
        simple_data_entry_pod_manifest,
        train_with_orchestration,
    )

__all__ = [
    "ActorPool",
    "Config",
    "PPOTrainer",
    "RejectionSampling",
    "TaskRunner",
    "Trainer",
    "VLMWrapper",
    "simple_data_entry_pod_manifest",
    "train_with_orchestration",
]

__getattr__, __dir__ = lazy_attributes(
    __name__, {name: "ppo_trainer" if name == "PPOTrainer" else "screens" for name in __all__}
)
