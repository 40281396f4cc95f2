"""One training run: its configuration and the wiring of actor and learner."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palaestra.train.config import RunConfig, config_from, load_config
    from palaestra.train.run import Outcome
    from palaestra.train.trainer import Trainer, build_trainer
    from palaestra.train.vector import evaluate_checkpoint, train

__all__ = [
    "Outcome",
    "RunConfig",
    "Trainer",
    "build_trainer",
    "config_from",
    "evaluate_checkpoint",
    "load_config",
    "train",
]

_HOME = {
    "Outcome": "run",
    "RunConfig": "config",
    "Trainer": "trainer",
    "build_trainer": "trainer",
    "config_from": "config",
    "evaluate_checkpoint": "vector",
    "load_config": "config",
    "train": "vector",
}


def __getattr__(name: str) -> Any:
    # A gateway reads its configuration with `palaestra.document` and must not pay for torch.
    if name in _HOME:
        return getattr(importlib.import_module(f"palaestra.train.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
