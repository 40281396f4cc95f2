"""The scripts of a CORL checkout, described from their source without running them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.runs.catalogue import ScriptInfo
from palaestra.runs.process.interpreter import Interpreter, probe
from palaestra.runs.runner import Machine
from palaestra.runs.runners.corl.script import CorlScript, read_corl_script

_DESCRIPTIONS = {
    "any_percent_bc": "Imitates the best episodes of the dataset.",
    "awac": "Weights the actions of the dataset by their advantage.",
    "cal_ql": "CQL with calibrated values, for fine-tuning.",
    "cql": "Lowers the values of actions that are not in the dataset.",
    "dt": "A transformer that predicts actions for a wanted return.",
    "edac": "SAC with an ensemble of critics that are kept diverse.",
    "iql": "Learns values by expectile regression, never for unseen actions.",
    "lb_sac": "SAC-N with large batches.",
    "rebrac": "TD3+BC with tuned details, in JAX.",
    "sac_n": "SAC with the minimum over many critics.",
    "spot": "TD3 that stays where a model of the dataset's actions is dense.",
    "td3_bc": "TD3 plus imitation of the dataset: fast and simple.",
}


def describe_corl_scripts(
    paths: Mapping[str, Path],
    interpreter: Interpreter,
    machine: Machine,
    required_packages: Callable[[frozenset[str]], Mapping[str, str]],
) -> list[ScriptInfo]:
    """One entry per script. `required_packages`: requirements of the distributions that given imports need."""
    scripts: dict[str, CorlScript | ConfigError] = {}
    for name, path in paths.items():
        try:
            scripts[name] = read_corl_script(path)
        except ConfigError as error:
            scripts[name] = error
    imports = {name: script.imports for name, script in scripts.items() if isinstance(script, CorlScript)}
    needed = {name: required_packages(modules) for name, modules in imports.items()}
    packages = sorted({package for names in needed.values() for package in names})
    probed = probe(interpreter, machine, packages=tuple(packages))
    missing = {package for package in packages if probed.packages.get(package) is None}
    return [_describe(name, script, needed.get(name, {}), missing, interpreter) for name, script in scripts.items()]


def _describe(
    name: str, script: CorlScript | ConfigError, needed: Mapping[str, str], missing: set[str], interpreter: Interpreter
) -> ScriptInfo:
    stem = name.rpartition("/")[2]
    title = stem.replace("_", " ") + (", fine-tuning" if "/" in name else "")
    if isinstance(script, ConfigError):
        text = f"It {script.reason}."
        return ScriptInfo(
            name=name, title=title, description=text, saves_checkpoints=False, installed=False, remedy=script.remedy
        )
    lacking = [package for package in needed if package in missing]
    description = _DESCRIPTIONS.get(stem, "")
    if "/" in name:
        description = f"{description} First offline, then in the environment.".strip()
    if _pickles_objects(script.path):
        description = f"{description} Its checkpoints hold pickled objects, which are not loaded here.".strip()
    return ScriptInfo(
        name=name,
        title=title,
        description=description,
        actions=("continuous",),
        saves_checkpoints=script.argument("checkpoints_path") is not None,
        plays=can_act(script.path) and not _pickles_objects(script.path),
        warm_start=script.argument("load_model") is not None and not _pickles_objects(script.path),
        installed=not lacking,
        remedy=f"{interpreter.path} -m pip install {' '.join(lacking)}" if lacking else "",
    )


def can_act(path: Path) -> bool:
    """Whether a script defines a network with the method `act`, which maps one observation to an action."""
    return any(
        isinstance(method, ast.FunctionDef) and method.name == "act"
        for network in _list_networks(path)
        for method in network.body
    )


def _pickles_objects(path: Path) -> bool:
    """Whether a script saves whole networks: those of CQL keep a learned number as a network `Scalar`."""
    return any(network.name == "Scalar" for network in _list_networks(path))


def _list_networks(path: Path) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if any(ast.unparse(base).endswith("nn.Module") for base in node.bases)]
