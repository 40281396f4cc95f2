"""Each task is loaded once, from whatever provides sessions; one that cannot be loaded is named by its place."""

import asyncio
import threading

import pytest
from tests.sessions.serving import served

from palaestra.errors import ConfigError
from palaestra.sessions.clients.provider import ServerAddresses, load_tasks
from palaestra.sessions.environment_config import EnvironmentConfig
from palaestra.sessions.task import TaskRequest


@pytest.fixture
def address():
    """A session server without a browser, in a thread of its own: `load_tasks` runs a loop itself."""
    ready, over, urls, loops = threading.Event(), asyncio.Event(), [], []

    async def serve():
        async with served() as url:
            urls.append(url)
            loops.append(asyncio.get_running_loop())
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield ServerAddresses((urls[0],), None)
    loops[0].call_soon_threadsafe(over.set)
    thread.join()


def load(address, *tasks):
    requests = [TaskRequest(task, 7) for task in tasks]
    return load_tasks(requests, EnvironmentConfig(), address, session_type="browser", actors=2)


def test_tasks_are_returned_in_order_with_everything_decided(address):
    specs = load(address, "fake/button", "fake/button")
    assert [(f"{spec.suite}/{spec.name}", spec.seed) for spec in specs] == [("fake/button", 7)] * 2


def test_a_task_that_no_suite_has_is_named_by_its_place(address):
    with pytest.raises(ConfigError, match=r"tasks\[1\].task = 'fake/no': the only task is"):
        load(address, "fake/button", "fake/no", "fake/neither")
