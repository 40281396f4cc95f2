"""The echo runner, on which the other tests of the run service rely."""

import contextlib
import json
import os
import signal
import time
from dataclasses import replace

import pytest
from tests.runs.runners.conftest import run, start

from palaestra.processes.procfs import list_descendants, read_stat
from palaestra.runs.runner import JournalFile
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, JournalReader, TrainingStep
from palaestra.telemetry.event import PhaseChanged


def _plan(paths, machine, **config):
    return EchoRunner().plan(RunSpec(runner="echo", config=config), paths, machine)


def _events(paths):
    with JournalReader(paths.attempt_dir / "metrics.jsonl") as reader:
        return [record.event for record in reader.read()], reader.corrupt_lines


def _totals(paths):
    return json.loads((paths.work_dir / "echo.json").read_text())


def _wait(condition, process, *, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "it ended instead"
        assert time.monotonic() < deadline, f"did not happen in {timeout_s} s"
        time.sleep(0.005)


def test_every_number_it_says_can_be_computed(paths, machine):
    plan = _plan(paths, machine, steps=20, metrics=3, episodes_every=10, checkpoint_every=10, spike_every=7)

    code, output = run(plan)

    events, corrupt = _events(paths)
    steps = [event for event in events if isinstance(event, TrainingStep)]
    assert (code, corrupt, plan.sources) == (0, 0, (JournalFile(),))
    assert output == "echo: 20 updates to go\n"
    assert [event.update for event in steps] == list(range(1, 21))
    assert steps[4] == TrainingStep(5, 50, {"m0": 5.0, "m1": 6.0, "m2": 7.0})
    assert steps[6].metrics["m0"] == 1_000_007.0
    assert [e for e in events if isinstance(e, EpisodeSummary)] == [
        EpisodeSummary(100, 1, 0, 1.0, 100),
        EpisodeSummary(200, 2, 0, 2.0, 100),
    ]
    assert [e.env_step for e in events if isinstance(e, CheckpointSaved)] == [100, 200]
    assert events[-1] == PhaseChanged("succeeded", "done")
    assert _totals(paths) == {"seq": 26, "first_update": 0, "updates": 20, "episodes": 2}


def test_a_resumed_one_goes_on_from_the_checkpoint(paths, machine):
    run(_plan(paths, machine, steps=10, checkpoint_every=5))
    second = paths.run_dir / "attempt_2"
    again = replace(
        paths, attempt=2, attempt_dir=second, work_dir=second / "work",
        resume_from=str(paths.attempt_dir / "checkpoints" / "step_50.json"),
    )  # fmt: skip

    run(_plan(again, machine, steps=10))

    events, _ = _events(again)
    assert [e.update for e in events if isinstance(e, TrainingStep)] == [6, 7, 8, 9, 10]
    assert events[0] == PhaseChanged("running", "resumed")


@pytest.mark.parametrize(
    ("then", "code", "words"),
    [
        ("exit:3", 3, "exiting with 3 as requested"),
        ("traceback", 1, "RuntimeError: requested by then=traceback"),
        ("abort", -signal.SIGABRT, ""),
        ("signal:KILL", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_it_is_told(paths, machine, then, code, words):
    found, output = run(_plan(paths, machine, steps=3, then=then))

    assert (found, words in output) == (code, True)
    assert _totals(paths)["updates"] == 3


def test_asked_to_stop_it_saves_says_so_and_exits_with_130(paths, machine):
    with start(_plan(paths, machine, steps=5, checkpoint_every=100, then="hang")) as process:
        _wait((paths.work_dir / "echo.json").exists, process)
        process.terminate()
        assert process.wait(20) == 130

    events, _ = _events(paths)
    assert [type(event) for event in events[-2:]] == [CheckpointSaved, PhaseChanged]
    assert events[-1].phase == "stopped"


def test_it_can_ignore_sigterm_and_leave_orphans_in_sessions_of_their_own(paths, machine):
    plan = _plan(paths, machine, steps=1, then="hang", ignore_term=True, fork="2:setsid")
    with start(plan) as process:
        try:
            _wait((paths.work_dir / "echo.json").exists, process)
            process.terminate()

            def orphans():
                return [
                    pid for pid in list_descendants(1) | list_descendants(os.getpid())
                    if str(paths.attempt_dir).encode() in _command_line(pid) and pid != process.pid
                ]  # fmt: skip

            # A process that is being reparented has no parent in the list.
            _wait(lambda: len(orphans()) == 2, process)
            assert process.poll() is None
            assert all(os.getsid(pid) not in (process.pid, os.getsid(0)) for pid in orphans())
        finally:
            process.kill()
            process.wait()
            while left := [pid for pid in list_descendants(1) if str(paths.attempt_dir).encode() in _command_line(pid)]:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def _command_line(pid):
    if read_stat(pid) is None:
        return b""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def test_damaged_records_are_where_they_were_asked_for(paths, machine):
    code, output = run(_plan(paths, machine, steps=4, corrupt_line="middle", traceback_alive=True))

    events, corrupt = _events(paths)
    assert (code, corrupt) == (0, 1)
    assert [e.update for e in events if isinstance(e, TrainingStep)] == [1, 2, 3, 4]
    assert "RuntimeError: requested, and still running" in output


def test_it_floods_and_speaks_marked_lines(paths, machine):
    code, output = run(_plan(paths, machine, steps=2, metrics=1, speak="stdout", flood=1))

    assert code == 0
    assert len(output) > 1 << 20
    marked = [json.loads(line.removeprefix("@palaestra ")) for line in output.splitlines() if line.startswith("@pal")]
    assert marked[1] == {"kind": "TrainingStep", "update": 1, "env_step": 10, "metrics": {"m0": 1.0}}


def test_its_event_files_are_read_by_tensorboard(paths, machine):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(_plan(paths, machine, steps=300, metrics=1, speak="tensorboard"))

    found = accumulator.EventAccumulator(str(paths.work_dir / "runs" / "echo"), size_guidance={"scalars": 0})
    found.Reload()

    assert [(point.step, point.value) for point in found.Scalars("losses/m0")][-2:] == [(2990, 299.0), (3000, 300.0)]
    assert len(found.Scalars("charts/episodic_return")) == 30


def test_memory_beyond_its_limit_is_a_memory_error(paths, machine):
    plan = _plan(paths, machine, steps=0, then="oom")
    limited = replace(plan, argv=("/usr/bin/env", "prlimit", "--as=300000000", *plan.argv))

    code, output = run(limited)

    assert (code, "MemoryError" in output) == (1, True)


def test_a_configuration_it_cannot_have_is_refused_with_the_nearest_key(machine):
    (finding,) = EchoRunner().preflight(RunSpec(runner="echo", config={"step": 3}), machine)

    assert (finding.level, finding.check, finding.remedy) == ("refused", "flag", "Did you mean 'steps'?")
