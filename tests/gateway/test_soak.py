"""The short form of `make soak`: real browsers and servers killed under play, and every episode accounted for once."""

import asyncio

import pytest
from benchmarks.session_soak import Plan, due, flat, run_soak, thirds

from palaestra.errors import ConfigError
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.suites import suites


def test_sixty_episodes_outlive_two_browsers_and_a_server_and_leave_nothing_behind():
    try:
        find_chromium()
    except ConfigError as missing:
        pytest.skip(str(missing))
    if not suites()["miniwob"].names():
        pytest.skip("the miniwob package is not installed")
    plan = Plan(episodes=60, concurrent=4, browser_every=25, server_every=40, warm=0)

    found = asyncio.run(run_soak(plan))

    assert found["failed_checks"] == []
    assert found["outcomes"] == {"solved": 54, "failed": 6}
    assert found["kills"] == {"browsers": 2, "servers": 1}
    # A frame without a picture came once in 5,000 episodes under load; such an episode is repeated like any other.
    known = {"browser_gone", "session_lost", "not opened: session_lost", "no_picture"}
    assert set(found["environment_failed"]) <= known


def test_kills_are_due_after_every_so_many_episodes_but_not_after_the_last():
    assert due(Plan()) == {"browsers": 24, "servers": 4}
    assert due(Plan(episodes=60, browser_every=25, server_every=60)) == {"browsers": 2}


def test_memory_is_flat_when_the_last_third_is_no_more_than_a_tenth_above_the_first():
    samples = [{"gateway": 50.0, "servers": 100.0, "browsers": 300.0 + 2 * number} for number in range(30)]

    memory = thirds(samples)

    assert memory["browsers"] == [314.0, 332.0, 350.0]  # of 306 to 322, 324 to 340 and 342 to 358
    assert flat(memory)
    assert not flat({"gateway": [50.0, 60.0, 66.0]})
