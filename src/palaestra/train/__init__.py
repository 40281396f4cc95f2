"""One training run: its configuration, its directory, and the wiring of actor and learner."""

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
