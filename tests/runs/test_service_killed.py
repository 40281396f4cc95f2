"""The service is killed in the middle of eight runs, and started again."""

import asyncio
import random
import time

import pytest
from tests.runs.attempts import wait_until
from tests.runs.serving import killed_service
from tests.runs.supervisors import echo, event_kinds, read_echo_report, read_journal

from palaestra.runs.phase import Phase
from palaestra.runs.series.reader import RunSeries
from palaestra.runs.state.event_log import RunEventLog, current_phase
from palaestra.runs.store.registry import open_registry_read_only
from palaestra.telemetry.event import EpisodeSummary, TrainingStep

STEPS = 400
LANGUAGES = ["journal", "stdout", "tensorboard"]


def _specs(home, speak):
    config = {"steps": STEPS, "rate": 200, "speak": speak, "until": str(home.path / "go")}
    return [echo(name=f"{speak}-{number}", **config) for number in range(4)]


def _rows(home, ids):
    registry = open_registry_read_only(home)
    rows = {run.run_id: run for run in registry.runs()}
    registry.close()
    return [rows[run_id] for run_id in ids]


async def _all(home, ids, fact, what):
    await wait_until(lambda: all(fact(row) for row in _rows(home, ids)), what)


def _kill_in_the_middle(home, languages):
    home.path.mkdir(parents=True, exist_ok=True)
    specs = [spec for language in languages for spec in _specs(home, language)]
    with killed_service(home) as first:
        ids = [first.submit(spec).run_id for spec in specs]
        asyncio.run(_all(home, ids, lambda row: row.phase is Phase.RUNNING, "all to run"))
        asyncio.run(
            wait_until(lambda: all(len(read_journal(home, run_id)) > 20 for run_id in ids), "something measured")
        )
    before = _rows(home, ids)
    with killed_service(home):
        assert all(event_kinds(home, run_id)[-1] == "adopted" for run_id in ids)
        after = _rows(home, ids)
        assert [row.phase for row in after] == [Phase.RUNNING] * len(ids)
        assert [row.trainer for row in after] == [row.trainer for row in before]
        (home.path / "go").touch()
        asyncio.run(_all(home, ids, lambda row: row.phase.has_ended, "all to end"))
    return ids


def _check_everything_once(home, run_id):
    report = read_echo_report(home, run_id)
    records = read_journal(home, run_id)
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    steps = [record.event for record in records if isinstance(record.event, TrainingStep)]
    measured = sorted((event.env_step, value) for event in steps for value in event.metrics.values())
    # Metric i is u + i at update u, and an update is ten environment steps.
    assert measured == sorted((10 * u, float(u + i)) for u in range(1, STEPS + 1) for i in (0, 1))
    assert sum(isinstance(r.event, EpisodeSummary) for r in records) == report["episodes"] == STEPS // 10
    series = RunSeries(home.run(run_id))
    points = {name.rpartition("/")[2]: info.points for name, info in series.names().items()}
    assert (points["m0"], points["m1"], points["return"]) == (STEPS, STEPS, STEPS // 10)
    assert event_kinds(home, run_id) == ["note", "launched", "first_sign", "adopted", "succeeded"]
    assert current_phase(RunEventLog(home.run(run_id)).read()) is Phase.SUCCEEDED


def test_eight_runs_are_re_adopted_with_every_metric_once_and_no_phase_changed(home):
    ids = _kill_in_the_middle(home, ["journal", "tensorboard"])
    assert len(ids) == 8
    for run_id in ids:
        _check_everything_once(home, run_id)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(20))
def test_eight_runs_are_re_adopted_twenty_times_over(home, turn):
    for run_id in _kill_in_the_middle(home, ["stdout", "journal"]):
        _check_everything_once(home, run_id)


def test_a_service_killed_again_and_again_changes_nothing(home):
    (home.path).mkdir(parents=True)
    with killed_service(home) as first:
        ids = [first.submit(spec).run_id for spec in _specs(home, "stdout")[:2]]
        asyncio.run(_all(home, ids, lambda row: row.phase is Phase.RUNNING, "all to run"))
    for _ in range(3):
        with killed_service(home):
            assert all(event_kinds(home, run_id)[-1] == "adopted" for run_id in ids)
    (home.path / "go").touch()
    with killed_service(home):
        asyncio.run(_all(home, ids, lambda row: row.phase.has_ended, "all to end"))
    for run_id in ids:
        updates = [r.event.update for r in read_journal(home, run_id) if isinstance(r.event, TrainingStep)]
        assert updates == list(range(1, STEPS + 1))


def test_runs_that_end_while_no_service_looks_are_told_as_they_ended(home):
    endings = ("exit:0", "exit:5", "signal:KILL")
    home.path.mkdir(parents=True)
    with killed_service(home) as first:
        specs = [echo(steps=3, until=str(home.path / "go"), then=then) for then in endings]
        ids = [first.submit(spec).run_id for spec in specs]
        asyncio.run(_all(home, ids, lambda row: row.phase is Phase.RUNNING, "all to run"))
    (home.path / "go").touch()
    exits = [home.run(run_id).attempt(1).exit for run_id in ids]
    asyncio.run(wait_until(lambda: all(exit_.exists() for exit_ in exits), "the trainers to end"))
    with killed_service(home):
        asyncio.run(_all(home, ids, lambda row: row.phase.has_ended, "the ends to be noted"))
    reasons = [row.reason for row in _rows(home, ids)]
    assert reasons[0] == "done"
    assert reasons[1].startswith("exit code 5")
    assert reasons[2] == "killed (SIGKILL)"


def _killed_at_any_moment(home, seed, kills):
    chance = random.Random(seed)
    ids = []
    for _ in range(kills):
        with killed_service(home, max_running=3) as client:
            ids += [client.submit(echo(steps=50, rate=100, speak=chance.choice(LANGUAGES))).run_id for _ in range(2)]
            time.sleep(chance.uniform(0.0, 0.4))  # the moment is what is tried here, not waited for
    with killed_service(home, max_running=3):
        asyncio.run(_all(home, ids, lambda row: row.phase.has_ended, "all to end"))
    for run_id, row in zip(ids, _rows(home, ids), strict=True):
        assert (row.phase, row.attempt, row.env_step) == (Phase.SUCCEEDED, 1, 500), (run_id, row.reason)
        steps = [record.event for record in read_journal(home, run_id) if isinstance(record.event, TrainingStep)]
        measured = sorted((event.env_step, value) for event in steps for value in event.metrics.values())
        assert measured == sorted((10 * u, float(u + i)) for u in range(1, 51) for i in (0, 1))
        assert event_kinds(home, run_id).count("launched") == 1


def test_a_service_killed_at_any_moment_loses_no_run(home):
    _killed_at_any_moment(home, seed=1, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_service_killed_at_many_moments_loses_no_run(home, seed):
    _killed_at_any_moment(home, seed, kills=6)
