"""The load test: its arithmetic, and a short run with restarts."""

import asyncio

import pytest
from benchmarks.load import Plan, is_flat, quantiles, run_load, thirds
from benchmarks.simulated_pages import SimulatedPage, is_hit

from palaestra.errors import ConfigError
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.conformance import check_session
from palaestra.sessions.fake import FakeSession


def test_a_simulated_page_keeps_every_rule_of_a_session():
    async def make():
        return SimulatedPage(0.0, FakeSession)

    asyncio.run(check_session(make, "fake/button"))


def test_a_hit_is_inside_the_square_of_40_pixels_whose_corner_follows_from_the_seed():
    # Seed 1: the corner is at (37, 53). Seed 4: (4 * 37 - 120, 4 * 53 - 170) = (28, 42).
    assert [is_hit(1, 37, 53), is_hit(1, 76, 92), is_hit(1, 77, 92), is_hit(1, 36, 53)] == [True, True, False, False]
    assert [is_hit(4, 28, 42), is_hit(4, 27, 42)] == [True, False]


def test_memory_is_flat_up_to_a_tenth_and_ten_megabytes_above_the_first_third():
    assert thirds([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [2.0, 4.0, 6.0]
    assert is_flat([50.0] * 8 + [65.0] * 4)  # 65 <= 1.1 * 50 + 10
    assert not is_flat([50.0] * 8 + [65.1] * 4)
    assert is_flat([50.0] * 4 + [500.0] * 4)  # eight samples say nothing


def test_quantiles_are_of_all_requests():
    assert quantiles([0.001 * number for number in range(1, 101)]) == {"p50_ms": 51.0, "p99_ms": 100.0, "max_ms": 100.0}


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "gateways"), [("servers", 2), ("local", 1)])
def test_a_minute_of_training_through_gateways_that_are_killed_loses_nothing(runtime, gateways):
    try:
        find_chromium()
    except ConfigError as missing:
        pytest.skip(str(missing))
    plan = Plan(
        minutes=1.0, sessions=24, real=2, actors=8, servers=2, gateways=gateways, runtime=runtime,
        restart_gateway_every=12.0, look_every_s=2.0,
    )  # fmt: skip

    found = asyncio.run(run_load(plan))

    assert {name for name, passed in found["checks"].items() if not passed} == set()
    assert found["episodes"]["scheduled"] > 0
    if runtime == "servers":
        assert found["sessions"]["held_replaced"] == 0
        assert found["sessions"]["adopted"] > 0
