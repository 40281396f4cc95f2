"""Configuration of a CORL script, read from its source without running it, and the command-line flags for it.

Every script declares one dataclass and lets `pyrallis.wrap` fill it. A comment above or behind a field explains it. The
scripts name the same thing differently (`env`, `env_name`), so that `CorlScript` says the role of a field. pyrallis
reads every value as YAML: `--batch_size=256`, `--betas=[0.9, 0.999]`, `--checkpoints_path=null`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.runs.runners.script_arguments import ScriptArgument, iterate_imports, parse_default, parse_type
from palaestra.runs.wire import JsonObject

_ENV_FIELDS = ("env", "env_name", "dataset_name")
_SEED_FIELDS = ("seed", "train_seed")
_UPDATE_FIELDS = (
    ("max_timesteps",),
    ("update_steps",),
    ("num_train_ops",),
    ("offline_iterations", "online_iterations", "vae_iterations"),
    ("num_offline_updates", "num_online_updates"),
)
"""Fields whose sum is the number of gradient updates; the first one of each is what a user would lower."""
_OFFLINE_FIELDS = ("vae_iterations", "offline_iterations", "num_offline_updates")
"""Fields of the scripts in `finetune` whose sum is the number of updates before the first step in the environment."""
_EVALUATION_FIELDS = ("eval_freq", "eval_frequency", "eval_every")
_COUNTS = (
    *("max_timesteps", "update_steps", "num_train_ops", "num_epochs", "num_updates_on_epoch", "warmup_steps"),
    *("eval_freq", "eval_frequency", "eval_every", "log_every", "policy_freq", "target_update_period"),
    *("batch_size", "n_episodes", "n_test_episodes", "eval_episodes", "episode_len", "max_traj_len", "seq_len"),
)
_PHASES = ("offline_iterations", "online_iterations", "vae_iterations", "num_offline_updates", "num_online_updates")
FIELD_RANGES: dict[str, JsonObject] = {
    **{name: {"minimum": 1} for name in _COUNTS},
    **{name: {"minimum": 0} for name in _PHASES},  # a script of `finetune` can skip a phase
    **{name: {"minimum": 0, "maximum": 1} for name in ("discount", "gamma", "online_discount")},
    "frac": {"exclusiveMinimum": 0, "maximum": 1},
}
"""Ranges of fields in the words of JSON Schema. The scripts check none: `eval_freq=-1` evaluates at every update."""
_NAMES = frozenset({"project", "group", "name"})
_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_YAML_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that YAML does not read as text."""


@dataclass(frozen=True)
class CorlScript:
    """A script as described by its source."""

    path: Path
    arguments: tuple[ScriptArgument, ...]
    imports: frozenset[str]
    """Packages that it imports at its top level, without the standard library."""

    def argument(self, name: str) -> ScriptArgument | None:
        """The field with this name."""
        return next((argument for argument in self.arguments if argument.name == name), None)

    @cached_property
    def env_field(self) -> str:
        """The field that names the environment."""
        return self._find(_ENV_FIELDS)

    @cached_property
    def seed_field(self) -> str:
        """The field of the seed of training."""
        return self._find(_SEED_FIELDS)

    @cached_property
    def update_field(self) -> str:
        """The field to lower for a shorter run."""
        return "num_epochs" if self.argument("num_epochs") else self._find([fields[0] for fields in _UPDATE_FIELDS])

    @cached_property
    def evaluation_field(self) -> str:
        """The field of the interval between evaluations."""
        return self._find(_EVALUATION_FIELDS)

    def defaults(self) -> JsonObject:
        """The defaults that are known without running it."""
        return {argument.name: argument.default for argument in self.arguments if not argument.computed}

    def count_updates(self, values: Mapping[str, object]) -> int | None:
        """The number of gradient updates of a run; None if the script does not say."""
        if "num_epochs" in values:
            epochs, updates = values["num_epochs"], values.get("num_updates_on_epoch", 1)
            return epochs * updates if isinstance(epochs, int) and isinstance(updates, int) else None
        for fields in _UPDATE_FIELDS:
            numbers = [value for field in fields if isinstance(value := values.get(field), int | float)]
            if fields[0] in values:
                return int(sum(numbers))
        return None

    def count_evaluations(self, values: Mapping[str, object]) -> int:
        """The number of evaluations of a run; each saves a checkpoint."""
        interval, updates = values.get(self.evaluation_field), self.count_updates(values)
        if not isinstance(interval, int | float) or interval < 1 or updates is None:
            return 1
        if self.evaluation_field == "eval_every":
            # Counted from the first epoch or update on, and always at the end.
            epochs = values.get("num_epochs")
            return int((epochs if isinstance(epochs, int) else updates) // interval) + 1
        return int(updates // interval)

    def _find(self, names: tuple[str, ...] | list[str]) -> str:
        return next((name for name in names if self.argument(name) is not None), "")


def read_corl_script(path: Path) -> CorlScript:
    """Read a script. Raises `ConfigError` if it does not use pyrallis."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ConfigError("script", str(path), f"cannot be read ({error})", "Check the file") from None
    class_name = _find_config_class(tree)
    settings = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name), None)
    if settings is None:
        reason = "passes no class of its own to pyrallis.wrap, so its options are unknown"
        raise ConfigError("script", str(path), reason, "Choose a CORL script, or write a runner (docs/runners.md)")
    packages = {name.split(".")[0] for name in iterate_imports(tree)}
    arguments = tuple(_iterate_fields(settings, source.splitlines()))
    return CorlScript(path, arguments, frozenset(packages - set(sys.stdlib_module_names) - {"__future__"}))


def _find_config_class(tree: ast.Module) -> str:
    """The class of the first argument of the function that `pyrallis.wrap` decorates."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.args.args:
            continue
        if any(ast.unparse(decorator).startswith("pyrallis.wrap") for decorator in node.decorator_list):
            annotation = node.args.args[0].annotation
            return "" if annotation is None else ast.unparse(annotation)
    return ""


def _iterate_fields(settings: ast.ClassDef, lines: list[str]) -> Iterator[ScriptArgument]:
    fields = [node for node in settings.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    trailing = [_read_trailing_comment(node, lines) for node in fields]
    # Where comments follow the fields, a comment above a field is the title of a section.
    comments = trailing if any(trailing) else [_read_comment_above(node, lines) for node in fields]
    for node, comment in zip(fields, comments, strict=True):
        assert isinstance(node.target, ast.Name)
        kind, item, optional, choices = parse_type(node.annotation)
        default, computed = parse_default(node.value)
        yield ScriptArgument(
            node.target.id,
            kind,
            list(default) if isinstance(default, tuple) else default,
            comment,
            optional or (default is None and not computed),
            choices,
            item,
            computed,
            hidden=node.target.id in _NAMES,
        )


def _read_trailing_comment(node: ast.AnnAssign, lines: list[str]) -> str:
    rest = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode().strip()
    return rest.lstrip("# ").strip() if rest.startswith("#") else ""


def _read_comment_above(node: ast.AnnAssign, lines: list[str]) -> str:
    comment_lines: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        comment_lines.insert(0, line.strip().lstrip("# ").strip())
    return " ".join(comment_lines)


def read_base_config(path: Path, script: CorlScript) -> JsonObject:
    """The values of a YAML file of the checkout. Raises `ConfigError` if they are not those of the script."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = f"cannot be read ({' '.join(str(error).split())[:200]})"
        raise ConfigError("config_path", str(path), reason, "Choose a file of configs/") from None
    if not isinstance(values, dict):
        raise ConfigError("config_path", str(path), "holds no keys", "Choose a file of configs/")
    unknown = sorted(str(key) for key in values if script.argument(str(key)) is None)
    if unknown:
        reason = f"{script.path.name} has no field {unknown[0]}"
        raise ConfigError("config_path", str(path), reason, f"Choose a file of configs/ for {script.path.stem}")
    # YAML 1.1 reads 1e-4 as text; pyrallis converts it by the type of the field.
    return {key: _convert(script.argument(key), value) for key, value in values.items()}


def _convert(argument: ScriptArgument | None, value: object) -> object:
    if not isinstance(value, str) or argument is None or argument.kind not in ("int", "float"):
        return value
    try:
        return float(value) if argument.kind == "float" else int(value)
    except ValueError:
        return value


def count_offline_updates(values: Mapping[str, object]) -> int:
    """The number of updates before a script acts in the environment; 0 for one that never does."""
    return int(sum(value for field in _OFFLINE_FIELDS if isinstance(value := values.get(field), int | float)))


def build_corl_flags(script: CorlScript, values: Mapping[str, object]) -> list[str]:
    """Command-line words for checked values, in the order of the fields."""
    return [f"--{field.name}={_to_yaml(values[field.name])}" for field in script.arguments if field.name in values]


def _to_yaml(value: object) -> str:
    is_plain = isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _YAML_WORDS
    return str(value) if is_plain else json.dumps(value)
