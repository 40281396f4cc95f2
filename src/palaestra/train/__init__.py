"""One training run: its configuration, its directory, and the wiring of actor and learner."""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.train.config import RunConfig, config_from, load_config
    from palaestra.train.loop import Outcome, build_trainer, evaluate_checkpoint, train
    from palaestra.train.run_directory import RunDirectory, runs_root

__all__ = [
    "Outcome",
    "RunConfig",
    "RunDirectory",
    "build_trainer",
    "config_from",
    "evaluate_checkpoint",
    "load_config",
    "runs_root",
    "train",
]

# A gateway reads its configuration with `palaestra.document` and must not pay for torch.
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Outcome": "loop",
        "RunConfig": "config",
        "RunDirectory": "run_directory",
        "build_trainer": "loop",
        "config_from": "config",
        "evaluate_checkpoint": "loop",
        "load_config": "config",
        "runs_root": "run_directory",
        "train": "loop",
    },
)
