"""A conformance test for runners.

Call `check_runner(MyRunner, spec, tmp_path)` in your tests, with a spec that runs for a few seconds. It raises
`AssertionError` with the rule that is broken. The last part launches the command as the service does, reads its
telemetry, starts the policy of its checkpoint if the runner claims `offline_inference`, and stops a second run early.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.files import detect_format, digest_path
from palaestra.runs.ingest.trainer_formats import OUTPUT_FORMATS, TAGS
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.play.protocol import MessageBuffer
from palaestra.runs.process.attempt_process import AttemptProcess
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import (
    AttemptPaths,
    EventFiles,
    JournalFile,
    LaunchPlan,
    Machine,
    PlayableRunner,
    PolicyRequest,
    Runner,
    StdoutLines,
)
from palaestra.runs.runners.catalogues import readiness_of, scripts_of
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.attempt_files import read_status
from palaestra.telemetry.event import Record
from palaestra.telemetry.journal import JournalReader

CANARY = "canary-0123456789-never-shown"
UNKNOWN_KEY = "no_such_key_anywhere"
_READINESS_S = 30.0
"""Far more than the second that a user should wait, for machines under load."""


def check_runner(
    make: Callable[[], Runner], spec: RunSpec, directory: Path, *, launch: bool = True, timeout_s: float = 120.0
) -> None:
    """Raise `AssertionError` with the first rule that the runner breaks. `directory` must be empty.

    The run of `spec` must end within `timeout_s` and report at least one event.
    """
    machine = Machine({**os.environ, "WANDB_API_KEY": CANARY}, free_disk_bytes=1 << 40)
    _check_declarations(make(), spec)
    before = _list_files(directory)
    _check_preflight(make(), spec, machine)
    plan = make().plan(spec, _paths(directory, "trial-one"), machine)
    _check_plan(plan, spec)
    _check_same_digest(
        plan, make().plan(spec, _paths(directory, "trial-one"), machine), "two instances plan the same command"
    )
    _check_same_digest(
        plan, make().plan(spec, _paths(directory, "trial-two"), machine), "the digest does not depend on the run id"
    )
    assert _list_files(directory) == before, "preflight and plan write nothing"
    assert CANARY not in json.dumps(plan.to_redacted_dict()), "a redacted plan contains no secrets"
    _check_catalogues(make(), spec, machine)
    if launch:
        asyncio.run(asyncio.wait_for(_check_run(plan), timeout_s))
        if make().capabilities.offline_inference:
            _check_policy(make, spec, plan, machine, timeout_s)
        second = make().plan(spec, _paths(directory, "three"), machine)
        asyncio.run(asyncio.wait_for(_check_stop(second), timeout_s))


def _paths(directory: Path, run_id: str) -> AttemptPaths:
    run = Home(directory / "var" / "training").run(run_id)
    attempt = run.attempt(1)
    return AttemptPaths(run_id, 1, run.path, attempt.path, attempt.work)


def _list_files(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.rglob("*"))


def _check_declarations(runner: Runner, spec: RunSpec) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_-]*", runner.name), (
        f"the name of a runner is one lower-case word: {runner.name!r}"
    )
    assert runner.capabilities.title, "capabilities have a title"
    schema = runner.config_schema(spec)
    assert json.loads(json.dumps(schema)) == schema, "config_schema is plain JSON"
    assert schema.get("type") == "object", "config_schema describes an object"
    properties = schema.get("properties")
    assert isinstance(properties, dict), "config_schema has properties"
    assert all(isinstance(value, dict) for value in properties.values()), "every property has a schema"


def _check_preflight(runner: Runner, spec: RunSpec, machine: Machine) -> None:
    refused = [finding for finding in runner.preflight(spec, machine) if finding.level == "refused"]
    assert not refused, f"the given spec can be run: {refused}"
    invalid = spec.model_copy(update={"config": {**spec.config, UNKNOWN_KEY: 1}})
    refused = [finding for finding in runner.preflight(invalid, machine) if finding.level == "refused"]
    assert refused, "an unknown key is refused"
    assert any(UNKNOWN_KEY in finding.text for finding in refused), "a refusal names the key"
    assert all(finding.remedy for finding in refused), "a refusal has a remedy"
    without_python = spec.model_copy(update={"python": "/no/such/python"})
    try:
        findings = runner.preflight(without_python, machine)
    except ConfigError:
        raise AssertionError("preflight returns findings and does not raise") from None
    assert all(finding.text for finding in findings), "every finding has a text"


def _check_plan(plan: LaunchPlan, spec: RunSpec) -> None:
    paths = plan.paths
    assert plan.argv, "a plan has a command"
    assert all(isinstance(word, str) and "\0" not in word for word in plan.argv), "argv contains strings without NUL"
    assert os.path.isabs(plan.argv[0]), "argv[0] is an absolute path"
    assert os.access(plan.argv[0], os.X_OK), "argv[0] is executable"
    assert plan.cwd == spec.invoked_from or plan.cwd.is_relative_to(paths.attempt_dir), (
        "cwd is in the attempt or the directory of the request"
    )
    assert all(isinstance(value, str) for value in plan.environment.values()), "environment values are strings"
    assert plan.environment.get("TMPDIR", "").startswith(str(paths.attempt_dir)), "TMPDIR is in the attempt"
    assert plan.sources, "a plan has a telemetry source"
    for source in plan.sources:
        if isinstance(source, StdoutLines):
            assert source.format in OUTPUT_FORMATS, (
                f"the format {source.format!r} is one of {', '.join(OUTPUT_FORMATS)}"
            )
        elif isinstance(source, EventFiles):
            assert source.tags in TAGS, f"the tag table {source.tags!r} is one of {', '.join(TAGS)}"
    for name in plan.files:
        assert not Path(name).is_absolute(), f"{name} is inside the attempt"
        assert ".." not in Path(name).parts, f"{name} is inside the attempt"
    assert json.loads(json.dumps(dict(plan.resolved))) is not None, "the resolved configuration is plain JSON"
    assert plan.stop_grace_s >= 0, "stop_grace_s is not negative"


def _check_same_digest(plan: LaunchPlan, again: LaunchPlan, rule: str) -> None:
    assert plan.digest() == again.digest(), rule


def _prepare_attempt(plan: LaunchPlan) -> Attempt:
    attempt = Attempt(plan.paths.attempt_dir)
    attempt.work.mkdir(parents=True)
    for name, text in plan.files.items():
        path = attempt.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return attempt


async def _check_run(plan: LaunchPlan) -> None:
    attempt = _prepare_attempt(plan)
    child = await AttemptProcess.launch(plan, attempt)
    try:
        await child.wait()
    finally:
        if read_status(attempt).alive:
            await child.stop("operator", 0.0)
        child.close()
    status = read_status(attempt)
    assert status.exit is not None, "the run ends and its exit is recorded"
    tail = attempt.stdout.read_text(errors="replace")[-500:]
    assert status.exit.returncode == 0, f"the given spec succeeds: {status.exit}; output: {tail}"
    assert _read_events(plan, attempt), "the run reports at least one event"


def _check_catalogues(runner: Runner, spec: RunSpec, machine: Machine) -> None:
    names = [info.name for info in scripts_of(runner, spec, machine)]
    assert len(set(names)) == len(names), "scripts have different names"
    assert all(names), "every script has a name"
    if names and spec.script is not None:
        assert spec.script in names, "the script of the given spec is in the list of scripts"
    began = time.monotonic()
    readiness = readiness_of(runner, spec, machine)
    assert readiness.level != "missing", f"a runner that can run the given spec is ready: {readiness.text}"
    assert time.monotonic() - began < _READINESS_S, f"readiness is found within {_READINESS_S:.0f} s"


def _check_policy(
    make: Callable[[], Runner], spec: RunSpec, plan: LaunchPlan, machine: Machine, timeout_s: float
) -> None:
    """A checkpoint of the run can be planned as a policy, and its process says that it is ready."""
    runner = make()
    assert hasattr(runner, "plan_policy"), "a runner with offline_inference has plan_policy"
    record = _find_checkpoint(runner, spec, plan)
    assert record is not None, "with offline_inference, the given spec saves a checkpoint"
    request = PolicyRequest(
        checkpoint=record, spec=spec, command=plan.to_redacted_dict(), deterministic=True, env_id=plan.env_id
    )
    policy = runner.plan_policy(request, machine)
    again = cast(PlayableRunner, make()).plan_policy(request, machine)
    assert policy.digest() == again.digest(), "two instances plan the same policy"
    assert not policy.foreign_code, "a checkpoint of a run that the user agreed to needs no further consent"
    assert os.path.isabs(policy.argv[0]), "argv[0] of a policy is an absolute path"
    assert CANARY not in json.dumps([policy.argv, dict(policy.environment)]), "a policy gets no secrets"
    process = subprocess.Popen(
        policy.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **policy.environment},
        cwd=policy.cwd or None,
    )
    # A watchdog instead of a timeout of the read, which has none.
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        output, _ = process.communicate()
    finally:
        timer.cancel()
    messages = list(MessageBuffer().add(output))
    assert messages, "a policy process sends a message when it is loaded"
    assert messages[0].type == "ready", f"a policy of the run is ready: {messages[0].header}"
    assert process.returncode == 0, "a policy process ends when its input is closed"


def _find_checkpoint(runner: Runner, spec: RunSpec, plan: LaunchPlan) -> CheckpointRecord | None:
    attempt = Attempt(plan.paths.attempt_dir)
    files = [*attempt.checkpoints.glob("[!.]*"), *(p for glob in plan.checkpoints for p in attempt.work.glob(glob))]
    path = next((path for path in sorted(files) if path.name != attempt.best.name), None)
    if path is None:
        return None
    digest = digest_path(path)
    return CheckpointRecord(
        checkpoint_id=digest.sha256[:16],
        run_id=plan.paths.run_id,
        agent_id=f"{runner.name}/{plan.algorithm}",
        env_id=plan.env_id,
        attempt=1,
        env_step=None,
        path=str(path),
        sha256=digest.sha256,
        size_bytes=digest.size_bytes,
        format=detect_format(path),
        created=path.stat().st_mtime,
    )


async def _check_stop(plan: LaunchPlan) -> None:
    attempt = _prepare_attempt(plan)
    child = await AttemptProcess.launch(plan, attempt)
    try:
        await child.stop("operator", plan.stop_grace_s)
    finally:
        child.close()
    assert not read_status(attempt).alive, "no process is left after a stop"


def _read_events(plan: LaunchPlan, attempt: Attempt) -> list[Record]:
    if not any(isinstance(source, JournalFile) for source in plan.sources):
        translator = Translator(attempt, plan.sources)
        try:
            while translator.pump(10_000, final=True):
                pass
        finally:
            translator.close()
    with JournalReader(attempt.journal) as reader:
        return reader.read()
