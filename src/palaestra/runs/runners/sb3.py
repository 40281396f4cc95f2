"""The runner `sb3`: algorithms of an installed Stable-Baselines3, in whatever interpreter has it.

The program is ours (`programs/sb3_program.py`) and the algorithm theirs; what it may be told is read from the
constructor's own signature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from palaestra.config import Section, closest_names, parse_section
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
from palaestra.runs.runner import AttemptPaths, Finding, LaunchPlan, Machine, RunnerCapabilities, StdoutLines
from palaestra.runs.spec import RunSpec

__all__ = ["Sb3Config", "Sb3Runner"]

PROGRAM = Path(__file__).with_name("programs") / "sb3_program.py"
ALGORITHMS = {
    **{name.lower(): f"stable_baselines3:{name}" for name in ("PPO", "A2C", "DQN", "SAC", "TD3", "DDPG")},
    **{name.lower(): f"sb3_contrib:{name}" for name in ("TRPO", "QRDQN", "TQC")},
}
_PLACED = frozenset({"policy", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"})
"""Arguments of the constructors that are set elsewhere, or would write somewhere."""


class Sb3Config(Section):
    """Everything but the algorithm's own arguments, which go into `algorithm`."""

    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the algorithm, such as learning_rate; its own defaults hold for the rest."""
    policy: str = "MlpPolicy"
    """`MlpPolicy`, `CnnPolicy` or `MultiInputPolicy`."""
    num_envs: int = Field(1, ge=1, le=1024)
    """Copies of the environment, stepped one after the other."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Handed to the environment's constructor."""
    total_timesteps: int = Field(100_000, ge=1)
    """Steps over all copies together."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; null is one at the end."""
    log_interval: int | None = Field(None, ge=1)
    """As `learn` understands it; null is the algorithm's own."""


class Sb3Runner:
    """Algorithms of Stable-Baselines3."""

    name = "sb3"
    capabilities = RunnerCapabilities(title="Stable-Baselines3", warm_start=True, resume=True, video=True)

    def config_schema(self, spec: RunSpec) -> dict[str, Any]:
        """The keys of `Sb3Config`."""
        return Sb3Config.model_json_schema()

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Algorithm, keys, interpreter, packages, environment, and the algorithm's own arguments."""
        try:
            config, address = _understood(spec)
            interpreter = choose_python(spec)
        except ConfigError as error:
            check = error.place if error.place in ("script", "python", "env", "warm_start") else "flag"
            return [Finding(check, "refused", f"{error.place} = {error.value!r}: {error.reason}", error.remedy)]
        found = _probed(spec, address, interpreter, machine)
        findings = python_findings(interpreter, found, _needed(spec, address), oldest=(3, 9))
        if any(finding.level == "refused" for finding in findings):
            return findings
        return [
            Finding("script", "ok", address),
            *findings,
            *environment_findings(found, spec.env_id or ""),
            *(cuda_findings(interpreter, found) if spec.gpus else []),
            *_argument_findings(config.algorithm, found, address),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """Our program in that interpreter; every value in one word of JSON."""
        config, address = _understood(spec)
        interpreter = choose_python(spec)
        found = _probed(spec, address, interpreter, machine)
        assert spec.env_id is not None
        data = config.model_dump(exclude={"total_timesteps"})
        argv = [
            interpreter.path, str(PROGRAM), address, "--env", spec.env_id, "--seed", str(spec.seed or 0),
            "--total-timesteps", str(config.total_timesteps), "--config", json.dumps(data, sort_keys=True),
            "--out", str(paths.attempt_dir / "checkpoints"), "--device", "cuda" if spec.gpus else "cpu",
        ]  # fmt: skip
        if paths.resume_from is not None:
            argv += ["--resume", paths.resume_from]
        elif spec.warm_start is not None:
            argv += ["--load", str(_path(spec))]
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
            env_signature=found.env.get("signature", {}),
            resolved={**config.model_dump(), "env_id": spec.env_id, "seed": spec.seed or 0, "class": address},
            versions={"python": found.shown_version, **{k: v for k, v in found.packages.items() if v is not None}},
        )


def _understood(spec: RunSpec) -> tuple[Sb3Config, str]:
    name = (spec.script or "").lower()
    if name not in ALGORITHMS:
        close = closest_names(name, ALGORITHMS, count=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Use --script with one of {', '.join(ALGORITHMS)}"
        raise ConfigError("script", spec.script, "no such algorithm", remedy)
    if spec.env_id is None or spec.env_id.startswith("-"):
        raise ConfigError("env", spec.env_id, "no environment named", "Use --env CartPole-v1")
    if spec.warm_start is not None and not _path(spec).is_file():
        raise ConfigError("warm_start", spec.warm_start, "no such file", "Give a step_N.zip of an earlier run")
    return parse_section(Sb3Config, spec.config), ALGORITHMS[name]


def _path(spec: RunSpec) -> Path:
    return spec.invoked_from / Path(spec.warm_start or "").expanduser()


def _needed(spec: RunSpec, address: str) -> dict[str, str]:
    names = {"stable-baselines3": "stable-baselines3", "gymnasium": "gymnasium", "torch": "torch"}
    if address.startswith("sb3_contrib"):
        names["sb3-contrib"] = "sb3-contrib"
    if spec.video:
        names["moviepy"] = "moviepy"
    return names


def _probed(spec: RunSpec, address: str, interpreter: Interpreter, machine: Machine) -> Probe:
    packages = tuple(_needed(spec, address))
    return probe(interpreter, machine, packages=packages, env_id=spec.env_id, cuda=spec.gpus > 0, signature_of=address)


def _argument_findings(given: dict[str, Any], found: Probe, address: str) -> list[Finding]:
    """Names against the constructor's signature; kinds as far as its defaults tell."""
    if not found.arguments.get("found"):
        return [Finding("script", "refused", f"{address}: {found.arguments.get('reason')}", "Install a newer version")]
    takes = {name: about for name, about in found.arguments["takes"].items() if name not in _PLACED}
    findings = []
    for name, value in given.items():
        about = takes.get(name)
        if about is None:
            close = closest_names(name, takes, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"It takes {', '.join(takes)}"
            findings.append(Finding("flag", "refused", f"algorithm.{name}: {address} has no such argument", remedy))
        elif not _plausible(value, about):
            text = f"algorithm.{name} = {value!r}: {address} wants {about['kind']}"
            findings.append(Finding("flag", "refused", text, f"Its default is {about['default']!r}"))
    return findings or [Finding("config", "ok", f"{len(given)} arguments of {address}")]


def _plausible(value: object, about: dict[str, Any]) -> bool:
    default, kind = about["default"], str(about["kind"])
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float) and isinstance(value, str):
        return "str" in kind
    return True
