"""The conformance tests of the `Session` protocol.

`await check_session(make, task)` opens as many sessions as it needs and raises `AssertionError` with the rule that was
broken. It works with every task.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from palaestra.errors import SessionRefused
from palaestra.sessions.action import Click, Move, Point, Terminate, TypeText, Wait
from palaestra.sessions.session import Session
from palaestra.sessions.task import TaskRequest

MakeSession = Callable[[], Awaitable[Session]]


async def check_session(make: MakeSession, task: str, *, other_seed: int = 4) -> None:
    """Test every rule on sessions from `make`; `other_seed` must give another screen than seed 3."""
    await _check_seed_determines_screen(make, task, other_seed)
    await _check_steps_and_retries(make, task)
    await _check_refusals_change_nothing(make, task)
    await _check_reset_clears_everything(make, task)
    await _check_end_is_final(make, task)
    await _check_close_is_final(make, task)


@contextlib.asynccontextmanager
async def _open(make: MakeSession) -> AsyncIterator[Session]:
    """A session that is closed when the block ends."""
    session = await make()
    try:
        yield session
    finally:
        await session.close()


async def _expect_refusal(request: Awaitable[object], *codes: str) -> None:
    outcome = "it was accepted"
    try:
        await request
    except SessionRefused as refusal:
        if refusal.code in codes:
            return
        outcome = f"got {refusal.code}: {refusal}"
    raise AssertionError(f"expected a refusal {' or '.join(codes)}, {outcome}")


async def _check_seed_determines_screen(make: MakeSession, task: str, other_seed: int) -> None:
    screens = []
    for seed in (3, 3, other_seed):
        async with _open(make) as session:
            spec = await session.reset(TaskRequest(task, seed))
            assert spec.seed == seed, f"the spec says seed {spec.seed}, {seed} was requested"
            assert spec.instruction, "a task needs an instruction"
            assert spec.step_limit >= 1, "a task needs a step limit"
            picture = await session.screenshot()
            assert picture.size == spec.screen, f"the screen is {picture.size}, the spec says {spec.screen}"
            progress = await session.progress()
            assert not progress.done, "a new episode cannot be over"
            screens.append((picture.sha256, spec.instruction))
    assert screens[0] == screens[1], "the same seed must give the same pixels and the same instruction"
    assert screens[0] != screens[2], f"seeds 3 and {other_seed} give the same screen: the seed has no effect"


async def _check_steps_and_retries(make: MakeSession, task: str) -> None:
    async with _open(make) as session:
        await session.reset(TaskRequest(task, 3))
        first = await session.act(Move(Point(1, 1)), step=1)
        assert first.number == 1, f"the first act is number 1, not {first.number}"
        again = await session.act(Move(Point(1, 1)), step=1)
        assert again == first, "a repeated step must return the stored result, byte for byte"
        await _expect_refusal(session.act(Move(Point(2, 2)), step=1), "step_conflict")
        await _expect_refusal(session.act(Move(Point(2, 2)), step=3), "step_out_of_order")
        await _expect_refusal(session.act(Move(Point(2, 2)), step=0), "bad_request", "step_out_of_order")
        second = await session.act(Wait(0.01), step=2)
        assert second.number == 2, "refused steps must not count"


async def _check_refusals_change_nothing(make: MakeSession, task: str) -> None:
    async with _open(make) as session:
        await _expect_refusal(session.act(Wait(0.01), step=1), "not_reset")
        await _expect_refusal(session.reset(TaskRequest("no-such-suite/no-such-task")), "unknown_task")
        await _expect_refusal(session.reset(TaskRequest(task, 0, {"no_such_parameter": 1})), "bad_params")
        spec = await session.reset(TaskRequest(task, 3))
        before = await session.screenshot()
        width, height = spec.screen.width, spec.screen.height
        for action in (Click(Point(width, 0)), Move(Point(0, height)), Click(Point(-1, 5))):
            await _expect_refusal(session.act(action, step=1), "invalid_action")
        assert (await session.screenshot()).sha256 == before.sha256, "a refused act must not change the screen"


async def _check_reset_clears_everything(make: MakeSession, task: str) -> None:
    async with _open(make) as session:
        await session.reset(TaskRequest(task, 3))
        fresh = await session.screenshot()
        spec = await session.reset(TaskRequest(task, 3))
        middle = Point(spec.screen.width // 2, spec.screen.height // 2)
        await session.act(Click(middle), step=1)
        if not (await session.progress()).done:
            await session.act(TypeText("left behind"), step=2)
        await session.reset(TaskRequest(task, 3))
        assert (await session.screenshot()).sha256 == fresh.sha256, "a reset must restore the screen"
        progress = await session.progress()
        assert not progress.done, "a reset begins a new episode"
        assert progress.reward == 0.0, "a new episode has no reward"


async def _check_end_is_final(make: MakeSession, task: str) -> None:
    async with _open(make) as session:
        await session.reset(TaskRequest(task, 3))
        last = await session.act(Terminate(False), step=1)
        assert last.progress.done, "terminate ends an episode"
        later = await session.progress()
        assert (later.done, later.truncated) == (True, last.progress.truncated), "an episode that ended must stay over"
        await _expect_refusal(session.act(Wait(0.01), step=2), "episode_over")


async def _check_close_is_final(make: MakeSession, task: str) -> None:
    async with _open(make) as session:
        await session.reset(TaskRequest(task, 3))
        await session.close()
    await _expect_refusal(session.screenshot(), "no_session")
