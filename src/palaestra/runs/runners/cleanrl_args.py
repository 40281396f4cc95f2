"""What a CleanRL script can be told, read from its source without running it.

Every script declares one dataclass and hands it to `tyro.cli`: names, types, defaults and a docstring per field. That
is the schema of the run's configuration, and it is the script's own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palaestra.errors import ConfigError

__all__ = ["Script", "ScriptArgument", "read_script"]

Kind = Literal["bool", "int", "float", "str", "list", "other"]
_KINDS: dict[str, Kind] = {"bool": "bool", "int": "int", "float": "float", "str": "str"}
_LISTS = frozenset({"Sequence", "List", "list", "Tuple", "tuple"})
_RUNTIME = "to be filled in runtime"


@dataclass(frozen=True)
class ScriptArgument:
    """One field of the script's dataclass."""

    name: str
    kind: Kind
    default: Any = None
    help: str = ""
    optional: bool = False
    """Whether None is a value, too."""
    choices: tuple[str, ...] = ()
    item: Kind = "str"
    """Kind of the elements of a list."""
    computed: bool = False
    """The default is an expression that only the script can evaluate."""
    hidden: bool = False
    """Settable, but nothing for a form: the script computes it, or names itself by it."""


@dataclass(frozen=True)
class Script:
    """One script, as far as its source tells."""

    path: Path
    arguments: tuple[ScriptArgument, ...]
    imports: frozenset[str] = field(default_factory=frozenset)
    """First words of everything it imports at its top level, the standard library left out."""
    local_imports: tuple[str, ...] = ()
    """Modules of the checkout it imports, as `cleanrl_utils.buffers`."""

    def argument(self, name: str) -> ScriptArgument | None:
        """One argument by name."""
        return next((argument for argument in self.arguments if argument.name == name), None)


def read_script(path: Path) -> Script:
    """Read a script; `ConfigError` when it is not one that tyro drives."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ConfigError("script", str(path), f"cannot be read ({error})", "Look at the file") from None
    name = _driven_class(tree)
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        reason = "hands no class of its own to tyro.cli, so its options are unknown"
        raise ConfigError("script", str(path), reason, "Choose one of CleanRL's, or write a runner (docs/runners.md)")
    imports = list(_imports(tree))
    return Script(
        path,
        tuple(_arguments(found, source.splitlines())),
        frozenset(word.split(".")[0] for word in imports) - set(sys.stdlib_module_names) - {"__future__"},
        tuple(word for word in imports if word.startswith("cleanrl_utils.")),
    )


def _driven_class(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tyro.cli" and node.args:
            return ast.unparse(node.args[0])
    return ""


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _arguments(found: ast.ClassDef, lines: list[str]) -> Iterator[ScriptArgument]:
    marked = [number for number, line in enumerate(lines, start=1) if _RUNTIME in line and found.lineno <= number]
    filled_from = min(marked, default=len(lines) + 1)
    for node, following in zip(found.body, [*found.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        kind, item, optional, choices = _type(node.annotation)
        default, computed = _default(node.value)
        yield ScriptArgument(
            name, kind, default, _docstring(following), optional or (default is None and not computed), choices, item,
            computed, hidden=node.lineno > filled_from or name == "exp_name",
        )  # fmt: skip


def _default(value: ast.expr | None) -> tuple[Any, bool]:
    if value is None:
        return None, True
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("int", "float") and len(value.args) == 1:
        inner, unknown = _default(value.args[0])  # int(1e6) is how a million is written
        return (None, True) if unknown else ((int if ast.unparse(value.func) == "int" else float)(inner), False)
    try:
        return ast.literal_eval(value), False
    except (ValueError, TypeError, SyntaxError):
        return None, True


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _type(annotation: ast.expr) -> tuple[Kind, Kind, bool, tuple[str, ...]]:
    """Kind, kind of elements, whether None is allowed, choices."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _type(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = [side for side in (annotation.left, annotation.right) if ast.unparse(side) != "None"]
        kind, item, _, choices = _type(sides[0]) if len(sides) == 1 else ("other", "str", True, ())
        return kind, item, True, choices
    if isinstance(annotation, ast.Subscript):
        return _subscripted(annotation)
    return _KINDS.get(ast.unparse(annotation), "other"), "str", False, ()


def _subscripted(annotation: ast.Subscript) -> tuple[Kind, Kind, bool, tuple[str, ...]]:
    outer = ast.unparse(annotation.value).removeprefix("typing.")
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if outer == "Optional":
        kind, item, _, choices = _type(inner[0])
        return kind, item, True, choices
    if outer == "Literal":
        return "str", "str", False, tuple(str(ast.literal_eval(element)) for element in inner)
    if outer in _LISTS:
        return "list", _KINDS.get(ast.unparse(inner[0]), "other"), False, ()
    return "other", "str", False, ()
