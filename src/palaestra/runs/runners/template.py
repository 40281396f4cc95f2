"""A runner to copy: any script that prints `@palaestra {...}` lines becomes a trainer of the run service.

docs/runners.md explains it. `palaestra runs start --runner my-trainer --script train.py steps=1000` then runs
`python train.py --steps=1000`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError
from palaestra.runs.process.interpreter import choose_python, trainer_environment
from palaestra.runs.runner import AttemptPaths, Finding, LaunchPlan, Machine, RunnerCapabilities, StdoutLines
from palaestra.runs.spec import RunSpec

KEYS = {"steps": int, "learning_rate": float}
"""Configuration keys of the script. Any other key is refused before a launch."""


class MyTrainerRunner:
    """Runs your own scripts."""

    name = "my-trainer"
    # A request for a capability that is not declared here is refused.
    capabilities = RunnerCapabilities(title="A script of your own", runs_foreign_code=True)

    def config_schema(self, spec: RunSpec) -> dict[str, Any]:
        """JSON Schema of the configuration keys."""
        types = {int: "integer", float: "number"}
        return {"type": "object", "properties": {key: {"type": types[kind]} for key, kind in KEYS.items()}}

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Refuse what would fail later, with a remedy."""
        script = _find_script(spec)
        if script is None:
            return [Finding("script", "refused", f"{spec.script} is not a file", "Use --script with a path")]
        for key, value in spec.config.items():
            if key not in KEYS:
                return [Finding("flag", "refused", f"{key}: no such key", f"Known: {', '.join(KEYS)}")]
            if not isinstance(value, int | float) or isinstance(value, bool):
                return [Finding("flag", "refused", f"{key} = {value!r}: is not a number", f"Write {key}=1")]
        try:
            python = choose_python(spec)
        except ConfigError as error:
            return [Finding("python", "refused", f"{error.value}: {error.reason}", error.remedy)]
        return [Finding("script", "ok", str(script)), Finding("python", "ok", python.path)]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """The command that the user sees and the service executes, without a shell."""
        script = _find_script(spec)
        if script is None:
            raise ConfigError("script", spec.script, "is not a file", "Use --script with a path")
        flags = [f"--{key}={value}" for key, value in spec.config.items()]
        seed = [] if spec.seed is None else [f"--seed={spec.seed}"]
        return LaunchPlan(
            argv=(choose_python(spec).path, str(script), *flags, *seed),
            environment=trainer_environment(spec, paths, machine),
            cwd=paths.work_dir,
            paths=paths,
            sources=(StdoutLines("events"),),
            env_id=spec.env_id or "",
            algorithm=script.stem,
            total_steps=spec.config.get("steps"),
            resolved=dict(spec.config),
            script_sha256=hashlib.sha256(script.read_bytes()).hexdigest(),  # a changed script needs a new confirmation
        )


def _find_script(spec: RunSpec) -> Path | None:
    path = spec.invoked_from / (spec.script or "")
    return path if path.is_file() else None
