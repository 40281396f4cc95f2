"""Questions of many actors are answered in few batches, the same ones for the same seeds."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from palaestra.actor.inference import BatchedInference, ConcurrentInference
from palaestra.policy.vlm.generation import Completion
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Conversation, Prompt
from palaestra.policy.vlm.sampler import ConcurrentSampler, ReplyRequest, SampledReply

PICTURE = Picture(b"", (16, 16))


def question(seed):
    return ReplyRequest(Conversation("", str(seed), (), PICTURE), seed)


class Echo:
    """Answers every question with its seed; waits for `gate` before each batch."""

    def __init__(self):
        self.batches, self.version = [], 0
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()

    def sample(self, questions, *, temperature):
        self.begun.set()
        assert self.gate.wait(10)
        self.batches.append([asked.seed for asked in questions])
        return [self.one(asked) for asked in questions]

    def one(self, asked):
        array = np.array([asked.seed])
        sampled = Completion(array, np.zeros(1), np.array([self.version]), str(asked.seed), True, "")
        return SampledReply(Prompt(array, (PICTURE,)), sampled)


def scene(play, **more):
    async def running():
        echo = Echo()
        inference = BatchedInference(echo, temperature=1.0, **more)
        try:
            await play(echo, inference)
        finally:
            echo.gate.set()
            await inference.close()

    asyncio.run(running())


async def texts(inference, *seeds):
    made = await asyncio.gather(*(inference.sample_reply(question(seed)) for seed in seeds))
    return [one.completion.text for one in made]


def test_sixteen_actors_that_ask_at_once_share_one_batch_and_each_gets_its_own_answer():
    async def play(echo, inference):
        with _players(inference, 16):
            assert await texts(inference, *range(16)) == [str(seed) for seed in range(16)]
        assert echo.batches == [list(range(16))]

    scene(play)


@contextlib.contextmanager
def _players(inference, count):
    inference.set_num_actors(count)
    yield
    inference.set_num_actors(0)


def test_whoever_asks_while_a_batch_is_under_way_is_in_the_next_one():
    async def play(echo, inference):
        echo.gate.clear()
        with _players(inference, 1):
            first = asyncio.create_task(texts(inference, 1))
            await asyncio.to_thread(echo.begun.wait, 10)
            rest = asyncio.create_task(texts(inference, 2, 3, 4))
            await asyncio.sleep(0)
            echo.gate.set()
            assert await first + await rest == ["1", "2", "3", "4"]
        assert echo.batches == [[1], [2, 3, 4]]

    scene(play)


def test_no_batch_is_larger_than_it_may_be():
    async def play(echo, inference):
        with _players(inference, 5):
            await texts(inference, 1, 2, 3, 4, 5)
        assert [len(batch) for batch in echo.batches] == [2, 2, 1]

    scene(play, max_batch=2)


def test_one_that_asks_alone_is_answered_a_moment_later_though_others_play():
    async def play(echo, inference):
        with _players(inference, 16):
            assert await texts(inference, 7) == ["7"]

    scene(play)


def test_in_lockstep_a_batch_waits_for_every_player_and_is_in_the_order_of_seeds():
    async def play(echo, inference):
        with _players(inference, 3):
            early = asyncio.create_task(texts(inference, 9, 4))
            for _ in range(5):
                await asyncio.sleep(0)
            assert echo.batches == []
            await texts(inference, 6)
            await early
        assert echo.batches == [[4, 6, 9]]
        assert inference.out_of_step == 0

    scene(play, lockstep=True)


def test_in_lockstep_a_player_that_leaves_is_not_waited_for():
    async def play(echo, inference):
        inference.set_num_actors(2)
        asked = asyncio.create_task(texts(inference, 1))
        await asyncio.sleep(0)
        inference.set_num_actors(1)
        assert await asked == ["1"]
        assert inference.out_of_step == 0

    scene(play, lockstep=True)


def test_in_lockstep_a_player_that_never_asks_is_given_up_and_counted():
    async def play(echo, inference):
        with _players(inference, 2):
            assert await texts(inference, 1) == ["1"]
        assert inference.out_of_step == 1

    scene(play, lockstep=True, stuck_s=0.01)


def test_an_error_of_the_sampler_reaches_everybody_who_asked_and_the_next_are_answered():
    async def play(echo, inference):
        with _players(inference, 2):
            right = echo.sample
            echo.sample = lambda questions, temperature: 1 / 0
            results = await asyncio.gather(
                inference.sample_reply(question(1)), inference.sample_reply(question(2)), return_exceptions=True
            )
            assert [type(result) for result in results] == [ZeroDivisionError] * 2
            echo.sample = right
            assert await texts(inference, 3, 4) == ["3", "4"]

    scene(play)


def test_an_actor_that_left_while_waiting_is_not_answered_for():
    async def play(echo, inference):
        echo.gate.clear()
        with _players(inference, 1):
            first = asyncio.create_task(texts(inference, 1))
            await asyncio.to_thread(echo.begun.wait, 10)
            leaving = asyncio.create_task(texts(inference, 2))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            echo.gate.set()
            await first
            await texts(inference, 3)
        assert echo.batches == [[1], [3]]

    scene(play)


def test_closing_leaves_nobody_waiting():
    async def play(echo, inference):
        echo.gate.clear()
        with _players(inference, 2):
            first = asyncio.create_task(texts(inference, 1))
            await asyncio.to_thread(echo.begun.wait, 10)
            second = asyncio.create_task(texts(inference, 2))
            await asyncio.sleep(0)
            closing = asyncio.create_task(inference.close())
            await asyncio.sleep(0)
            echo.gate.set()
            await closing
            for asked in (first, second):
                with pytest.raises(asyncio.CancelledError):
                    await asked

    scene(play)


class Concurrent(Echo):
    """Takes requests one by one, and answers when it is told to."""

    def __init__(self):
        super().__init__()
        self.under_way = {}

    def submit(self, asked, *, temperature):
        self.under_way[asked.seed] = Future()
        return self.under_way[asked.seed]


def test_a_sampler_that_batches_by_itself_gets_every_request_at_once_and_answers_in_its_own_order():
    async def play():
        sampler = Concurrent()
        assert isinstance(sampler, ConcurrentSampler)
        inference = ConcurrentInference(sampler, temperature=1.0)
        asked = asyncio.create_task(texts(inference, 1, 2, 3))
        while len(sampler.under_way) < 3:
            await asyncio.sleep(0)
        for seed in (3, 1, 2):
            sampler.under_way[seed].set_result(sampler.one(question(seed)))
        assert await asked == ["1", "2", "3"]
        assert inference.busy_seconds > 0
        await inference.close()

    asyncio.run(play())


def test_closing_withdraws_the_requests_that_are_under_way():
    async def play():
        sampler = Concurrent()
        inference = ConcurrentInference(sampler, temperature=1.0)
        asked = asyncio.create_task(texts(inference, 1))
        while not sampler.under_way:
            await asyncio.sleep(0)
        await inference.close()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert sampler.under_way[1].cancelled()

    asyncio.run(play())
