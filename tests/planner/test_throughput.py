"""Rates of small pipelines, which can be computed by hand."""

import pytest

from palaestra.planner.throughput import LINGER_S, Setup, Times, simulate

FIXED = Times(session_step=0.2, session_variation=0, inference_batch=0.1, turns=2, update_episode=0.05)


def test_synchronous_episodes_are_played_in_waves_and_learned_from_afterwards():
    # 8 episodes on 4 sessions: 2 waves of 2 turns of 0.3 s, then 8 x 0.05 s of learning
    found = simulate(FIXED, Setup(sessions=4, batch_size=8))
    assert found.update_seconds == pytest.approx(1.2 + 0.4)
    assert found.learner_utilisation == pytest.approx(0.25)
    assert (found.staleness, found.mean_batch) == (0, 4)


def test_asynchronous_collection_hides_learning_behind_playing():
    found = simulate(FIXED, Setup(sessions=4, batch_size=8, collection="asynchronous"))
    assert found.update_seconds == pytest.approx(1.2)
    assert found.staleness_max == 1


def test_a_slow_learner_sets_the_pace_and_the_bound_the_staleness():
    slow = FIXED.model_copy(update={"update_episode": 1.0})
    for bound in (1, 2):
        found = simulate(slow, Setup(sessions=8, batch_size=8, collection="asynchronous", max_staleness=bound))
        assert found.update_seconds == pytest.approx(8.0)
        assert found.learner_utilisation == pytest.approx(1.0)
        assert found.staleness == pytest.approx(bound, abs=0.05)
        assert found.dropped_share == 0


def test_without_staleness_nothing_overlaps():
    together = Setup(sessions=8, batch_size=8, collection="asynchronous", max_staleness=0)
    found = simulate(FIXED, together)
    assert found.update_seconds == pytest.approx(0.6 + 0.4)
    assert found.staleness == 0


def test_a_batch_of_replies_has_at_most_max_batch_of_them():
    times = FIXED.model_copy(update={"update_episode": 0.01})
    limited = simulate(times, Setup(sessions=16, batch_size=64, collection="asynchronous", max_batch=2))
    # 2 replies in 0.1 s: 20 turns a second, 10 episodes
    assert limited.episodes_per_second == pytest.approx(10, rel=0.02)
    assert limited.sampler_utilisation == pytest.approx(1, abs=0.02)
    twice = simulate(times, Setup(sessions=16, batch_size=64, collection="asynchronous", max_batch=2), samplers=2)
    assert twice.episodes_per_second == pytest.approx(20, rel=0.02)


def test_a_lone_request_waits_for_others_and_then_goes_alone():
    times = Times(session_step=1.0, session_variation=0, inference_batch=0.5, turns=1, update_episode=0)
    found = simulate(times, Setup(sessions=2, batch_size=1, collection="asynchronous", max_staleness=9))
    assert LINGER_S == 0.003
    assert found.update_seconds == pytest.approx(0.75, rel=0.05)


def test_failing_sessions_are_played_again():
    perfect = simulate(FIXED, Setup(sessions=4, batch_size=8), updates=40)
    failing = simulate(FIXED.model_copy(update={"failure_rate": 0.2}), Setup(sessions=4, batch_size=8), updates=200)
    assert perfect.retried_share == 0
    assert failing.retried_share == pytest.approx(0.2, abs=0.03)
    assert failing.update_seconds > 1.1 * perfect.update_seconds


def test_sampling_and_learning_on_one_device_share_its_time():
    # Alone: 4 turns in 0.4 s of sampling, and 0.4 s of learning. On one device both take at least 0.8 s per update.
    times = Times(session_step=0, session_variation=0, inference_batch=0.1, turns=1, update_episode=0.1)
    setup = Setup(sessions=1, batch_size=4, collection="asynchronous")
    assert simulate(times, setup).update_seconds == pytest.approx(0.4, rel=0.05)
    assert simulate(times, setup, shared_compute=1.0).update_seconds == pytest.approx(0.8, rel=0.05)
    assert simulate(times, setup, shared_compute=2.0).update_seconds == pytest.approx(0.4, rel=0.05)


def test_a_vector_environment_is_one_session_whose_episodes_are_segments():
    # 8 steps of 0.05 s; learning takes 0.28 s: overlapped, the collector sets the pace; the lag is that of the learner
    times = Times(session_step=0, session_variation=0, inference_batch=0.05, turns=8, update_episode=0.28)
    both = {"sessions": 1, "batch_size": 1}
    assert simulate(times, Setup(**both)).update_seconds == pytest.approx(0.68)
    found = simulate(times, Setup(**both, collection="asynchronous"))
    assert found.update_seconds == pytest.approx(0.4)
    assert found.staleness == pytest.approx(6 / 8)  # the first 6 of 8 steps begin while the learner is at work


def test_a_large_system_has_the_rate_of_its_parts():
    small = simulate(FIXED, Setup(sessions=64, batch_size=64, collection="asynchronous"), samplers=4)
    times = FIXED.model_copy(update={"turns": 40.0})
    big = Setup(sessions=6400, batch_size=6400, collection="asynchronous")
    large = simulate(times, big, samplers=400, learner_speed=1000)
    assert small.episodes_per_second > 0
    assert large.turns_per_second == pytest.approx(6400 / 0.3, rel=0.1)
