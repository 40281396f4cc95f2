"""Runs as jobs of a real Ray cluster: the same metrics, once, and the same stop."""

import asyncio

import pytest
from tests.runs.remote.ray_head import run_ray_head
from tests.runs.supervisors import echo, event_kinds, read_echo_report, read_journal, run_supervisor, wait_for_end

from palaestra.runs.phase import Phase
from palaestra.runs.remote.hosts import HostConfig
from palaestra.telemetry.event import TrainingStep


@pytest.fixture(scope="module")
def ray_head():
    with run_ray_head() as address:
        yield address


@pytest.fixture(autouse=True)
def without_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def _hosts(address, tmp_path):
    return {"cluster": HostConfig(address=address, directory=str(tmp_path / "node"))}


def _job(home, **config):
    project = home.base / "project"
    project.mkdir(exist_ok=True)
    return echo(on="cluster", invoked_from=project, **config)


def _updates(home, run_id):
    return [r.event.update for r in read_journal(home, run_id) if isinstance(r.event, TrainingStep)]


def test_a_ray_job_has_the_metrics_files_and_end_of_a_run_at_home(home, ray_head, tmp_path):
    async def body():
        async with run_supervisor(home, hosts=_hosts(ray_head, tmp_path)) as supervisor:
            record = await supervisor.submit(_job(home, steps=50, checkpoint_every=25))
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert (record.phase, record.reason, record.host, record.env_step) == (Phase.SUCCEEDED, "done", "cluster", 500)
    assert _updates(home, record.run_id) == list(range(1, 51))
    assert read_echo_report(home, record.run_id)["episodes"] == 5
    assert event_kinds(home, record.run_id) == ["note", "launched", "first_sign", "succeeded"]
    attempt = home.run(record.run_id).attempt(1).path
    assert sorted(path.name for path in (attempt / "checkpoints").iterdir()) == ["step_250.json", "step_500.json"]
