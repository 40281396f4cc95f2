"""Binds the configuration of a run to one RLlib command: checks it, plans it, and names where its telemetry is.

RLlib is imported by `program.py` only, in the interpreter of the run (`--python`), which need not have Palaestra.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError
from palaestra.runs.process.interpreter import (
    choose_python,
    environment_findings,
    probe,
    python_findings,
    trainer_environment,
)
from palaestra.runs.runner import AttemptPaths, Finding, LaunchPlan, Machine, RunnerCapabilities, StdoutLines
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

ALGORITHMS = {"ppo": "PPO", "appo": "APPO", "impala": "IMPALA", "dqn": "DQN", "sac": "SAC"}
"""Names in RLlib, by the value of `--script`."""
_PROGRAM = Path(__file__).with_name("program.py")
# Ray alone has the module `ray.rllib`, and cannot import it without what its extra installs.
_NEEDED = {
    "ray": "ray[rllib]",
    "dm-tree": "ray[rllib]",
    "pyarrow": "ray[rllib]",
    "torch": "torch",
    "gymnasium": "gymnasium",
}


class RllibConfig(Section):
    """Configuration of an RLlib run."""

    total_timesteps: int = Field(100_000, ge=1)
    """Steps in the environment; the iteration in which they are reached is completed."""
    num_envs: int = Field(1, ge=1, le=1024)
    """Copies of the environment in the process of the trainer."""
    env_kwargs: JsonObject = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    training: JsonObject = Field(default_factory=dict)
    """Arguments of `AlgorithmConfig.training`, such as lr, gamma and train_batch_size_per_learner."""


class RllibRunner:
    """Runs algorithms of RLlib."""

    name = "rllib"
    capabilities = RunnerCapabilities(title="RLlib, a template to copy")

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The keys of `RllibConfig`."""
        return RllibConfig.model_json_schema()

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Refuse what would fail later, with a remedy."""
        try:
            _read_config(spec)
            _find_algorithm(spec)
            interpreter = choose_python(spec)
        except ConfigError as error:
            return [Finding.from_error("flag", error)]
        if not spec.env_id:
            return [Finding("env", "refused", "no environment is given", "Add --env, for example CartPole-v1")]
        probed = probe(interpreter, machine, packages=list(_NEEDED), env_id=spec.env_id)
        return [
            *python_findings(interpreter, probed, _NEEDED, oldest=(3, 9)),
            *environment_findings(probed, spec.env_id),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """The command that the user sees and the service executes."""
        config, algorithm = _read_config(spec), _find_algorithm(spec)
        settings = {
            **config.model_dump(),
            "algorithm": algorithm,
            "env_id": spec.env_id,
            "seed": spec.seed,
            "directory": str(paths.attempt_dir),
        }
        return LaunchPlan(
            argv=(choose_python(spec).path, str(_PROGRAM), json.dumps(settings)),
            environment=trainer_environment(spec, paths, machine),
            cwd=paths.work_dir,
            paths=paths,
            sources=(StdoutLines("events"),),
            env_id=spec.env_id or "",
            algorithm=algorithm.lower(),
            total_steps=config.total_timesteps,
            steps_key="total_timesteps",
            resolved=config.model_dump(),
        )


def _read_config(spec: RunSpec) -> RllibConfig:
    return parse_section(RllibConfig, spec.config, place="config")


def _find_algorithm(spec: RunSpec) -> str:
    name = (spec.script or "ppo").lower()
    if name not in ALGORITHMS:
        raise ConfigError("script", spec.script, "no such algorithm", f"Known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
