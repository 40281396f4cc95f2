"""Evaluation: held-out episodes, confidence intervals, paired comparisons, HTML reports, trajectory viewer."""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

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

# Only playing needs torch.
__getattr__, __dir__ = lazy_attributes(
    __name__,
    dict.fromkeys(("Evaluation", "evaluate"), "play")
    | dict.fromkeys(("comparison_page", "evaluation_page", "write_page"), "report")
    | dict.fromkeys(("ScreenComparison", "ScreenEvaluation"), "screens")
    | {"write_viewer": "viewer"},
)
