"""The scripts of a CleanRL checkout, described from their source without running them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from palaestra.errors import ConfigError
from palaestra.runs.catalogue import ScriptInfo
from palaestra.runs.process.interpreter import Interpreter, probe
from palaestra.runs.runner import Machine
from palaestra.runs.runners.cleanrl_script import Script, read_script

_Actions: TypeAlias = tuple[Literal["discrete", "continuous"], ...]
_NETWORKS = frozenset({"Agent", "Actor", "QNetwork"})
"""Classes that `policy_program.py` can act with."""
_MANY_STEPS_PER_FRAME = ("atari", "procgen")
"""Scripts whose wrappers of frames a play does not have."""


def describe_scripts(
    paths: Sequence[Path], interpreter: Interpreter, machine: Machine, distributions: Mapping[str, str]
) -> list[ScriptInfo]:
    """One entry per script. `distributions`: names on the package index of modules that are called otherwise."""
    scripts: dict[Path, Script | ConfigError] = {}
    for path in paths:
        try:
            scripts[path] = read_script(path)
        except ConfigError as error:
            scripts[path] = error
    imported = {name for path, script in scripts.items() for name in _packages(path, script)}
    names = {module: distributions.get(module, module) for module in sorted(imported)}
    probed = probe(interpreter, machine, packages=tuple(names.values()))
    missing = {module for module, name in names.items() if probed.packages.get(name) is None}
    return [_describe(path, script, missing, names, interpreter) for path, script in scripts.items()]


def _packages(path: Path, script: Script | ConfigError) -> frozenset[str]:
    """Modules of other packages that a script needs."""
    if isinstance(script, ConfigError):
        return frozenset()
    is_atari = "atari" in path.stem and "gymnasium" in script.imports
    emulator = {"ale_py", "cv2"} if is_atari else set()
    return (script.imports | emulator) - {"cleanrl", "cleanrl_utils", "ppo_trxl", "pom_env"}


def _describe(
    path: Path, script: Script | ConfigError, missing: set[str], names: Mapping[str, str], interpreter: Interpreter
) -> ScriptInfo:
    title = path.stem.replace("_", " ")
    if isinstance(script, ConfigError):
        return ScriptInfo(
            name=path.stem,
            title=title,
            description=f"It {script.reason}.",
            saves_checkpoints=False,
            installed=False,
            remedy=script.remedy,
        )
    source = path.read_text(encoding="utf-8")
    lacking = sorted(_packages(path, script) & missing)
    saves = script.argument("save_model") is not None
    note = "Saves its model with save_model=true." if saves else "Saves no model, so that it cannot be played."
    return ScriptInfo(
        name=path.stem,
        title=title,
        description=" ".join(filter(None, (_read_description(source), note))),
        actions=_find_actions(source),
        saves_checkpoints=saves,
        plays=saves and _can_act(path.stem, script, source),
        installed=not lacking,
        remedy=f"{interpreter.path} -m pip install {' '.join(names[name] for name in lacking)}" if lacking else "",
    )


def _read_description(source: str) -> str:
    """The docstring of a script, else its first comment."""
    docstring = ast.get_docstring(ast.parse(source))
    if docstring:
        return " ".join(docstring.split())
    first = next((line for line in source.splitlines() if line.strip()), "")
    text = first.lstrip("# ").strip() if first.startswith("#") and not first.startswith("#!") else ""
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." if text else ""


def _find_actions(source: str) -> _Actions:
    """Which attributes of the action space the networks use."""
    if "single_action_space.n" in source.replace("single_action_space.nvec", ""):
        return ("discrete",)
    return ("continuous",) if "single_action_space.shape" in source else ()


def _can_act(name: str, script: Script, source: str) -> bool:
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    is_torch = "torch" in script.imports and not script.imports & {"jax", "flax"}
    has_frames = any(word in name for word in _MANY_STEPS_PER_FRAME)
    return is_torch and "gymnasium" in script.imports and bool(classes & _NETWORKS) and not has_frames
