"""Two minutes of what `benchmarks.soak` does for half an hour."""

import pytest
from benchmarks.soak import PARTS, soak


@pytest.mark.slow
@pytest.mark.parametrize(
    "attacked", [what for _, what in PARTS], ids=lambda what: f"{what['collector']}-{what.get('overflow', 'block')}"
)
def test_no_step_is_lost_or_learned_twice_while_collectors_are_killed(attacked):
    found = soak(seconds=40, seed=1, **attacked)
    assert found["failed_checks"] == [], found
    assert found["taken"] - found["learned"] - found["dropped"] - found["unread"] <= found["in_flight_bound"]
