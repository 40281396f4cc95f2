"""The runner `cleanrl`: an unmodified script of the user's own CleanRL checkout.

Flags are generated from the script's own arguments; it runs in a working directory of its own. Where Gymnasium 1 is
installed a compatibility shim goes onto PYTHONPATH, declared in the command. The operator agrees to every command,
because neither we nor an installed package brought the code.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.runs.process.interpreter import (
    Interpreter,
    Probe,
    choose_python,
    cuda_findings,
    environment_findings,
    probe,
    python_findings,
    trainer_environment,
)
from palaestra.runs.runner import (
    AttemptPaths,
    EventFiles,
    Finding,
    Injection,
    LaunchPlan,
    Machine,
    RunnerCapabilities,
    StdoutLines,
)
from palaestra.runs.runners.cleanrl_imports import ScannedImports, scan_imports
from palaestra.runs.runners.cleanrl_script import (
    Script,
    argument_schema,
    build_flags,
    check_values,
    leaves_directory,
    read_script,
)
from palaestra.runs.spec import RunSpec

__all__ = ["CleanrlRunner", "tracking_findings"]

SHIM = Path(__file__).with_name("shims") / "cleanrl" / "sitecustomize.py"
RENAMED = {"GrayScaleObservation": "GrayscaleObservation", "FrameStack": "FrameStackObservation"}
"""Wrappers of Gymnasium 0.29 that version 1 has under another name; the shim brings the old names back."""
_WHY = "lets a script for Gymnasium 0.29 report its episodes under Gymnasium 1"
CHECKOUT = "PALAESTRA_CLEANRL"
CLONE = "git clone https://github.com/vwxyzjn/cleanrl, then export PALAESTRA_CLEANRL=$PWD/cleanrl or give checkout=DIR"
_DISTRIBUTIONS = {
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "memory_gym": "memory-gym",
    "huggingface_hub": "huggingface-hub",
}
_LOCAL = frozenset({"cleanrl", "cleanrl_utils", "ppo_trxl", "pom_env"})
_REGISTER_NOTHING = frozenset({"gymnasium", "numpy", "torch", "tyro", "tensorboard", "flax", "jax", "optax", "rich"})
"""Imports that add no environments of their own; beside others, an id unknown to Gymnasium may still exist."""
_OURS = {
    "track": "Use --track offline or --track online",
    "capture_video": "Use --video",
    "env_id": "Use --env",
    "seed": "Use --seed",
}


@dataclass(frozen=True)
class _Wish:
    """A spec that was understood: which script, and every value it is told."""

    checkout: Path
    script: Script
    values: dict[str, Any]
    notes: tuple[Finding, ...]
    scanned: ScannedImports

    @property
    def films(self) -> bool:
        """Whether episodes are filmed at any time; evaluations of saved models are."""
        return self.scanned.films or bool(self.value("capture_video"))

    @property
    def atari(self) -> bool:
        return "atari" in self.script.path.stem and "gymnasium" in self.script.imports

    @property
    def env_id(self) -> str:
        return str(self.value("env_id") or "")

    def value(self, name: str) -> Any:
        argument = self.script.argument(name)
        return self.values.get(name, argument.default if argument else None)


class CleanrlRunner:
    """Scripts of a CleanRL checkout, as they are."""

    name = "cleanrl"
    capabilities = RunnerCapabilities(
        title="CleanRL, from your checkout",
        external_services=("wandb", "huggingface"),
        video=True,
        tracking=True,
        runs_foreign_code=True,
    )

    def config_schema(self, spec: RunSpec) -> dict[str, Any]:
        """The script's own arguments; without a script only where the checkout is."""
        where = {"type": "string", "description": f"Directory of the CleanRL checkout; else ${CHECKOUT}."}
        properties: dict[str, Any] = {"checkout": where}
        if spec.script is not None:
            checkout = _checkout(spec, os.environ)
            arguments = read_script(_script(spec.script, checkout)).arguments
            properties |= argument_schema(argument for argument in arguments if argument.name not in _OURS)
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Checkout, script, flags, interpreter, packages, environment, credentials: in this order."""
        try:
            wish = _understood(spec, machine)
            interpreter = choose_python(spec, wish.checkout)
        except ConfigError as error:
            shown = f"{error.value}: " if error.value not in (None, "") else ""
            return [Finding(error.place, "refused", f"{shown}{error.reason}", error.remedy)]
        refused = check_values(wish.script.arguments, wish.values, wish.script.path.name)
        if refused:
            return refused
        found = _probed(wish, interpreter, machine, spec)
        locked = spec.python is None and (wish.checkout / "uv.lock").is_file() and shutil.which("uv") is not None
        remedy = f"uv sync --project {wish.checkout}" if locked else ""
        text = f"{wish.script.path.relative_to(wish.checkout)} (sha256 {_hash(wish)[:12]})"
        return [
            Finding("script", "ok", text),
            *python_findings(interpreter, found, _needed(wish, spec), oldest=(3, 8), remedy=remedy),
            *_environment(wish, found),
            *_wrappers(wish, found, interpreter),
            *(cuda_findings(interpreter, found) if _wants_cuda(wish, spec) else []),
            *wish.notes,
            *tracking_findings(spec, machine),
            *_upload(wish, machine),
            *([_shim_note(found)] if _needs_shim(wish, found) else []),
            *([_NO_CLIPS] if _needs_shim(wish, found) and spec.track != "off" and wish.films else []),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`python script.py --flags`, in the attempt's working directory."""
        wish = _understood(spec, machine)
        refused = check_values(wish.script.arguments, wish.values, wish.script.path.name)
        if refused:
            raise ConfigError(refused[0].check, wish.script.path.name, refused[0].text, refused[0].remedy)
        interpreter = choose_python(spec, wish.checkout)
        found = _probed(wish, interpreter, machine, spec)
        search = [str(wish.checkout)]
        shim = paths.attempt_dir / "shim" / SHIM.name
        text = SHIM.read_text(encoding="utf-8") if _needs_shim(wish, found) else ""
        if text:
            search.insert(0, str(shim.parent))
        further = {"PYTHONPATH": ":".join(search)}
        if spec.track != "off":
            further["WANDB_MODE"] = spec.track
        total = wish.value("total_timesteps")
        return LaunchPlan(
            argv=(interpreter.path, str(wish.script.path), *build_flags(wish.script.arguments, wish.values)),
            environment=trainer_environment(spec, paths, machine, further),
            cwd=paths.work_dir,
            paths=paths,
            sources=(EventFiles("runs/**/events.out.tfevents.*", "cleanrl"), StdoutLines("cleanrl")),
            checkpoints=("runs/**/*.cleanrl_model",),
            videos=("videos/**/*.mp4",),
            env_id=wish.env_id,
            algorithm=wish.script.path.stem,
            total_steps=total if isinstance(total, int) else None,
            env_signature=found.env.get("signature", {}),
            resolved={
                **{argument.name: wish.value(argument.name) for argument in wish.script.arguments},
                "script": str(wish.script.path.relative_to(wish.checkout)),
                "checkout": str(wish.checkout),
            },
            files={f"shim/{SHIM.name}": text} if text else {},
            injected=(Injection(str(shim), _sha256(text), _WHY),) if text else (),
            script_sha256=_hash(wish),
            versions={"python": found.shown_version, **{k: v for k, v in found.packages.items() if v is not None}},
        )


def _understood(spec: RunSpec, machine: Machine) -> _Wish:
    """Which script with which values; `ConfigError` whose place is the check that failed."""
    checkout = _checkout(spec, machine.environment)
    if spec.script is None:
        raise ConfigError(
            "script", None, "no script named", f"Use --script with one of {', '.join(_names(checkout)[:8])}"
        )
    script = read_script(_script(spec.script, checkout))
    values = {key: value for key, value in spec.config.items() if key != "checkout"}
    for key, remedy in _OURS.items():
        if key in values:
            raise ConfigError("flag", key, "is an option of every runner, not a key of this one", remedy)
    notes = []
    general = {
        "env_id": spec.env_id,
        "seed": spec.seed,
        "track": spec.track != "off" or None,
        "capture_video": spec.video or None,
    }
    for key, value in general.items():
        if value is None:
            continue
        if script.argument(key) is None:
            raise ConfigError("flag", key, f"{script.path.name} has no argument {key}", "Leave it out")
        values[key] = value
    if script.argument("cuda") is not None:
        if values.get("cuda") and not spec.gpus:
            notes.append(Finding("gpu", "warning", "cuda is asked for and no GPU: it runs on the CPU", "Use --gpus 1"))
        values["cuda"] = spec.gpus > 0
    known = {one.name: one.default for one in script.arguments if not one.computed} | values
    return _Wish(checkout, script, values, tuple(notes), scan_imports(script.path, checkout, _LOCAL, known))


def _checkout(spec: RunSpec, environment: Mapping[str, str]) -> Path:
    """The key `checkout`, else what the request brought, else the environment of whoever looks: of the service."""
    wished = spec.config.get("checkout") or spec.checkout
    given = wished or environment.get(CHECKOUT)
    if not isinstance(given, str):
        reason = f"no CleanRL checkout is known: the request names none and the run service has no {CHECKOUT}"
        raise ConfigError("script", spec.script, reason, CLONE)
    checkout = (spec.invoked_from / Path(given).expanduser()).resolve()
    if not (checkout / "cleanrl").is_dir():
        whose = "" if wished else f" ({CHECKOUT} in the run service's environment; yours counts when it is sent)"
        raise ConfigError("script", str(checkout), f"is not a CleanRL checkout{whose}", CLONE)
    return checkout


def _names(checkout: Path) -> list[str]:
    return sorted(path.stem for path in (checkout / "cleanrl").glob("*.py"))


def _script(name: str, checkout: Path) -> Path:
    if leaves_directory(name):
        raise ConfigError("script", name, "must lie in the checkout", "Give its name, such as dqn")
    stem = name.removeprefix("cleanrl/").removesuffix(".py")
    path = checkout / "cleanrl" / f"{stem}.py"
    if path.is_file() and path.resolve().is_relative_to(checkout):
        return path
    close = closest_names(stem, _names(checkout))
    remedy = f"Nearest: {', '.join(close)}" if close else f"There are {', '.join(_names(checkout)[:12])}"
    raise ConfigError("script", name, f"is not in {checkout / 'cleanrl'}", remedy)


def _needed(wish: _Wish, spec: RunSpec) -> dict[str, str]:
    """Distributions that the script imports from its first line to its last, and how to install each."""
    names = {_DISTRIBUTIONS.get(word, word) for word in wish.scanned.packages}
    names |= {"tensorboard"} if "torch" in names else set()
    names |= {"wandb"} if spec.track != "off" else set()
    names |= {"moviepy"} if wish.films else set()
    names |= {"ale-py", "opencv-python"} if wish.atari else set()
    extras = {"gymnasium": "gymnasium[classic-control]"}
    return {name: extras.get(name, name) for name in sorted(names)}


def _probed(wish: _Wish, interpreter: Interpreter, machine: Machine, spec: RunSpec) -> Probe:
    env_id = wish.env_id if "gymnasium" in wish.script.imports else None
    packages, cuda = tuple(_needed(wish, spec)), _wants_cuda(wish, spec)
    return probe(
        interpreter, machine, packages=packages, env_id=env_id, cuda=cuda, pythonpath=(str(wish.checkout),),
        register=("ale_py",) if wish.atari else (), render=wish.films, wrappers=tuple(sorted(wish.scanned.wrappers)),
    )  # fmt: skip


def _wants_cuda(wish: _Wish, spec: RunSpec) -> bool:
    return spec.gpus > 0 and "torch" in wish.script.imports


def _environment(wish: _Wish, found: Probe) -> list[Finding]:
    if None in found.packages.values():
        # Without its packages the environment cannot be made; they are what is refused.
        return []
    findings = environment_findings(found, wish.env_id)
    if wish.script.imports - _LOCAL - _REGISTER_NOTHING:
        # The script's own imports may register what a bare Gymnasium does not know.
        return [Finding(f.check, "warning" if f.level == "refused" else f.level, f.text, f.remedy) for f in findings]
    return findings


def _wrappers(wish: _Wish, found: Probe, interpreter: Interpreter) -> list[Finding]:
    """Whether the installed Gymnasium has what the script takes from its `wrappers`."""
    missing = sorted(set(found.missing_wrappers) - RENAMED.keys())
    if not missing:
        return []
    version = found.packages.get("gymnasium")
    text = f"{wish.script.path.name} uses gymnasium.wrappers.{missing[0]}, which gymnasium {version} does not have"
    return [Finding("wrappers", "refused", text, f"{interpreter.path} -m pip install 'gymnasium==0.29.1'")]


def _upload(wish: _Wish, machine: Machine) -> list[Finding]:
    """Whether the Hugging Face Hub would let us in; only asked of runs that upload their model when they have ended."""
    if "huggingface_hub" not in wish.scanned.packages or not wish.value("upload_model"):
        return []
    home = Path(machine.environment.get("HOME", ""))
    cache = machine.environment.get("HF_HOME") or home / ".cache" / "huggingface"
    if machine.environment.get("HF_TOKEN") or (Path(cache) / "token").is_file():
        return [Finding("credentials", "ok", "for the Hugging Face Hub")]
    text = "upload_model needs HF_TOKEN in the service's environment, or a token that hf auth login has stored"
    return [Finding("credentials", "refused", text, "hf auth login, or leave upload_model out")]


def _needs_shim(wish: _Wish, found: Probe) -> bool:
    return "gymnasium" in wish.script.imports and found.at_least("gymnasium", 1)


def _shim_note(found: Probe) -> Finding:
    text = f"{found.packages['gymnasium']}: a compatibility shim is injected, or no episode would ever be reported"
    return Finding("gymnasium", "warning", text, "Install gymnasium==0.29.1 to run without it")


_NO_CLIPS = Finding(
    "wandb", "warning", "clips stay in the run's directory: W&B cannot take them from Gymnasium 1",
    "Install gymnasium==0.29.1 to have them uploaded",
)  # fmt: skip


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(wish: _Wish) -> str:
    """Of the script and of the checkout's modules it imports by name."""
    digest = hashlib.sha256(wish.script.path.read_bytes())
    for module in wish.script.local_imports:
        path = wish.checkout / f"{module.replace('.', '/')}.py"
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def tracking_findings(spec: RunSpec, machine: Machine) -> list[Finding]:
    """Whether W&B would let us in; only asked of runs that log online."""
    if spec.track != "online":
        return []
    if machine.environment.get("WANDB_API_KEY") or _in_netrc("api.wandb.ai", machine.environment.get("HOME", "")):
        return [Finding("credentials", "ok", "for W&B")]
    text = "W&B online needs WANDB_API_KEY in the service's environment, or an entry in ~/.netrc"
    return [Finding("credentials", "refused", text, "wandb login, or use --track offline")]


def _in_netrc(host: str, home: str) -> bool:
    try:
        return netrc.netrc(str(Path(home) / ".netrc")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
