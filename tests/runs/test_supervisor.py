"""The supervisor with real processes: from a request to an end that is written down."""

import asyncio
import json
import os
import shutil
import signal
import stat

import pytest
from tests.runs.attempts import wait_for_output, wait_until, with_timeout
from tests.runs.supervisors import (
    echo,
    event_kinds,
    read_echo_report,
    read_journal,
    run_and_close_supervisor,
    run_supervisor,
    wait_for_end,
    wait_for_phase,
)

from palaestra.errors import ConsentRequired, IllegalTransition, LaunchRefused, UnknownRun
from palaestra.files.atomic import write_json
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunEvent
from palaestra.runs.runner import Finding, RunnerCapabilities
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import rebuild
from palaestra.runs.store.registry import Registry
from palaestra.telemetry.event import TrainingStep


def test_a_run_goes_from_queued_to_succeeded_and_every_step_is_on_record(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            record = await supervisor.submit(echo(steps=40, seed=7, tags=("t",), name="Mine"))
            assert (record.phase, record.total_steps) == (Phase.QUEUED, 400)
            assert record.run_id.startswith("mine-")
            end = await wait_for_end(supervisor, record.run_id)
            await wait_until(lambda: supervisor.idle, "the slot to be free")
            return end

    record = asyncio.run(body())
    assert (record.phase, record.reason, record.code) == (Phase.SUCCEEDED, "done", "exit")
    assert (record.agent_id, record.env_id, record.seed, record.tags) == ("echo/echo", "Echo-v0", 7, ("t",))
    # Episode e returns e, one every ten updates: the mean of 1, 2, 3, 4.
    assert (record.env_step, record.episodes, record.episode_return) == (400, 4, 2.5)
    assert record.ended >= record.started >= record.created
    assert record.bytes_on_disk > 1000
    assert event_kinds(home, record.run_id) == ["note", "launched", "first_sign", "succeeded"]
    run = home.run(record.run_id)
    assert json.loads(run.spec.read_text())["config"] == {"steps": 40}
    assert json.loads((run.path / "resolved.json").read_text())["steps"] == 40
    assert stat.S_IMODE(run.attempt(1).command.stat().st_mode) == 0o600


def test_what_is_shown_is_what_is_executed(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            preview = await supervisor.preview(echo(steps=3))
            assert not home.runs.exists() or not list(home.runs.iterdir())
            record = await supervisor.submit(echo(steps=3))
            await wait_for_end(supervisor, record.run_id)
            return preview, record

    preview, record = asyncio.run(body())
    command = json.loads(home.run(record.run_id).attempt(1).command.read_text())
    assert command["digest"] == preview.plan.digest()
    assert command["argv"][-1] == "--steps=3"


def test_a_failed_run_remembers_its_last_lines(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            return await wait_for_end(supervisor, (await supervisor.submit(echo(steps=2, then="exit:3"))).run_id)

    record = asyncio.run(body())
    assert (record.phase, record.code) == (Phase.FAILED, "exit")
    assert record.reason.startswith("exit code 3")
    facts = RunEventLog(home.run(record.run_id)).read()[-1].facts
    assert (facts["returncode"], facts["env_step"], facts["leftovers"]) == (3, 20, 0)


def test_a_killed_trainer_is_killed_sigkill(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=2, then="hang"))).run_id
            record = await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            os.kill(record.trainer.pid, signal.SIGKILL)
            return await wait_for_end(supervisor, run_id)

    assert asyncio.run(body()).reason == "killed (SIGKILL)"


def test_stop_answers_when_nothing_lives_and_the_end_is_written(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=2, then="hang", fork="2:setsid"))).run_id
            before = await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            after = await with_timeout(supervisor.stop(run_id))
            assert (after.phase, after.reason) == (Phase.STOPPED, "stopped by the operator")
            assert not before.trainer.is_alive()
            assert not before.watchdog.is_alive()
            with pytest.raises(IllegalTransition, match="is stopped and cannot be stopped"):
                await supervisor.stop(run_id)
            return run_id

    run_id = asyncio.run(body())
    assert event_kinds(home, run_id)[-2:] == ["stop_asked", "stopped"]


def test_two_stops_at_once_are_one(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=2, then="hang", ignore_term=True))).run_id
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            both = await with_timeout(
                asyncio.gather(supervisor.stop(run_id, grace_s=3600), supervisor.stop(run_id, grace_s=0.1))
            )
            assert {record.phase for record in both} == {Phase.STOPPED}

    asyncio.run(body())


def test_a_limit_makes_runs_wait_and_priority_decides(home):
    async def body():
        async with run_supervisor(home, max_running=1) as supervisor:
            first = await supervisor.submit(echo(steps=1, until=str(home.path / "go"), name="first"))
            low = await supervisor.submit(echo(steps=1, priority=-1, name="low"))
            high = await supervisor.submit(echo(steps=1, priority=9, name="high"))
            await wait_for_phase(supervisor, first.run_id, Phase.RUNNING)
            assert [supervisor.registry.get(r.run_id).phase for r in (low, high)] == [Phase.QUEUED] * 2
            (home.path / "go").touch()
            for record in (first, low, high):
                await wait_for_end(supervisor, record.run_id)
            return [supervisor.registry.get(r.run_id).started for r in (first, high, low)]

    started = asyncio.run(body())
    assert started == sorted(started)


def test_a_waiting_run_is_stopped_without_ever_starting(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            await supervisor.drain(True)
            record = await supervisor.submit(echo(steps=1))
            stopped = await supervisor.stop(record.run_id)
            assert (stopped.phase, stopped.attempt) == (Phase.STOPPED, 0)
            assert supervisor.idle

    asyncio.run(body())
    assert not list(home.runs.glob("*/attempt_*"))


def test_draining_starts_nothing_and_ends_nothing(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            running = await supervisor.submit(echo(steps=1, then="hang"))
            await wait_for_phase(supervisor, running.run_id, Phase.RUNNING)
            await supervisor.drain(True)
            waiting = await supervisor.submit(echo(steps=1))
            assert supervisor.registry.get(waiting.run_id).phase is Phase.QUEUED
            assert supervisor.registry.get(running.run_id).phase is Phase.RUNNING
            await supervisor.drain(False)
            assert (await wait_for_end(supervisor, waiting.run_id)).phase is Phase.SUCCEEDED

    asyncio.run(body())


def test_a_run_that_waits_says_why_to_whoever_looks(home):
    async def body():
        async with run_and_close_supervisor(home, max_running=1) as supervisor:
            running = await supervisor.submit(echo(steps=1, then="hang"))
            await wait_for_phase(supervisor, running.run_id, Phase.RUNNING)
            waiting = (await supervisor.submit(echo(steps=1))).run_id
            for look in (supervisor.get_run, RunReader(home).run):
                assert look(waiting).reason == "waits for a slot (1 of 1 in use)"
            await supervisor.drain(True)
            for look in (supervisor.get_run, RunReader(home).run):
                assert look(waiting).reason == "the service is draining: palaestra runs drain --off"
            assert supervisor.registry.get(waiting).reason == ""
            await supervisor.stop(running.run_id)
            return waiting

    run_id = asyncio.run(body())
    data = json.loads((home.service / "queue.json").read_text())
    write_json(home.service / "queue.json", {**data, "by": {"pid": 1, "started": 0, "boot_id": "another"}})
    assert RunReader(home).run(run_id).reason == "waits for a service; palaestra serve starts one"

    async def next_service():
        async with run_supervisor(home) as supervisor:
            assert supervisor.draining
            assert supervisor.get_run(run_id).phase is Phase.QUEUED
            await supervisor.drain(False)
            assert (await wait_for_end(supervisor, run_id)).phase is Phase.SUCCEEDED

    asyncio.run(next_service())


def test_gpus_are_leased_to_one_run_at_a_time(home, monkeypatch):
    monkeypatch.setenv("PALAESTRA_GPUS", "4,7")

    async def body():
        async with run_supervisor(home) as supervisor:
            runs = [await supervisor.submit(echo(steps=1, gpus=1, until=str(home.path / "go"))) for _ in range(3)]
            for record in runs[:2]:
                await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            assert supervisor.registry.get(runs[2].run_id).phase is Phase.QUEUED
            (home.path / "go").touch()
            for record in runs:
                await wait_for_end(supervisor, record.run_id)
            with pytest.raises(LaunchRefused, match="needs 3 GPUs and this machine has 2"):
                await supervisor.submit(echo(gpus=3))
            return runs

    runs = asyncio.run(body())
    commands = [json.loads(home.run(record.run_id).attempt(1).command.read_text()) for record in runs]
    visible = [command["environment"]["CUDA_VISIBLE_DEVICES"] for command in commands]
    assert visible[:2] == ["4", "7"]
    assert visible[2] in ("4", "7")


class _Fussy(EchoRunner):
    name = "fussy"
    capabilities = RunnerCapabilities(title="Fussy", runs_foreign_code=True)

    def preflight(self, spec, machine):
        if spec.script == "broken":
            raise ZeroDivisionError("a bug of the runner")
        level = "refused" if spec.script == "missing" else "ok"
        return [Finding("script", level, f"{spec.script} is not there", "Write it")]


REFUSED = [
    ({"runner": "ecco"}, r"runner = 'ecco': no such runner\. Did you mean 'echo'\?"),
    ({"runner": "fussy", "script": "missing"}, r"preflight = 'script': missing is not there\. Write it"),
    ({"runner": "fussy", "script": "broken"}, "failed in a preview .ZeroDivisionError: a bug of the runner"),
    ({"runner": "echo", "config": {"stepz": 1}}, "Did you mean 'steps'"),
    ({"runner": "echo", "video": True}, "runner echo cannot record video"),
    ({"runner": "echo", "track": "online"}, "runner echo cannot be tracked"),
    ({"runner": "echo", "warm_start": "abc"}, "runner echo cannot begin with another's weights"),
    ({"runner": "echo", "gpus": 1}, "needs 1 GPU and this machine has none"),
    ({"runner": "echo", "config": {"until": "hf_abcdefghijklmnopqrst"}}, "config.until looks like a token"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_cannot_work_is_refused_before_anything_is_written(home, spec, message):
    async def body():
        async with run_supervisor(home, runners={"echo": EchoRunner(), "fussy": _Fussy()}) as supervisor:
            with pytest.raises(LaunchRefused, match=message):
                await supervisor.submit(RunSpec(**spec))
            assert supervisor.idle
            assert supervisor.registry.ids() == frozenset()

    asyncio.run(body())
    assert list(home.runs.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused(home):
    async def body():
        async with run_supervisor(home, min_free_disk_mb=10**9) as supervisor:
            with pytest.raises(
                LaunchRefused, match=r"MB are free where runs are stored, and at least 1000000000 MB are required"
            ):
                await supervisor.submit(echo())

    asyncio.run(body())
    assert list(home.runs.iterdir()) == []


def test_foreign_code_runs_only_once_somebody_agreed_to_exactly_it(home):
    async def body():
        async with run_supervisor(home, runners={"fussy": _Fussy()}) as supervisor:
            spec = RunSpec(runner="fussy", script="x", config={"steps": 1})
            with pytest.raises(ConsentRequired) as asked:
                await supervisor.submit(spec)
            assert list(home.runs.iterdir()) == []
            other = RunSpec(runner="fussy", script="x", config={"steps": 2})
            with pytest.raises(ConsentRequired, match="has changed since it was agreed to"):
                await supervisor.submit(other, asked.value.digest)
            record = await supervisor.submit(spec, asked.value.digest)
            assert (await wait_for_end(supervisor, record.run_id)).phase is Phase.SUCCEEDED

    asyncio.run(body())


def test_a_command_that_changed_while_it_waited_is_not_run(home, monkeypatch):
    async def body():
        async with run_supervisor(home, runners={"fussy": _Fussy()}) as supervisor:
            spec = RunSpec(runner="fussy", script="x", config={"steps": 1})
            digest = (await supervisor.preview(spec)).plan.digest()
            await supervisor.drain(True)
            record = await supervisor.submit(spec, digest)
            monkeypatch.setenv("PATH", os.environ["PATH"] + ":/tmp/another")
            await supervisor.drain(False)
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert record.phase is Phase.REFUSED
    assert "has changed since it was agreed to" in record.reason


def test_a_resumed_run_goes_on_in_a_new_attempt(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=30, checkpoint_every=10, then="exit:1"))).run_id
            assert (await wait_for_end(supervisor, run_id)).phase is Phase.FAILED
            resumed = await supervisor.resume(run_id)
            assert resumed.phase is Phase.QUEUED
            with pytest.raises(IllegalTransition, match="cannot be resumed"):
                await supervisor.resume(run_id)
            await wait_until(lambda: supervisor.idle)
            return supervisor.registry.get(run_id)

    record = asyncio.run(body())
    assert record.attempt == 2
    assert event_kinds(home, record.run_id).count("launched") == 2
    command = json.loads(home.run(record.run_id).attempt(2).command.read_text())
    assert any("--resume-from=" in word and "attempt_1/checkpoints" in word for word in command["argv"])


def test_a_run_without_a_checkpoint_cannot_be_resumed(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=1))).run_id
            await wait_for_end(supervisor, run_id)
            with pytest.raises(LaunchRefused, match=r"has no checkpoint to resume from\. Start a new run"):
                await supervisor.resume(run_id)
            assert supervisor.registry.get(run_id).phase is Phase.SUCCEEDED

    asyncio.run(body())


def test_an_unknown_run_is_unknown_to_every_request(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            for request in (
                supervisor.stop,
                supervisor.resume,
                supervisor.archive,
                supervisor.restore,
                supervisor.delete,
            ):
                for name in ("no-such-run", "../../etc", "A", ""):
                    with pytest.raises(UnknownRun):
                        await request(name)

    asyncio.run(body())


def test_stalling_is_told_and_where_asked_for_ends_the_run(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            stalled = (await supervisor.submit(echo(steps=1, then="hang", stall_after_s=0.3))).run_id
            ended = (await supervisor.submit(echo(steps=1, then="hang", stall_after_s=0.3, stall_action="stop"))).run_id
            record = await wait_for_end(supervisor, ended)
            assert (record.phase, record.code) == (Phase.STALLED, "stalled")
            await wait_until(lambda: supervisor.registry.get(stalled).alarms)
            record = supervisor.registry.get(stalled)
            assert (record.phase, record.alarms[0].code) == (Phase.RUNNING, "stalled")
            return stalled

    run_id = asyncio.run(body())
    assert "alarm" in event_kinds(home, run_id)


def test_steps_without_episodes_raise_an_alarm(home):
    async def body():
        async with run_supervisor(home, no_episode_steps=100) as supervisor:
            run_id = (await supervisor.submit(echo(steps=10, episodes_every=0, then="hang"))).run_id
            await wait_until(lambda: supervisor.registry.get(run_id).alarms)
            return supervisor.registry.get(run_id).alarms[0]

    alarm = asyncio.run(body())
    assert (alarm.code, alarm.text[:35]) == ("no_episodes", "100 steps and no finished episode: ")


def test_a_killed_watchdog_is_an_alarm_and_the_run_goes_on(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=1, until=str(home.path / "go")))).run_id
            record = await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            os.kill(record.watchdog.pid, signal.SIGKILL)
            await wait_until(lambda: supervisor.registry.get(run_id).alarms)
            assert supervisor.registry.get(run_id).alarms[0].code == "watchdog_gone"
            (home.path / "go").touch()
            end = await wait_for_end(supervisor, run_id)
            assert (end.phase, end.code, end.alarms) == (Phase.SUCCEEDED, "journal", ())

    asyncio.run(body())


def test_a_stream_has_everything_once_and_can_be_taken_up_anywhere(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=300, rate=600))).run_id
            live = [item async for item in supervisor.subscribe(run_id)]
            again = [item async for item in supervisor.subscribe(run_id)]
            assert sorted(item.id for item in live) == sorted({item.id for item in live})
            steps = [
                item.item.event.update for item in live if isinstance(getattr(item.item, "event", None), TrainingStep)
            ]
            assert steps == list(range(1, 301))
            assert {str(item.item) for item in again} == {str(item.item) for item in live}
            for place in (0, 1, 2, 5, len(again) // 2, len(again) - 2):
                rest = [item async for item in supervisor.subscribe(run_id, again[place].id)]
                assert [item.item for item in rest] == [item.item for item in again[place + 1 :]]

    asyncio.run(body())


def test_the_life_of_all_runs_is_one_stream(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            events = []

            async def listen():
                async for run_id, record in supervisor.stream_events():
                    events.append((run_id, record.kind))

            listening = asyncio.ensure_future(listen())
            await asyncio.sleep(0)
            runs = [(await supervisor.submit(echo(steps=1))).run_id for _ in range(2)]
            await wait_until(lambda: sum(what == "succeeded" for _, what in events) == 2)
            listening.cancel()
            assert {run_id for run_id, _ in events} == set(runs)

    asyncio.run(body())


def test_runs_outlive_a_service_and_are_adopted_by_the_next(home):
    async def first():
        async with run_and_close_supervisor(home) as supervisor:
            hanging = (await supervisor.submit(echo(steps=5, until=str(home.path / "go")))).run_id
            short = (await supervisor.submit(echo(steps=5, until=str(home.path / "first")))).run_id
            for run_id in (hanging, short):
                await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            await supervisor.drain(True)
            waiting = (await supervisor.submit(echo(steps=5))).run_id
            return hanging, short, waiting

    hanging, short, waiting = asyncio.run(first())
    (home.path / "first").touch()

    async def second():
        await wait_until(home.run(short).attempt(1).exit.exists)
        async with run_supervisor(home) as supervisor:
            assert supervisor.report.adopted == [hanging]
            assert supervisor.report.ended == [short]
            assert supervisor.report.queued == [waiting]
            assert supervisor.registry.get(hanging).phase is Phase.RUNNING
            await supervisor.drain(False)
            (home.path / "go").touch()
            for run_id in (hanging, waiting, short):
                assert (await wait_for_end(supervisor, run_id)).phase is Phase.SUCCEEDED

    asyncio.run(second())
    for run_id in (hanging, short, waiting):
        records = read_journal(home, run_id)
        assert [record.seq for record in records] == list(range(1, read_echo_report(home, run_id)["seq"] + 1))
    assert event_kinds(home, hanging) == ["note", "launched", "first_sign", "adopted", "succeeded"]


def test_a_stop_that_the_service_did_not_live_to_make_is_made_by_the_next(home):
    async def first():
        async with run_and_close_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=5, then="hang"))).run_id
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            return run_id

    run_id = asyncio.run(first())
    RunEventLog(home.run(run_id)).append(RunEvent(0, 1.0, 1, "stop_asked", Phase.STOPPING, code="operator"))

    async def second():
        async with run_supervisor(home) as supervisor:
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(second())
    assert (record.phase, record.reason) == (Phase.STOPPED, "stopped by the operator")


def test_a_launch_that_was_cut_short_is_made_again_under_the_same_number(home):
    async def first():
        async with run_and_close_supervisor(home) as supervisor:
            await supervisor.drain(True)
            return (await supervisor.submit(echo(steps=5))).run_id

    run_id = asyncio.run(first())
    run = home.run(run_id)
    run.attempt(1).work.mkdir(parents=True)
    RunEventLog(run).append(RunEvent(0, 1.0, 1, "launched", Phase.STARTING))

    async def second():
        async with run_supervisor(home) as supervisor:
            assert supervisor.report.relaunched == [run_id]
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(second())
    assert (record.phase, record.attempt) == (Phase.SUCCEEDED, 1)
    assert event_kinds(home, run_id) == ["note", "launched", "first_sign", "succeeded"]


def test_a_run_whose_directory_is_gone_is_lost_and_the_service_starts(home):
    async def first():
        async with run_and_close_supervisor(home) as supervisor:
            await supervisor.drain(True)
            return (await supervisor.submit(echo(steps=5))).run_id

    run_id = asyncio.run(first())
    shutil.rmtree(home.run(run_id).path)

    async def second():
        async with run_supervisor(home) as supervisor:
            return supervisor.registry.get(run_id)

    record = asyncio.run(second())
    assert (record.phase, record.reason) == (Phase.LOST, "its directory is gone")


def test_a_registry_damaged_while_the_service_runs_is_rebuilt(home, caplog):
    async def body():
        async with run_supervisor(home) as supervisor:
            first = (await supervisor.submit(echo(steps=1))).run_id
            await wait_for_end(supervisor, first)
            # The file under the open connection turns into noise, its log included.
            supervisor.registry._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with open(home.registry, "r+b") as file:
                file.write(b"\xa5" * 4096 * 2)
            supervisor.registry._connection.execute("PRAGMA cache_size = 0")
            second = (await supervisor.submit(echo(steps=1))).run_id
            await wait_for_end(supervisor, second)
            return {run.run_id: run.phase for run in supervisor.registry.runs()}, {first, second}

    found, runs = asyncio.run(body())
    assert found == dict.fromkeys(runs, Phase.SUCCEEDED)
    assert "the registry was damaged" in caplog.text
    assert len(list(home.path.glob("registry.corrupt-*.sqlite"))) == 1


def test_what_the_registry_says_is_what_the_directories_say(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            ids = [
                (await supervisor.submit(echo(steps=12, then=then))).run_id for then in ("exit:0", "exit:2", "abort")
            ]
            for run_id in ids:
                await wait_for_end(supervisor, run_id)
            return supervisor.registry.runs()

    kept = asyncio.run(body())
    fresh = Registry.open(home.path / "fresh.sqlite")
    rebuild(home, fresh)

    def columns_of(runs):
        columns = (
            "run_id",
            "phase",
            "reason",
            "code",
            "agent_id",
            "env_id",
            "env_step",
            "episodes",
            "total_steps",
            "started",
        )
        return sorted(tuple(getattr(run, name) for name in columns) for run in runs)

    assert columns_of(fresh.runs()) == columns_of(kept)
    fresh.close()


def test_archive_restore_delete_and_gc(home):
    async def body():
        async with run_supervisor(home, retention={"keep_last": 1}) as supervisor:
            ids = []
            for _ in range(2):
                ids.append((await supervisor.submit(echo(steps=1))).run_id)
                await wait_for_end(supervisor, ids[-1])
            live = (await supervisor.submit(echo(steps=1, then="hang"))).run_id
            for put_away in (supervisor.archive, supervisor.delete):
                with pytest.raises(IllegalTransition, match="only a run that has ended"):
                    await put_away(live)
            assert [action.run_id for action in await supervisor.gc()] == [ids[0]]
            assert home.run(ids[0]).path.exists()
            await supervisor.gc(dry_run=False)
            assert not home.run(ids[0]).path.exists()
            assert [run.run_id for run in supervisor.registry.runs(archived=True)] == [ids[0]]
            restored = await supervisor.restore(ids[0])
            assert (restored.archived, home.run(ids[0]).spec.exists()) == (False, True)
            await supervisor.delete(ids[0])
            assert supervisor.registry.get(ids[0]) is None
            assert (await supervisor.restore(ids[0])).phase is Phase.SUCCEEDED
            with pytest.raises(IllegalTransition, match="neither archived nor deleted"):
                await supervisor.restore(ids[0])

    asyncio.run(body())


def test_a_service_killed_after_packing_finds_the_package(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=1))).run_id
            ended = await wait_for_end(supervisor, run_id)
            await supervisor.archive(run_id)
            supervisor.registry.put(ended)
        async with run_supervisor(home) as supervisor:
            assert [run.run_id for run in supervisor.registry.runs(archived=True)] == [run_id]
            assert (await supervisor.restore(run_id)).archived is False

    asyncio.run(body())


def test_a_run_of_palaestra_train_is_known_from_its_first_moment(home):
    async def body():
        async with run_supervisor(home, scan_every_s=3600) as supervisor:
            attempt = home.run("solo-1").attempt(1)
            attempt.path.mkdir(parents=True)
            write_json(home.run("solo-1").path / "resolved.json", {"env": {"id": "CartPole-v1"}})
            assert supervisor.get_run("solo-1").env_id == "CartPole-v1"
            assert [item async for item in supervisor.subscribe("solo-1")] == []

    asyncio.run(body())


def test_one_change_of_a_run_at_a_time(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=20, rate=0, checkpoint_every=10, then="exit:1"))).run_id
            await wait_for_end(supervisor, run_id)
            changes = (supervisor.archive, supervisor.resume, supervisor.delete, supervisor.restore)
            first, *others = await asyncio.gather(*(change(run_id) for change in changes), return_exceptions=True)
            assert first.archived
            assert {str(other) for other in others} == {
                f"{run_id} is being archived, deleted, restored, resumed or edited by another request"
            }
            await supervisor.restore(run_id)
            assert (await supervisor.resume(run_id)).phase is Phase.QUEUED
            with pytest.raises(IllegalTransition, match="only a run that has ended"):
                await supervisor.delete(run_id)
            await wait_for_end(supervisor, run_id)

    asyncio.run(body())


def test_a_run_of_palaestra_train_alone_is_shown_and_not_stopped(home):
    attempt = home.run("solo-1").attempt(1)
    attempt.path.mkdir(parents=True)
    write_json(home.run("solo-1").path / "resolved.json", {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}})

    async def body():
        from palaestra.telemetry import Journal

        with Journal(attempt.journal):
            async with run_supervisor(home, scan_every_s=0.05) as supervisor:
                assert supervisor.report.unsupervised == 1
                assert supervisor.registry.get("solo-1").phase is Phase.RUNNING
                with pytest.raises(IllegalTransition, match=f"not stopped by it; end it with kill {os.getpid()}"):
                    await supervisor.stop("solo-1")
        async with run_supervisor(home, scan_every_s=0.05) as supervisor:
            assert supervisor.registry.get("solo-1").phase is Phase.LOST

    asyncio.run(body())


def test_a_lost_run_that_was_resumed_without_the_service_has_the_outcome_of_its_new_attempt(home):
    run = home.run("solo-1")
    run.attempt(1).path.mkdir(parents=True)
    write_json(run.path / "resolved.json", {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "sac"}})

    async def body():
        from palaestra.telemetry import Journal, TrainingStep
        from palaestra.telemetry.event import PhaseChanged

        with Journal(run.attempt(1).journal) as journal:
            journal.emit(TrainingStep(1, 600, {}))
        async with run_supervisor(home, scan_every_s=3600) as supervisor:
            assert supervisor.get_run("solo-1").phase is Phase.LOST
            run.attempt(2).path.mkdir()
            with Journal(run.attempt(2).journal) as journal:
                journal.emit_many([TrainingStep(2, 900, {}), PhaseChanged("succeeded", "done")])
            row = supervisor.get_run("solo-1")
            assert (row.phase, row.attempt, row.env_step) == (Phase.SUCCEEDED, 2, 900)
            assert RunReader(home).run("solo-1").phase is Phase.SUCCEEDED
        async with run_supervisor(home, scan_every_s=3600) as supervisor:
            assert supervisor.registry.get("solo-1").phase is Phase.SUCCEEDED

    asyncio.run(body())


def test_arguments_and_output_are_the_trainers_own(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=1, until=";touch canary $(touch canary)"))).run_id
            attempt = home.run(run_id).attempt(1)
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            await wait_for_output(attempt, "")
            await supervisor.stop(run_id, grace_s=1)
            return attempt

    attempt = asyncio.run(body())
    assert not list(home.base.rglob("canary"))
    assert "--until=;touch canary $(touch canary)" in json.loads(attempt.command.read_text())["argv"]


def test_checkpoints_are_told_to_the_catalogue_once_announced_and_looked_for_at_the_end(home):
    seen, scanned = [], []

    class CheckpointCatalogue:
        def add_announced(self, run, attempt, records):
            seen.extend((run.run_id, attempt.number, record.event.env_step) for record in records)

        def scan_attempt(self, run, attempt, patterns):
            scanned.append((run.run_id, attempt.number, patterns))

    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue()) as supervisor:
            run_id = (await supervisor.submit(echo(steps=30, checkpoint_every=10))).run_id
            await wait_for_end(supervisor, run_id)
            return run_id

    run_id = asyncio.run(body())
    assert sorted(set(seen)) == [(run_id, 1, 100), (run_id, 1, 200), (run_id, 1, 300)]
    assert scanned == [(run_id, 1, ())]


def test_a_traceback_in_the_output_of_a_run_that_goes_on_is_an_alarm(home, monkeypatch):
    monkeypatch.setattr("palaestra.runs.state.alarms.TRACEBACK_AFTER_S", 0.1)

    async def body():
        async with run_supervisor(home) as supervisor:
            run_id = (await supervisor.submit(echo(steps=4, traceback_alive=True, then="hang"))).run_id
            await wait_until(lambda: supervisor.registry.get(run_id).alarms, "an alarm")
            return supervisor.registry.get(run_id)

    record = asyncio.run(body())
    assert (record.phase, record.alarms[0].code) == (Phase.RUNNING, "traceback")
