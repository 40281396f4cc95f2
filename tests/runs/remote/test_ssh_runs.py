"""Runs on another machine over SSH: the same events, logs, checkpoints and stops as at home."""

import pytest
from tests.runs.remote.sshd import needs_sshd, run_sshd
from tests.runs.supervisors import echo, event_kinds, read_echo_report, read_journal, run_supervisor, wait_for_end

from palaestra.runs.phase import Phase
from palaestra.telemetry.event import TrainingStep

pytestmark = needs_sshd


@pytest.fixture
def sshd(tmp_path):
    with run_sshd(tmp_path / "sshd") as server:
        yield server


def _updates(home, run_id):
    return [r.event.update for r in read_journal(home, run_id) if isinstance(r.event, TrainingStep)]


async def _start_and_end(home, sshd, **config):
    async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
        record = await supervisor.submit(echo(on="box", **config))
        return await wait_for_end(supervisor, record.run_id)


def test_a_run_over_ssh_has_the_same_metrics_output_and_end_as_one_at_home(home, sshd):
    import asyncio

    record = asyncio.run(_start_and_end(home, sshd, steps=50))
    assert (record.phase, record.reason, record.host, record.env_step) == (Phase.SUCCEEDED, "done", "box", 500)
    assert _updates(home, record.run_id) == list(range(1, 51))
    assert read_echo_report(home, record.run_id)["episodes"] == 5
    assert event_kinds(home, record.run_id) == ["note", "launched", "first_sign", "succeeded"]
