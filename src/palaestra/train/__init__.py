"""One training run: its configuration and the wiring of actor and learner."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palaestra.train.config import RunConfig, config_from, load_config
    from palaestra.train.loop import Outcome, build_trainer, evaluate_checkpoint, train

__all__ = [
    "Outcome",
    "RunConfig",
    "build_trainer",
    "config_from",
    "evaluate_checkpoint",
    "load_config",
    "train",
]

_HOME = {
    "Outcome": "loop",
    "RunConfig": "config",
    "build_trainer": "loop",
    "config_from": "config",
    "evaluate_checkpoint": "loop",
    "load_config": "config",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    # A gateway reads its configuration with `palaestra.document` and must not pay for torch.
    if name in _HOME:
        return getattr(importlib.import_module(f"palaestra.train.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
