"""The title, tags and notes of a run: changed in any phase, found by a search, and never lost."""

import asyncio
import errno
import json
import os
import signal
import sqlite3
import threading

import pytest
from tests.runs.attempts import wait_until
from tests.runs.serving import killed_service, service_thread
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.errors import ConfigError, PalaestraError, UnknownRun
from palaestra.files.atomic import read_json, write_json
from palaestra.runs import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent, digest_config
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.database import MIGRATIONS
from palaestra.runs.store.rebuild import read_run
from palaestra.runs.supervisor import supervisor as supervisor_module
from palaestra.telemetry.event import PhaseChanged, TrainingStep
from palaestra.telemetry.journal import Journal

EDIT = {"name": "Baseline, three layers", "tags": ["good", "paper"], "notes": "First line.\nSecond line: ü."}


def _words(record):
    return record.name, record.tags, record.notes


EDITED = (EDIT["name"], ("good", "paper"), EDIT["notes"])


def test_a_run_that_has_ended_is_edited_field_by_field_and_found_by_its_words(served):
    trainer, run_id = served.trainer, served.done()
    assert _words(trainer.run(run_id)) == ("", (), "")
    assert _words(trainer.update_run(run_id[:-1], **EDIT)) == EDITED
    assert _words(trainer.run(run_id)) == EDITED
    assert _words(trainer.update_run(run_id, tags=["good", "good", "better"])) == (
        EDIT["name"],
        ("good", "better"),
        EDIT["notes"],
    )
    assert _words(trainer.update_run(run_id, name="  ", notes="")) == ("", ("good", "better"), "")
    trainer.update_run(run_id, **EDIT)
    for search in ("THREE", "second ü", "paper baseline"):
        assert [row.run_id for row in trainer.runs(search=search)] == [run_id], search
    assert [row.run_id for row in trainer.runs(tag="paper")] == [run_id]
    assert trainer.run(run_id).phase is Phase.SUCCEEDED
    last = trainer.run_events(run_id)[-1]
    assert (last.kind, last.reason, last.phase) == ("edited", "changed name, tags, notes", Phase.SUCCEEDED)


def test_a_run_is_marked_as_a_favorite_and_found_by_it_also_with_a_new_registry(served):
    trainer, run_id, other = served.trainer, served.done(), served.done()
    assert not trainer.run(run_id).favorite
    record = trainer.update_run(run_id, favorite=True)
    assert (record.favorite, _words(record)) == (True, ("", (), ""))
    assert [row.run_id for row in trainer.runs(where="favorite=true")] == [run_id]
    assert other in [row.run_id for row in trainer.runs(where="favorite=false")]
    assert read_run(served.home.run(run_id)).favorite  # as the registry is rebuilt
    last = trainer.run_events(run_id)[-1]
    assert (last.kind, last.reason, last.facts) == ("edited", "changed favorite", {"favorite": True})
    assert not trainer.update_run(run_id, favorite=False).favorite
    with pytest.raises(ConfigError, match="favorite"):
        trainer.update_run(run_id, favorite="yes")


def test_an_edit_that_changes_nothing_leaves_no_event(served):
    run_id = served.done()
    served.trainer.update_run(run_id, **EDIT)
    before = len(served.trainer.run_events(run_id))
    assert _words(served.trainer.update_run(run_id, **EDIT)) == EDITED
    assert len(served.trainer.run_events(run_id)) == before


def test_queued_and_running_runs_are_edited_and_keep_it_to_their_end(served):
    trainer, gate = served.trainer, served.home.path / "edit-go"
    trainer.drain(True)
    run_id = trainer.start_run({"steps": 50, "rate": 100, "until": str(gate)}, runner="echo", tags=["mine"])
    assert trainer.update_run(run_id, name="queued").phase is Phase.QUEUED
    trainer.drain(False)
    trainer.wait(run_id, phases=[Phase.RUNNING], timeout_s=60)
    record = trainer.update_run(run_id, notes="while it runs")
    assert (record.phase, *_words(record)) == (Phase.RUNNING, "queued", ("mine",), "while it runs")
    gate.touch()
    record = trainer.wait(run_id, timeout_s=60)
    assert (record.phase, record.env_step, *_words(record)) == (
        Phase.SUCCEEDED,
        500,
        "queued",
        ("mine",),
        "while it runs",
    )


def test_edits_of_one_run_from_many_clients_are_applied_one_after_the_other(served):
    run_id = served.done()
    errors = []

    def edit(number):
        try:
            served.trainer.update_run(run_id, notes=f"number {number}")
        except PalaestraError as error:
            errors.append(error)

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    edits = [event.facts["notes"] for event in served.trainer.run_events(run_id) if event.kind == "edited"]
    assert sorted(edits) == sorted(f"number {number}" for number in range(12))
    assert served.trainer.run(run_id).notes == edits[-1]


def _alone(home, run_id):
    run = home.run(run_id)
    run.attempt(1).path.mkdir(parents=True)
    write_json(run.resolved, {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "trainer": {"seed": 5}})
    return run


def test_a_run_of_palaestra_train_alone_is_edited_while_it_runs_and_afterwards(served):
    trainer, run = served.trainer, _alone(served.home, "alone-2")
    with Journal(run.attempt(1).journal) as journal:
        journal.emit(TrainingStep(1, 10, {"loss": 1.0}))
        record = trainer.update_run("alone-2", name="by hand")
        assert (record.phase, record.supervised, record.name) == (Phase.RUNNING, False, "by hand")
        assert trainer.run("alone-2").name == "by hand"
        journal.emit(PhaseChanged("succeeded"))
    assert (trainer.run("alone-2").phase, trainer.run("alone-2").name) == (Phase.SUCCEEDED, "by hand")
    assert trainer.update_run("alone-2", tags=["kept"]).tags == ("kept",)
    record = read_run(run)
    assert (record.phase, record.supervised, *_words(record)) == (Phase.SUCCEEDED, False, "by hand", ("kept",), "")
    assert not run.spec.exists()


def test_other_clients_hear_of_an_edit(served):
    run_id = served.done()
    heard = []
    with served.trainer.watch_runs() as events:
        reading = threading.Thread(target=lambda: heard.extend(next(iter(events)) for _ in range(1)))
        reading.start()
        asyncio.run(wait_until(lambda: events._socket is not None, "the stream to open"))
        while not heard:
            served.trainer.update_run(run_id, notes=f"{len(served.trainer.run_events(run_id))}")
            reading.join(0.2)
    assert (heard[0][0], heard[0][1].kind) == (run_id, "edited")


def test_an_archived_run_is_refused_and_a_restored_one_still_has_its_title(served):
    trainer, run_id = served.trainer, served.done()
    trainer.update_run(run_id, **EDIT)
    trainer.archive_run(run_id)
    with pytest.raises(ConfigError, match=f"is archived.*palaestra runs restore {run_id}"):
        trainer.update_run(run_id, name="x")
    assert _words(trainer.runs(archived=True, search="three")[0]) == EDITED
    assert _words(trainer.restore_run(run_id)) == EDITED


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "body"),
        ({"name": None}, "body"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": 5}, "name"),
        ({"tags": "good"}, "tags"),
        ({"tags": ["x" * 101]}, "tags.0"),
        ({"tags": [""]}, "tags.0"),
        ({"tags": ["a"] * 101}, "tags"),
        ({"notes": "x" * 20_001}, "notes"),
        ({"notes": "nul \0"}, "notes"),
        ({"notes": "\ud800"}, "notes"),
        ({"notes": "my key is sk-abcdefghijklmnop"}, "notes"),
        ({"phase": "succeeded"}, "phase"),
        ({"run_id": "other"}, "run_id"),
    ],
)
def test_bad_edits_are_refused_and_change_nothing(served, body, place):
    run_id = served.done()
    events = served.trainer.run_events(run_id)
    answer = served.ask("PATCH", f"/runs/{run_id}", body)
    assert (answer.status, answer.json["error"]["place"]) == (422, place), answer.body
    assert served.trainer.run_events(run_id) == events


def test_an_unknown_run_is_not_edited(served):
    with pytest.raises(UnknownRun):
        served.trainer.update_run("nobody", name="x")
    answer = served.ask("PUT", f"/runs/{served.done()}", {"name": "x"})
    assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, GET, PATCH")


def test_an_edit_survives_a_killed_service_and_a_lost_registry(home):
    home.path.mkdir(parents=True)
    gate = home.path / "go"
    with killed_service(home) as trainer:
        live = trainer.start_run({"steps": 3, "until": str(gate)}, runner="echo")
        ended = trainer.start_run({"steps": 3}, runner="echo")
        trainer.wait(live, phases=[Phase.RUNNING], timeout_s=60)
        trainer.wait(ended, timeout_s=60)
        trainer.update_run(live, **EDIT)
        trainer.update_run(ended, **EDIT)
        os.kill(read_json(home.endpoint)["pid"], signal.SIGKILL)
    for suffix in ("", "-wal", "-shm"):
        home.registry.with_name(home.registry.name + suffix).unlink(missing_ok=True)
    with killed_service(home) as trainer:
        assert [_words(trainer.run(run_id)) for run_id in (live, ended)] == [EDITED, EDITED]
        gate.touch()
        assert _words(trainer.wait(live, timeout_s=60)) == EDITED


def test_an_edit_whose_row_was_not_written_is_found_at_the_next_start(home):
    with service_thread(home):
        trainer = TrainerService(home)
        run_id = trainer.start_run({"steps": 1}, runner="echo")
        record = trainer.wait(run_id, timeout_s=60)
    # As after a kill between the two writes.
    facts = {"name": "late", "tags": ["a"]}
    RunEventLog(home.run(run_id)).append(RunEvent(0, 1.0, record.attempt, "edited", record.phase, facts=facts))
    with service_thread(home):
        assert _words(TrainerService(home).run(run_id)) == ("late", ("a",), "")


def test_an_edit_that_does_not_fit_on_the_disk_is_refused_and_can_be_repeated(home, monkeypatch):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=1))).run_id
            await wait_for_end(supervisor, run_id)
            monkeypatch.setattr(supervisor_module, "_EDIT_TIMEOUT_S", 0.2)
            with monkeypatch.context() as patch:
                patch.setattr(RunEventLog, "append", _raise_disk_full)
                with pytest.raises(ConfigError, match=r"the disk is full.*Free space and try again"):
                    await supervisor.edit(run_id, {"name": "too much"})
            assert supervisor.get_run(run_id).name == ""
            monkeypatch.setattr(supervisor_module, "_EDIT_TIMEOUT_S", 60.0)
            assert (await supervisor.edit(run_id, {"name": "fits"})).name == "fits"

    asyncio.run(body())


def _raise_disk_full(log, event, durable=True):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_damaged_edit_is_passed_over(home):
    with service_thread(home):
        trainer = TrainerService(home)
        run_id = trainer.start_run({"steps": 1}, runner="echo", tags=["t"])
        record = trainer.wait(run_id, timeout_s=60)
    facts = {"name": 5, "tags": "good", "notes": None, "phase": "failed"}
    RunEventLog(home.run(run_id)).append(RunEvent(0, 1.0, record.attempt, "edited", record.phase, facts=facts))
    row = read_run(home.run(run_id))
    assert (row.phase, *_words(row)) == (Phase.SUCCEEDED, "", ("t",), "")


def test_runs_that_differ_in_their_seed_only_have_the_same_digest(served):
    trainer = served.trainer

    def digest(config, **spec):
        run_id = trainer.start_run(config, runner="echo", **spec)
        record = trainer.wait(run_id, timeout_s=60)
        assert record.config_digest == read_run(served.home.run(run_id)).config_digest
        return record.config_digest

    first = digest({"steps": 3}, seed=1, name="one", tags=["a"], priority=3)
    assert len(first) == 16
    assert digest({"steps": 3}, seed=2, name="two") == first
    assert digest({"steps": 3, "rate": 0}) == first  # given, and the default
    assert digest({"steps": 4}, seed=1) != first
    assert digest({"steps": 3}, seed=1, environment={"FASTER": "1"}) != first
    assert digest({"steps": 3}, seed=1, env_id="Other-v0") != first


def test_the_seed_of_any_section_and_the_name_do_not_count_and_nothing_else_is_left_out():
    config = {"name": "a", "trainer": {"seed": 1, "lr": 0.1}, "env": {"id": "X", "seeds": [1]}, "tasks": [{"seed": 3}]}
    other = {"name": "b", "trainer": {"lr": 0.1, "seed": 2}, "env": {"id": "X", "seeds": [1]}, "tasks": [{}]}
    assert digest_config("X", {"runner": "palaestra", "seed": 5}, config) == digest_config("X", {}, other)
    assert digest_config("Y", {}, other) != digest_config("X", {}, other)
    assert digest_config("X", {}, {**other, "env": {"id": "X", "seeds": [2]}}) != digest_config("X", {}, other)
    assert digest_config("X", {"script": "dqn"}, other) != digest_config("X", {}, other)


def test_a_resume_with_changes_has_another_digest(served):
    trainer = served.trainer
    run_id = trainer.start_run({"steps": 20, "checkpoint_every": 10}, runner="echo")
    first = trainer.wait(run_id, timeout_s=60).config_digest
    trainer.resume_run(run_id, changes={"steps": 30})
    assert trainer.wait(run_id, timeout_s=60).config_digest not in ("", first)


def test_the_registry_of_an_earlier_version_is_continued_and_its_runs_get_a_digest(home):
    with service_thread(home):
        trainer = TrainerService(home)
        run_id = trainer.start_run({"steps": 1}, runner="echo", tags=["t"])
        digest = trainer.wait(run_id, timeout_s=60).config_digest
    connection = sqlite3.connect(home.registry)
    for column in ("name", "notes", "config_digest"):
        connection.execute(f"ALTER TABLE runs DROP COLUMN {column}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) - 1}")
    connection.commit()
    connection.close()
    # As an earlier version wrote it.
    log = home.run(run_id).events
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line["facts"].pop("config_digest", None)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with service_thread(home):
        record = TrainerService(home).run(run_id)
    assert (record.config_digest, record.tags, record.name) == (digest, ("t",), "")
