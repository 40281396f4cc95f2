"""What a script will import, also late: inside functions and branches that its arguments reach.

Scripts import what they need for their last step (an evaluation, an upload) where they need it, hours after the start.
The source is read and never run. A condition on the script's own arguments is decided by their values; any other is
taken both ways. Imports that the script is prepared to miss (`except ImportError`) are no need.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ScannedImports", "scan_imports"]

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
_TOLERATED = frozenset({"ImportError", "ModuleNotFoundError", "Exception"})


@dataclass(frozen=True)
class ScannedImports:
    """What was found."""

    packages: frozenset[str]
    """First words of the modules that will be imported, the standard library and the checkout's own left out."""
    films: bool
    """A function is called that films episodes by default (`capture_video: bool = True`)."""
    wrappers: frozenset[str]
    """Names it takes from `gymnasium.wrappers`."""


def scan_imports(script: Path, checkout: Path, local: Iterable[str], values: Mapping[str, Any]) -> ScannedImports:
    """Follow a script from its first line to its last, with the values of its arguments that are known."""
    scan = _Scan(checkout, frozenset(local), values)
    scan.module(script, main=True)
    packages = frozenset(scan.packages - sys.stdlib_module_names - {"__future__"})
    return ScannedImports(packages, scan.films, frozenset(scan.wrappers))


class _Scan:
    def __init__(self, checkout: Path, local: frozenset[str], values: Mapping[str, Any]) -> None:
        self._checkout, self._local, self._values = checkout, local, values
        self._modules: dict[Path, dict[str, ast.FunctionDef]] = {}
        self._imported: dict[str, ast.FunctionDef] = {}
        """Functions of the checkout by the names under which they were imported."""
        self._main = False
        self._optional = False
        self.packages: set[str] = set()
        self.wrappers: set[str] = set()
        self.films = False

    def module(self, path: Path, *, main: bool = False) -> dict[str, ast.FunctionDef]:
        """Follow a module; the functions it defines."""
        if path in self._modules:
            return self._modules[path]
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            return {}
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._modules[path] = functions
        before, self._main = self._main, main
        self._block(tree.body, functions=main)
        self._main = before
        return functions

    def _block(self, statements: Iterable[ast.stmt], *, functions: bool = True) -> None:
        for statement in statements:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._import(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                self._import_from(statement)
            elif isinstance(statement, ast.If):
                self._expressions(statement)
                self._if(statement)
            elif isinstance(statement, ast.Try):
                self._try(statement)
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                # A script's own functions are there to be called; those of other modules only if it imports them.
                if functions:
                    self._block(statement.body)
            else:
                for field in ("body", "orelse"):
                    self._block(getattr(statement, field, ()))
                self._expressions(statement)

    def _if(self, statement: ast.If) -> None:
        condition = self._value(statement.test)
        if condition is _UNKNOWN or condition:
            self._block(statement.body)
        if condition is _UNKNOWN or not condition:
            self._block(statement.orelse)

    def _try(self, statement: ast.Try) -> None:
        before = self._optional
        self._optional = before or any(_tolerates(handler) for handler in statement.handlers)
        self._block(statement.body)
        self._optional = before
        self._block([*statement.orelse, *statement.finalbody])

    def _import(self, name: str) -> None:
        if name.split(".")[0] in self._local:
            path = self._path(name)
            if path is not None:
                self.module(path)
        elif not self._optional:
            self.packages.add(name.split(".")[0])

    def _import_from(self, statement: ast.ImportFrom) -> None:
        if not statement.module or statement.level:
            return
        self._import(statement.module)
        path = self._path(statement.module) if statement.module.split(".")[0] in self._local else None
        functions = self.module(path) if path is not None else {}
        for alias in statement.names:
            function = functions.get(alias.name)
            if function is not None:
                self._imported[alias.asname or alias.name] = function
                before, self._main = self._main, False
                self._block(function.body)
                self._main = before

    def _expressions(self, statement: ast.stmt) -> None:
        own = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
        for node in (node for child in own for node in ast.walk(child)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._imported:
                self.films = self.films or self._films(node, self._imported[node.func.id])
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("gym.wrappers", "gymnasium.wrappers"):
                self.wrappers.add(node.attr)

    def _films(self, call: ast.Call, function: ast.FunctionDef) -> bool:
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        defaults = function.args.defaults
        arguments: dict[str | None, ast.expr] = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        arguments |= dict(zip(names, call.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
        value = self._value(arguments["capture_video"]) if "capture_video" in arguments else _UNKNOWN
        return value is not _UNKNOWN and bool(value)

    def _path(self, module: str) -> Path | None:
        base = self._checkout / module.replace(".", "/")
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def _value(self, node: ast.expr) -> Any:
        """What an expression is, when it consists of the script's arguments and constants."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
            return self._values.get(node.attr, _UNKNOWN)
        if isinstance(node, ast.Name) and node.id == "__name__":
            return "__main__" if self._main else "imported"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._value(node.operand)
            return _UNKNOWN if inner is _UNKNOWN else not inner
        if isinstance(node, ast.BoolOp):
            return self._boolean_value(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._comparison_value(node)
        return _UNKNOWN

    def _boolean_value(self, node: ast.BoolOp) -> Any:
        values = [self._value(value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) is decisive for value in values):
            return decisive
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decisive

    def _comparison_value(self, node: ast.Compare) -> Any:
        left, right = self._value(node.left), self._value(node.comparators[0])
        compare = _COMPARISONS.get(type(node.ops[0]))
        if compare is None or left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        try:
            return compare(left, right)
        except TypeError:
            return _UNKNOWN


def _tolerates(handler: ast.ExceptHandler) -> bool:
    kinds = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return any(kind is None or ast.unparse(kind) in _TOLERATED for kind in kinds)
