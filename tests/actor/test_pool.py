"""The pool keeps its places filled, loses nothing, and stops."""

import asyncio
import contextlib
import threading

import pytest

from palaestra.actor.pool import ActorPool, PoolThread, play_all
from palaestra.actor.task_runner import EpisodeRequest
from palaestra.errors import CollectorFailed, SessionRefused
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.sessions.task import TaskRequest


def request(number):
    return EpisodeRequest(str(number), TaskRequest("fake/button", number), seed=number)


def finished(asked):
    return Trajectory(asked.episode_id, {"task": "fake/button"}, (), Outcome.FAILURE, {})


class Stage:
    """Episodes that end when told to."""

    def __init__(self):
        self.gates, self.at_once, self.most = {}, 0, 0

    async def play(self, asked):
        self.gates[asked.episode_id] = gate = asyncio.Event()
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await gate.wait()
        finally:
            self.at_once -= 1
        return finished(asked)

    async def end(self, *numbers):
        for number in numbers:
            while str(number) not in self.gates:
                await asyncio.sleep(0)
            self.gates[str(number)].set()


def test_five_episodes_at_two_a_time_are_played_once_each_and_come_in_order():
    async def scene():
        stage, heard = Stage(), []
        playing = asyncio.create_task(
            play_all(
                stage.play,
                [request(n) for n in range(5)],
                concurrent=2,
                on_finished=lambda o, t: heard.append(o.episode_id),
            )
        )
        await stage.end(1, 2, 0, 4, 3)
        made = await playing
        assert [one.episode_id for one in made] == ["0", "1", "2", "3", "4"]
        assert sorted(heard) == ["0", "1", "2", "3", "4"]
        assert stage.most == 2

    asyncio.run(scene())


def test_no_orders_is_no_work():
    assert asyncio.run(play_all(Stage().play, [], concurrent=2)) == []


def pool_of(play, count, concurrent, delivered, **more):
    waiting = iter([request(n) for n in range(count)])
    return ActorPool(
        play, next_request=lambda: next(waiting, None), free_slots=lambda running: concurrent - running,
        deliver=lambda asked, made: delivered.append(asked.episode_id), **more,
    )  # fmt: skip


def test_an_actor_that_crashes_is_replaced():
    async def play(asked):
        if asked.episode_id in ("1", "3"):
            raise ZeroDivisionError
        return finished(asked)

    async def scene():
        delivered, crashed = [], []
        pool = pool_of(play, 6, 2, delivered, on_crash=lambda asked, error: crashed.append(asked.episode_id))
        await pool.run()
        assert delivered == ["0", "2", "4", "5"]
        assert crashed == ["1", "3"]

    asyncio.run(scene())


def test_three_crashes_in_a_row_end_the_pool_with_their_reason():
    async def play(asked):
        raise ZeroDivisionError(asked.episode_id)

    delivered = []
    with pytest.raises(ZeroDivisionError, match="2"):
        asyncio.run(_run(lambda: pool_of(play, 10, 1, delivered)))


def test_a_task_that_is_refused_ends_the_pool_at_once():
    async def play(asked):
        raise SessionRefused("unknown_task", "no such task", status=404)

    with pytest.raises(SessionRefused, match="no such task"):
        asyncio.run(_run(lambda: pool_of(play, 10, 4, [])))


async def _run(build):
    await build().run()


def test_when_one_ends_the_pool_in_anger_the_others_are_stopped_too():
    async def scene():
        stage = Stage()

        async def play(asked):
            if asked.episode_id == "2":
                await asyncio.sleep(0)
                raise SessionRefused("unknown_task", "no such task", status=404)
            return await stage.play(asked)

        with pytest.raises(SessionRefused):
            await pool_of(play, 3, 3, []).run()
        assert stage.at_once == 0

    asyncio.run(scene())


def test_without_more_orders_nothing_more_begins_and_what_is_running_is_waited_for():
    async def scene():
        stage, delivered = Stage(), []
        pool = pool_of(stage.play, 3, 2, delivered)
        running = asyncio.create_task(pool.run())
        await stage.end(0)
        while len(stage.gates) < 3:
            await asyncio.sleep(0)
        await stage.end(1, 2)
        await running
        assert sorted(delivered) == ["0", "1", "2"]

    asyncio.run(scene())


def test_cancelling_stops_every_actor():
    async def scene():
        stage = Stage()
        running = asyncio.create_task(pool_of(stage.play, 10, 4, []).run())
        while stage.at_once < 4:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert stage.at_once == 0

    asyncio.run(scene())


def test_no_more_begin_than_are_free_and_waking_lets_more_begin():
    async def scene():
        stage, allowed, delivered = Stage(), [1], []
        waiting = iter([request(n) for n in range(3)])
        pool = ActorPool(
            stage.play, next_request=lambda: next(waiting, None), free_slots=lambda running: allowed[0] - running,
            deliver=lambda asked, made: delivered.append(asked.episode_id),
        )  # fmt: skip
        running = asyncio.create_task(pool.run())
        while stage.at_once < 1:
            await asyncio.sleep(0)
        allowed[0] = 3
        pool.wake()
        await stage.end(2, 1, 0)
        await running
        assert stage.most == 3
        assert sorted(delivered) == ["0", "1", "2"]

    asyncio.run(scene())


class Thread:
    """A pool in a thread, with what came of it."""

    def __init__(self, play, count=1000, concurrent=2):
        self.delivered, self.closed = [], threading.Event()
        self.some = threading.Event()

        @contextlib.asynccontextmanager
        async def open_pool():
            try:
                yield pool_of(play, count, concurrent, self.delivered)
            finally:
                self.closed.set()

        self.pool = PoolThread(open_pool)


def test_a_pool_in_a_thread_plays_to_its_end_and_gives_up_what_it_holds():
    async def play(asked):
        return finished(asked)

    made = Thread(play, count=20)
    made.pool.start()
    assert made.closed.wait(10)
    assert made.pool.stop()
    assert len(made.delivered) == 20
    made.pool.raise_if_failed()


def test_a_pool_in_a_thread_stops_when_told_though_its_actors_wait_for_ever():
    begun = threading.Event()

    async def play(asked):
        begun.set()
        await asyncio.Event().wait()

    made = Thread(play)
    made.pool.start()
    assert begun.wait(10)
    assert made.pool.stop(10)
    assert made.closed.is_set()
    made.pool.raise_if_failed()


def test_what_ends_a_pool_in_a_thread_surfaces_where_experience_is_waited_for():
    async def play(asked):
        raise ZeroDivisionError

    made = Thread(play)
    made.pool.start()
    assert made.closed.wait(10)
    assert made.pool.stop()
    with pytest.raises(CollectorFailed, match="ZeroDivisionError"):
        made.pool.raise_if_failed()
