"""A damaged or missing registry costs nothing but the time to read the run directories."""

import json
import logging

from palaestra.files.atomic import write_json
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import open_registry, read_run, rebuild
from palaestra.runs.store.registry import Registry
from palaestra.telemetry import Journal
from palaestra.telemetry.event import PhaseChanged


def _run(home, run_id="echo-1", *events, **spec):
    run = home.run(run_id)
    run.path.mkdir(parents=True)
    write_json(run.spec, {"schema_version": 1, "runner": "echo", "seed": 3, "tags": ["t"], "priority": 2, **spec})
    for seq, (kind, phase, more) in enumerate(events):
        RunEventLog(run).append(RunEvent(0, 100.0 + seq, 1, kind, phase, **more))
    return run


ENDED = (
    ("submitted", Phase.QUEUED, {}),
    ("launched", Phase.STARTING, {}),
    ("failed", Phase.FAILED, {"reason": "exit code 3", "code": "exit", "facts": {"env_step": 50, "episodes": 4}}),
    ("note", Phase.FAILED, {"reason": "somebody looked at it"}),
)


def test_an_ended_run_is_read_from_its_life(home):
    run = _run(home, "echo-1", *ENDED)
    plan = {"sources": [], "checkpoints": [], "videos": [], "gpus": [], "env_id": "E-v0", "algorithm": "ppo"}
    run.attempt(1).path.mkdir()
    write_json(run.attempt(1).path / "plan.json", {"schema": 1, **plan, "total_steps": 99})
    record = read_run(run)
    assert record.phase is Phase.FAILED
    assert (record.agent_id, record.env_id, record.total_steps) == ("echo/ppo", "E-v0", 99)
    assert (record.created, record.started, record.ended) == (100.0, 101.0, 102.0)
    assert (record.env_step, record.episodes, record.seed, record.priority, record.tags) == (50, 4, 3, 2, ("t",))


def test_an_end_that_only_the_watchdog_saw_is_told_as_it_was(home):
    run = _run(home, "echo-1", *ENDED[:2])
    attempt = run.attempt(1)
    attempt.path.mkdir()
    write_json(attempt.exit, {"schema": 1, "returncode": -9, "ended": 500.0})
    record = read_run(run)
    assert (record.phase, record.reason, record.ended) == (Phase.KILLED, "killed (SIGKILL)", 500.0)


def test_a_run_of_palaestra_train_alone_is_shown_as_its_journal_says(home):
    attempt = home.run("solo-1").attempt(1)
    resolved = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "trainer": {"seed": 5}}
    attempt.path.mkdir(parents=True)
    (home.run("solo-1").path / "resolved.json").write_text(json.dumps(resolved))
    with Journal(attempt.journal) as journal:
        journal.emit(PhaseChanged("running"))
        live = read_run(home.run("solo-1"))
        assert (live.phase, live.supervised, live.ended) == (Phase.RUNNING, False, None)
        assert (live.agent_id, live.env_id, live.seed) == ("palaestra/ppo", "CartPole-v1", 5)
        journal.emit(PhaseChanged("stopped"))
    assert read_run(home.run("solo-1")).phase is Phase.STOPPED
    attempt.journal.unlink()
    assert read_run(home.run("solo-1")).phase is Phase.LOST


def test_what_is_no_run_is_named_and_left_alone(home):
    _run(home)
    (home.runs / "stray").mkdir()
    (home.runs / ".half.new").mkdir()
    registry = Registry.open(home.registry)
    report = rebuild(home, registry)
    registry.close()
    assert (report.runs, report.unreadable) == (1, ("stray",))
    assert (home.runs / "stray").exists()


def test_a_damaged_registry_is_set_aside_and_rebuilt_with_one_warning(home, caplog):
    _run(home, "echo-1", *ENDED)
    _run(home, "echo-2")
    home.registry.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with caplog.at_level(logging.WARNING):
        registry = open_registry(home)
    assert sorted(run.run_id for run in registry.runs()) == ["echo-1", "echo-2"]
    registry.close()
    (aside,) = home.path.glob("registry.corrupt-*.sqlite")
    assert aside.read_bytes().endswith(b"\xff" * 5000)
    assert str(aside) in caplog.text


def test_a_registry_damaged_in_the_middle_is_noticed_at_the_door(home):
    registry = Registry.open(home.registry)
    rows = [
        RunRecord(run_id=f"r-{n}", runner="e", agent_id="e", env_id="x" * 200, phase=Phase.LOST) for n in range(500)
    ]
    registry.put_many(rows)
    registry.close()
    _run(home, "echo-1", *ENDED)
    data = bytearray(home.registry.read_bytes())
    assert len(data) > 100_000
    for page in range(8, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
    home.registry.write_bytes(data)
    registry = open_registry(home)
    assert [run.run_id for run in registry.runs()] == ["echo-1"]
    registry.close()
    assert len(list(home.path.glob("registry.corrupt-*.sqlite"))) == 1


def test_a_missing_registry_is_made_from_what_is_there(home):
    _run(home, "echo-1", *ENDED)
    registry = open_registry(home)
    assert registry.get("echo-1").phase is Phase.FAILED
    registry.close()
