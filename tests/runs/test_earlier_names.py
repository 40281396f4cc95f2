"""State directories of earlier versions: their files are read, continued and never rewritten."""

import asyncio
import json
import sqlite3

from tests.runs.attempts import wait_until, with_timeout
from tests.runs.supervisors import (
    echo,
    event_kinds,
    read_journal,
    run_and_close_supervisor,
    run_supervisor,
    wait_for_phase,
)

from palaestra.files.atomic import write_json
from palaestra.processes.procfs import ProcessIdentity, boot_id
from palaestra.runs.ingest.feed import Feed
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.runner import JournalFile, StdoutLines
from palaestra.runs.series.files import Commit, append_commit
from palaestra.runs.state.attempt_files import AttemptPlan, read_status
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.resume import read_current_spec

WATCHDOG, TRAINER = ({"pid": pid, "started": 1, "boot_id": "an earlier boot"} for pid in (11, 12))
LINE = {"schema": 1, "time": 5.0, "boottime": 1.0, "boot_id": "b", "attempt": 1, "reason": "", "code": "", "facts": {}}
LIFE = (
    {**LINE, "attempt": 0, "happening": "note", "phase": "queued", "facts": {"env_id": "Echo-v0", "algorithm": "echo"}},
    {**LINE, "happening": "launched", "phase": "starting"},
    {**LINE, "happening": "first_sign", "phase": "running"},
    {**LINE, "happening": "adopted", "phase": "running", "facts": {"warden_lives": True}},
    {**LINE, "happening": "alarm", "phase": "running", "code": "warden_gone", "reason": "its watchdog was killed"},
    {**LINE, "happening": "failed", "phase": "failed", "code": "exit", "facts": {"env_step": 70, "returncode": 3}},
)
PLAN = {
    "schema": 1,
    "sources": [{"grammar": "events", "kind": "stdout"}],
    "checkpoints": ["*.pt"],
    "videos": [],
    "stop_grace_s": 7.0,
    "env_id": "Echo-v0",
    "algorithm": "echo",
    "total_steps": 100,
    "env_signature": {},
    "script_sha256": "",
    "gpus": [],
    "film": True,
}


def _write_ended_run(home, run_id="old-1"):
    run = home.run(run_id)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    spec = {
        "schema_version": 1,
        "runner": "echo",
        "config": {"given": 1},
        "given": "steps: 1\n",
        "stall_action": "tell",
    }
    write_json(run.spec, spec)
    write_json(run.resolved, {})
    lines = [json.dumps({**line, "seq": seq}) for seq, line in enumerate(LIFE, start=1)]
    (run.path / "life.jsonl").write_text("\n".join([*lines, ""]))
    write_json(attempt.plan, PLAN)
    write_json(attempt.process, {"schema": 1, "warden": WATCHDOG, "trainer": TRAINER, "label": "old-1/1/ab"})
    write_json(attempt.exit, {"schema": 1, "returncode": 3, "ended": 6.0})
    return run


def test_an_ended_run_is_read_with_the_current_names(home):
    run = _write_ended_run(home)
    reader, attempt = RunReader(home), run.attempt(1)

    record = reader.run("old-1")
    assert (record.phase, record.env_step, record.env_id) == (Phase.FAILED, 70, "Echo-v0")
    events = reader.events("old-1")
    assert [event.kind for event in events] == ["note", "launched", "first_sign", "adopted", "alarm", "failed"]
    assert (events[3].facts, events[4].code) == ({"watchdog_alive": True}, "watchdog_gone")
    assert read_status(attempt).watchdog == ProcessIdentity(**WATCHDOG)
    plan = AttemptPlan.read(attempt)
    assert (plan.sources, plan.record_video, plan.stop_grace_s) == ((StdoutLines("events"),), True, 7.0)
    document = reader.document("old-1", "spec")
    assert (document["config_text"], document["stall_action"]) == ("steps: 1\n", "alarm")
    assert document["config"] == {"given": 1}  # the keys of a runner are its own


def test_an_ended_run_can_be_resumed_and_its_log_continues_in_its_file(home):
    run = _write_ended_run(home)
    log = RunEventLog(run)
    spec = read_current_spec(run, log.read())
    assert (spec.config_text, spec.stall_action, spec.config) == ("steps: 1\n", "alarm", {"given": 1})

    before = (run.path / "life.jsonl").read_bytes()
    appended = log.append(log.read()[0])
    assert appended.seq == 7
    assert (run.path / "life.jsonl").read_bytes().startswith(before)
    assert not run.events.exists()
    assert RunEventLog(run).read()[-1] == appended


def test_what_a_trainer_reported_to_an_earlier_service_is_still_known(home):
    attempt = home.run("old-1").attempt(1)
    attempt.series.mkdir(parents=True)
    tally = {"env_step": 70, "episodes": 4, "said": "succeeded", "said_reason": "done"}
    append_commit(attempt.series / "commits.log", Commit(tally=tally, boot_id=boot_id(), whole=True), durable=True)
    feed = Feed(attempt, (JournalFile(),))
    try:
        progress = feed.progress()
    finally:
        feed.close()
    assert (progress.reported_phase, progress.env_step, progress.episodes) == ("succeeded", 70, 4)


def _rename(document, **names):
    return {names.get(key, key): value for key, value in document.items()}


def _rewrite_as_earlier_version(home, run_id):
    """The files of a live run, and its row, as the earlier version wrote them."""
    run = home.run(run_id)
    attempt = run.attempt(1)
    lines = [_rename(json.loads(line), kind="happening") for line in run.events.read_text().splitlines()]
    (run.path / "life.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.events.unlink()
    for path, names in (
        (run.spec, {"config_text": "given"}),
        (attempt.process, {"watchdog": "warden"}),
        (attempt.plan, {"record_video": "film"}),
    ):
        write_json(path, _rename(json.loads(path.read_text()), **names))
    write_json(run.spec, {**json.loads(run.spec.read_text()), "stall_action": "tell"})
    connection = sqlite3.connect(home.registry)
    connection.execute("""UPDATE runs SET process = replace(process, '"watchdog":', '"warden":')""")
    connection.commit()
    connection.close()


def test_a_live_run_of_an_earlier_version_is_adopted_and_loses_nothing(home):
    go = home.path / "go"

    async def body():
        async with run_and_close_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=30, until=str(go)))).run_id
            before = await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            await wait_until(lambda: supervisor.registry.get(run_id).env_step == 300, "all updates")
        _rewrite_as_earlier_version(home, run_id)

        assert RunReader(home).run(run_id).phase is Phase.RUNNING  # a reader beside the earlier service
        async with run_supervisor(home) as supervisor:
            assert supervisor.report.adopted == [run_id]
            record = supervisor.get_run(run_id)
            assert (record.watchdog, record.trainer) == (before.watchdog, before.trainer)
            assert record.watchdog.is_alive()
            go.touch()
            await wait_until(lambda: supervisor.registry.get(run_id).phase.has_ended, "the end")
            return supervisor.registry.get(run_id)

    record = asyncio.run(with_timeout(body()))
    assert (record.phase, record.env_step, record.code) == (Phase.SUCCEEDED, 300, "exit")
    assert event_kinds(home, record.run_id) == ["note", "launched", "first_sign", "adopted", "succeeded"]
    assert not home.run(record.run_id).events.exists()
    updates = [one.event.update for one in read_journal(home, record.run_id) if hasattr(one.event, "update")]
    assert updates == list(range(1, 31))
    assert len(RunReader(home).recent_metrics(record.run_id, 100, ["m0"])["m0"]) == 30


def test_an_earlier_run_comes_back_when_the_registry_is_rebuilt(home):
    _write_ended_run(home)
    registry = open_registry(home)
    assert registry.get("old-1").phase is Phase.FAILED
    registry.close()
