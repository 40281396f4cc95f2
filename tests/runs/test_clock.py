"""Somebody sets the clock on the wall while runs go on."""

import asyncio
import time

from tests.runs.attempts import wait_until
from tests.runs.supervisors import echo, run_supervisor, wait_for_end, wait_for_phase

from palaestra.runs.phase import Phase

DAY = 86_400.0


class Wall:
    """A clock that can be set."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


def _with_a_jump(home, ahead, **spec):
    wall = Wall()

    async def body():
        async with run_supervisor(home, clock=wall) as supervisor:
            run_id = (await supervisor.submit(echo(steps=3, until=str(home.path / "go"), **spec))).run_id
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            wall.ahead = ahead
            looks = supervisor._runs[run_id]._monitor._alarms._last_activity
            assert looks <= time.monotonic()
            (home.path / "go").touch()
            return await wait_for_end(supervisor, run_id)

    return asyncio.run(body())


def test_a_jump_forward_stalls_nothing_and_stretches_nothing(home):
    record = _with_a_jump(home, DAY, stall_after_s=3600, stall_action="stop")
    assert record.phase is Phase.SUCCEEDED
    assert 0 <= record.ended - record.started < 600


def test_a_jump_back_makes_no_negative_duration(home):
    record = _with_a_jump(home, -DAY)
    assert record.phase is Phase.SUCCEEDED
    assert 0 <= record.ended - record.started < 600


def test_the_grace_of_a_stop_is_not_the_walls(home):
    wall = Wall()

    async def body():
        async with run_supervisor(home, clock=wall) as supervisor:
            run_id = (await supervisor.submit(echo(steps=3, then="hang", ignore_term=True))).run_id
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            stopping = asyncio.ensure_future(supervisor.stop(run_id, grace_s=3600))
            await wait_until(lambda: supervisor.registry.get(run_id).phase is Phase.STOPPING)
            wall.ahead = DAY
            done, _ = await asyncio.wait({stopping}, timeout=0.5)
            assert not done
            await supervisor.stop(run_id, grace_s=0.0)
            return await stopping

    assert asyncio.run(body()).phase is Phase.STOPPED
