"""Numbers of runs that nobody watches: whoever asks for them brings the series up to the journal."""

import multiprocessing
import shutil

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.feed import Feed, update_series
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.runner import JournalFile
from palaestra.runs.series.files import SeriesBusy, SeriesLock
from palaestra.runs.series.reader import SeriesReader
from palaestra.runs.state.unsupervised import summarize_journal
from palaestra.telemetry.event import EpisodeSummary, PhaseChanged, TrainingStep
from palaestra.telemetry.journal import Journal

JOURNAL = (JournalFile(),)


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path / "attempt_1")


def steps(first, stop):
    return [TrainingStep(i, 10 * i, {"loss": float(i)}) for i in range(first, stop)]


def losses(attempt):
    return [point.value for point in SeriesReader(attempt.series).recent("loss", 10**6)]


def test_series_that_nobody_wrote_are_made_from_the_journal_and_then_go_on_with_it(attempt):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 50))
        update_series(attempt)
        assert losses(attempt) == [float(i) for i in range(50)]
        journal.emit_many(steps(50, 60))
        update_series(attempt)
        assert losses(attempt) == [float(i) for i in range(60)]
        before = (attempt.series / "commits.log").read_bytes()
        update_series(attempt)
        assert (attempt.series / "commits.log").read_bytes() == before
    shutil.rmtree(attempt.series)
    update_series(attempt)
    assert losses(attempt) == [float(i) for i in range(60)]


def test_a_journal_that_was_damaged_does_not_take_its_series_along(attempt):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 50))
    update_series(attempt)
    attempt.journal.write_bytes(b"garbage\n")
    update_series(attempt)
    assert losses(attempt) == [float(i) for i in range(50)]


def test_nothing_is_made_where_there_is_no_attempt(attempt):
    update_series(attempt)
    assert not attempt.path.exists()


def test_one_writes_and_the_others_read_what_is_there(attempt):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 10))
    feed = Feed(attempt, JOURNAL)
    with pytest.raises(SeriesBusy):
        Feed(attempt, JOURNAL)
    update_series(attempt)
    assert losses(attempt) == []
    feed.catch_up(100)
    feed.close()
    assert losses(attempt) == [float(i) for i in range(10)]


def _ask(path, at_once):
    at_once.wait(30)
    update_series(Attempt(path), wait_s=30)


def test_several_that_ask_at_once_make_every_point_once(attempt):
    with Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 20_000))
    context = multiprocessing.get_context("fork")
    at_once = context.Barrier(4)
    readers = [context.Process(target=_ask, args=(attempt.path, at_once)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0] * 4
    assert losses(attempt) == [float(i) for i in range(20_000)]


def test_a_service_waits_for_a_reader_and_takes_in_the_rest(attempt):
    with Pump(lambda *_: None) as pump, Journal(attempt.journal) as journal:
        journal.emit_many(steps(0, 10))
        reader = SeriesLock(attempt)
        pump.watch("r", attempt, JOURNAL)
        busy = pump.finish("r", timeout_s=0.0)
        assert "another process" in busy.problem
        reader.close()
        pump.watch("r", attempt, JOURNAL)
        assert pump.finish("r").problem == ""
    assert losses(attempt) == [float(i) for i in range(10)]


def test_the_end_of_a_journal_tells_how_far_its_run_is(attempt):
    with Journal(attempt.journal) as journal:
        journal.emit(PhaseChanged("running"))
        journal.emit_many([EpisodeSummary(10 * i, i, 0, float(i), 10) for i in range(1, 151)])
        journal.emit_many([*steps(0, 200), EpisodeSummary(1995, 151, 0, 1e6, 1)])
        journal.emit(PhaseChanged("succeeded"))
    told = summarize_journal(attempt.journal)
    assert (told.phase, told.env_step, told.episodes) == ("succeeded", 1995, 151)
    assert told.episode_return == (sum(range(52, 151)) + 1e6) / 100
    attempt.journal.write_bytes(b'{"kind": "TrainingStep", "env_step": 1' + b"0" * 400 + b"}\n[1]\n\xff\n")
    assert summarize_journal(attempt.journal).env_step == 0
    assert summarize_journal(attempt.path / "none").episode_return is None
