"""The runner `sb3`: algorithms of Stable-Baselines3, in any interpreter that has it installed.

It runs `programs/sb3_program.py`. Arguments of an algorithm are checked against the signature of its constructor.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field

from palaestra.config import Section, closest_names, parse_section
from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.checkpoint import digest_file
from palaestra.runs.catalogue import ScriptInfo
from palaestra.runs.checkpoints.sb3_zip import Sb3Zip, find_statistics
from palaestra.runs.process.interpreter import (
    Interpreter,
    Probe,
    ProbedParameter,
    choose_policy_python,
    choose_python,
    cuda_findings,
    environment_findings,
    policy_environment,
    probe,
    python_findings,
    require_packages,
    trainer_environment,
)
from palaestra.runs.process.parameter_schema import is_object_only, object_schema, parameter_properties
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import (
    AttemptPaths,
    Finding,
    LaunchPlan,
    Machine,
    PolicyPlan,
    PolicyRequest,
    RunnerCapabilities,
    StdoutLines,
)
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

_Actions: TypeAlias = tuple[Literal["discrete", "continuous"], ...]
PROGRAM = Path(__file__).with_name("programs") / "sb3_program.py"
POLICY_PROGRAM = PROGRAM.with_name("policy_program.py")
ALGORITHMS = {
    **{name.lower(): f"stable_baselines3:{name}" for name in ("PPO", "A2C", "DQN", "SAC", "TD3", "DDPG")},
    **{name.lower(): f"sb3_contrib:{name}" for name in ("TRPO", "QRDQN", "TQC")},
}
_DISCRETE: _Actions = ("discrete",)
_CONTINUOUS: _Actions = ("continuous",)
_DESCRIPTIONS: dict[str, tuple[str, str, _Actions]] = {
    "ppo": ("PPO", "On-policy, robust: the usual first choice.", _DISCRETE + _CONTINUOUS),
    "a2c": ("A2C", "On-policy, with small updates; fast on cheap environments.", _DISCRETE + _CONTINUOUS),
    "dqn": ("DQN", "Off-policy, with a replay buffer of past steps.", _DISCRETE),
    "sac": ("SAC", "Off-policy, explores by entropy; needs few steps.", _CONTINUOUS),
    "td3": ("TD3", "Off-policy, deterministic, with two critics.", _CONTINUOUS),
    "ddpg": ("DDPG", "Off-policy, deterministic; TD3 is its more stable successor.", _CONTINUOUS),
    "trpo": ("TRPO", "On-policy, limits each update by a trust region.", _DISCRETE + _CONTINUOUS),
    "qrdqn": ("QR-DQN", "DQN that learns the distribution of returns.", _DISCRETE),
    "tqc": ("TQC", "SAC with truncated quantile critics.", _CONTINUOUS),
}
_SCHEMA_AGE_S = 600.0
_RANGES: tuple[tuple[str, JsonObject], ...] = (
    ("gamma gae_lambda tau", {"minimum": 0, "maximum": 1}),
    ("exploration_fraction exploration_initial_eps exploration_final_eps", {"minimum": 0, "maximum": 1}),
    ("learning_rate ent_coef vf_coef max_grad_norm target_kl", {"minimum": 0}),
    ("clip_range clip_range_vf learning_starts", {"minimum": 0}),
    ("n_steps batch_size n_epochs buffer_size target_update_interval", {"minimum": 1}),
    ("train_freq policy_delay stats_window_size", {"minimum": 1}),
    ("gradient_steps sde_sample_freq", {"minimum": -1}),
)
_KNOWN_ARGUMENTS = {name: limits for names, limits in _RANGES for name in names.split()}
"""Ranges that the signatures do not say."""
_RESERVED_ARGUMENTS = frozenset({"policy", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"})
"""Constructor arguments that the program sets, or that would write files."""


class Sb3Config(Section):
    """Configuration of a Stable-Baselines3 run."""

    algorithm: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the algorithm, such as learning_rate. Default: those of the algorithm."""
    policy: str = "MlpPolicy"
    """`MlpPolicy`, `CnnPolicy` or `MultiInputPolicy`."""
    num_envs: int = Field(1, ge=1, le=1024)
    """Number of environments, stepped one after the other."""
    env_kwargs: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    total_timesteps: int = Field(100_000, ge=1)
    """Total number of steps over all environments."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Steps between checkpoints (null: only at the end)."""
    log_interval: int | None = Field(None, ge=1)
    """`log_interval` of `learn` (null: default of the algorithm)."""


class Sb3Runner:
    """Runs algorithms of Stable-Baselines3."""

    name = "sb3"
    capabilities = RunnerCapabilities(
        title="Stable-Baselines3", offline_inference=True, warm_start=True, resume=True, video=True
    )

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The keys of `Sb3Config`; with a script, also the arguments of its algorithm, if they can be read."""
        schema = Sb3Config.model_json_schema()
        address = ALGORITHMS.get((spec.script or "").lower())
        if address is None:
            return schema
        machine = Machine(environment=dict(os.environ), free_disk_bytes=0)
        arguments = probe(choose_python(spec), machine, signature_of=address, max_age_s=_SCHEMA_AGE_S).arguments
        if arguments is not None:
            usable = {
                name: parameter
                for name, parameter in arguments.items()
                if name not in _RESERVED_ARGUMENTS and not is_object_only(parameter)
            }
            description = schema["properties"]["algorithm"].get("description", "")
            properties = object_schema(parameter_properties(usable, _KNOWN_ARGUMENTS))
            schema["properties"]["algorithm"] = {**properties, "description": description, "default": {}}
        return schema

    def scripts(self, spec: RunSpec, machine: Machine) -> list[ScriptInfo]:
        """The algorithms, and whether their package is installed."""
        interpreter = choose_python(spec)
        probed = probe(interpreter, machine, packages=("stable-baselines3", "sb3-contrib"))
        infos = []
        for name, address in ALGORITHMS.items():
            package = "sb3-contrib" if address.startswith("sb3_contrib") else "stable-baselines3"
            is_installed = probed.packages.get(package) is not None
            title, description, actions = _DESCRIPTIONS[name]
            infos.append(
                ScriptInfo(
                    name=name,
                    title=title,
                    description=description,
                    actions=actions,
                    plays=True,
                    warm_start=True,
                    installed=is_installed,
                    remedy="" if is_installed else f"{interpreter.path} -m pip install {package}",
                )
            )
        return infos

    def readiness(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Whether the interpreter has the library."""
        interpreter = choose_python(spec)
        needed = _required_packages(RunSpec(), "")
        probed = probe(interpreter, machine, packages=tuple(needed))
        return python_findings(interpreter, probed, needed, oldest=(3, 9))

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Check algorithm, keys, interpreter, packages, environment and the arguments of the algorithm."""
        try:
            config, address = _parse_spec(spec)
            interpreter = choose_python(spec)
        except ConfigError as error:
            check = error.place if error.place in ("script", "python", "env", "warm_start") else "flag"
            return [Finding.from_error(check, error)]
        probed = _run_probe(spec, address, interpreter, machine)
        findings = python_findings(interpreter, probed, _required_packages(spec, address), oldest=(3, 9))
        if any(finding.level == "refused" for finding in findings):
            return findings
        return [
            Finding("script", "ok", address),
            *findings,
            *environment_findings(probed, spec.env_id or ""),
            *(cuda_findings(interpreter, probed) if spec.gpus else []),
            *_argument_findings(config.algorithm, probed, address),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`sb3_program.py` in that interpreter, with the configuration as JSON."""
        config, address = _parse_spec(spec)
        interpreter = choose_python(spec)
        probed = _run_probe(spec, address, interpreter, machine)
        assert spec.env_id is not None
        data = config.model_dump(exclude={"total_timesteps"})
        flags = {
            "--env": spec.env_id,
            "--seed": str(spec.seed or 0),
            "--total-timesteps": str(config.total_timesteps),
            "--config": json.dumps(data, sort_keys=True),
            "--out": str(paths.attempt_dir / "checkpoints"),
            "--device": "cuda" if spec.gpus else "cpu",
        }
        argv = [interpreter.path, str(PROGRAM), address, *itertools.chain.from_iterable(flags.items())]
        if paths.resume_from is not None:
            argv += ["--resume", paths.resume_from]
        elif spec.warm_start is not None:
            argv += ["--load", str(_warm_start_path(spec))]
        if spec.video:
            argv.append("--video")
        return LaunchPlan(
            argv=tuple(argv),
            environment=trainer_environment(spec, paths, machine),
            cwd=paths.work_dir,
            paths=paths,
            sources=(StdoutLines("sb3"),),
            videos=("videos/**/*.mp4",),
            stop_grace_s=30.0,
            env_id=spec.env_id,
            algorithm=(spec.script or "").lower(),
            total_steps=config.total_timesteps,
            steps_key="total_timesteps",
            env_signature=probed.env_signature,
            resolved={**config.model_dump(), "env_id": spec.env_id, "seed": spec.seed or 0, "class": address},
            versions={"python": probed.version_text, **{k: v for k, v in probed.packages.items() if v is not None}},
        )

    def plan_policy(self, request: PolicyRequest, machine: Machine) -> PolicyPlan:
        """`policy_program.py` in the interpreter that trained it; the library's own `load` only with consent."""
        checkpoint = request.checkpoint
        if request.unsafe:
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, request.unsafe, "Use another checkpoint")
        try:
            described = Sb3Zip(checkpoint.path)
        except ValueError as error:
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, str(error), "Use another one") from None
        loader = _find_loader(checkpoint, described) if described.serialized else ""
        interpreter = choose_policy_python(request)
        needed = _required_packages(RunSpec(), loader or described.module)
        require_packages(interpreter, probe(interpreter, machine, packages=tuple(needed)), needed)
        spec = request.spec or RunSpec()
        # The spaces are those of training, whatever the parameters of the play are.
        env_kwargs = request.parameters if request.spec is None else spec.config.get("env_kwargs") or {}
        argv = [interpreter.path, str(POLICY_PROGRAM), "sb3", checkpoint.path, "--sha256", checkpoint.sha256]
        env_id = spec.env_id or checkpoint.env_id or request.env_id
        argv += [f"--env={env_id}", "--env-kwargs", json.dumps(env_kwargs)]
        argv += [] if request.deterministic else ["--sample"]
        foreign_code = ""
        if loader:
            argv += ["--unpickle", loader]
            foreign_code = f"{Path(checkpoint.path).name} holds {'; '.join(described.serialized)}"
        plan = PolicyPlan(argv=tuple(argv), environment=policy_environment(), foreign_code=foreign_code)
        statistics = find_statistics(Path(checkpoint.path))
        if statistics is None:
            return plan
        extended = replace(
            plan,
            argv=(*argv, "--statistics", str(statistics), "--statistics-sha256", digest_file(statistics).sha256),
            foreign_code="; ".join(filter(None, (foreign_code, f"the pickle {statistics.name} of VecNormalize"))),
        )
        return extended if foreign_code else replace(plan, alternative=extended)


def _find_loader(checkpoint: CheckpointRecord, described: Sb3Zip) -> str:
    """The class that can load a whole zip. Raises `CheckpointError` if there is none."""
    algorithm = checkpoint.agent_id.rpartition("/")[2].lower()
    address = ALGORITHMS.get(algorithm if algorithm in ALGORITHMS else described.algorithm, "")
    if address and described.has_objects:
        return address
    why = "which its import left out" if address else f"and its algorithm is none of {', '.join(ALGORITHMS)}"
    reason = f"it needs {'; '.join(described.serialized)}, {why}"
    remedy = "Import it again with --trust" if address else "Name the algorithm at the import: --agent sb3/ppo"
    raise CheckpointError("checkpoint", checkpoint.checkpoint_id, reason, remedy)


def _parse_spec(spec: RunSpec) -> tuple[Sb3Config, str]:
    name = (spec.script or "").lower()
    if name not in ALGORITHMS:
        close = closest_names(name, ALGORITHMS, count=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Use --script with one of {', '.join(ALGORITHMS)}"
        raise ConfigError("script", spec.script, "no such algorithm", remedy)
    if spec.env_id is None or spec.env_id.startswith("-"):
        raise ConfigError("env", spec.env_id, "no environment given", "Use --env CartPole-v1")
    if spec.warm_start is not None and not _warm_start_path(spec).is_file():
        raise ConfigError("warm_start", spec.warm_start, "no such file", "Give a step_N.zip of an earlier run")
    return parse_section(Sb3Config, spec.config), ALGORITHMS[name]


def _warm_start_path(spec: RunSpec) -> Path:
    return spec.invoked_from / Path(spec.warm_start or "").expanduser()


def _required_packages(spec: RunSpec, address: str) -> dict[str, str]:
    names = {"stable-baselines3": "stable-baselines3", "gymnasium": "gymnasium", "torch": "torch"}
    if address.startswith("sb3_contrib"):
        names["sb3-contrib"] = "sb3-contrib"
    if spec.video:
        names["moviepy"] = "moviepy"
    return names


def _run_probe(spec: RunSpec, address: str, interpreter: Interpreter, machine: Machine) -> Probe:
    packages = tuple(_required_packages(spec, address))
    return probe(interpreter, machine, packages=packages, env_id=spec.env_id, cuda=spec.gpus > 0, signature_of=address)


def _argument_findings(arguments: JsonObject, probed: Probe, address: str) -> list[Finding]:
    """Check names against the signature of the constructor, and types as far as its defaults tell."""
    if probed.arguments is None:
        return [Finding("script", "refused", f"{address}: {probed.import_error}", "Install a newer version")]
    known = {name: parameter for name, parameter in probed.arguments.items() if name not in _RESERVED_ARGUMENTS}
    findings = []
    for name, value in arguments.items():
        parameter = known.get(name)
        if parameter is None:
            close = closest_names(name, known, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}"
            findings.append(Finding("flag", "refused", f"algorithm.{name}: {address} has no such argument", remedy))
        elif not _has_plausible_type(value, parameter):
            text = f"algorithm.{name} = {value!r}: {address} expects {parameter.kind}"
            findings.append(Finding("flag", "refused", text, f"Its default is {parameter.default!r}"))
    return findings or [Finding("config", "ok", f"{len(arguments)} arguments of {address}")]


def _has_plausible_type(value: object, parameter: ProbedParameter) -> bool:
    if isinstance(parameter.default, bool):
        return isinstance(value, bool)
    if isinstance(parameter.default, int | float) and isinstance(value, str):
        return "str" in parameter.kind
    return True
