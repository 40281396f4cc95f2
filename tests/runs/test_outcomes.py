"""Every way an attempt can end, by a real process, and what is then said about it."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from tests.runs.attempts import (
    build_plan,
    create_attempt,
    read_outcome,
    run_attempt,
    wait_for_output,
    wait_until,
    with_timeout,
)

from palaestra.errors import LaunchRefused
from palaestra.files.atomic import write_json
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import PhaseEvent
from palaestra.runs.process.attempt_process import AttemptProcess
from palaestra.runs.state.attempt_files import exception_line, last_lines


def _end_of(home, code, **options):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, code, **options) as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    return read_outcome(attempt)


def test_exit_zero_is_succeeded(home):
    end = _end_of(home, "print('done')")
    assert (end.event, end.reason, end.code) == (PhaseEvent.SUCCEEDED, "done", "exit")


def test_a_non_zero_exit_is_failed_with_the_code_and_the_last_line(home):
    end = _end_of(home, "import sys; print('loading'); sys.exit('no such dataset: mnist')")
    assert (end.event, end.reason) == (PhaseEvent.FAILED, "exit code 1: no such dataset: mnist")


def test_a_traceback_is_failed_with_its_last_line(home):
    end = _end_of(home, "raise ValueError('bad learning rate')")
    assert end.reason == "exit code 1: ValueError: bad learning rate"


def test_a_killed_trainer_is_killed_sigkill(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(60)") as child:
            await wait_for_output(attempt, "up")
            os.kill(child.trainer.pid, signal.SIGKILL)
            await with_timeout(child.wait())

    asyncio.run(body())
    end = read_outcome(attempt)
    assert (end.event, end.reason, end.code) == (PhaseEvent.KILLED, "killed (SIGKILL)", "signal")


@pytest.mark.parametrize(("number", "name"), [(6, "SIGABRT"), (11, "SIGSEGV"), (15, "SIGTERM")])
def test_a_trainer_that_dies_by_a_signal_nobody_of_us_sent_is_killed(home, number, name):
    end = _end_of(home, f"import os; os.kill(os.getpid(), {number})")
    assert (end.event, end.reason) == (PhaseEvent.KILLED, f"killed ({name})")


def test_memory_beyond_the_limit_fails_the_trainer_and_not_the_machine(home):
    end = _end_of(home, "print(len(bytearray(1 << 30)))", memory_mb=512)
    assert (end.event, end.reason) == (PhaseEvent.FAILED, "exit code 1: MemoryError")


def test_a_program_that_is_not_there_is_refused(home):
    attempt = create_attempt(home)
    plan = replace(build_plan(attempt, ""), argv=("/nowhere/python", "x"))
    with pytest.raises(LaunchRefused, match="/nowhere/python cannot be executed: No such file or directory"):
        asyncio.run(AttemptProcess.launch(plan, attempt))
    end = read_outcome(attempt)
    assert (end.event, end.code) == (PhaseEvent.LAUNCH_REFUSED, "exec_failed")


def test_a_working_directory_that_is_not_there_is_refused(home):
    attempt = create_attempt(home)
    with pytest.raises(LaunchRefused, match="gone cannot be executed: No such file"):
        asyncio.run(AttemptProcess.launch(build_plan(attempt, "", cwd=attempt.path / "gone"), attempt))


def test_a_trainer_asked_to_stop_is_stopped_whatever_it_exits_with(home):
    attempt = create_attempt(home)
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up'); time.sleep(60)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_for_output(attempt, "up")
            await with_timeout(child.stop("operator", 10.0))

    asyncio.run(body())
    end = read_outcome(attempt)
    assert (end.event, end.reason, end.code) == (PhaseEvent.STOPPED, "stopped by the operator", "operator")


def test_a_run_that_finished_before_it_heard_of_the_stop_has_succeeded(home):
    attempt = create_attempt(home)
    line = '{"schema":1,"kind":"PhaseChanged","seq":1,"time":0.0,"phase":"succeeded","reason":"done"}'
    code = f"open('../metrics.jsonl', 'w').write('{line}\\n')"

    async def body():
        async with run_attempt(attempt, code) as child:
            await with_timeout(child.wait())
        write_json(attempt.stop, {"schema": 1, "reason": "operator", "grace_s": 1, "asked": 0.0})

    asyncio.run(body())
    assert read_outcome(attempt).event is PhaseEvent.SUCCEEDED


def test_a_trainer_whose_watchdog_was_killed_ends_as_lost_unless_its_journal_knows(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(60)") as child:
            await wait_for_output(attempt, "up")
            os.kill(child.watchdog.pid, signal.SIGKILL)
            await wait_until(lambda: not child.watchdog.is_alive())
            os.kill(child.trainer.pid, signal.SIGKILL)
            await with_timeout(child.wait())

    asyncio.run(body())
    assert (read_outcome(attempt).event, read_outcome(attempt).code) == (PhaseEvent.LOST, "no_witness")
    attempt.journal.write_text('{"schema":1,"kind":"PhaseChanged","seq":9,"time":0.0,"phase":"failed","reason":""}\n')
    assert (read_outcome(attempt).event, read_outcome(attempt).code) == (PhaseEvent.FAILED, "journal")


def test_a_run_of_an_earlier_boot_is_lost_to_the_restart(home):
    attempt = create_attempt(home)
    earlier = {"pid": os.getpid(), "started": 1, "boot_id": "another"}
    write_json(attempt.process, {"schema": 1, "watchdog": earlier, "trainer": earlier, "label": "x", "started": 0.0})
    assert AttemptProcess.adopt(attempt) is None
    assert (read_outcome(attempt).event, read_outcome(attempt).code) == (PhaseEvent.LOST, "reboot")


def test_a_pid_that_was_given_to_somebody_else_is_not_taken_for_the_trainer(home):
    attempt = create_attempt(home)
    me = ProcessIdentity.of(os.getpid())
    other = {"pid": me.pid, "started": me.started - 1, "boot_id": me.boot_id}
    write_json(attempt.process, {"schema": 1, "watchdog": other, "trainer": other, "label": "x", "started": 0.0})
    assert AttemptProcess.adopt(attempt) is None
    assert read_outcome(attempt).code == "no_witness"


def test_a_record_of_a_later_version_is_treated_as_absent(home):
    attempt = create_attempt(home)
    write_json(attempt.exit, {"schema": 2, "returncode": 0})
    assert read_outcome(attempt).code == "no_witness"


def test_the_last_lines_are_what_a_person_saw(tmp_path):
    log = tmp_path / "stdout.log"
    log.write_bytes(b"a\n" * 50_000 + b"  1%\r 50%\r100%\nend\xff\n\n\n")
    assert last_lines(log, 3) == "a\n100%\nend\ufffd"


def test_arguments_reach_the_trainer_as_they_are(home):
    attempt = create_attempt(home)
    nasty = ["; touch canary", "$(touch canary)", "--x=*", "", "a b\n", "ünï"]

    async def body():
        async with run_attempt(attempt, "import sys; print(sys.argv[1:])", *nasty) as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    assert attempt.stdout.read_text() == f"{nasty}\n"
    assert list(attempt.work.iterdir()) == []


def test_a_trainer_inherits_no_descriptor_and_no_signal_setting(home):
    attempt = create_attempt(home)
    code = (
        "import os; print(len(os.listdir('/proc/self/fd')), "
        "hex(int(open('/proc/self/status').read().split('SigIgn:')[1].split()[0], 16) & 0x7FFFFFFF))"
    )

    async def body():
        left_open = os.open(os.devnull, os.O_RDONLY)
        os.set_inheritable(left_open, True)
        async with run_attempt(attempt, code) as child:
            await with_timeout(child.wait())
        os.close(left_open)

    asyncio.run(body())
    # 4 = standard streams and the listing itself; Python ignores SIGPIPE (13) and SIGXFSZ (25) by its own choice.
    assert attempt.stdout.read_text() == "4 0x1001000\n"


IGNORED = (
    "Exception ignored in: <function RecordVideo.__del__>\nTraceback (most recent call last):\n"
    '  File "b.py", line 2, in close\nImportError: sys.meta_path is None\n'
)
RAISED = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    close()\nAttributeError: no enabled\n'
)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (RAISED, "AttributeError: no enabled"),
        (RAISED + "\x1b[1;34mwandb\x1b[0m: Find logs at: x\n" * 100, "AttributeError: no enabled"),
        (RAISED + IGNORED, "AttributeError: no enabled"),
        (RAISED + "cleaning up\n", "AttributeError: no enabled"),
        (RAISED + "step\n" * 21, ""),
        (RAISED + "\nDuring handling of the above exception, another exception occurred:\n\n"
         + RAISED.replace("AttributeError: no enabled", "ValueError: a\n  b"), "ValueError: a"),
        (IGNORED, ""),
        ("".join(f"[rank0]: {line}\n" for line in RAISED.splitlines()), "AttributeError: no enabled"),
        ("Traceback (most recent call last):\n  File", ""),
        ("done\n", ""),
    ],
)  # fmt: skip
def test_what_ended_a_program_is_the_exception_of_its_last_traceback(tmp_path, output, line):
    log = tmp_path / "stdout.log"
    log.write_text("global_step=1\n" + output)
    assert exception_line(log) == line


def test_a_failure_is_named_by_its_exception_whatever_is_printed_behind_it(home):
    code = "import atexit; atexit.register(print, 'Find logs at: wandb/x'); raise ValueError('bad learning rate')"
    assert _end_of(home, code).reason == "exit code 1: ValueError: bad learning rate"


def test_a_program_that_leaves_with_words_of_its_own_is_named_by_them(home):
    code = "import sys\ntry:\n  1 / 0\nexcept Exception: pass\nprint('a'); sys.exit('no such dataset: mnist')"
    assert _end_of(home, code).reason == "exit code 1: no such dataset: mnist"
