"""Writes docs/python-api.md: the public names of the packages, with their signatures and first sentences."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "python-api.md"
PACKAGES = (
    "palaestra",
    "palaestra.log",
    "palaestra.runs",
    "palaestra.train",
    "palaestra.env",
    "palaestra.policy",
    "palaestra.policy.vlm",
    "palaestra.learner",
    "palaestra.learner.trajectories",
    "palaestra.learner.transitions",
    "palaestra.experience",
    "palaestra.evaluation",
    "palaestra.actor",
    "palaestra.sessions",
    "palaestra.telemetry",
)
WITH_METHODS = (
    "ActorCritic PPOTrainer Rollout TrainedRun Trainer TrainerOrchestrator TrainerService Trajectory VLMPolicy".split()
)
"""Classes whose methods are listed."""

INTRODUCTION = """# Python API

The public names of each package, as their docstrings describe them. Everything else may change without notice. Examples
are in [Python](python.md), [algorithms](algorithms.md) and [runs](runs.md#from-python). `make docs` writes this page.
"""


def build_page() -> str:
    """The page from the docstrings of the installed package."""
    seen: set[int] = set()
    return "\n".join([INTRODUCTION, *(_describe_package(name, seen) for name in PACKAGES)])


def _describe_package(name: str, seen: set[int]) -> str:
    module = import_module(name)
    lines = [f"## {name}\n", f"{_first_paragraph(module)}\n"]
    for attribute in _public_names(module):
        value = getattr(module, attribute)
        if isinstance(value, ModuleType):
            # `palaestra.train` is a package that can be called.
            value = getattr(import_module("palaestra.api"), attribute)
        # A name that the root exports as well is described there.
        if id(value) in seen or attribute == "__version__":
            continue
        seen.add(id(value))
        lines.append(_describe(attribute, value))
    return "\n".join(lines)


def _public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
        ]
    return sorted(names, key=str.lower)


def _describe(name: str, value: Any) -> str:
    if not callable(value):
        return f"- **`{name}`**: a {type(value).__name__}.\n"
    lines = [f"- **`{name}{_signature(value)}`**  ", f"  {_first_paragraph(value)}\n"]
    if inspect.isclass(value) and name in WITH_METHODS:
        for method, member in sorted(_public_methods(value).items()):
            lines.append(f"    - `{method}{_signature(member)}`: {_first_paragraph(member)}")
        lines.append("")
    return "\n".join(lines)


def _public_methods(owner: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in owner.__mro__:
        if base.__module__.startswith("palaestra"):
            for name, member in vars(base).items():
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                    found.setdefault(name, function)
    return found


def _signature(value: Any) -> str:
    """Names and defaults of the parameters; types are in the source."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [_without_annotation(each) for each in parameters if each.name not in ("self", "cls")]
    text = str(inspect.Signature(bare))
    return text if len(text) <= 160 else "(…)"


def _without_annotation(parameter: inspect.Parameter) -> inspect.Parameter:
    parameter = parameter.replace(annotation=inspect.Parameter.empty)
    # The text of an object or of a configuration holds an address, or is a page of its own.
    is_plain = parameter.default is inspect.Parameter.empty or re.fullmatch(
        r"[^<>(){}]{0,30}|\(\)", repr(parameter.default)
    )
    return parameter if is_plain else parameter.replace(default=_Elsewhere())


class _Elsewhere:
    """A default value that is not shown."""

    def __repr__(self) -> str:
        return "…"


def _first_paragraph(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    return " ".join(text.split("\n\n")[0].split())


def main() -> None:
    """Write the page."""
    PAGE.write_text(build_page())


if __name__ == "__main__":
    main()
