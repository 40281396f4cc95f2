"""One training run: its configuration and the components of actor and learner.

The package can be called: `palaestra.train("CartPole-v1")` is `palaestra.api.train`.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes, make_callable

if TYPE_CHECKING:
    from palaestra.train.config import RunConfig, config_from, load_config
    from palaestra.train.evaluation import evaluate_checkpoint
    from palaestra.train.run import TrainingResult
    from palaestra.train.trainer import Trainer, build_trainer
    from palaestra.train.vector import train

__all__ = [
    "RunConfig",
    "Trainer",
    "TrainingResult",
    "build_trainer",
    "config_from",
    "evaluate_checkpoint",
    "load_config",
    "train",
]

# A gateway reads its configuration with `palaestra.config.file` and must not pay for torch.
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "TrainingResult": "run",
        "RunConfig": "config",
        "Trainer": "trainer",
        "build_trainer": "trainer",
        "config_from": "config",
        "evaluate_checkpoint": "evaluation",
        "load_config": "config",
        "train": "vector",
    },
)

make_callable(__name__, "palaestra.api.training:train")
