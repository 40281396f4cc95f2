"""The Python API for notebooks and scripts: train, evaluate, save and load in a few lines (docs/python.md).

`import palaestra as pal` offers the same functions as `pal.train`, `pal.evaluate` and `pal.load`. Runs made with them
are ordinary run directories: `palaestra runs list`, the run service and the studio show them.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.api.evaluation import evaluate
    from palaestra.api.policy import TrainedPolicy
    from palaestra.api.screen_evaluation import ScreenReport
    from palaestra.api.screen_policy import TrainedScreenPolicy
    from palaestra.api.trained_run import TrainedRun, load
    from palaestra.api.training import train

__all__ = [
    "ScreenReport",
    "TrainedPolicy",
    "TrainedRun",
    "TrainedScreenPolicy",
    "evaluate",
    "load",
    "train",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ScreenReport": "screen_evaluation",
        "TrainedPolicy": "policy",
        "TrainedRun": "trained_run",
        "TrainedScreenPolicy": "screen_policy",
        "evaluate": "evaluation",
        "load": "trained_run",
        "train": "training",
    },
)
