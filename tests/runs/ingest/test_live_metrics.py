"""Points that wait for a client: put together by run and curve, bounded, with their extremes."""

import math

import pytest

from palaestra.runs.ingest.live_metrics import LiveMetrics, MetricSubscription, group_by_metric, thin
from palaestra.runs.series.writer import MAX_METRICS, SeriesWriter
from palaestra.telemetry.event import EpisodeSummary, LogLine, Record, TrainingStep


def _records(first, stop, **metrics):
    return [Record(n, float(n), TrainingStep(n, 10 * n, metrics or {"loss": float(n)})) for n in range(first, stop)]


def _subscribe(*run_ids, **options):
    woken = []
    return MetricSubscription(dict.fromkeys(run_ids, 1), lambda: woken.append(True), **options), woken


def _drain(subscription):
    return {batch.run_id: batch for batch in subscription.take()}


def test_points_have_the_names_of_the_stored_series(tmp_path):
    records = [
        *_records(1, 3, loss=0.5),
        Record(3, 3.0, EpisodeSummary(30, 1, 0, 17.0, 8)),
        Record(4, 4.0, LogLine("info", "nothing measured")),
        Record(5, 5.0, TrainingStep(3, 2**63, {"loss": 1.0})),
    ]
    curves = group_by_metric(records)
    assert curves == {
        "loss": [(10, 0.5, 1.0), (20, 0.5, 2.0)],
        "episode/return": [(30, 17.0, 3.0)],
        "episode/length": [(30, 8.0, 3.0)],
    }
    writer = SeriesWriter(tmp_path / "series")
    writer.add(records)
    assert (writer.columns, writer.waiting, writer.left_out) == (3, 4, 1)


def test_what_comes_between_two_batches_is_one_batch_per_run_in_order():
    live, woken = LiveMetrics(), []
    subscription = live.subscribe({"a": 1, "b": 1}, lambda: woken.append(True))
    subscription.take()
    for first in (1, 4, 7):
        live.publish("a", 1, _records(first, first + 3))
    live.publish("b", 1, _records(1, 2))
    live.publish("c", 1, _records(1, 9))
    first, second = subscription.take()
    assert [step for step, _, _ in first.points["loss"]] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert (first.run_id, second.run_id, len(second.points["loss"])) == ("a", "b", 1)
    assert subscription.take() == []
    assert len(woken) == 4
    live.unsubscribe(subscription)
    live.publish("a", 1, _records(10, 11))
    assert subscription.take() == []


def test_the_history_is_needed_at_first_and_when_a_later_attempt_begins():
    live = LiveMetrics()
    subscription = live.subscribe({"queued": 0, "ended": 1}, lambda: None)
    assert {batch.run_id: batch.needs_history for batch in subscription.take()} == {"queued": True, "ended": True}
    live.publish("queued", 1, _records(1, 2))
    live.publish("ended", 2, _records(1, 2))
    assert {batch.run_id: batch.needs_history for batch in subscription.take()} == {"queued": False, "ended": True}
    live.publish("ended", 2, _records(2, 3))
    assert [batch.needs_history for batch in subscription.take()] == [False]


def test_an_end_is_told_once_and_again_after_a_resume():
    subscription, woken = _subscribe("a")
    subscription.take()
    subscription.set_ended("a", False)
    assert not woken
    subscription.set_ended("a", True)
    subscription.set_ended("a", True)
    subscription.set_ended("stranger", True)
    assert [(batch.run_id, batch.has_ended) for batch in subscription.take()] == [("a", True)]
    assert len(woken) == 1
    subscription.set_ended("a", False)
    subscription.set_ended("a", True)
    assert [batch.has_ended for batch in subscription.take()] == [True]


def test_points_that_wait_are_thinned_and_a_spike_of_one_step_stays():
    subscription, _ = _subscribe("a", max_waiting=1000)
    peak = 0
    for first in range(0, 100_000, 500):
        curve = [
            (n, 1e6 if n == 60_123 else -1e6 if n == 7 else math.sin(n), float(n)) for n in range(first, first + 500)
        ]
        subscription.add("a", 1, {"loss": curve})
        peak = max(peak, subscription.waiting)
    assert peak <= 1500  # the limit, and the last publication before it is noticed
    kept = _drain(subscription)["a"].points["loss"]
    steps = [step for step, _, _ in kept]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert {(7, -1e6, 7.0), (60_123, 1e6, 60_123.0)} <= set(kept)


def test_very_many_curves_keep_a_few_points_each():
    subscription, _ = _subscribe("a", "b", max_waiting=1000)
    names = [f"m{n}" for n in range(400)]
    for step in range(200):
        for run_id in ("a", "b"):
            subscription.add(run_id, 1, {name: [(step, float(step), 0.0)] for name in names})
    # 800 curves of at least four points; thinned again when their number has doubled.
    assert subscription.waiting <= 2 * 4 * 800 + 400
    batches = _drain(subscription)
    assert all(batches["a"].points[name][-1] == (199, 199.0, 0.0) for name in names)


def test_no_more_metrics_wait_than_a_series_can_have():
    subscription, _ = _subscribe("a")
    for n in range(0, 2 * MAX_METRICS, 100):
        subscription.add("a", 1, {f"m{i}": [(0, 0.0, 0.0)] for i in range(n, n + 100)})
    assert len(_drain(subscription)["a"].points) == MAX_METRICS


@pytest.mark.parametrize("count", [4, 5, 17, 1000])
def test_thinning_keeps_first_lowest_highest_and_last_and_the_limit(count):
    curve = [(n, float((n * 7919) % 1000), float(n)) for n in range(1000)]
    kept = thin(curve, count)
    assert len(kept) <= max(4, count)
    assert {curve[0], curve[-1], min(curve, key=lambda p: p[1]), max(curve, key=lambda p: p[1])} <= set(kept)


def test_nan_is_kept_at_the_ends_and_is_no_extreme():
    curve = [(n, math.nan if n in (0, 50) else float(n), 0.0) for n in range(100)]
    kept = thin(curve, 4)
    assert math.isnan(kept[0][1])
    assert [step for step, _, _ in kept[1:]] == [1, 99]
