"""Arguments of a CleanRL script, read from its source without running it, and the command-line flags for them.

Every script declares one dataclass and passes it to `tyro.cli`: names, types, defaults and a docstring per field. This
is the schema of the run's configuration. Flags follow tyro: `--kebab-case value`, `--x` and `--no-x` for booleans, and
`--x=value` for values that start with a dash, so that no value can become another flag.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.runs.runners.script_arguments import ScriptArgument, iterate_imports, parse_default, parse_type

_RUNTIME_COMMENT = "to be filled in runtime"


@dataclass(frozen=True)
class Script:
    """A script as described by its source."""

    path: Path
    arguments: tuple[ScriptArgument, ...]
    imports: frozenset[str] = field(default_factory=frozenset)
    """Packages that it imports at its top level, without the standard library."""
    local_imports: tuple[str, ...] = ()
    """Modules of the checkout that it imports, such as `cleanrl_utils.buffers`."""

    def argument(self, name: str) -> ScriptArgument | None:
        """The argument with this name."""
        return next((argument for argument in self.arguments if argument.name == name), None)


def read_script(path: Path) -> Script:
    """Read a script. Raises `ConfigError` if it does not use tyro."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ConfigError("script", str(path), f"cannot be read ({error})", "Check the file") from None
    class_name = next(
        (
            ast.unparse(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tyro.cli" and node.args
        ),
        "",
    )
    settings = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name), None)
    if settings is None:
        reason = "passes no class of its own to tyro.cli, so its options are unknown"
        raise ConfigError("script", str(path), reason, "Choose a CleanRL script, or write a runner (docs/runners.md)")
    imports = list(iterate_imports(tree))
    return Script(
        path,
        tuple(_iterate_arguments(settings, source.splitlines())),
        frozenset(name.split(".")[0] for name in imports) - set(sys.stdlib_module_names) - {"__future__"},
        tuple(name for name in imports if name.startswith("cleanrl_utils.")),
    )


def _iterate_arguments(settings: ast.ClassDef, lines: list[str]) -> Iterator[ScriptArgument]:
    comments = [number for number, line in enumerate(lines, start=1) if _RUNTIME_COMMENT in line]
    computed_from = min((number for number in comments if number >= settings.lineno), default=len(lines) + 1)
    for node, following in zip(settings.body, [*settings.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        kind, item, optional, choices = parse_type(node.annotation)
        default, computed = parse_default(node.value)
        yield ScriptArgument(
            name,
            kind,
            default,
            _parse_docstring(following),
            optional or (default is None and not computed),
            choices,
            item,
            computed,
            hidden=node.lineno > computed_from or name == "exp_name",
        )


def _parse_docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def build_flags(arguments: Sequence[ScriptArgument], values: Mapping[str, object]) -> list[str]:
    """Command-line words for checked values, in the order of the script's arguments."""
    words: list[str] = []
    for argument in arguments:
        if argument.name not in values:
            continue
        flag, value = f"--{argument.name.replace('_', '-')}", values[argument.name]
        text = str(value)
        if argument.kind == "bool" and isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif argument.kind == "list" and isinstance(value, list | tuple):
            words += [flag, *(str(element) for element in value)]
        elif text.startswith("-") or not text:
            words.append(f"{flag}={text}")
        else:
            words += [flag, text]
    return words
