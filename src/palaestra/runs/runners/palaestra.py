"""The runner `palaestra`: our own trainer, as a command like any other.

It gets its configuration as a file of the attempt and writes the journal itself. Everything it would refuse is found by
`train --check` in a process of its own, so that the run service never loads torch.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import palaestra
from palaestra.errors import ConfigError
from palaestra.runs.process.interpreter import (
    Interpreter,
    choose_python,
    cuda_findings,
    inherited_variables,
    probe,
    trainer_environment,
)
from palaestra.runs.runner import AttemptPaths, Finding, JournalFile, LaunchPlan, Machine, RunnerCapabilities
from palaestra.runs.spec import RunSpec
from palaestra.runs.video.encoder import require_encoder

__all__ = ["PalaestraRunner", "training_document"]

LIMIT_S = 180.0
REMEMBERED_S = 60.0
_CODE = ("-P", "-m", "palaestra")
_ROOT = str(Path(palaestra.__file__).parents[1])


def training_document(spec: RunSpec) -> dict[str, Any]:
    """The configuration that `train` reads: the spec's own keys, with its general wishes put in their places."""
    data = copy.deepcopy(spec.config)

    def put(section: str, key: str, value: object) -> None:
        inner = data.get(section)
        if inner is not None and not isinstance(inner, Mapping):
            raise ConfigError(section, inner, "is not a mapping", f"Write {section}: {{{key}: {value}}}")
        data[section] = {**(inner or {}), key: value}

    if spec.env_id is not None:
        put("env", "id", spec.env_id)
    if spec.script is not None:
        put("algorithm", "name", spec.script)
    if spec.seed is not None:
        put("trainer", "seed", spec.seed)
    if spec.track != "off":
        put("telemetry", "wandb", spec.track)
    put("telemetry", "progress", False)
    return data


class PalaestraRunner:
    """Our own trainer."""

    name = "palaestra"
    capabilities = RunnerCapabilities(
        title="Palaestra's own trainer",
        offline_inference=True,
        warm_start=True,
        resume=True,
        external_services=("wandb",),
        video=True,
        tracking=True,
    )

    def __init__(self) -> None:
        self._checked: dict[str, tuple[dict[str, Any], float]] = {}

    def config_schema(self, spec: RunSpec) -> dict[str, Any]:
        """As `palaestra schema run` prints it; `schema ui` for models on screens."""
        kind = "ui" if "model" in spec.config and "env" not in spec.config else "run"
        done = _called(choose_python(spec), ("schema", kind), "", spec.invoked_from, {"PATH": "/usr/bin:/bin"})
        schema: dict[str, Any] = json.loads(done.stdout)
        return schema

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """What `train` itself says of the configuration and the environment."""
        if not spec.invoked_from.is_dir():
            text = f"{spec.invoked_from} is not a directory"
            return [Finding("path", "refused", text, "Start it from a directory that exists")]
        if spec.warm_start is not None and not (_path(spec, spec.warm_start) / "manifest.json").is_file():
            text = f"{spec.warm_start} is not a checkpoint of ours"
            return [Finding("warm_start", "refused", text, "palaestra checkpoints list shows those that are")]
        try:
            interpreter = choose_python(spec)
            found = self._check(spec, interpreter, machine)
        except ConfigError as error:
            check = {"env.id": "env", "python": "python"}.get(error.place, "flag")
            return [Finding(check, "refused", f"{error.place} = {error.value!r}: {error.reason}", error.remedy)]
        length = f", {found['total_steps']:,} steps" if found["total_steps"] else ""
        return [
            Finding("python", "ok", f"{interpreter.path} ({interpreter.how})"),
            Finding("env", "ok", found["env_id"]),
            Finding("config", "ok", f"{found['algorithm']}{length}"),
            *(cuda_findings(interpreter, probe(interpreter, machine, cuda=True)) if spec.gpus else []),
            *_device_findings(spec, found["resolved"]),
            *(_film_findings(spec, found["env_id"]) if spec.video else []),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`palaestra train` into the attempt."""
        from palaestra.config.file import is_ui_config  # reads YAML, which naming the runners must not load

        interpreter = choose_python(spec)
        found = self._check(spec, interpreter, machine)
        document = paths.attempt_dir / "config.input.json"
        argv = [interpreter.path, *_CODE, "train", str(document)]
        argv += ["--into", str(paths.run_dir), "--attempt", str(paths.attempt)]
        if paths.resume_from is not None:
            argv += ["--resume", str(paths.run_dir), "--checkpoint", paths.resume_from]
        elif spec.warm_start is not None:
            argv += ["--warm-start", str(_path(spec, spec.warm_start))]
        return LaunchPlan(
            argv=tuple(argv),
            environment=trainer_environment(spec, paths, machine, {"PYTHONPATH": _ROOT, **_gateway_token(machine)}),
            cwd=spec.invoked_from,
            paths=paths,
            sources=(JournalFile(),),
            film=spec.video,
            # It finishes its update and saves a checkpoint, which for a large model takes a while.
            stop_grace_s=60.0,
            env_id=found["env_id"],
            algorithm=found["algorithm"],
            total_steps=found["total_steps"],
            steps_key="trainer.num_training_steps" if is_ui_config(spec.config) else "trainer.total_timesteps",
            env_signature=found["env_signature"],
            resolved=found["resolved"],
            files={document.name: json.dumps(training_document(spec), indent=2) + "\n"},
            versions={"palaestra": palaestra.__version__},
        )

    def _check(self, spec: RunSpec, interpreter: Interpreter, machine: Machine) -> dict[str, Any]:
        """What `train --check` answers, remembered for a minute; `ConfigError` as it refuses."""
        document = json.dumps(training_document(spec))
        # What it will see: a device that is not among the leased ones is refused before the run is queued.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[: spec.gpus]), **spec.environment}
        key = json.dumps([document, interpreter.path, str(spec.invoked_from), visible], sort_keys=True)
        now = time.monotonic()
        self._checked = {k: entry for k, entry in self._checked.items() if now - entry[1] < REMEMBERED_S}
        if key not in self._checked:
            environment = {**inherited_variables(machine), **visible}
            answer = _called(interpreter, ("train", "/dev/stdin", "--check"), document, spec.invoked_from, environment)
            try:
                found = json.loads(answer.stdout.splitlines()[-1])
            except (ValueError, IndexError):
                said = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
                reason = f"cannot run palaestra (exit code {answer.returncode}: {said[:300]})"
                raise ConfigError("python", interpreter.path, reason, "Install palaestra there") from None
            self._checked[key] = (found, now)
        found = self._checked[key][0]
        if "refused" in found:
            refused = found["refused"]
            raise ConfigError(refused["place"], refused["value"], refused["reason"], refused["remedy"])
        return found


def _device_findings(spec: RunSpec, resolved: Mapping[str, Any]) -> list[Finding]:
    """Whether the GPUs it leases would be used."""
    key = "model.device" if "model" in resolved else "trainer.device"
    section, _, name = key.partition(".")
    if spec.gpus and resolved[section][name] == "cpu":
        text = f"{key} is cpu: the run would hold the GPU and train on the CPU"
        return [Finding("gpu", "refused", text, f"Set {key}=auto, or leave --gpus out")]
    if spec.gpus > 1:
        text = f"it trains on one GPU: {spec.gpus - 1} of the {spec.gpus} would be idle"
        return [Finding("gpu", "warning", text, "Ask for one: --gpus 1")]
    return []


def _film_findings(spec: RunSpec, env_id: str) -> list[Finding]:
    """Whether its checkpoints can be filmed, which happens in our own interpreter."""
    from palaestra.config.file import is_ui_config  # reads YAML, which naming the runners must not load

    if is_ui_config(spec.config) or env_id.startswith("compiled/"):
        return [Finding("video", "refused", f"{env_id} draws nothing that could be filmed", "Leave --video out")]
    try:
        require_encoder()
    except ConfigError as error:
        return [Finding("video", "refused", error.reason, error.remedy)]
    return []


def _gateway_token(machine: Machine) -> dict[str, str]:
    """Training on screens asks a gateway for sessions; no other runner has a use for its token."""
    return {name: value for name, value in machine.environment.items() if name == "PALAESTRA_GATEWAY_TOKEN"}


def _path(spec: RunSpec, given: str) -> Path:
    return spec.invoked_from / Path(given).expanduser()


def _called(
    interpreter: Interpreter, words: tuple[str, ...], given: str, cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    path = ":".join(part for part in (_ROOT, environment.get("PYTHONPATH", "")) if part)
    try:
        return subprocess.run(
            [interpreter.path, *_CODE, *words], input=given, env={**environment, "PYTHONPATH": path}, cwd=cwd,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError("python", interpreter.path, f"cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "config", words[0], f"no answer within {LIMIT_S:.0f} s", "Try palaestra train --check"
        ) from None
