"""The pump: every record of every live attempt, once, on disk and to followers."""

import errno
import os
import shutil
import threading
import time

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.feed import Feed
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.runner import JournalFile, StdoutLines
from palaestra.runs.series.reader import SeriesReader
from palaestra.telemetry.event import EpisodeSummary, LogLine, PhaseChanged, TrainingStep
from palaestra.telemetry.journal import Journal

JOURNAL = (JournalFile(),)


class Followed:
    """Collects what is published and lets a test wait for it."""

    def __init__(self):
        self.records = {}
        self.changed = threading.Condition()

    def __call__(self, run_id, attempt, records):
        with self.changed:
            self.records.setdefault((run_id, attempt), []).extend(records)
            self.changed.notify_all()

    def seqs(self, run_id="r", attempt=1):
        return [record.seq for record in self.records.get((run_id, attempt), [])]

    def wait_for(self, count, run_id="r", attempt=1):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seqs(run_id, attempt)) >= count, timeout=30)


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path / "attempt_1")


@pytest.fixture
def followed():
    return Followed()


def steps(first, stop):
    return [TrainingStep(i, 10 * i, {"loss": 1.0 / (i + 1), "entropy": float(i)}) for i in range(first, stop)]


def wait_until(true, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_what_a_trainer_writes_reaches_followers_while_it_runs_and_the_series_in_the_end(attempt, followed):
    with Pump(followed) as pump, Journal(attempt.journal) as journal:
        pump.watch("r", attempt, JOURNAL)
        journal.emit_many(steps(0, 100))
        followed.wait_for(100)
        journal.emit_many([EpisodeSummary(1000, 1, 0, 5.0, 50), EpisodeSummary(1010, 2, 0, 7.0, 60)])
        journal.emit(PhaseChanged("succeeded", "all steps done"))
        progress = pump.finish("r")

    assert followed.seqs() == list(range(1, 104))
    assert (progress.seq, progress.env_step, progress.update, progress.episodes) == (103, 1010, 99, 2)
    assert (progress.episode_return, progress.reported_phase, progress.problem) == (6.0, "succeeded", "")
    series = SeriesReader(attempt.series)
    assert {name: info.points for name, info in series.names().items()} == {
        "loss": 100,
        "entropy": 100,
        "episode/return": 2,
        "episode/length": 2,
    }
    assert [point.step for point in series.recent("entropy", 3)] == [970, 980, 990]


def test_a_new_pump_goes_on_where_the_last_commit_was(attempt, followed):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 50))
        with Pump(followed) as pump:
            pump.watch("r", attempt, JOURNAL)
            assert pump.finish("r").seq == 50
        journal.emit_many([*steps(50, 80), EpisodeSummary(800, 1, 0, 3.0, 10)])
    again = Followed()
    with Pump(again) as pump:
        pump.watch("r", attempt, JOURNAL)
        progress = pump.finish("r")

    assert again.seqs() == list(range(51, 82))
    assert (progress.seq, progress.env_step, progress.episodes) == (81, 800, 1)
    assert SeriesReader(attempt.series).names()["loss"].points == 80


def test_attempts_are_followed_side_by_side_and_a_missing_journal_is_merely_empty(tmp_path, followed):
    attempts = [Attempt(tmp_path / str(i) / "attempt_1") for i in range(8)]
    with Pump(followed) as pump:
        for i, attempt in enumerate(attempts):
            pump.watch(str(i), attempt, JOURNAL)
        for i, attempt in enumerate(attempts[:7]):
            with Journal(attempt.journal) as journal:
                journal.emit_many(steps(0, 10 * (i + 1)))
        assert [pump.finish(str(i)).seq for i in range(8)] == [10, 20, 30, 40, 50, 60, 70, 0]


def test_a_corrupt_line_is_stepped_over_and_counted_also_after_a_restart(attempt, followed):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 3))
    with attempt.journal.open("ab") as file:
        file.write(b'{"schema":1,"kind":"Train\n\x00\xff\xfe\n')
    with Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        assert pump.finish("r").corrupt == 2
        with Journal(attempt.journal) as journal:
            journal.emit_many(steps(3, 4))
        pump.watch("r", attempt, JOURNAL)
        progress = pump.finish("r")

    assert (progress.seq, progress.corrupt) == (4, 2)
    assert SeriesReader(attempt.series).names()["loss"].points == 4


def test_a_journal_that_was_replaced_is_read_anew(attempt, followed):
    with Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        with Journal(attempt.journal) as journal:
            journal.emit_many(steps(0, 20))
        followed.wait_for(20)
        other = Attempt(attempt.path.parent / "attempt_2")
        with Journal(other.journal) as journal:
            journal.emit_many(steps(0, 5))
        other.journal.rename(attempt.journal)
        followed.wait_for(25)
        progress = pump.finish("r")

    assert (progress.seq, progress.update) == (5, 4)
    assert SeriesReader(attempt.series).names()["loss"].points == 5


def test_a_run_whose_files_cannot_be_written_says_so_and_recovers_while_the_others_go_on(tmp_path, followed):
    broken, sound = Attempt(tmp_path / "a" / "attempt_1"), Attempt(tmp_path / "b" / "attempt_1")
    for attempt in (broken, sound):
        with Journal(attempt.journal) as journal:
            journal.emit_many(steps(0, 10))
    broken.series.write_text("a file where a directory belongs")
    with Pump(followed) as pump:
        pump.watch("a", broken, JOURNAL)
        pump.watch("b", sound, JOURNAL)
        wait_until(lambda: pump.progress("a").problem)
        assert "NotADirectoryError" in pump.progress("a").problem
        assert not pump.progress("a").disk_full
        assert pump.finish("b").seq == 10
        broken.series.unlink()
        progress = pump.finish("a")

    assert (progress.seq, progress.problem) == (10, "")
    assert followed.seqs("a") == list(range(1, 11))


def test_a_deleted_series_is_rebuilt_from_the_journal(attempt, followed):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 100))
    with Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        pump.finish("r")
        before = {path.name: path.read_bytes() for path in attempt.series.iterdir() if path.name != "commits.log"}
        shutil.rmtree(attempt.series)
        pump.watch("r", attempt, JOURNAL)
        pump.finish("r")

    assert {p.name: p.read_bytes() for p in attempt.series.iterdir() if p.name != "commits.log"} == before


def test_output_is_measured_and_tracebacks_in_it_are_counted(attempt, followed):
    attempt.path.mkdir()
    text = "hello\n" * 10 + "Traceback (most recent call last):\n  File x\nValueError: no\n"
    attempt.stdout.write_text(text)
    with Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        wait_until(lambda: pump.progress("r").tracebacks == 1)
        with attempt.stdout.open("a") as file:
            file.write("Traceback (most recent")
            file.flush()
            wait_until(lambda: pump.progress("r").output_bytes == len(text) + 22)
            file.write(" call last)\n")
        progress = pump.finish("r")

    assert (progress.tracebacks, progress.output_bytes) == (2, len(text) + 34)


def test_an_attempt_is_followed_once_and_one_that_nobody_follows_has_no_progress(attempt, followed):
    with Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        with pytest.raises(ValueError, match="already being watched"):
            pump.watch("r", attempt, JOURNAL)
        pump.finish("r")
        assert pump.progress("r") is None
        with pytest.raises(ValueError, match="not being watched"):
            pump.finish("r")


def test_trying_again_and_again_leaves_no_file_open(attempt):
    attempt.path.mkdir()
    attempt.series.write_text("a file where a directory belongs")
    before = len(os.listdir("/proc/self/fd"))
    for sources in (JOURNAL, (StdoutLines("events"),)):
        for _ in range(5):
            with pytest.raises(NotADirectoryError):
                Feed(attempt, sources)
    assert len(os.listdir("/proc/self/fd")) == before


def test_events_that_are_no_numbers_are_published_too(attempt, followed):
    with Pump(followed) as pump, Journal(attempt.journal) as journal:
        pump.watch("r", attempt, JOURNAL)
        journal.emit(LogLine("info", "hello"))
        followed.wait_for(1)
        pump.finish("r")

    assert followed.records["r", 1][0].event == LogLine("info", "hello")
    assert SeriesReader(attempt.series).names() == {}


def test_a_pump_that_was_closed_in_the_middle_loses_nothing_for_the_next_one(attempt, followed):
    before = len(os.listdir("/proc/self/fd"))
    with Journal(attempt.journal) as journal:
        with Pump(followed) as pump:
            pump.watch("r", attempt, JOURNAL)
            journal.emit_many(steps(0, 100))
            followed.wait_for(100)
        assert not [thread for thread in threading.enumerate() if thread.name == "palaestra-pump"]
        journal.emit_many(steps(100, 150))
    again = Followed()
    with Pump(again) as pump:
        pump.watch("r", attempt, JOURNAL)
        assert pump.finish("r").seq == 150

    assert again.seqs()[-50:] == list(range(101, 151))
    assert SeriesReader(attempt.series).names()["loss"].points == 150
    assert len(os.listdir("/proc/self/fd")) == before


def test_everything_that_was_published_can_be_written_to_the_series_at_once(attempt, followed):
    """A client that loads the series after it has subscribed must find what was published before."""
    with Journal(attempt.journal) as journal, Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        for first in range(0, 40, 4):
            journal.emit_many(steps(first, first + 4))
            followed.wait_for(first + 4)
            pump.flush("r")
            assert SeriesReader(attempt.series).names()["loss"].points == first + 4
        pump.flush("another run")


def test_a_flush_that_fails_is_a_problem_of_the_run_and_is_made_up_for(attempt, followed, monkeypatch):
    with Journal(attempt.journal) as journal, Pump(followed) as pump:
        pump.watch("r", attempt, JOURNAL)
        journal.emit_many(steps(0, 4))
        followed.wait_for(4)
        with monkeypatch.context() as patch:
            patch.setattr(Feed, "flush", _raise_disk_full)
            pump.flush("r")
        assert pump.progress("r").disk_full
        wait_until(lambda: SeriesReader(attempt.series).names().get("loss") is not None)
        assert (SeriesReader(attempt.series).names()["loss"].points, followed.seqs()) == (4, [1, 2, 3, 4])


def _raise_disk_full(feed):
    raise OSError(errno.ENOSPC, "No space left on device")
