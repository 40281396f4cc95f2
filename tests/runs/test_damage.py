"""Odd values, damaged files and faults of ours: one run may suffer, never the service, the others or a slot."""

import asyncio
import contextlib
import json
import os
import sqlite3
from dataclasses import replace

import pytest
from tests.runs.attempts import wait_until, with_timeout
from tests.runs.supervisors import (
    echo,
    event_kinds,
    run_and_close_supervisor,
    run_supervisor,
    wait_for_end,
    wait_for_phase,
)

from palaestra.cli.runs.table import format_note
from palaestra.config import parse_section
from palaestra.errors import ConfigError, IllegalTransition, LaunchRefused
from palaestra.files.atomic import read_json
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.attempt_files import read_status
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import read_run
from palaestra.telemetry import Journal

UNSTORABLE = [
    ({"seed": 10**25}, "seed"),
    ({"seed": -1}, "seed"),
    ({"env_id": "\udcff"}, r"spec\.env_id = .*half of a surrogate pair"),
    ({"env_id": "a\nb"}, "line break"),
    ({"env_id": "x" * 301}, "longer than 300"),
    ({"tags": ["ok", "\x1b[2J"]}, "control character"),
    ({"tags": ["\ud800"]}, r"spec\.tags\[0\] = .*half of a surrogate pair"),
    ({"script": "a\0b"}, "control character"),
    ({"config_text": "\ud800"}, r"spec\.config_text = .*half of a surrogate pair"),
    ({"environment": {"A": "\ud800"}}, r"spec\.environment\.A = .*half of a surrogate pair"),
    ({"config": {"a": {"b": ["\ud800"]}}}, r"spec\.config\.a\.b\[0\] = .*half of a surrogate pair"),
    ({"config": {"\ud800": 1}}, r"spec\.config = .*half of a surrogate pair"),
    ({"config": {"steps": 10**30}}, "at steps: is a number beyond 64 bits"),
    ({"config": {"a": {"steps": float("nan")}}}, "at a.steps: is not a finite number"),
]


@pytest.mark.parametrize(("given", "message"), UNSTORABLE, ids=[str(number) for number in range(len(UNSTORABLE))])
def test_what_cannot_be_stored_is_refused_at_the_door(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(RunSpec, given, place="spec")


def test_what_people_write_is_taken():
    given = {"seed": 2**63 - 1, "env_id": "ALE/Pong-v5", "tags": ["größe 1"], "config_text": "a: 1\nb: 2\n"}
    assert parse_section(RunSpec, given).seed == 2**63 - 1


class _Odd(EchoRunner):
    """Plans what cannot be."""

    name = "odd"

    def plan(self, spec, paths, machine):
        plan = super().plan(spec, paths, machine)
        changes = {
            "steps": {"total_steps": 10**30},
            "env": {"env_id": "a\nb"},
            "environment": {"environment": {**plan.environment, "A": "\ud800"}},
            "value": {"resolved": {"a": "\ud800"}},
        }
        return replace(plan, **changes[spec.script])


@pytest.mark.parametrize("script", ["steps", "env", "value"])
def test_a_plan_that_cannot_be_put_on_record_is_refused_and_nothing_is_written(home, script):
    async def body():
        async with run_supervisor(home, runners={"odd": _Odd()}) as supervisor:
            with pytest.raises(LaunchRefused, match="plan"):
                await supervisor.submit(RunSpec(runner="odd", script=script, config={"steps": 1}))
            assert supervisor.idle

    asyncio.run(body())
    assert list(home.runs.iterdir()) == []


def test_a_fault_while_launching_refuses_the_run_and_frees_its_slot(home):
    async def body():
        async with run_supervisor(home, runners={"odd": _Odd(), "echo": EchoRunner()}, max_running=1) as supervisor:
            run_id = (await supervisor.submit(RunSpec(runner="odd", script="environment", config={"steps": 1}))).run_id
            other = (await supervisor.submit(echo(steps=1))).run_id
            assert (await wait_for_end(supervisor, other)).phase is Phase.SUCCEEDED
            with pytest.raises(IllegalTransition, match="is refused"):
                await with_timeout(supervisor.stop(run_id))
            return supervisor.registry.get(run_id)

    record = asyncio.run(body())
    assert record.phase is Phase.REFUSED
    assert "could not be started (UnicodeEncodeError" in record.reason
    assert RunEventLog(home.run(record.run_id)).read()[-1].phase is Phase.REFUSED


def test_a_request_that_fails_half_way_leaves_nothing_behind(home, monkeypatch):
    def unable(self, record, durable=True):
        raise PermissionError(13, "Permission denied")

    async def body():
        async with run_supervisor(home) as supervisor:
            with monkeypatch.context() as broken:
                broken.setattr(RunEventLog, "append", unable)
                with pytest.raises(PermissionError):
                    await supervisor.submit(echo(steps=1))
            assert supervisor.idle
            assert supervisor.registry.ids() == frozenset()
            assert list(home.runs.iterdir()) == []
            assert (
                await wait_for_end(supervisor, (await supervisor.submit(echo(steps=1))).run_id)
            ).phase is Phase.SUCCEEDED

    asyncio.run(body())


def test_steps_beyond_64_bits_are_not_counted_and_the_next_service_starts(home, tmp_path):
    line = json.dumps({"kind": "TrainingStep", "env_step": 10**30, "metrics": {"loss": 1.0}})
    script = tmp_path / "speak.py"
    script.write_text(f"print('@palaestra ' + {line!r})")

    class Speaking(EchoRunner):
        def plan(self, spec, paths, machine):
            plan = super().plan(spec, paths, machine)
            return replace(plan, argv=(plan.argv[0], str(script)))

    async def body():
        async with run_supervisor(home, runners={"echo": Speaking()}) as supervisor:
            record = await wait_for_end(supervisor, (await supervisor.submit(echo(speak="stdout"))).run_id)
            assert (record.phase, record.env_step) == (Phase.SUCCEEDED, 0)
        home.registry.unlink()
        async with run_supervisor(home) as supervisor:
            assert supervisor.registry.get(record.run_id).phase is Phase.SUCCEEDED

    asyncio.run(body())


def test_a_run_that_cannot_be_read_keeps_neither_the_service_nor_the_others(home, caplog):
    async def body():
        async with run_and_close_supervisor(home) as supervisor:
            await supervisor.drain(True)
            return [(await supervisor.submit(echo(steps=1, name=name))).run_id for name in ("a", "b", "c", "good")]

    unreadable, huge, spec, good = asyncio.run(body())
    home.run(unreadable).events.unlink()
    home.run(unreadable).events.mkdir()
    home.run(huge).spec.write_text(json.dumps({**read_json(home.run(huge).spec), "seed": 10**30, "priority": 10**30}))
    home.run(spec).spec.write_text("{")
    home.registry.unlink()

    async def again():
        async with run_supervisor(home) as supervisor:
            await supervisor.drain(False)
            for run_id in (huge, spec, good):
                await wait_for_end(supervisor, run_id)
            return {run.run_id: run for run in supervisor.registry.runs()}

    rows = asyncio.run(again())
    assert rows[good].phase is Phase.SUCCEEDED
    assert {rows[huge].phase, rows[spec].phase} == {Phase.REFUSED}
    assert f"{unreadable}: left alone, because it cannot be read: IsADirectoryError" in caplog.text
    listed = {run.run_id for run in RunReader(home).runs()}
    assert {huge, spec, good} <= listed


def _left_running(home, **config):
    """A run that goes on without any service; its id and its trainer."""

    async def body():
        async with run_and_close_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=2, then="hang", **config))).run_id
            record = await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            return run_id, record.trainer

    return asyncio.run(body())


def _left_dead(home):
    """A run whose trainer and watchdog were killed while no service ran; its id and attempt."""
    run_id, trainer = _left_running(home)
    attempt = home.run(run_id).attempt(1)
    for identity in (read_status(attempt).watchdog, trainer):
        os.kill(identity.pid, 9)
    asyncio.run(wait_until(lambda: not read_status(attempt).alive, "both to be gone"))
    return run_id, attempt


def _adopts_and_stops(home, run_id, trainer):
    async def body():
        async with run_supervisor(home) as supervisor:
            assert supervisor.report.adopted == [run_id]
            record = await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            assert (record.trainer, record.attempt) == (trainer, 1)
            stopped = await with_timeout(supervisor.stop(run_id))
            assert not trainer.is_alive()
            return stopped

    return asyncio.run(body())


def test_a_live_attempt_whose_process_file_is_lost_is_adopted_and_not_started_twice(home):
    run_id, trainer = _left_running(home)
    home.run(run_id).attempt(1).process.unlink()
    record = _adopts_and_stops(home, run_id, trainer)
    assert record.phase is Phase.STOPPED
    assert event_kinds(home, run_id).count("launched") == 1


def test_an_attempt_that_ran_and_of_which_nothing_is_known_is_lost_and_not_run_again(home):
    run_id, attempt = _left_dead(home)
    attempt.process.unlink()

    async def body():
        async with run_supervisor(home) as supervisor:
            assert supervisor.report.ended == [run_id]
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.attempt) == (Phase.LOST, 1)
    assert event_kinds(home, run_id).count("launched") == 1


def test_what_is_written_waits_for_a_registry_that_somebody_holds_and_says_so(home, caplog, monkeypatch):
    monkeypatch.setattr("palaestra.runs.supervisor.state_writer._RETRY_S", 0.05)
    monkeypatch.setattr("palaestra.runs.store.database._BUSY_TIMEOUT_S", 0.05)

    async def body():
        async with run_supervisor(home) as supervisor:
            with contextlib.closing(sqlite3.connect(home.registry, isolation_level=None)) as browser:
                browser.execute("BEGIN IMMEDIATE")
                submitting = asyncio.create_task(supervisor.submit(echo(steps=1)))
                await wait_until(lambda: "the registry is held by another process" in caplog.text, "the word")
                browser.execute("ROLLBACK")
            return await wait_for_end(supervisor, (await submitting).run_id)

    assert asyncio.run(body()).phase is Phase.SUCCEEDED
    assert "space" not in caplog.text


def test_a_trainer_without_watchdog_and_process_file_is_found_by_its_label(home):
    run_id, trainer = _left_running(home)
    attempt = home.run(run_id).attempt(1)
    os.kill(read_status(attempt).watchdog.pid, 9)
    asyncio.run(wait_until(lambda: not read_status(attempt).watchdog_alive, "the watchdog to be gone"))
    attempt.process.unlink()
    assert _adopts_and_stops(home, run_id, trainer).phase is Phase.STOPPED


@pytest.mark.parametrize("damaged", [b"", b"garbage\n", b'{"schema":1,"seq":1\n\xff\xff\n'])
def test_a_live_run_whose_event_log_is_damaged_is_adopted_and_not_started_twice(home, damaged):
    run_id, trainer = _left_running(home)
    home.run(run_id).events.write_bytes(damaged)
    assert _adopts_and_stops(home, run_id, trainer).phase is Phase.STOPPED
    assert not home.run(run_id).attempt(2).path.exists()


def test_a_run_that_ended_and_whose_life_is_damaged_is_not_run_again(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=3))).run_id
            await wait_for_end(supervisor, run_id)
        home.run(run_id).events.write_bytes(b"garbage\n")
        async with run_supervisor(home) as supervisor:
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.attempt, record.env_step) == (Phase.SUCCEEDED, 1, 30)


def test_the_attempt_of_a_damaged_life_that_ends_too_early_is_found(home):
    async def body():
        async with run_and_close_supervisor(home) as supervisor:
            spec = echo(steps=20, checkpoint_every=10, until=str(home.path / "go"))
            run_id = (await supervisor.submit(spec)).run_id
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            await supervisor.stop(run_id)
            await supervisor.resume(run_id)
            await wait_until(lambda: supervisor.registry.get(run_id).phase is Phase.RUNNING, "the second attempt")
            trainer = supervisor.registry.get(run_id).trainer
        log = home.run(run_id).events
        lines = log.read_bytes().splitlines(keepends=True)
        kept = next(number for number, line in enumerate(lines) if b'"resumed"' in line)
        log.write_bytes(b"".join(lines[:kept]) + b"garbage\n")
        async with run_supervisor(home) as supervisor:
            assert supervisor.report.adopted == [run_id]
            record = supervisor.get_run(run_id)
            assert (record.attempt, record.trainer) == (2, trainer)
            await supervisor.stop(run_id)

    asyncio.run(body())


def test_a_new_attempt_takes_no_directory_that_somebody_trained_in(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=20, checkpoint_every=10, then="exit:1"))).run_id
            await wait_for_end(supervisor, run_id)
            other = home.run(run_id).attempt(2)
            other.path.mkdir()
            message = r"trains in its attempt 2\. Wait for it, or end it with kill"
            with Journal(other.journal):
                for change in (supervisor.resume, supervisor.archive, supervisor.delete):
                    with pytest.raises(LaunchRefused, match=message):
                        await _pretending(change(run_id))
            await supervisor.resume(run_id)
            await wait_until(lambda: supervisor.idle)
            return supervisor.registry.get(run_id)

    async def _pretending(work):
        # The journal is held by this very process, which is not the service for once.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("palaestra.runs.process.attempt_process.os.getpid", lambda: 0)
            return await work

    assert asyncio.run(body()).attempt == 3


def test_the_numbers_of_a_resumed_run_do_not_go_back(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=40, checkpoint_every=40, then="exit:1"))).run_id
            first = await wait_for_end(supervisor, run_id)
            assert (first.env_step, first.episodes, first.episode_return) == (400, 4, 2.5)
            await supervisor.drain(True)
            await supervisor.resume(run_id)
            stopped = await supervisor.stop(run_id)
            assert (stopped.env_step, stopped.episodes, stopped.episode_return) == (400, 4, 2.5)
            await supervisor.drain(False)
            await supervisor.resume(run_id)
            return await ends_again(supervisor, run_id)

    async def ends_again(supervisor, run_id):
        await wait_until(lambda: supervisor.idle, "the second end")
        return supervisor.registry.get(run_id)

    record = asyncio.run(body())
    assert (record.attempt, record.env_step) == (2, 400)
    assert record.episodes >= 4
    assert record.episode_return is not None
    stored = read_run(home.run(record.run_id))
    assert (stored.env_step, stored.episodes, stored.episode_return) == (400, record.episodes, record.episode_return)


def test_a_rebuilt_row_of_an_ended_run_is_the_row_that_was(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=5, seed=3, tags=("t",)))).run_id
            await wait_for_end(supervisor, run_id)
            # The record of the code may arrive after the end of a short run.
            await wait_until(lambda: supervisor.get_run(run_id).environment_digest, "its versions")
            return supervisor.get_run(run_id)

    record = asyncio.run(body())
    stored = read_run(home.run(record.run_id))
    assert abs(stored.created - record.created) < 1.0
    assert replace(stored, created=record.created, watchdog=record.watchdog, trainer=record.trainer) == record


def test_a_run_that_ended_unseen_ended_when_it_last_showed_itself(home):
    run_id, attempt = _left_dead(home)
    for path in (attempt.stdout, attempt.journal):
        os.utime(path, (trainer_began := home.run(run_id).spec.stat().st_mtime + 1000,) * 2)

    async def body():
        async with run_supervisor(home, clock=lambda: trainer_began + 30_000) as supervisor:
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.ended) == (Phase.LOST, trainer_began)
    assert read_run(home.run(run_id)).ended == trainer_began


def test_a_run_that_succeeded_without_an_episode_says_so_for_ever(home):
    async def body():
        async with run_supervisor(home, no_episode_steps=100) as supervisor:
            records = {}
            for name, spec in {
                "silent": echo(steps=60, episodes_every=0),
                "short": echo(steps=9, episodes_every=0),
                "loud": echo(steps=60),
                "unasked": echo(steps=60, episodes_every=0, no_episode_steps=0),
                "failed": echo(steps=60, episodes_every=0, then="exit:1"),
            }.items():
                records[name] = await wait_for_end(supervisor, (await supervisor.submit(spec)).run_id)
            return records

    records = asyncio.run(body())
    assert (records["silent"].reason, records["silent"].code) == ("600 steps and no finished episode", "no_episodes")
    assert records["silent"].phase is Phase.SUCCEEDED
    assert {records[name].reason for name in ("short", "loud", "unasked")} == {"done"}
    assert records["failed"].reason.startswith("exit code 1")
    assert format_note(records["silent"]) == "! 600 steps and no finished episode"
    assert format_note(records["loud"]) == ""
    assert read_run(home.run(records["silent"].run_id)).code == "no_episodes"


def test_a_rebuilt_row_of_a_run_that_waits_is_the_row_that_was(home):
    async def body():
        async with run_and_close_supervisor(home) as supervisor:
            await supervisor.drain(True)
            return await supervisor.submit(echo(steps=5, seed=3, priority=2))

    record = asyncio.run(body())
    stored = read_run(home.run(record.run_id))
    assert replace(stored, created=record.created) == record


def test_a_registry_that_is_removed_under_the_service_is_made_anew(home, caplog):
    async def body():
        async with run_supervisor(home, scan_every_s=0.05) as supervisor:
            over = await wait_for_end(supervisor, (await supervisor.submit(echo(steps=5))).run_id)
            live = (await supervisor.submit(echo(steps=7, then="hang"))).run_id
            await wait_until(lambda: supervisor.get_run(live).env_step == 70, "the numbers")
            home.registry.unlink()
            await wait_until(lambda: home.registry.exists(), "the registry")
            await wait_until(lambda: {run.run_id for run in RunReader(home).runs()} == {over.run_id, live}, "the rows")
            await wait_until(lambda: RunReader(home).run(live).env_step == 70, "the numbers of what runs")
            assert RunReader(home).run(over.run_id).ended == over.ended

    asyncio.run(body())
    assert "the registry was removed; it was rebuilt from 2 run directories" in caplog.text
    assert not list(home.path.glob("registry.corrupt-*"))
