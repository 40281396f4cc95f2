"""What is quick because little is done, counted in bytes, steps and modules; `benchmarks.run_service` has seconds."""

import subprocess
import sys

import pytest

from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.series import reader as reader_module
from palaestra.runs.series.files import read_records
from palaestra.runs.series.reader import SeriesReader
from palaestra.runs.series.writer import SeriesWriter
from palaestra.runs.store.registry import Registry
from palaestra.telemetry.event import Record, TrainingStep
from palaestra.telemetry.journal import Cursor

SPIKE = 1_000.0


def build(directory, count, spike_at, batch=20_000):
    """A series as the pump makes it, of a saw with one spike."""
    writer = SeriesWriter(directory)
    for start in range(0, count, batch):
        writer.add(
            Record(i + 1, float(i), TrainingStep(i, 4 * i, {"loss": SPIKE if i == spike_at else float(i % 97)}))
            for i in range(start, min(count, start + batch))
        )
        writer.flush(Cursor(1, start + 1, start + 1), {})


@pytest.fixture
def bytes_read(monkeypatch):
    """How much of the series files was read, in bytes."""
    sizes = []

    def counted(directory, index, level, start, stop):
        found = read_records(directory, index, level, start, stop)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(reader_module, "read_records", counted)
    return sizes


def read_all_ways(directory, count, spike_at, bytes_read):
    reader = SeriesReader(directory)
    points = reader.decimate("loss", 2_000)
    whole = sum(bytes_read)
    assert len(points) <= 2_000
    assert [point.step for point in points if point.value == SPIKE] == [4 * spike_at]
    assert (points[0].step, points[-1].step) == (0, 4 * (count - 1))
    bytes_read.clear()
    assert len(reader.recent("loss", 1_000)) == 1_000
    recent = sum(bytes_read)
    bytes_read.clear()
    part = reader.decimate("loss", 2_000, 4 * spike_at - 40_000, 4 * spike_at + 40_000)
    assert [point.step for point in part if point.value == SPIKE] == [4 * spike_at]
    return whole, recent, sum(bytes_read)


# 500 stretches are shown; the level chosen has fewer than 16 buckets for each, and 15 more per level at either end.
MOST_BYTES = 500 * 16 * 72 + 2 * 15 * 5 * 72


def test_a_read_of_two_hundred_thousand_points_costs_what_is_shown(tmp_path, bytes_read):
    build(tmp_path / "series", 200_000, 123_456)
    whole, recent, part = read_all_ways(tmp_path / "series", 200_000, 123_456, bytes_read)
    assert whole <= MOST_BYTES
    assert recent == 24_000
    assert part <= MOST_BYTES + 2 * 6 * 32 * 72


@pytest.mark.slow
def test_a_read_of_ten_million_points_costs_no_more(tmp_path, bytes_read):
    build(tmp_path / "series", 10_000_000, 7_654_321, batch=200_000)
    assert (tmp_path / "series" / "0.pts").stat().st_size == 240_000_000
    whole, recent, part = read_all_ways(tmp_path / "series", 10_000_000, 7_654_321, bytes_read)
    assert whole <= MOST_BYTES
    assert recent == 24_000
    assert part <= MOST_BYTES + 2 * 6 * 32 * 72


def test_the_newest_of_ten_thousand_runs_are_found_without_looking_at_the_others(tmp_path):
    registry = Registry.open(tmp_path / "registry.sqlite")
    registry.put_many(
        [
            RunRecord(
                run_id=f"r{i:05}", runner="echo", agent_id="echo/none", env_id="None", phase=Phase.SUCCEEDED, created=i
            )
            for i in range(10_000)
        ]
    )
    hundreds = 0

    def count():
        nonlocal hundreds
        hundreds += 1
        return 0

    registry._connection.set_progress_handler(count, 100)
    newest = registry.runs(limit=30)
    registry._connection.set_progress_handler(None, 0)
    registry.close()

    assert [record.run_id for record in newest] == [f"r{i:05}" for i in range(9_999, 9_969, -1)]
    # The virtual machine of SQLite takes some 40 steps for a row; 10,000 rows would be thousands of hundreds.
    assert hundreds <= 50


def test_what_follows_a_run_is_loaded_without_numpy_or_a_web_server():
    code = """
import sys
from palaestra.runs.ingest import stdout, stream
from palaestra.runs.series import MetricPoint
from palaestra.runs.state import progress
from palaestra.runs.store import registry
heavy = ("numpy", "torch", "fastapi", "uvicorn", "httpx", "rich", "yaml")
sys.exit(str([name for name in heavy if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr
