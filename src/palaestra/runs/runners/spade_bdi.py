"""The runner `spade-bdi`: an AgentSpeak agent on XMPP whose plans choose the actions, with Q-learning as a skill.

It runs `programs/bdi_program.py` in an environment of its own, because agentspeak is licensed under the GPL and SPADE
pins versions of common packages: neither is ever imported or required by palaestra.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import json
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from palaestra.config import parse_section
from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.home import Home
from palaestra.runs.catalogue import EnvironmentInfo
from palaestra.runs.process.environments import read_parameters
from palaestra.runs.process.interpreter import (
    CACHE_S,
    Interpreter,
    choose_python,
    inherited_variables,
    policy_environment,
    trainer_environment,
)
from palaestra.runs.process.virtual_environment import RunnerEnvironment, pip_variables
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
from palaestra.runs.runners.spade_bdi_checks import NAME, SpadeBdiConfig, XmppConfig, begin_stream, find_syntax_fault
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

PROGRAM = Path(__file__).with_name("programs") / "bdi_program.py"
PLANS = PROGRAM.with_name("bdi") / "plans"
ENVIRONMENT = RunnerEnvironment("spade_bdi", PROGRAM.with_name("bdi") / "requirements.txt", size_mb=230)
_ENVIRONMENTS = {
    "FrozenLake-v1": "Toy text",
    "FrozenLake8x8-v1": "Toy text",
    "CliffWalking-v1": "Toy text",
    "CliffWalkingSlippery-v1": "Toy text",
    "Taxi-v4": "Toy text",
    "palaestra/GridWorld-v0": "Palaestra",
}
_LIMITS = {"FrozenLake-v1": 100, "FrozenLake8x8-v1": 200, "Taxi-v4": 200, "palaestra/GridWorld-v0": 100}
_CHECK_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 3.0
_STOP_GRACE_S = 15.0


@dataclass(frozen=True)
class CheckAnswer:
    """What the interpreter of the worker says about plans, environment and checkpoint."""

    findings: tuple[Finding, ...]
    env_signature: JsonObject
    versions: dict[str, str]


class SpadeBdiRunner:
    """Runs BDI agents of SPADE."""

    name = "spade-bdi"
    capabilities = RunnerCapabilities(
        title="SPADE-BDI: plans, beliefs and Q-learning",
        offline_inference=True,
        warm_start=True,
        live_beliefs=True,
        external_services=("xmpp",),
    )

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The keys of `SpadeBdiConfig`."""
        return SpadeBdiConfig.model_json_schema()

    def environments(self, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> list[EnvironmentInfo]:
        """The environments with plans. Others with numbered states and actions work as well."""
        return [
            EnvironmentInfo(env_id=env_id, group=group, max_episode_steps=_LIMITS.get(env_id))
            for env_id, group in _ENVIRONMENTS.items()
        ]

    def environment_parameters(self, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
        """The arguments of an environment's constructor."""
        return read_parameters(env_id, choose_python(RunSpec()), machine, register=("palaestra.env.make",))

    def readiness(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Whether its environment exists, or could be created."""
        return ENVIRONMENT.findings(machine) if spec.python is None else []

    def preparation(self, machine: Machine) -> list[str]:
        """The command that creates its environment."""
        return [*ENVIRONMENT.command(machine, None, prints_to_stderr=True), "-c", "pass"]

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Check keys, interpreter, XMPP server, environment, plans and the checkpoint of a warm start."""
        try:
            config = _parse_spec(spec)
            _check_export(config, Home.default().path)
            interpreter = _choose_interpreter(spec, machine)
        except ConfigError as error:
            check = error.place if error.place in ("script", "python", "env", "warm_start", "asl") else "flag"
            return [Finding.from_error(check, error)]
        findings = [*_xmpp_findings(config.xmpp, machine), *_syntax_findings(_asl_path(spec, config))]
        if any(finding.check == "asl" for finding in findings):
            return findings
        if interpreter is None:
            findings += ENVIRONMENT.findings(machine)
            if not any(finding.level == "refused" for finding in findings):
                text = "plans and env are checked only when the run starts, in the Python environment that it creates"
                findings.append(Finding("asl", "warning", text, f"palaestra runners --prepare {self.name}"))
            return findings
        return [*findings, *_check(spec, config, interpreter, machine).findings]

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`bdi_program.py train`, in an environment that is created if it is missing."""
        config = _parse_spec(spec)
        state = paths.run_dir.parents[1]
        interpreter = _choose_interpreter(spec, machine)
        answer = None if interpreter is None else _check(spec, config, interpreter, machine)
        assert spec.env_id is not None
        settings = config.model_dump(mode="json", exclude={"save_as"})
        settings["asl"] = str(_asl_path(spec, config) or "")
        flags = {
            "--env": spec.env_id,
            "--seed": str(spec.seed or 0),
            "--config": json.dumps(settings, sort_keys=True),
            "--out": str(paths.attempt_dir / "checkpoints"),
        }
        if spec.warm_start is not None:
            flags["--load"] = str(_find_warm_start(spec, state))
        if config.save_as:
            _check_export(config, state)
            flags["--export"] = str(named_agents(state) / config.save_as)
        start = [_given_python(spec)] if spec.python is not None else ENVIRONMENT.command(machine, state)
        variables = {} if spec.python is not None else pip_variables(machine)
        password = machine.environment.get(config.xmpp.password_variable)
        if config.xmpp.host and password is not None:
            variables[config.xmpp.password_variable] = password
        return LaunchPlan(
            argv=(*start, str(PROGRAM), "train", *itertools.chain.from_iterable(flags.items())),
            environment=trainer_environment(spec, paths, machine, variables),
            cwd=paths.work_dir,
            paths=paths,
            sources=(StdoutLines("events"),),
            stop_grace_s=_STOP_GRACE_S,
            env_id=spec.env_id,
            algorithm=_agent_name(config),
            steps_key="episodes",
            env_signature={} if answer is None else answer.env_signature,
            resolved={**config.model_dump(mode="json"), "env_id": spec.env_id, "seed": spec.seed or 0},
            script_sha256=_plans_digest(spec, config),
            versions={} if answer is None else answer.versions,
        )

    def plan_policy(self, request: PolicyRequest, machine: Machine) -> PolicyPlan:
        """`bdi_program.py act` in the interpreter of a new run with the same spec."""
        checkpoint = request.checkpoint
        if checkpoint.format != "spade_bdi":
            reason = f"is of the format {checkpoint.format}"
            raise CheckpointError("checkpoint", checkpoint.checkpoint_id, reason, "Choose one of a BDI agent")
        spec = request.spec or RunSpec(runner=self.name)
        if spec.python is not None:
            start = [_given_python(spec)]
        else:
            start = ENVIRONMENT.command(machine, _state_directory(Path(checkpoint.path)), prints_to_stderr=True)
        argv = [*start, str(PROGRAM), "act", checkpoint.path, "--sha256", checkpoint.sha256]
        argv += [] if request.deterministic else ["--sample"]
        variables = {**policy_environment(), "PYTHONHASHSEED": "0"}
        return PolicyPlan(argv=tuple(argv), environment=variables)


def _given_python(spec: RunSpec) -> str:
    """The interpreter that the spec names."""
    return choose_python(spec).path


def _parse_spec(spec: RunSpec) -> SpadeBdiConfig:
    if spec.script is not None:
        raise ConfigError("script", spec.script, "a BDI agent has no scripts", "Give the plans with asl=FILE")
    if spec.env_id is None or spec.env_id.startswith("-"):
        raise ConfigError("env", spec.env_id, "no environment given", "Use --env FrozenLake-v1")
    config = parse_section(SpadeBdiConfig, spec.config)
    path = _asl_path(spec, config)
    if path is not None and not path.is_file():
        raise ConfigError("asl", config.asl, f"{path} is not a file", "Give the path of an AgentSpeak file")
    if spec.warm_start is not None:
        _find_warm_start(spec, Home.default().path)
    return config


def _asl_path(spec: RunSpec, config: SpadeBdiConfig) -> Path | None:
    return None if config.asl is None else (spec.invoked_from / Path(config.asl).expanduser()).absolute()


def _agent_name(config: SpadeBdiConfig) -> str:
    """`bdi`, or the name of the user's own plans: runs with other plans are another agent."""
    stem = Path(config.asl or "").stem
    return stem if NAME.fullmatch(stem) else "bdi"


def _plans_digest(spec: RunSpec, config: SpadeBdiConfig) -> str:
    """Hash of the plans: of the given file, or of those that ship."""
    path = _asl_path(spec, config)
    files = [path] if path is not None else sorted(PLANS.glob("*.asl"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _find_warm_start(spec: RunSpec, state: Path) -> Path:
    """The checkpoint directory of a warm start: a path, or a name in the library."""
    name = spec.warm_start or ""
    candidates = (spec.invoked_from / Path(name).expanduser(), named_agents(state) / name)
    for path in candidates:
        if (path / "manifest.json").is_file():
            return path.absolute()
    known = sorted(path.parent.name for path in named_agents(state).glob("[!.]*/manifest.json"))
    remedy = f"Known names: {', '.join(known)}" if known else "Give a step_N directory of an earlier run"
    raise ConfigError("warm_start", name, "is neither a checkpoint of a BDI agent nor a name in the library", remedy)


def named_agents(state: Path) -> Path:
    """The directory of agents that were kept by name, in a state directory."""
    return Home(state).custom / "spade_bdi"


def _check_export(config: SpadeBdiConfig, state: Path) -> None:
    path = named_agents(state) / config.save_as
    if config.save_as and path.exists():
        raise ConfigError("save_as", config.save_as, f"{path} exists", "Choose another name, or remove it")


def _state_directory(checkpoint: Path) -> Path | None:
    """The state directory that a checkpoint lies in; None if it lies elsewhere."""
    return next((path for path in checkpoint.parents if (path.parent.name, path.name) == ("var", "training")), None)


def _choose_interpreter(spec: RunSpec, machine: Machine) -> Interpreter | None:
    """The interpreter of the worker; None if its environment has to be created first."""
    if spec.python is not None:
        return choose_python(spec)
    if ENVIRONMENT.is_ready(machine):
        return Interpreter(ENVIRONMENT.python(machine), "its own environment")
    return None


def _xmpp_findings(config: XmppConfig, machine: Machine) -> list[Finding]:
    """Check that the port of an embedded server is free, or that an external server answers."""
    if not config.host:
        if not config.port:
            return [Finding("xmpp", "ok", "an embedded server on a free port of 127.0.0.1")]
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", config.port))
            except OSError as error:
                text = f"xmpp.port = {config.port}: the port cannot be used ({error.strerror})"
                return [Finding("xmpp", "refused", text, "Set xmpp.port=0 for a free port")]
        return [Finding("xmpp", "ok", f"an embedded server on port {config.port} of 127.0.0.1")]
    if not machine.environment.get(config.password_variable):
        text = f"{config.password_variable}, the password of {config.jid}, is not set where the service runs"
        return [Finding("xmpp", "refused", text, f"export {config.password_variable}=… and restart the service")]
    where = f"{config.host}:{config.port or 5222}"
    try:
        domain = config.jid.rpartition("@")[2].partition("/")[0]
        address = begin_stream(config.host, config.port or 5222, domain, _CONNECT_TIMEOUT_S)
    except (OSError, UnicodeError) as error:
        text = f"xmpp.host = {config.host!r}: the server at {where} does not answer ({error})"
        remedy = "Start it, or leave xmpp.host out: then a server is embedded"
        return [Finding("xmpp", "refused", text, remedy)]
    if not config.verify_tls and not ipaddress.ip_address(address).is_loopback:
        text = f"xmpp.verify_tls is false: the password may reach another server than {where}"
        return [Finding("xmpp", "warning", text, "Give the server a certificate that can be verified")]
    return [Finding("xmpp", "ok", f"the server at {where} answers")]


def _syntax_findings(path: Path | None) -> list[Finding]:
    """Refuse plans whose text has an error that needs no parser. Those that ship have none."""
    if path is None:
        return []
    try:
        fault = find_syntax_fault(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [Finding("asl", "refused", f"{path} cannot be read ({error})", "Give the path of an AgentSpeak file")]
    return (
        [] if fault is None else [Finding("asl", "refused", f"{path}:{fault.line}: {fault.reason}", "Correct the line")]
    )


_answers: dict[tuple[str, ...], tuple[CheckAnswer, float]] = {}


def _check(spec: RunSpec, config: SpadeBdiConfig, interpreter: Interpreter, machine: Machine) -> CheckAnswer:
    """Run `bdi_program.py check`. The answer is cached for a minute, since a preview and a launch ask the same."""
    assert spec.env_id is not None
    load = str(_find_warm_start(spec, Home.default().path)) if spec.warm_start is not None else ""
    arguments = ["--env", spec.env_id, "--env-kwargs", json.dumps(config.env_kwargs, sort_keys=True)]
    arguments += ["--asl", str(_asl_path(spec, config) or ""), "--load", load]
    key = (interpreter.path, _plans_digest(spec, config), *arguments)
    now = time.monotonic()
    for old in [known for known, (_, expires) in _answers.items() if now > expires]:
        del _answers[old]
    if key not in _answers:
        _answers[key] = (_run_check(interpreter, arguments, machine), now + CACHE_S)
    return _answers[key][0]


def _run_check(interpreter: Interpreter, arguments: list[str], machine: Machine) -> CheckAnswer:
    environment = {**inherited_variables(machine), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(
            [interpreter.path, str(PROGRAM), "check", *arguments],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
        data = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        text = f"{interpreter.path} cannot run the worker ({last[:300]})"
        remedy = f"{interpreter.path} -m pip install -r {ENVIRONMENT.requirements}, or leave --python out"
        return CheckAnswer((Finding("python", "refused", text, remedy),), {}, {})
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"{interpreter.path} cannot run the worker ({error})"
        return CheckAnswer((Finding("python", "refused", text, "Name a working interpreter with --python"),), {}, {})
    versions = {name: version for name, version in data["versions"].items() if version is not None}
    problems = [Finding(check, "refused", text, remedy) for check, text, remedy in data["problems"]]
    findings = problems or [
        Finding("env", "ok", f"{data['env'].get('env_id')}"),
        Finding("asl", "ok", f"{len(data['plans'])} plans"),
    ]
    python = Finding("python", "ok", f"{interpreter.path} ({interpreter.how})")
    return CheckAnswer((python, *findings), data["env"], versions)
