"""Points on disk: exact, decimated, and as they were after any crash."""

import math
import os
import random
import threading
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.ingest.feed import Feed
from palaestra.runs.runner import JournalFile
from palaestra.runs.series import MetricPoint
from palaestra.runs.series import reader as reader_module
from palaestra.runs.series import writer as writer_module
from palaestra.runs.series.files import (
    BUCKET,
    FANOUT,
    LEVELS,
    POINT,
    build_next_level,
    cover_range,
    points_to_buckets,
    read_last_commit,
    read_records,
)
from palaestra.runs.series.reader import RunSeries, SeriesReader
from palaestra.runs.series.writer import SeriesWriter
from palaestra.telemetry.event import EpisodeSummary, Record, TrainingStep
from palaestra.telemetry.journal import Cursor, Journal

VALUES = st.floats(width=32)


def records(values, name="loss", first=0, stride=1):
    return [
        Record(i + 1, float(i), TrainingStep(i, first + i * stride, {name: float(value)}))
        for i, value in enumerate(values)
    ]


def write(directory, values, *, chunk=1000, **how):
    writer = SeriesWriter(directory)
    told = records(values, **how)
    for start in range(0, len(told), chunk):
        writer.add(told[start : start + chunk])
        writer.flush(Cursor(1, start + 1, start + 1), {})
    return writer


def same(left, right):
    return left == right or (math.isnan(left) and math.isnan(right))


def test_records_are_72_and_24_bytes_long():
    assert (POINT.itemsize, BUCKET.itemsize) == (24, 72)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(VALUES, max_size=700), chunk=st.sampled_from([1, 7, 16, 100, 1000]))
def test_every_level_holds_first_lowest_highest_and_last_as_brute_force_finds_them(tmp_path_factory, values, chunk):
    directory = tmp_path_factory.mktemp("series")
    write(directory, values, chunk=chunk)

    for level in range(1, LEVELS + 1):
        size = FANOUT**level
        expected = [values[i : i + size] for i in range(0, len(values) - size + 1, size)]
        found = read_records(directory, 0, level, 0, len(expected) + 1) if expected else []
        assert len(found) == len(expected)
        for number, (bucket, stretch) in enumerate(zip(found, expected, strict=True)):
            numbers = [value for value in stretch if not math.isnan(value)]
            assert same(bucket["first"], stretch[0])
            assert same(bucket["last"], stretch[-1])
            assert same(bucket["low"], min(numbers) if numbers else math.nan)
            assert same(bucket["high"], max(numbers) if numbers else math.nan)
            low = next((i for i, value in enumerate(stretch) if numbers and value == min(numbers)), 0)
            high = next((i for i, value in enumerate(stretch) if numbers and value == max(numbers)), 0)
            steps = (bucket["first_step"], bucket["low_step"], bucket["high_step"], bucket["last_step"])
            assert steps == tuple(number * size + i for i in (0, low, high, size - 1))
            assert bucket["time"] == number * size + size - 1


@given(first=st.integers(0, 5000), length=st.integers(0, 5000), level=st.integers(0, 5))
def test_a_cover_is_every_point_of_the_range_once_and_in_order(first, length, level):
    pieces = cover_range(first, first + length, level)
    ranges = [(p.start * FANOUT**p.level, p.stop * FANOUT**p.level) for p in pieces]
    assert sum(stop - start for start, stop in ranges) == length
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert not ranges or (ranges[0][0], ranges[-1][1]) == (first, first + length)
    assert len(pieces) <= 2 * level + 1


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(VALUES, min_size=1, max_size=900),
    points=st.integers(4, 200),
    first=st.integers(-5, 2000),
    length=st.integers(0, 2000),
)
def test_a_decimated_range_keeps_its_ends_and_its_extremes(tmp_path_factory, values, points, first, length):
    directory = tmp_path_factory.mktemp("series")
    write(directory, values, stride=2)
    last = first + length
    told = SeriesReader(directory).decimate("loss", points, first, last)
    inside = [(2 * i, value) for i, value in enumerate(values) if first <= 2 * i <= last]

    assert len(told) <= points
    assert bool(told) == bool(inside)
    assert [point.step for point in told] == sorted(point.step for point in told)
    for point in told:
        assert same(dict(inside)[point.step], point.value)
    if inside:
        assert (told[0].step, told[-1].step) == (inside[0][0], inside[-1][0])
        numbers = [value for _, value in inside if not math.isnan(value)]
        if numbers:
            assert min(numbers) in [point.value for point in told]
            assert max(numbers) in [point.value for point in told]
    if len(inside) <= points:
        assert len(told) == len(inside)


def test_recent_points_come_oldest_first_and_as_many_as_there_are(tmp_path):
    write(tmp_path, range(40), first=100)
    reader = SeriesReader(tmp_path)
    assert reader.recent("loss", 2) == [MetricPoint(138, 38.0, 38.0), MetricPoint(139, 39.0, 39.0)]
    assert len(reader.recent("loss", 1000)) == 40
    assert [point.step for point in reader.recent("loss", 2, before=110)] == [108, 109]
    assert reader.recent("loss", 0) == reader.recent("other", 5) == []


def test_a_directory_that_does_not_exist_has_no_metrics(tmp_path):
    reader = SeriesReader(tmp_path / "none")
    assert (reader.names(), reader.recent("a", 3), reader.decimate("a"), reader.first_step("a")) == ({}, [], [], None)


def test_episodes_become_two_metrics(tmp_path):
    writer = SeriesWriter(tmp_path)
    writer.add([Record(1, 2.0, EpisodeSummary(50, 1, 0, 7.5, 20))])
    writer.flush(Cursor(1, 1, 1), {})
    reader = SeriesReader(tmp_path)
    assert reader.recent("episode/return", 5) == [MetricPoint(50, 7.5, 2.0)]
    assert reader.recent("episode/length", 5) == [MetricPoint(50, 20.0, 2.0)]


def test_what_was_written_and_not_committed_is_cut_off_and_can_be_added_again(tmp_path):
    values = [float(value) for value in range(2_000)]
    told = records(values)
    rng = random.Random(3)
    writer, at = SeriesWriter(tmp_path), 0
    while at < len(told):
        step = rng.randrange(1, 120)
        writer.add(told[at : at + step])
        if rng.random() < 0.5:
            # Killed with part of the flush on disk.
            for column in writer._columns.values():
                column.write()
        else:
            writer.flush(Cursor(1, at + step, at + step), {"env_step": at})
        writer = SeriesWriter(tmp_path)
        at = writer.cursor.seq
    expected = tmp_path / "expected"
    write(expected, values)

    for path in expected.iterdir():
        if path.name not in ("commits.log",):
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_files_shorter_than_their_commit_are_not_believed(tmp_path):
    write(tmp_path / "s", range(100))
    os.truncate(tmp_path / "s" / "0.pts", 24 * 60)
    writer = SeriesWriter(tmp_path / "s")
    assert (writer.cursor, writer.points) == (Cursor(), 0)
    assert list((tmp_path / "s").iterdir()) == []


def test_after_a_power_cut_only_what_was_synced_is_believed(tmp_path, monkeypatch):
    writer = write(tmp_path / "a", range(100))
    writer = write(tmp_path / "b", range(100))
    writer.flush(Cursor(1, 100, 100), {"episodes": 3}, durable=True)
    monkeypatch.setattr(writer_module, "boot_id", lambda: "another boot")

    assert SeriesWriter(tmp_path / "a").points == 0
    synced = SeriesWriter(tmp_path / "b")
    assert (synced.points, synced.cursor, synced.tally) == (100, Cursor(1, 100, 100), {"episodes": 3})


@pytest.mark.parametrize("damage", [b"", b"\x00" * 50, b"garbage\n"])
def test_a_damaged_last_commit_falls_back_to_the_one_before(tmp_path, damage):
    writer = write(tmp_path, range(50))
    good = (tmp_path / "commits.log").read_bytes()
    writer.add(records(range(10)))
    writer.flush(Cursor(1, 60, 60), {})
    whole = (tmp_path / "commits.log").read_bytes()
    (tmp_path / "commits.log").write_bytes(good + whole[len(good) : -20] + damage)

    assert SeriesReader(tmp_path).names()["loss"].points == 50
    again = SeriesWriter(tmp_path)
    assert (again.points, again.cursor.seq) == (50, 1)
    again.add(records(range(10)))
    again.flush(Cursor(1, 60, 60), {})
    assert SeriesReader(tmp_path).names()["loss"].points == 60


def test_the_log_of_commits_stays_short(tmp_path):
    writer = SeriesWriter(tmp_path)
    for number in range(1_000):
        writer.add(records([1.0], name=f"m{number % 200}"))
        writer.flush(Cursor(1, number, number), {})
    assert (tmp_path / "commits.log").stat().st_size < 270_000
    assert sum(info.points for info in SeriesReader(tmp_path).names().values()) == 1_000


def test_no_more_than_two_thousand_metrics_are_kept_and_the_rest_is_counted(tmp_path):
    writer = SeriesWriter(tmp_path)
    for number in range(2_010):
        writer.add(records([1.0], name=f"m{number}"))
    writer.add([Record(1, 0.0, TrainingStep(0, 2**63, {"m0": 1.0}))])
    writer.flush(Cursor(1, 1, 1), {})
    assert writer.left_out == 11
    assert len(SeriesReader(tmp_path).names()) == 2_000


def test_no_file_stays_open_between_flushes(tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    writer = write(tmp_path, range(100))
    SeriesReader(tmp_path).decimate("loss", 10)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert writer.points == 100


def test_names_may_be_anything(tmp_path):
    names = ["a/b", "../../etc/passwd", 'é\n"', "", "x" * 3_000]
    writer = SeriesWriter(tmp_path / "series")
    for name in names:
        writer.add(records([1.0], name=name))
    writer.flush(Cursor(1, 1, 1), {})
    assert list(SeriesReader(tmp_path / "series").names()) == names
    assert SeriesWriter(tmp_path / "series").points == 5
    assert {path.parent for path in tmp_path.rglob("*")} <= {tmp_path, tmp_path / "series"}


def run_of(tmp_path, *attempts):
    for number, (first, values) in enumerate(attempts, start=1):
        write(tmp_path / f"attempt_{number}" / "series", values, first=first)
    return RunSeries(RunDirectory(tmp_path))


def test_a_resumed_attempt_hides_the_steps_it_took_again(tmp_path):
    series = run_of(tmp_path, (0, [1.0] * 100), (60, [2.0] * 50), (80, [3.0] * 30))
    told = series.decimate("loss", 1000)
    assert [(p.step, p.value) for p in told] == [
        *((s, 1.0) for s in range(60)),
        *((s, 2.0) for s in range(60, 80)),
        *((s, 3.0) for s in range(80, 110)),
    ]
    assert [p.step for p in series.recent("loss", 55)] == list(range(55, 110))
    assert len(series.decimate("loss", 40)) <= 40
    assert [p.step for p in series.decimate("loss", 1000, 58, 61)] == [58, 59, 60, 61]
    assert series.names()["loss"].points == 180


def test_an_attempt_that_began_at_zero_again_hides_everything(tmp_path):
    series = run_of(tmp_path, (0, [1.0] * 100), (0, [2.0] * 10))
    assert {point.value for point in series.recent("loss", 100)} == {2.0}
    assert len(series.decimate("loss", 100)) == 10


def test_steps_that_fall_are_searched_by_the_greatest_so_far(tmp_path):
    writer = SeriesWriter(tmp_path)
    writer.add([Record(i + 1, 0.0, TrainingStep(0, step, {"a": 0.0})) for i, step in enumerate([1, 5, 2, 7, 9])])
    writer.flush(Cursor(1, 1, 1), {})
    assert [point.step for point in SeriesReader(tmp_path).decimate("a", 100, 5, 8)] == [5, 2, 7]


def test_a_bucket_of_nothing_but_nan_is_nan():
    points = np.zeros(FANOUT, POINT)
    points["value"] = math.nan
    (bucket,) = build_next_level(points_to_buckets(points))
    assert math.isnan(bucket["low"])
    assert math.isnan(bucket["high"])


def test_a_spike_of_one_step_is_seen_among_a_hundred_thousand_points_for_the_price_of_what_is_shown(tmp_path):
    values = [0.0] * 100_000
    values[54_321] = 99.0
    write(tmp_path, values, chunk=50_000)
    read = 0

    def counted(directory, index, level, start, stop):
        nonlocal read
        read += (stop - start) * (72 if level else 24)
        return read_records(directory, index, level, start, stop)

    with patch("palaestra.runs.series.reader.read_records", counted):
        told = SeriesReader(tmp_path).decimate("loss", 400)
    assert len(told) <= 400
    assert [point.step for point in told if point.value == 99.0] == [54_321]
    # Of 2,400,000 bytes of points: the 390 buckets of 256, and at most 15 of every smaller size behind them.
    assert read <= 390 * 72 + 15 * 72 + 15 * 24


def test_whoever_reads_while_it_grows_sees_a_beginning_of_it_and_never_anything_else(tmp_path):
    done = threading.Event()
    wrong = []

    def read():
        reader, before = SeriesReader(tmp_path), 0
        while not done.is_set():
            recent = reader.recent("loss", 50)
            steps = [point.step for point in recent]
            told = reader.decimate("loss", 40)
            if steps != list(range(steps[0], steps[0] + len(steps))) if steps else before:
                wrong.append(steps)
            if recent and (any(p.value != float(p.step % 7) for p in [*recent, *told]) or steps[-1] < before):
                wrong.append(recent)
            before = steps[-1] if steps else before

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    write(tmp_path, [float(step % 7) for step in range(6_000)], chunk=37)
    done.set()
    for thread in readers:
        thread.join()
    assert wrong == []


def test_a_chart_of_a_thousand_metrics_reads_the_commits_once(tmp_path, monkeypatch):
    writer = SeriesWriter(tmp_path)
    writer.add([Record(1, 0.0, TrainingStep(0, 1, {f"m{number}": float(number) for number in range(1_000)}))])
    writer.flush(Cursor(1, 1, 1), {})
    read = []
    monkeypatch.setattr(reader_module, "read_last_commit", lambda path: read.append(path) or read_last_commit(path))
    reader = SeriesReader(tmp_path)
    assert [reader.recent(name, 1)[0].value for name in reader.names()] == [float(number) for number in range(1_000)]
    assert len(read) == 1
    writer.add([Record(2, 0.0, TrainingStep(0, 2, {"m7": 70.0}))])
    writer.flush(Cursor(1, 2, 2), {})
    assert reader.recent("m7", 1)[0].value == 70.0
    assert len(read) == 2


def test_a_feed_that_catches_up_writes_as_it_goes(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path / "attempt_1")
    with Journal(attempt.journal) as journal:
        journal.emit_many(TrainingStep(n, n, {"a": float(n), "b": 1.0}) for n in range(1, 10_001))
    waiting = []
    flush = SeriesWriter.flush

    def watched(self, *arguments, **options):
        waiting.append(self.waiting)
        flush(self, *arguments, **options)

    monkeypatch.setattr(SeriesWriter, "flush", watched)
    feed = Feed(attempt, (JournalFile(),))
    while feed.finish(2_000) or feed.has_more:
        pass
    feed.close()

    assert max(waiting) < 10_000
    assert SeriesReader(attempt.series).names()["a"].points == 10_000
