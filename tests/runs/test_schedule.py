"""The retention policy on a schedule: when it is applied, what it leaves alone, and what its report says."""

import asyncio
import json

import pytest
from tests.runs.attempts import wait_until
from tests.runs.serving import service_thread
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.runs import TrainerService
from palaestra.runs.archive.retention import RetentionAction, RetentionPolicy
from palaestra.runs.archive.schedule import RetentionSchedule
from palaestra.runs.phase import Phase

HOUR = 3600.0


def _schedule(home, every_h, now, calls, actions=()):
    async def apply():
        calls.append(now[0])
        return list(actions)

    home.service.mkdir(parents=True, exist_ok=True)
    return RetentionSchedule(home, every_h, apply, lambda: now[0])


def test_it_is_applied_at_once_then_when_it_is_due_and_a_restart_does_not_repeat_it(home, monkeypatch):
    monkeypatch.setattr("palaestra.runs.archive.schedule._MAX_SLEEP_S", 0.01)
    now, calls = [1000.0], []

    async def serve_at(hour, next_hour):
        """A service that starts at an hour, and runs until an hour later."""
        now[0] = 1000.0 + hour * HOUR
        schedule = _schedule(home, 6.0, now, calls)
        assert abs(schedule.read_report().next - (1000.0 + next_hour * HOUR)) <= 0.2 * HOUR
        schedule.start()
        for _ in range(20):  # the task checks the clock in between
            now[0] += 0.05 * HOUR
            await asyncio.sleep(0.01)
        await schedule.close()

    for hour, next_hour in ((0, 0), (5.2, 6), (100, 100)):
        asyncio.run(serve_at(hour, next_hour))
    # The second service runs from 5.2 to 6.2 hours: it is due at 6 hours, six hours after the first time.
    first, second, third = ((call - 1000.0) / HOUR for call in calls)
    assert 0 <= first < 0.5
    assert 6 <= second <= 6.2
    assert 100 <= third < 100.5


def test_it_is_off_by_default_and_a_time_in_the_future_or_a_damaged_report_is_due(home):
    now, calls = [1000.0], []
    off = _schedule(home, None, now, calls)
    off.start()
    assert (off.read_report().every_h, off.read_report().next) == (None, None)
    on = _schedule(home, 1.0, now, calls)
    for text in ('{"last": 99999.0, "actions": []}', '{"last": "x"}', "torn", "[]"):
        (home.service / "retention.json").write_text(text)
        assert on.read_report().next == 1000.0
    for actions, size in (([1], 0), ([{}], 0), ([], "x"), ([], None)):
        (home.service / "retention.json").write_text(json.dumps({"last": 400.0, "actions": actions, "bytes": size}))
        assert (on.read_report().next, on.read_report().actions) == (4000.0, ())
    assert calls == []


def test_the_report_counts_what_was_done_and_what_failed(home, caplog):
    now, calls = [1000.0], []
    actions = [
        RetentionAction("a", "archive", "ended 9 days ago", 100),
        RetentionAction("b", "delete", "ended 99 days ago", 7, failed="is being resumed"),
    ]

    async def body():
        schedule = _schedule(home, 1.0, now, calls, actions)
        schedule.start()
        await wait_until(lambda: schedule.read_report().last is not None, "the report")
        await schedule.close()
        return schedule.read_report()

    with caplog.at_level("INFO", "palaestra.runs.archive.schedule"):
        report = asyncio.run(body())
    assert (report.last, report.next, report.num_actions, report.num_failed, report.bytes) == (
        1000.0,
        4600.0,
        2,
        1,
        100,
    )
    assert report.actions == tuple(actions)
    assert "archive a (ended 9 days ago): 100 bytes" in caplog.text
    assert "delete b (ended 99 days ago): failed: is being resumed" in caplog.text


def test_a_failure_of_the_policy_is_logged_and_does_not_end_the_schedule(home, monkeypatch, caplog):
    monkeypatch.setattr("palaestra.runs.archive.schedule._MAX_SLEEP_S", 0.01)
    calls = []

    async def fail():
        calls.append(1)
        raise OSError("the disk is gone")

    async def body():
        home.service.mkdir(parents=True)
        now = [0.0]

        def clock():
            now[0] += 10 * HOUR
            return now[0]

        schedule = RetentionSchedule(home, 1.0, fail, clock)
        schedule.start()
        await wait_until(lambda: len(calls) == 2, "a second try")
        await schedule.close()
        return schedule.read_report()

    report = asyncio.run(body())
    assert (report.error, report.num_actions) == ("the disk is gone", 0)
    assert "the disk is gone" in caplog.text


def test_an_interval_of_less_than_six_minutes_is_refused():
    assert parse_section(RetentionPolicy, {"every_h": 0.1}, place="retention").every_h == 0.1
    with pytest.raises(ConfigError, match=r"retention\.every_h = 0\.09: input should be greater than or equal to 0\.1"):
        parse_section(RetentionPolicy, {"every_h": 0.09}, place="retention")


def test_a_service_archives_ended_runs_shortens_outputs_and_leaves_live_runs_and_favorites_alone(home):
    async def end_runs():
        async with run_supervisor(home) as supervisor:
            ids = []
            for _ in range(3):
                ids.append((await supervisor.submit(echo(steps=1))).run_id)
                await wait_for_end(supervisor, ids[-1])
            await supervisor.edit(ids[0], {"favorite": True})
            return ids

    favorite, old, newest = asyncio.run(end_runs())
    output = home.run(newest).attempt(1).stdout
    output.write_bytes(b"x" * (12 << 20))
    # Unchecked: the shortest interval of a configuration is six minutes.
    policy = RetentionPolicy(keep_last=1, log_mb=11).model_copy(update={"every_h": 0.0005})
    with service_thread(home, retention=policy):
        service = TrainerService(home)
        live = service.start_run({"steps": 1, "then": "hang"}, runner="echo")
        service.wait(live, phases=[Phase.RUNNING], timeout_s=60)
        live_output = home.run(live).attempt(1).stdout
        asyncio.run(wait_until(lambda: service.run(old).archived, "the archive"))
        asyncio.run(wait_until(lambda: output.stat().st_size < 11 << 20, "the shorter output"))
        report = service.retention_report()
        assert service.run(live).phase is Phase.RUNNING
        assert live_output.exists()
        service.stop_run(live, grace_s=0)
        assert not service.run(favorite).archived
        assert (report.every_h, report.num_failed) == (0.0005, 0)
    assert f"retention: archive {old}" in (home.service / "service.log").read_text()
    assert json.loads((home.service / "retention.json").read_text())["schema"] == 1
