"""The runner `cleanrl`: unmodified scripts of the user's CleanRL checkout.

Flags are generated from the arguments of the script, which runs in the working directory of the attempt. With
Gymnasium 1, a compatibility shim is added to PYTHONPATH and declared in the command. The user confirms every command,
because the code is foreign.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palaestra.config import closest_names
from palaestra.errors import CheckpointError, ConfigError
from palaestra.runs.catalogue import EnvironmentInfo, ScriptInfo
from palaestra.runs.process.environments import list_environments, read_parameters
from palaestra.runs.process.interpreter import (
    Interpreter,
    Probe,
    choose_policy_python,
    choose_python,
    cuda_findings,
    environment_findings,
    policy_environment,
    probe,
    python_findings,
    require_packages,
    tracking_findings,
    trainer_environment,
)
from palaestra.runs.process.parameter_schema import object_schema
from palaestra.runs.runner import (
    AttemptPaths,
    EventFiles,
    Finding,
    Injection,
    LaunchPlan,
    Machine,
    PolicyPlan,
    PolicyRequest,
    RunnerCapabilities,
    StdoutLines,
)
from palaestra.runs.runners.cleanrl_catalogue import describe_scripts
from palaestra.runs.runners.cleanrl_imports import ScannedImports, scan_imports
from palaestra.runs.runners.cleanrl_script import Script, build_flags, read_script
from palaestra.runs.runners.script_arguments import argument_schema, check_values, leaves_directory
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

POLICY_PROGRAM = Path(__file__).with_name("programs") / "policy_program.py"
SHIM = Path(__file__).with_name("shims") / "cleanrl" / "sitecustomize.py"
RENAMED = {"GrayScaleObservation": "GrayscaleObservation", "FrameStack": "FrameStackObservation"}
"""Wrappers of Gymnasium 0.29 that were renamed in version 1; the shim adds the old names."""
_SHIM_REASON = "lets a script for Gymnasium 0.29 report its episodes under Gymnasium 1"
CHECKOUT = "PALAESTRA_CLEANRL"
CLONE = "git clone https://github.com/vwxyzjn/cleanrl, then export PALAESTRA_CLEANRL=$PWD/cleanrl or give checkout=DIR"
_DISTRIBUTIONS = {
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "memory_gym": "memory-gym",
    "huggingface_hub": "huggingface-hub",
}
_BASIC_PACKAGES = {name: name for name in ("gymnasium", "torch", "tensorboard", "tyro")}
"""Packages that every script for torch imports at its top."""
_LOCAL = frozenset({"cleanrl", "cleanrl_utils", "ppo_trxl", "pom_env"})
_REGISTER_NOTHING = frozenset({"gymnasium", "numpy", "torch", "tyro", "tensorboard", "flax", "jax", "optax", "rich"})
"""Packages that register no environments. Others may register an id that Gymnasium does not know."""
_RUN_OPTIONS = {
    "track": "Use --track offline or --track online",
    "capture_video": "Use --video",
    "env_id": "Use --env",
    "seed": "Use --seed",
}


@dataclass(frozen=True)
class _Request:
    """A parsed spec: the script and the values of its arguments."""

    checkout: Path
    script: Script
    values: JsonObject
    findings: tuple[Finding, ...]
    scanned: ScannedImports

    @property
    def records_video(self) -> bool:
        """Whether it records videos, while training or in the evaluation of the saved model."""
        return self.scanned.records_video or bool(self.value("capture_video"))

    @property
    def is_atari(self) -> bool:
        return "atari" in self.script.path.stem and "gymnasium" in self.script.imports

    @property
    def env_id(self) -> str:
        return str(self.value("env_id") or "")

    @property
    def all_values(self) -> JsonObject:
        """The values of all arguments that are known before the script runs."""
        return {argument.name: self.value(argument.name) for argument in self.script.arguments}

    def value(self, name: str) -> object:
        argument = self.script.argument(name)
        return self.values.get(name, argument.default if argument else None)


class CleanrlRunner:
    """Runs unmodified scripts of a CleanRL checkout."""

    name = "cleanrl"
    capabilities = RunnerCapabilities(
        title="CleanRL, from your checkout",
        offline_inference=True,
        external_services=("wandb", "huggingface"),
        video=True,
        tracking=True,
        runs_foreign_code=True,
    )

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The arguments of the script, and the checkout."""
        description = f"Directory of the CleanRL checkout. Default: ${CHECKOUT}."
        properties: JsonObject = {"checkout": {"type": "string", "description": description}}
        if spec.script is not None:
            checkout = _find_checkout(spec, os.environ)
            arguments = read_script(_find_script(spec.script, checkout)).arguments
            properties |= argument_schema(argument for argument in arguments if argument.name not in _RUN_OPTIONS)
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def scripts(self, spec: RunSpec, machine: Machine) -> list[ScriptInfo]:
        """The scripts of the checkout."""
        checkout = _find_checkout(spec, machine.environment)
        paths = [checkout / "cleanrl" / f"{name}.py" for name in _script_names(checkout)]
        return describe_scripts(paths, choose_python(spec, checkout), machine, _DISTRIBUTIONS)

    def environments(self, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> list[EnvironmentInfo]:
        """What Gymnasium has registered in the interpreter of the checkout, with Atari if it is installed."""
        interpreter = choose_python(spec, _find_checkout(spec, machine.environment))
        return list_environments(interpreter, machine, register=("ale_py",), refresh=refresh)

    def environment_parameters(self, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
        """None: the scripts make their environments without arguments. Raises if there is no such environment."""
        interpreter = choose_python(spec, _find_checkout(spec, machine.environment))
        read_parameters(env_id, interpreter, machine, register=("ale_py",))
        return object_schema({})

    def readiness(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Whether there are a checkout and the packages that all scripts need."""
        checkout = _find_checkout(spec, machine.environment)
        interpreter = choose_python(spec, checkout)
        probed = probe(interpreter, machine, packages=tuple(_BASIC_PACKAGES))
        return [
            Finding("checkout", "ok", f"{len(_script_names(checkout))} scripts in {checkout}"),
            *python_findings(interpreter, probed, _BASIC_PACKAGES, oldest=(3, 8)),
        ]

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Check checkout, script, flags, interpreter, packages, environment and credentials."""
        try:
            request = _parse_request(spec, machine)
            interpreter = choose_python(spec, request.checkout)
        except ConfigError as error:
            value = f"{error.value}: " if error.value not in (None, "") else ""
            return [Finding(error.place, "refused", f"{value}{error.reason}", error.remedy)]
        refused = check_values(request.script.arguments, request.values, request.script.path.name)
        if refused:
            return refused
        probed = _run_probe(request, interpreter, machine, spec)
        locked = spec.python is None and (request.checkout / "uv.lock").is_file() and shutil.which("uv") is not None
        remedy = f"uv sync --project {request.checkout}" if locked else ""
        text = f"{request.script.path.relative_to(request.checkout)} (sha256 {_hash_script(request)[:12]})"
        return [
            Finding("script", "ok", text),
            *python_findings(interpreter, probed, _required_packages(request, spec), oldest=(3, 8), remedy=remedy),
            *_environment_findings(request, probed),
            *_wrapper_findings(request, probed, interpreter),
            *(cuda_findings(interpreter, probed) if _wants_cuda(request, spec) else []),
            *request.findings,
            *tracking_findings(spec, machine),
            *_upload_findings(request, machine),
            *_shim_findings(request, probed, spec),
            *_checkpoint_findings(request),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`python script.py --flags` in the working directory of the attempt."""
        request = _parse_request(spec, machine)
        refused = check_values(request.script.arguments, request.values, request.script.path.name)
        if refused:
            raise ConfigError(refused[0].check, request.script.path.name, refused[0].text, refused[0].remedy)
        interpreter = choose_python(spec, request.checkout)
        probed = _run_probe(request, interpreter, machine, spec)
        search = [str(request.checkout)]
        shim = paths.attempt_dir / "shim" / SHIM.name
        text = SHIM.read_text(encoding="utf-8") if _needs_shim(request, probed) else ""
        if text:
            search.insert(0, str(shim.parent))
        variables = {"PYTHONPATH": ":".join(search)}
        if spec.track != "off":
            variables["WANDB_MODE"] = spec.track
        total = request.value("total_timesteps")
        return LaunchPlan(
            argv=(interpreter.path, str(request.script.path), *build_flags(request.script.arguments, request.values)),
            environment=trainer_environment(spec, paths, machine, variables),
            cwd=paths.work_dir,
            paths=paths,
            sources=(EventFiles("runs/**/events.out.tfevents.*", "cleanrl"), StdoutLines("cleanrl")),
            checkpoints=("runs/**/*.cleanrl_model",),
            videos=("videos/**/*.mp4",),
            env_id=request.env_id,
            algorithm=request.script.path.stem,
            total_steps=total if isinstance(total, int) else None,
            env_signature=probed.env_signature,
            resolved={
                **request.all_values,
                "script": str(request.script.path.relative_to(request.checkout)),
                "checkout": str(request.checkout),
            },
            files={f"shim/{SHIM.name}": text} if text else {},
            injected=(Injection(str(shim), hashlib.sha256(text.encode()).hexdigest(), _SHIM_REASON),) if text else (),
            script_sha256=_hash_script(request),
            versions={"python": probed.version_text, **{k: v for k, v in probed.packages.items() if v is not None}},
        )

    def plan_policy(self, request: PolicyRequest, machine: Machine) -> PolicyPlan:
        """`policy_program.py` with the networks of the run's script, which must be unchanged or needs consent."""
        checkpoint = request.checkpoint
        if request.unsafe or checkpoint.format != "torch_zip":
            reason = request.unsafe or "is not a file of torch, as the scripts for JAX write none"
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, reason, "Use another checkpoint")
        spec = request.spec or _imported_spec(request)
        script = _parse_request(spec, machine)
        if script.is_atari:
            reason = "a play has no wrappers for Atari, on whose frames it was trained"
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, reason, "Play a script without them")
        interpreter = choose_policy_python(request, script.checkout)
        probed = probe(interpreter, machine, packages=tuple(_BASIC_PACKAGES))
        require_packages(interpreter, probed, _BASIC_PACKAGES)
        sources = [str(path) for path in _source_files(script)]
        sha256 = _hash_script(script)
        argv = [interpreter.path, str(POLICY_PROGRAM), "cleanrl", checkpoint.path, "--sha256", checkpoint.sha256]
        argv += [f"--env={script.env_id}", "--values", json.dumps(script.all_values), "--script", sources[0]]
        argv += ["--script-sha256", sha256, *(["--imported", *sources[1:]] if sources[1:] else [])]
        argv += [] if request.deterministic else ["--sample"]
        shim = [str(SHIM.parent)] if _needs_shim(script, probed) else []
        trained_with = request.command.get("script_sha256")
        return PolicyPlan(
            argv=tuple(argv),
            environment=policy_environment([*shim, str(script.checkout)]),
            foreign_code="" if trained_with == sha256 else _describe_script(script, trained_with),
        )


def _imported_spec(request: PolicyRequest) -> RunSpec:
    """The spec of an imported checkpoint: the script that its agent names, in the environment of the play."""
    checkpoint = request.checkpoint
    script = checkpoint.agent_id.partition("/")[2]
    if not script:
        remedy = "Import it again with --agent cleanrl/SCRIPT and --env ENV"
        raise CheckpointError("checkpoint", checkpoint.checkpoint_id, "its agent names no script", remedy)
    return RunSpec(runner="cleanrl", script=script, env_id=checkpoint.env_id or request.env_id)


def _describe_script(script: _Request, trained_with: object) -> str:
    name = script.script.path.relative_to(script.checkout)
    why = "has changed since the run" if trained_with else "is not known to be the one that saved it"
    return f"{name} of {script.checkout}, which {why}"


def _parse_request(spec: RunSpec, machine: Machine) -> _Request:
    """The script and its values. Raises `ConfigError` with the name of the failed check as its place."""
    checkout = _find_checkout(spec, machine.environment)
    if spec.script is None:
        raise ConfigError(
            "script", None, "no script given", f"Use --script with one of {', '.join(_script_names(checkout)[:8])}"
        )
    script = read_script(_find_script(spec.script, checkout))
    values = {key: value for key, value in spec.config.items() if key != "checkout"}
    for key, remedy in _RUN_OPTIONS.items():
        if key in values:
            raise ConfigError("flag", key, "is set by an option of runs start", remedy)
    findings = []
    options = {
        "env_id": spec.env_id,
        "seed": spec.seed,
        "track": spec.track != "off" or None,
        "capture_video": spec.video or None,
    }
    for key, value in options.items():
        if value is None:
            continue
        if script.argument(key) is None:
            raise ConfigError("flag", key, f"{script.path.name} has no argument {key}", "Leave it out")
        values[key] = value
    if script.argument("cuda") is not None:
        if values.get("cuda") and not spec.gpus:
            findings.append(
                Finding("gpu", "warning", "cuda is set but no GPU was requested: it runs on the CPU", "Use --gpus 1")
            )
        values["cuda"] = spec.gpus > 0
    known = {argument.name: argument.default for argument in script.arguments if not argument.computed} | values
    return _Request(checkout, script, values, tuple(findings), scan_imports(script.path, checkout, _LOCAL, known))


def _find_checkout(spec: RunSpec, environment: Mapping[str, str]) -> Path:
    """The checkout of the configuration, else of the request, else of the environment."""
    requested = spec.config.get("checkout") or spec.checkout
    directory = requested or environment.get(CHECKOUT)
    if not isinstance(directory, str):
        reason = f"no CleanRL checkout: the request names none, and {CHECKOUT} is not set in the run service"
        raise ConfigError("script", spec.script, reason, CLONE)
    checkout = (spec.invoked_from / Path(directory).expanduser()).resolve()
    if not (checkout / "cleanrl").is_dir():
        source = "" if requested else f" ({CHECKOUT} in the environment of the run service)"
        raise ConfigError("script", str(checkout), f"is not a CleanRL checkout{source}", CLONE)
    return checkout


def _script_names(checkout: Path) -> list[str]:
    return sorted(path.stem for path in (checkout / "cleanrl").glob("*.py"))


def _find_script(name: str, checkout: Path) -> Path:
    if leaves_directory(name):
        raise ConfigError("script", name, "must be in the checkout", "Give its name, such as dqn")
    stem = name.removeprefix("cleanrl/").removesuffix(".py")
    path = checkout / "cleanrl" / f"{stem}.py"
    if path.is_file() and path.resolve().is_relative_to(checkout):
        return path
    close = closest_names(stem, _script_names(checkout))
    remedy = f"Nearest: {', '.join(close)}" if close else f"There are {', '.join(_script_names(checkout)[:12])}"
    raise ConfigError("script", name, f"is not in {checkout / 'cleanrl'}", remedy)


def _required_packages(request: _Request, spec: RunSpec) -> dict[str, str]:
    """Distributions that the script imports at any time, and their requirement strings."""
    names = {_DISTRIBUTIONS.get(package, package) for package in request.scanned.packages}
    names |= {"tensorboard"} if "torch" in names else set()
    names |= {"wandb"} if spec.track != "off" else set()
    names |= {"moviepy"} if request.records_video else set()
    names |= {"ale-py", "opencv-python"} if request.is_atari else set()
    extras = {"gymnasium": "gymnasium[classic-control]"}
    return {name: extras.get(name, name) for name in sorted(names)}


def _run_probe(request: _Request, interpreter: Interpreter, machine: Machine, spec: RunSpec) -> Probe:
    env_id = request.env_id if "gymnasium" in request.script.imports else None
    packages, cuda = tuple(_required_packages(request, spec)), _wants_cuda(request, spec)
    return probe(
        interpreter,
        machine,
        packages=packages,
        env_id=env_id,
        cuda=cuda,
        pythonpath=(str(request.checkout),),
        register=("ale_py",) if request.is_atari else (),
        render=request.records_video,
        wrappers=tuple(sorted(request.scanned.wrappers)),
    )


def _wants_cuda(request: _Request, spec: RunSpec) -> bool:
    return spec.gpus > 0 and "torch" in request.script.imports


def _environment_findings(request: _Request, probed: Probe) -> list[Finding]:
    if None in probed.packages.values():
        # The missing packages are refused already.
        return []
    findings = environment_findings(probed, request.env_id)
    if request.script.imports - _LOCAL - _REGISTER_NOTHING:
        # An import of the script may register the environment.
        return [Finding(f.check, "warning" if f.level == "refused" else f.level, f.text, f.remedy) for f in findings]
    return findings


def _wrapper_findings(request: _Request, probed: Probe, interpreter: Interpreter) -> list[Finding]:
    """Whether the installed Gymnasium has the wrappers that the script uses."""
    missing = sorted(set(probed.missing_wrappers) - RENAMED.keys())
    if not missing:
        return []
    version = probed.packages.get("gymnasium")
    text = f"{request.script.path.name} uses gymnasium.wrappers.{missing[0]}, which gymnasium {version} does not have"
    return [Finding("wrappers", "refused", text, f"{interpreter.path} -m pip install 'gymnasium==0.29.1'")]


def _upload_findings(request: _Request, machine: Machine) -> list[Finding]:
    """Whether there are credentials for the Hugging Face Hub, for runs that upload their model."""
    if "huggingface_hub" not in request.scanned.packages or not request.value("upload_model"):
        return []
    home = Path(machine.environment.get("HOME", ""))
    cache = machine.environment.get("HF_HOME") or home / ".cache" / "huggingface"
    if machine.environment.get("HF_TOKEN") or (Path(cache) / "token").is_file():
        return [Finding("credentials", "ok", "for the Hugging Face Hub")]
    text = "upload_model needs HF_TOKEN in the service's environment, or a token stored by hf auth login"
    return [Finding("credentials", "refused", text, "hf auth login, or leave upload_model out")]


def _needs_shim(request: _Request, probed: Probe) -> bool:
    return "gymnasium" in request.script.imports and probed.at_least("gymnasium", 1)


def _shim_findings(request: _Request, probed: Probe, spec: RunSpec) -> list[Finding]:
    if not _needs_shim(request, probed):
        return []
    text = f"{probed.packages['gymnasium']}: a compatibility shim is injected, so that episodes are reported"
    findings = [Finding("gymnasium", "warning", text, "Install gymnasium==0.29.1 to run without it")]
    if spec.track != "off" and request.records_video:
        text = "videos stay in the run directory: W&B cannot upload them with Gymnasium 1"
        findings.append(Finding("wandb", "warning", text, "Install gymnasium==0.29.1 to upload them"))
    return findings


def _hash_script(request: _Request) -> str:
    """SHA-256 of the script and of the modules of the checkout that it imports."""
    digest = hashlib.sha256()
    for path in _source_files(request):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _source_files(request: _Request) -> list[Path]:
    """The script, and the modules of the checkout that it imports."""
    modules = [request.checkout / f"{module.replace('.', '/')}.py" for module in request.script.local_imports]
    return [request.script.path, *(path for path in modules if path.is_file())]


def _checkpoint_findings(request: _Request) -> list[Finding]:
    """Whether the run saves a model, which is needed to watch it later."""
    if request.script.argument("save_model") is None:
        text = f"{request.script.path.name} saves no model: the trained policy cannot be played"
        return [Finding("checkpoint", "warning", text, "Choose a script with the argument save_model")]
    if not request.value("save_model"):
        text = "save_model is false: the trained policy is not kept and cannot be played"
        return [Finding("checkpoint", "warning", text, "Set save_model=true")]
    return []
