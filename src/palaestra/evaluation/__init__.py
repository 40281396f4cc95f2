"""How good a policy is: held-out play, intervals, paired comparisons, HTML reports and the trajectory viewer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palaestra.evaluation.play import Evaluation, evaluate
    from palaestra.evaluation.report import comparison_page, evaluation_page, write_page
    from palaestra.evaluation.screens import ScreenComparison, ScreenEvaluation
    from palaestra.evaluation.viewer import write_viewer

__all__ = [
    "Evaluation",
    "ScreenComparison",
    "ScreenEvaluation",
    "comparison_page",
    "evaluate",
    "evaluation_page",
    "write_page",
    "write_viewer",
]

_MODULES = {
    "play": ("Evaluation", "evaluate"),
    "report": ("comparison_page", "evaluation_page", "write_page"),
    "screens": ("ScreenComparison", "ScreenEvaluation"),
    "viewer": ("write_viewer",),
}


def __getattr__(name: str) -> Any:
    # Scoring recorded episodes and drawing pages need no torch; only playing does.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"palaestra.evaluation.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
