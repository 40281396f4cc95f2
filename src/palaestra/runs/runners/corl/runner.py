"""The runner `corl`: unmodified scripts of the user's CORL checkout.

The scripts import Gym 0.23, D4RL and W&B, which current interpreters do not have. Three small modules of these names
(`shims/corl`) are put into the attempt, on PYTHONPATH, and declared in the command: they pass a verified local dataset
and a Gymnasium environment to the script, and its metrics to the run service. The user confirms every command, because
the code of the scripts is foreign.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from palaestra.errors import CheckpointError, ConfigError
from palaestra.runs.catalogue import ScriptInfo
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
from palaestra.runs.runner import (
    AttemptPaths,
    Finding,
    Injection,
    LaunchPlan,
    Machine,
    PolicyPlan,
    PolicyRequest,
    RunnerCapabilities,
    StdoutLines,
)
from palaestra.runs.runners.corl.catalogue import can_act, describe_corl_scripts
from palaestra.runs.runners.corl.checkout import (
    CHECKOUT,
    find_base_config,
    find_checkout,
    find_script,
    list_scripts,
    script_name,
)
from palaestra.runs.runners.corl.checks import jax_findings, range_findings, run_findings, warm_start_findings
from palaestra.runs.runners.corl.offline_data import (
    VARIABLE,
    OfflineData,
    dataset_findings,
    load_offline_data,
    read_settings,
)
from palaestra.runs.runners.corl.script import (
    FIELD_RANGES,
    CorlScript,
    build_corl_flags,
    read_base_config,
    read_corl_script,
)
from palaestra.runs.runners.script_arguments import argument_schema, check_values
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

SHIMS = Path(__file__).parents[1] / "shims" / "corl"
POLICY_PROGRAM = Path(__file__).parents[1] / "programs" / "corl_policy_program.py"
OBSERVATION_FILE = "observations.json"
"""How a script transforms observations; the injected `gym` writes it into the working directory."""
CHECKPOINTS = "models"
"""Where the scripts save checkpoints, in the working directory of the attempt."""
_REPLACED = {
    "gym": "the interface of Gym 0.23 on Gymnasium",
    "d4rl": "reads the dataset of the run and normalises scores",
    "wandb": "passes metrics and checkpoints to the run service, and to W&B if the run asks for it",
}
"""Modules that are injected, and why."""
_RUNNER_KEYS: dict[str, JsonObject] = {
    "checkout": {"type": "string", "description": f"Directory of the CORL checkout. Default: ${CHECKOUT}."},
    "dataset": {
        "type": "string",
        "description": "Id of a local dataset, such as pendulum/medium-v0 (palaestra datasets list).",
        "x-choices": "datasets",
    },
    "config_path": {
        "type": "string",
        "description": "File of the checkout's configs whose values are used unless they are given here, such as "
        "offline/td3_bc/halfcheetah/medium_v2.yaml.",
    },
    "metrics_every": {
        "type": ["integer", "null"],
        "minimum": 1,
        "default": None,
        "description": "Updates over which losses are averaged before they are recorded. Default: chosen so that a run "
        "records at most 2,000 values per loss. Evaluations are always recorded.",
    },
}
_RUN_OPTIONS = {
    **dict.fromkeys(("env", "env_name", "dataset_name"), "Use --env, or let the dataset decide"),
    **dict.fromkeys(("seed", "train_seed"), "Use --seed"),
    "load_model": "Use --warm-start CHECKPOINT",
    "wandb": "Use --track online or --track offline; metrics are recorded in any case",
}


@dataclass(frozen=True)
class _Request:
    """A parsed spec: the script and the values of its fields."""

    checkout: Path
    script: CorlScript
    values: JsonObject
    """Values that the command gives."""
    base: JsonObject
    """Values of the file at `config_path`."""
    base_file: Path | None
    metrics_every: int | None
    findings: tuple[Finding, ...]

    @property
    def all_values(self) -> JsonObject:
        """The values of all fields that are known before the script runs."""
        return {**self.script.defaults(), **self.base, **self.values}

    def check(self) -> list[Finding]:
        """Problems with the values, of the command and of the file."""
        values = {**self.base, **self.values}
        return check_values(self.script.arguments, values, self.script.path.name) or range_findings(self.script, values)

    @property
    def total_updates(self) -> int | None:
        return self.script.count_updates(self.all_values)


class CorlRunner:
    """Runs unmodified scripts of a CORL checkout."""

    name = "corl"
    capabilities = RunnerCapabilities(
        title="CORL, from your checkout",
        offline_inference=True,
        warm_start=True,
        external_services=("wandb",),
        tracking=True,
        runs_foreign_code=True,
    )

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The fields of the script, the dataset and the checkout."""
        properties: JsonObject = dict(_RUNNER_KEYS)
        if spec.script is not None:
            script = read_corl_script(find_script(spec.script, find_checkout(spec, os.environ)))
            fields = argument_schema(field for field in script.arguments if field.name not in _RUN_OPTIONS)
            properties |= {name: entry | FIELD_RANGES.get(name, {}) for name, entry in fields.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def scripts(self, spec: RunSpec, machine: Machine) -> list[ScriptInfo]:
        """The scripts of the checkout."""
        checkout = find_checkout(spec, machine.environment)
        paths = {name: find_script(name, checkout) for name in list_scripts(checkout)}
        needed = partial(_required_packages, tracks=False)
        return describe_corl_scripts(paths, choose_python(spec, checkout), machine, needed)

    def readiness(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Whether there are a checkout and the packages that all scripts need."""
        checkout = find_checkout(spec, machine.environment)
        interpreter = choose_python(spec, checkout)
        needed = _required_packages(frozenset({"torch"}), tracks=False)
        probed = probe(interpreter, machine, packages=tuple(needed))
        return [
            Finding("checkout", "ok", f"{len(list_scripts(checkout))} scripts in {checkout}"),
            *python_findings(interpreter, probed, needed, oldest=(3, 8)),
        ]

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Check checkout, script, fields, dataset, interpreter, packages, environment, disk, time and credentials."""
        try:
            request = _parse_request(spec, machine)
            refused = request.check()
            if refused:
                return refused
            data = load_offline_data(spec)
            interpreter = choose_python(spec, request.checkout)
        except ConfigError as error:
            value = f"{error.value}: " if error.value not in (None, "") else ""
            return [Finding(error.place, "refused", f"{value}{error.reason}", error.remedy)]
        needed = _required_packages(request.script.imports, tracks=spec.track != "off")
        probed = _run_probe(request, data, interpreter, machine, spec)
        text = f"{request.script.path.relative_to(request.checkout)} (sha256 {_hash_script(request)[:12]})"
        packages = python_findings(interpreter, probed, needed, oldest=(3, 8))
        is_complete = not any(finding.level == "refused" for finding in packages)
        return [
            Finding("script", "ok", text),
            *packages,
            *(environment_findings(probed, data.env_id) if is_complete else []),
            *dataset_findings(data, probed),
            *(cuda_findings(interpreter, probed) if spec.gpus else []),
            *request.findings,
            *run_findings(request.script, request.all_values, data, machine, on_gpu=spec.gpus > 0),
            *jax_findings(request.script, interpreter, probed),
            *warm_start_findings(request.script, script_name(request.script.path), spec, data),
            *tracking_findings(spec, machine),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`python script.py --fields` in the working directory of the attempt."""
        request = _parse_request(spec, machine)
        refused = request.check()
        if refused:
            raise ConfigError(refused[0].check, request.script.path.name, refused[0].text, refused[0].remedy)
        data = load_offline_data(spec)
        interpreter = choose_python(spec, request.checkout)
        probed = _run_probe(request, data, interpreter, machine, spec)
        values = {**request.values, request.script.env_field: data.env_id}
        if spec.warm_start is not None:
            values["load_model"] = str(spec.invoked_from / Path(spec.warm_start).expanduser())
        shims = {name: (SHIMS / f"{name}.py").read_text(encoding="utf-8") for name in _REPLACED}
        base = [] if request.base_file is None else [f"--config_path={request.base_file}"]
        return LaunchPlan(
            argv=(interpreter.path, str(request.script.path), *base, *build_corl_flags(request.script, values)),
            environment=trainer_environment(spec, paths, machine, _build_variables(spec, paths, request, data)),
            cwd=paths.work_dir,
            paths=paths,
            sources=(StdoutLines("corl"),),
            checkpoints=(f"{CHECKPOINTS}/**/*.pt",),
            env_id=data.env_id,
            algorithm=script_name(request.script.path),
            total_steps=request.total_updates,
            steps_key=request.script.update_field,
            env_signature=probed.env_signature,
            offline_dataset=data.identity,
            has_episodes=False,
            resolved={
                **request.all_values,
                **values,
                "script": str(request.script.path.relative_to(request.checkout)),
                "checkout": str(request.checkout),
                "dataset": data.dataset.dataset_id,
                "dataset_sha256": data.dataset.sha256,
            },
            files={f"shim/{name}.py": text for name, text in shims.items()},
            injected=tuple(
                Injection(
                    str(paths.attempt_dir / "shim" / f"{name}.py"),
                    hashlib.sha256(text.encode()).hexdigest(),
                    _REPLACED[name],
                )
                for name, text in shims.items()
            ),
            script_sha256=_hash_script(request),
            versions={"python": probed.version_text, **{k: v for k, v in probed.packages.items() if v is not None}},
        )

    def plan_policy(self, request: PolicyRequest, machine: Machine) -> PolicyPlan:
        """`corl_policy_program.py` with the actor of the run's script, which must be unchanged or needs consent."""
        checkpoint = request.checkpoint
        settings = read_settings(request.command)
        if request.unsafe or request.spec is None or settings is None:
            reason = request.unsafe or "is not in the directory of its run, which knows its script and normalisation"
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, reason, "Use another checkpoint")
        script = _parse_request(request.spec, machine)
        if not can_act(script.script.path):
            reason = f"{script.script.path.name} has no network that acts on one observation"
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, reason, "Use a checkpoint of another script")
        interpreter = choose_policy_python(request, script.checkout)
        needed = _required_packages(script.script.imports, tracks=False)
        require_packages(interpreter, probe(interpreter, machine, packages=tuple(needed)), needed)
        sha256 = hashlib.sha256(script.script.path.read_bytes()).hexdigest()
        argv = [interpreter.path, str(POLICY_PROGRAM), checkpoint.path, "--sha256", checkpoint.sha256]
        argv += [f"--env={checkpoint.env_id}", "--script", str(script.script.path), "--script-sha256", sha256]
        argv += ["--values", json.dumps(script.all_values)]
        argv += ["--observations", str(Path(checkpoint.path).parents[2] / OBSERVATION_FILE)]
        argv += [] if request.deterministic else ["--sample"]
        is_same = request.command.get("script_sha256") == _hash_script(script)
        return PolicyPlan(
            argv=tuple(argv),
            environment={
                **policy_environment([str(SHIMS), str(script.checkout)]),
                VARIABLE: json.dumps({**settings, "wandb": False}, sort_keys=True),
            },
            foreign_code="" if is_same else f"{script.script.path}, which has changed since the run",
        )


def _build_variables(spec: RunSpec, paths: AttemptPaths, request: _Request, data: OfflineData) -> dict[str, str]:
    settings = data.build_settings(
        total_updates=request.total_updates, metrics_every=request.metrics_every, wandb=spec.track != "off"
    )
    variables = {
        "PYTHONPATH": f"{paths.attempt_dir / 'shim'}:{request.checkout}",
        VARIABLE: settings,
        # A progress bar would write ten lines per second into the output.
        "TQDM_MININTERVAL": "10",
    }
    return variables | ({"WANDB_MODE": spec.track} if spec.track != "off" else {})


def _parse_request(spec: RunSpec, machine: Machine) -> _Request:
    """The script and its values. Raises `ConfigError` with the name of the failed check as its place."""
    checkout = find_checkout(spec, machine.environment)
    if spec.script is None:
        names = ", ".join(list_scripts(checkout)[:8])
        raise ConfigError("script", None, "no script given", f"Use --script with one of {names}")
    script = read_corl_script(find_script(spec.script, checkout))
    values = {key: value for key, value in spec.config.items() if key not in _RUNNER_KEYS}
    for key, remedy in _RUN_OPTIONS.items():
        if key in values:
            raise ConfigError("flag", key, "is set by an option of runs start", remedy)
    if not script.env_field:
        raise ConfigError("script", script.path.name, "has no field for its environment", "Choose another script")
    findings = []
    if spec.seed is not None:
        if not script.seed_field:
            raise ConfigError("flag", "seed", f"{script.path.name} has no field for a seed", "Leave --seed out")
        values[script.seed_field] = spec.seed
    if script.argument("checkpoints_path") is not None:
        values.setdefault("checkpoints_path", CHECKPOINTS)
        if values["checkpoints_path"] not in (CHECKPOINTS, None):
            reason = f"the service looks for checkpoints in {CHECKPOINTS}"
            raise ConfigError("checkpoints_path", values["checkpoints_path"], reason, "Leave it out, or set it to null")
    if script.argument("device") is not None:
        if str(values.get("device", "cpu")) != "cpu" and not spec.gpus:
            text = f"device = {values['device']}, but no GPU was requested: it runs on the CPU"
            findings.append(Finding("gpu", "warning", text, "Use --gpus 1"))
        values["device"] = "cuda" if spec.gpus else "cpu"
    base_file = find_base_config(spec.config.get("config_path"), checkout)
    base = {} if base_file is None else read_base_config(base_file, script)
    every = spec.config.get("metrics_every")
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise ConfigError("metrics_every", every, "is not a number of updates", "Give a positive integer")
    return _Request(checkout, script, values, base, base_file, every, tuple(findings))


def _required_packages(imports: frozenset[str], *, tracks: bool) -> dict[str, str]:
    """Distributions that a script with these imports needs, and their requirement strings."""
    names = {name for name in imports if name not in _REPLACED} | {"gymnasium", "h5py", "numpy", "pyrallis"}
    names |= {"wandb"} if tracks else set()
    return {name: name for name in sorted(names)}


def _run_probe(
    request: _Request, data: OfflineData, interpreter: Interpreter, machine: Machine, spec: RunSpec
) -> Probe:
    needed = _required_packages(request.script.imports, tracks=spec.track != "off")
    return probe(
        interpreter,
        machine,
        packages=tuple(needed),
        env_id=data.env_id,
        env_kwargs={"max_episode_steps": data.max_episode_steps, **data.env_kwargs},
        cuda=spec.gpus > 0,
    )


def _hash_script(request: _Request) -> str:
    """SHA-256 of the script and of the configuration file that it reads."""
    digest = hashlib.sha256(request.script.path.read_bytes())
    if request.base_file is not None:
        digest.update(request.base_file.read_bytes())
    return digest.hexdigest()
