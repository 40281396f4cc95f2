"""Packages that a script will import, including late imports inside functions and branches.

Scripts import packages for their last step (an evaluation, an upload) hours after the start. The source is parsed and
never run. Conditions on the script's arguments are evaluated with their values; for other conditions both branches are
scanned. Optional imports (`except ImportError`) are ignored.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNKNOWN = object()
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception"})


@dataclass(frozen=True)
class ScannedImports:
    """Result of a scan."""

    packages: frozenset[str]
    """Packages that will be imported, without the standard library and modules of the checkout."""
    records_video: bool
    """A function is called that records episodes by default (`capture_video: bool = True`)."""
    wrappers: frozenset[str]
    """Names that it uses from `gymnasium.wrappers`."""


def scan_imports(script: Path, checkout: Path, local: Iterable[str], values: Mapping[str, object]) -> ScannedImports:
    """Scan a script and the modules of the checkout that it imports, given the known values of its arguments."""
    scanner = _Scanner(checkout, frozenset(local), values)
    scanner.scan_module(script, main=True)
    packages = frozenset(scanner.packages - sys.stdlib_module_names - {"__future__"})
    return ScannedImports(packages, scanner.records_video, frozenset(scanner.wrappers))


class _Scanner:
    def __init__(self, checkout: Path, local: frozenset[str], values: Mapping[str, object]) -> None:
        self._checkout, self._local, self._values = checkout, local, values
        self._modules: dict[Path, dict[str, ast.FunctionDef]] = {}
        self._imported: dict[str, ast.FunctionDef] = {}
        """Functions of the checkout, by the names under which they were imported."""
        self._main = False
        self._optional = False
        self.packages: set[str] = set()
        self.wrappers: set[str] = set()
        self.records_video = False

    def scan_module(self, path: Path, *, main: bool = False) -> dict[str, ast.FunctionDef]:
        """Scan a module; returns the functions that it defines."""
        if path in self._modules:
            return self._modules[path]
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            return {}
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._modules[path] = functions
        previous, self._main = self._main, main
        self._scan_block(tree.body, functions=main)
        self._main = previous
        return functions

    def _scan_block(self, statements: Iterable[ast.stmt], *, functions: bool = True) -> None:
        for statement in statements:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._scan_import(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                self._scan_import_from(statement)
            elif isinstance(statement, ast.If):
                self._scan_expressions(statement)
                self._scan_if(statement)
            elif isinstance(statement, ast.Try):
                self._scan_try(statement)
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                # The script may call all its own functions; of other modules only the functions that it imports.
                if functions:
                    self._scan_block(statement.body)
            else:
                for field in ("body", "orelse"):
                    self._scan_block(getattr(statement, field, ()))
                self._scan_expressions(statement)

    def _scan_if(self, statement: ast.If) -> None:
        condition = self._evaluate(statement.test)
        if condition is _UNKNOWN or condition:
            self._scan_block(statement.body)
        if condition is _UNKNOWN or not condition:
            self._scan_block(statement.orelse)

    def _scan_try(self, statement: ast.Try) -> None:
        previous = self._optional
        self._optional = previous or any(_catches_import_error(handler) for handler in statement.handlers)
        self._scan_block(statement.body)
        self._optional = previous
        self._scan_block([*statement.orelse, *statement.finalbody])

    def _scan_import(self, name: str) -> None:
        if name.split(".")[0] in self._local:
            path = self._find_module(name)
            if path is not None:
                self.scan_module(path)
        elif not self._optional:
            self.packages.add(name.split(".")[0])

    def _scan_import_from(self, statement: ast.ImportFrom) -> None:
        if not statement.module or statement.level:
            return
        self._scan_import(statement.module)
        path = self._find_module(statement.module) if statement.module.split(".")[0] in self._local else None
        functions = self.scan_module(path) if path is not None else {}
        for alias in statement.names:
            function = functions.get(alias.name)
            if function is not None:
                self._imported[alias.asname or alias.name] = function
                previous, self._main = self._main, False
                self._scan_block(function.body)
                self._main = previous

    def _scan_expressions(self, statement: ast.stmt) -> None:
        children = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
        for node in (node for child in children for node in ast.walk(child)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._imported:
                self.records_video = self.records_video or self._records_video(node, self._imported[node.func.id])
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("gym.wrappers", "gymnasium.wrappers"):
                self.wrappers.add(node.attr)

    def _records_video(self, call: ast.Call, function: ast.FunctionDef) -> bool:
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        defaults = function.args.defaults
        arguments: dict[str | None, ast.expr] = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        arguments |= dict(zip(names, call.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
        value = self._evaluate(arguments["capture_video"]) if "capture_video" in arguments else _UNKNOWN
        return value is not _UNKNOWN and bool(value)

    def _find_module(self, module: str) -> Path | None:
        base = self._checkout / module.replace(".", "/")
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def _evaluate(self, node: ast.expr) -> object:
        """The value of an expression of constants and arguments of the script, or `_UNKNOWN`."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
            return self._values.get(node.attr, _UNKNOWN)
        if isinstance(node, ast.Name) and node.id == "__name__":
            return "__main__" if self._main else "imported"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._evaluate(node.operand)
            return _UNKNOWN if inner is _UNKNOWN else not inner
        if isinstance(node, ast.BoolOp):
            return self._evaluate_boolean(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._evaluate_comparison(node)
        return _UNKNOWN

    def _evaluate_boolean(self, node: ast.BoolOp) -> object:
        values = [self._evaluate(value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) is decisive for value in values):
            return decisive
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decisive

    def _evaluate_comparison(self, node: ast.Compare) -> object:
        left, right = self._evaluate(node.left), self._evaluate(node.comparators[0])
        compare = _COMPARISONS.get(type(node.ops[0]))
        if compare is None or left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        try:
            return compare(left, right)
        except TypeError:
            return _UNKNOWN


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    kinds = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return any(kind is None or ast.unparse(kind) in _IMPORT_ERRORS for kind in kinds)
