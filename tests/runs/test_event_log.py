"""The event log of a run."""

from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent
from palaestra.runs.state.event_log import RunEventLog, current_phase, duration_s


def _event(kind, phase, time=1.0, attempt=1, **more):
    return RunEvent(seq=0, time=time, attempt=attempt, kind=kind, phase=phase, **more)


def test_events_are_numbered_and_read_back_in_order(home):
    run = home.run("a")
    run.path.mkdir(parents=True)
    log = RunEventLog(run)
    first = log.append(_event("launched", Phase.STARTING, facts={"gpus": ["0"]}))
    second = RunEventLog(run).append(_event("failed", Phase.FAILED, reason="exit code 1", code="exit"))
    assert (first.seq, second.seq) == (1, 2)
    assert RunEventLog(run).read() == [first, second]
    assert RunEventLog(run).read(after=1) == [second]
    assert current_phase(RunEventLog(run).read()) is Phase.FAILED


def test_a_run_without_events_is_queued(home):
    assert RunEventLog(home.run("none")).read() == []
    assert current_phase([]) is Phase.QUEUED


def test_a_torn_line_is_skipped_counted_and_ended(home):
    run = home.run("a")
    run.path.mkdir(parents=True)
    RunEventLog(run).append(_event("launched", Phase.STARTING))
    whole = run.events.read_bytes()
    for cut in range(1, len(whole)):
        run.events.write_bytes(whole + whole[:cut].rstrip(b"\n"))
        log = RunEventLog(run)
        added = log.append(_event("first_sign", Phase.RUNNING))
        records = log.read()
        assert records[-1] == added
        assert (log.corrupt_lines, len(records)) in {(1, 2), (0, 3)}  # (0, 3): all but the newline was there


def test_lines_of_a_later_schema_or_with_an_unknown_phase_are_counted_not_believed(home):
    run = home.run("a")
    run.path.mkdir(parents=True)
    log = RunEventLog(run)
    log.append(_event("launched", Phase.STARTING))
    line = run.events.read_text()
    run.events.write_text(
        line + line.replace('"schema":1', '"schema":2') + line.replace("starting", "levitating") + "7\n"
    )
    assert len(log.read()) == 1
    assert log.corrupt_lines == 3


def test_a_duration_is_never_negative():
    assert duration_s(None, None, 5.0) == 0.0
    assert duration_s(3.0, None, 5.0) == 2.0
    assert duration_s(3.0, 4.0, 99.0) == 1.0
    assert duration_s(100.0, None, 5.0) == 0.0
