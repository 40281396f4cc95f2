"""The runner `palaestra`: our own trainer, started as a command.

It reads its configuration from a file of the attempt and writes the journal. The preflight runs `train --check` in a
subprocess, so that the run service never imports torch.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import palaestra
from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.catalogue import EnvironmentInfo, ScriptInfo
from palaestra.runs.process.environments import list_environments, read_parameters
from palaestra.runs.process.interpreter import (
    Interpreter,
    choose_python,
    cuda_findings,
    inherited_variables,
    probe,
    python_findings,
    trainer_environment,
)
from palaestra.runs.process.parameter_schema import object_schema
from palaestra.runs.runner import (
    AttemptPaths,
    Finding,
    JournalFile,
    LaunchPlan,
    Machine,
    PolicyPlan,
    PolicyRequest,
    RunnerCapabilities,
)
from palaestra.runs.runners.catalogues import list_tasks
from palaestra.runs.spec import RunSpec
from palaestra.runs.video.encoder import require_encoder
from palaestra.runs.wire import JsonObject, from_json

TIMEOUT_S = 180.0
CACHE_S = 60.0
SCRIPTS = (
    ScriptInfo(
        name="ppo",
        title="PPO",
        description="Proximal policy optimisation: on-policy, for environments and for screens.",
        actions=("discrete", "continuous", "screen"),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="dqn",
        title="DQN",
        description="Values of discrete actions from a replay buffer; optionally double, dueling or prioritised.",
        actions=("discrete",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="sac",
        title="SAC",
        description="Soft actor-critic: a stochastic policy from a replay buffer, with a learned temperature.",
        actions=("continuous",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="iql",
        title="IQL",
        description="Implicit Q-learning from a dataset, and fine-tuning in the environment.",
        actions=("discrete", "continuous"),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="td3_bc",
        title="TD3+BC",
        description="TD3 that stays close to the actions of a dataset, and fine-tuning in the environment.",
        actions=("continuous",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="bc",
        title="Behaviour cloning",
        description="Imitates the actions of a dataset.",
        actions=("discrete", "continuous"),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="q_learning",
        title="Q-learning",
        description="A table of action values, for numbered states and actions: seconds in FrozenLake and the like.",
        actions=("discrete",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="sarsa",
        title="SARSA",
        description="As Q-learning, but learns the value of its own behaviour, exploration included.",
        actions=("discrete",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="grpo",
        title="GRPO",
        description="Compares the episodes of a group that begins on the same screen; needs no value network.",
        actions=("screen",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="rejection_sampling",
        title="Rejection sampling",
        description="Imitates the successful episodes of the model itself.",
        actions=("screen",),
        plays=True,
        warm_start=True,
    ),
    ScriptInfo(
        name="supervised",
        title="Supervised",
        description="Imitates demonstrations (palaestra demos record), as a warm start for the other algorithms.",
        actions=("screen",),
        plays=True,
        warm_start=True,
    ),
)
"""The algorithms of `learner.registry`, which cannot be imported without torch."""
_WITHOUT_DATASETS = ("ppo", "q_learning", "sarsa")
"""Algorithms that learn from their own steps alone."""
OWN_ENVIRONMENTS = (
    "compiled/CartPole-v1",
    *(
        f"palaestra.env.toy:{name}"
        for name in ("Bandit", "Countdown", "Gate", "MaskedChoice", "MixedSenses", "Pixels", "TargetReach")
    ),
)
"""Environments of ours that are not in the registry of Gymnasium."""
SCHEMAS_FILE = Path(__file__).with_name("schemas.json")
"""Written by `make docs`: to build the schemas imports torch, which takes seconds."""
_REGISTER = ("palaestra.env.make",)
_MODULE = ("-P", "-m", "palaestra")
_ROOT = str(Path(palaestra.__file__).parents[1])


@dataclass(frozen=True)
class CheckedConfig:
    """What `train --check` prints for a configuration that can be trained."""

    env_id: str
    algorithm: str
    total_steps: int | None
    env_signature: JsonObject
    resolved: JsonObject
    offline_dataset: JsonObject = field(default_factory=dict)

    @property
    def is_offline(self) -> bool:
        """Whether the run learns from a dataset alone; its steps are gradient steps, and it has no episodes."""
        return bool(self.offline_dataset) and self.resolved.get("trainer", {}).get("total_timesteps") is None


def training_config(spec: RunSpec) -> JsonObject:
    """The configuration of `train`: the keys of the spec, with the options of the run applied."""
    data = copy.deepcopy(spec.config)

    def set_key(section: str, key: str, value: object) -> None:
        current = data.get(section)
        if current is not None and not isinstance(current, Mapping):
            raise ConfigError(section, current, "is not a mapping", f"Write {section}: {{{key}: {value}}}")
        data[section] = {**(current or {}), key: value}

    if spec.env_id is not None:
        set_key("env", "id", spec.env_id)
    if spec.script is not None:
        set_key("algorithm", "name", spec.script)
    if spec.seed is not None:
        set_key("trainer", "seed", spec.seed)
    if spec.track != "off":
        set_key("telemetry", "wandb", spec.track)
    return data


class PalaestraRunner:
    """Runs `palaestra train`."""

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
        self._check_cache: dict[str, tuple[JsonObject, float]] = {}

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The schema that `palaestra schema run` prints, or `schema ui` for UI agents; with a script, its settings."""
        is_ui = _is_ui(spec)
        schema = _read_schema("ui" if is_ui else "run")
        if spec.script is None or spec.script not in {info.name for info in SCRIPTS}:
            return schema
        settings = _read_schema(f"ui_{spec.script}" if is_ui else spec.script)
        definitions = {**schema.get("$defs", {}), **settings.get("$defs", {})}
        algorithm = {key: value for key, value in settings.items() if key != "$defs"}
        # The script is the name of the algorithm.
        algorithm["properties"] = {key: value for key, value in algorithm["properties"].items() if key != "name"}
        properties = {**schema["properties"], "algorithm": algorithm}
        if spec.script in _WITHOUT_DATASETS:
            properties.pop("dataset", None)
        return {**schema, "$defs": definitions, "properties": properties}

    def scripts(self, spec: RunSpec, machine: Machine) -> list[ScriptInfo]:
        """The built-in algorithms."""
        return list(SCRIPTS)

    def environments(self, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> list[EnvironmentInfo]:
        """Those of Gymnasium, ours, and the tasks on screens."""
        registered = list_environments(choose_python(spec), machine, register=_REGISTER, refresh=refresh)
        own = [EnvironmentInfo(env_id=env_id, group="Palaestra") for env_id in OWN_ENVIRONMENTS]
        try:
            from palaestra.sessions.browser.chromium import find_chromium

            find_chromium()
            remedy = ""
        except ConfigError as error:
            remedy = error.remedy
        screens = [
            EnvironmentInfo(
                env_id=info.task,
                group=f"Screen tasks: {info.suite}",
                kind="screen",
                installed=not remedy,
                remedy=remedy,
                max_episode_steps=info.parameters.get("properties", {}).get("step_limit", {}).get("default"),
            )
            for info in list_tasks()
        ]
        return [*registered, *own, *screens]

    def environment_parameters(self, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
        """The arguments of a constructor, or the parameters of a task."""
        task = next((info for info in list_tasks() if info.task == env_id), None)
        if task is not None:
            return task.parameters
        name = env_id.removeprefix("compiled/") if env_id in OWN_ENVIRONMENTS else env_id
        schema = read_parameters(name, choose_python(spec), machine, register=_REGISTER)
        return object_schema({}) if name != env_id else schema

    def readiness(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Whether the interpreter has the packages of the trainer."""
        interpreter = choose_python(spec)
        needed = {name: name for name in ("torch", "tensordict", "gymnasium")}
        probed = probe(interpreter, machine, packages=tuple(needed))
        return python_findings(interpreter, probed, needed, oldest=(3, 11))

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """The result of `train --check` for the configuration and the environment."""
        if not spec.invoked_from.is_dir():
            text = f"{spec.invoked_from} is not a directory"
            return [Finding("path", "refused", text, "Start it from a directory that exists")]
        if spec.warm_start is not None and not (_warm_start_path(spec) / "manifest.json").is_file():
            text = f"{spec.warm_start} is not a palaestra checkpoint"
            return [Finding("warm_start", "refused", text, "List checkpoints with: palaestra checkpoints list")]
        try:
            interpreter = choose_python(spec)
            checked = self._check(spec, interpreter, machine)
        except ConfigError as error:
            check = {"env.id": "env", "python": "python"}.get(error.place, "flag")
            return [Finding.from_error(check, error)]
        length = f", {checked.total_steps:,} steps" if checked.total_steps else ""
        return [
            Finding("python", "ok", f"{interpreter.path} ({interpreter.how})"),
            Finding("env", "ok", checked.env_id),
            Finding("config", "ok", f"{checked.algorithm}{length}"),
            *(cuda_findings(interpreter, probe(interpreter, machine, cuda=True)) if spec.gpus else []),
            *_device_findings(spec, checked.resolved),
            *(_video_findings(spec, checked.env_id) if spec.video else []),
        ]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`palaestra train` in the prepared attempt."""
        from palaestra.config.file import is_ui_config  # imports YAML, which listing the runners must not

        interpreter = choose_python(spec)
        checked = self._check(spec, interpreter, machine)
        config_file = paths.attempt_dir / "config.input.json"
        argv = [interpreter.path, *_MODULE, "train", str(config_file)]
        argv += ["--into", str(paths.run_dir), "--attempt", str(paths.attempt)]
        if paths.resume_from is not None:
            argv += ["--resume", str(paths.run_dir), "--checkpoint", paths.resume_from]
        elif spec.warm_start is not None:
            argv += ["--warm-start", str(_warm_start_path(spec))]
        return LaunchPlan(
            argv=tuple(argv),
            environment=trainer_environment(spec, paths, machine, {"PYTHONPATH": _ROOT, **_gateway_token(machine)}),
            cwd=spec.invoked_from,
            paths=paths,
            sources=(JournalFile(),),
            record_video=spec.video,
            # It finishes its update and saves a checkpoint, which takes a while for a large model.
            stop_grace_s=60.0,
            env_id=checked.env_id,
            algorithm=checked.algorithm,
            total_steps=checked.total_steps,
            steps_key="trainer.num_training_steps" if is_ui_config(spec.config) else "trainer.total_timesteps",
            env_signature=checked.env_signature,
            offline_dataset=checked.offline_dataset,
            has_episodes=not checked.is_offline,
            resolved=checked.resolved,
            files={config_file.name: json.dumps(training_config(spec), indent=2) + "\n"},
            versions={"palaestra": palaestra.__version__},
        )

    def plan_policy(self, request: PolicyRequest, machine: Machine) -> PolicyPlan:
        """The policy of a checkpoint in this interpreter."""
        options = () if request.deterministic else ("--sample",)
        program = (sys.executable, "-P", "-m", "palaestra.train.play.own_policy")
        return PolicyPlan(argv=(*program, request.checkpoint.path, *options), environment={"PYTHONPATH": _ROOT})

    def _check(self, spec: RunSpec, interpreter: Interpreter, machine: Machine) -> CheckedConfig:
        """The result of `train --check`, cached for a minute. Raises `ConfigError` if it refuses."""
        document = json.dumps(training_config(spec))
        # The devices that the run will see, so that other devices are refused before it is queued.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[: spec.gpus]), **spec.environment}
        # Where the run will find its dataset.
        visible["PALAESTRA_HOME"] = str(Home.default().base)
        key = json.dumps([document, interpreter.path, str(spec.invoked_from), visible], sort_keys=True)
        now = time.monotonic()
        self._check_cache = {k: entry for k, entry in self._check_cache.items() if now - entry[1] < CACHE_S}
        if key not in self._check_cache:
            environment = {**inherited_variables(machine), **visible}
            process = _run_cli(
                interpreter, ("train", "/dev/stdin", "--check"), document, spec.invoked_from, environment
            )
            try:
                answer = json.loads(process.stdout.splitlines()[-1])
            except (ValueError, IndexError):
                output = (process.stderr.strip().splitlines() or ["no output"])[-1]
                reason = f"cannot run palaestra (exit code {process.returncode}: {output[:300]})"
                raise ConfigError("python", interpreter.path, reason, "Install palaestra there") from None
            self._check_cache[key] = (answer, now)
        answer = self._check_cache[key][0]
        if "refused" in answer:
            refused = answer["refused"]
            raise ConfigError(refused["place"], refused["value"], refused["reason"], refused["remedy"])
        return from_json(CheckedConfig, answer)


def _read_schema(section: str) -> JsonObject:
    """What `palaestra schema SECTION` prints."""
    schemas = json.loads(SCHEMAS_FILE.read_text(encoding="utf-8"))
    schema: JsonObject = schemas[section]
    return schema


def _is_ui(spec: RunSpec) -> bool:
    """Whether a spec is about tasks on screens: by its configuration, its algorithm or its environment."""
    if "env" in spec.config or "model" in spec.config:
        return "env" not in spec.config
    actions = next((info.actions for info in SCRIPTS if info.name == spec.script), ())
    return actions == ("screen",) or (spec.env_id or "") in {info.task for info in list_tasks()}


def _device_findings(spec: RunSpec, resolved: JsonObject) -> list[Finding]:
    """Whether the run would use the GPUs that it leases."""
    key = "model.device" if "model" in resolved else "trainer.device"
    section, _, name = key.partition(".")
    if spec.gpus and resolved[section][name] == "cpu":
        text = f"{key} is cpu: the run would lease the GPU and train on the CPU"
        return [Finding("gpu", "refused", text, f"Set {key}=auto, or leave --gpus out")]
    if spec.gpus > 1:
        text = f"it trains on one GPU; {spec.gpus - 1} of {spec.gpus} would be idle"
        return [Finding("gpu", "warning", text, "Use --gpus 1")]
    return []


def _video_findings(spec: RunSpec, env_id: str) -> list[Finding]:
    """Whether the service can record its checkpoints, in our own interpreter."""
    from palaestra.config.file import is_ui_config  # imports YAML, which listing the runners must not

    if is_ui_config(spec.config) or env_id.startswith("compiled/"):
        return [Finding("video", "refused", f"{env_id} cannot render images", "Leave --video out")]
    try:
        require_encoder()
    except ConfigError as error:
        return [Finding("video", "refused", error.reason, error.remedy)]
    return []


def _gateway_token(machine: Machine) -> dict[str, str]:
    """The token with which UI agents open sessions; no other runner gets it."""
    return {name: value for name, value in machine.environment.items() if name == "PALAESTRA_GATEWAY_TOKEN"}


def _warm_start_path(spec: RunSpec) -> Path:
    return spec.invoked_from / Path(spec.warm_start or "").expanduser()


def _run_cli(
    interpreter: Interpreter, arguments: tuple[str, ...], stdin: str, cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    python_path = ":".join(part for part in (_ROOT, environment.get("PYTHONPATH", "")) if part)
    try:
        return subprocess.run(
            [interpreter.path, *_MODULE, *arguments],
            input=stdin,
            env={**environment, "PYTHONPATH": python_path},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise ConfigError("python", interpreter.path, f"cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "config", arguments[0], f"no answer within {TIMEOUT_S:.0f} s", "Try palaestra train --check"
        ) from None
