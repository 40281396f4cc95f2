"""The archive: translated lines that carry their own cursor."""

import errno
import json
import os

import pytest

from palaestra.errors import ConfigError
from palaestra.runs.ingest.translated_journal import Origin, TranslatedEvent, TranslatedJournal
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import Journal, JournalReader


def entry(number):
    return TranslatedEvent(
        TrainingStep(0, number, {"loss": number / 2}), Origin("stdout:events", "stdout.log", number), 7.0
    )


def batch(path, *numbers):
    archive = TranslatedJournal(path)
    archive.append([entry(number) for number in numbers], {"at": numbers[-1]})
    archive.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_lines_are_a_journals_and_say_where_they_come_from(path):
    batch(path, 1, 2)

    with JournalReader(path) as reader:
        assert [(r.seq, r.time, r.event) for r in reader.read()] == [
            (1, 7.0, TrainingStep(0, 1, {"loss": 0.5})),
            (2, 7.0, TrainingStep(0, 2, {"loss": 1.0})),
        ]
        assert reader.corrupt_lines == 0
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["from"] == {"source": "stdout:events", "file": "stdout.log", "offset": 1}
    assert "resume" not in first
    assert second["resume"] == {"at": 2}


def test_cut_at_any_byte_it_goes_on_from_its_last_whole_batch(path):
    batch(path, 1, 2, 3)
    first = path.read_bytes()
    batch(path, 4, 5, 6)
    whole = path.read_bytes()

    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        archive = TranslatedJournal(path)
        archive.close()
        expected = (whole, 6, {"at": 6}) if size == len(whole) else (first, 3, {"at": 3})
        if size < len(first):
            expected = (b"", 0, {})
        assert (path.read_bytes(), archive.seq, archive.state) == expected


def test_a_damaged_end_is_translated_again_from_the_batch_before(path):
    batch(path, 1)
    first = path.read_bytes()
    batch(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(first) + 5] + b"\x00\xff" + whole[len(first) + 7 :])

    archive = TranslatedJournal(path)
    archive.append([entry(2)], {"at": 2})
    archive.close()

    assert path.read_bytes() == whole


def test_a_batch_that_does_not_fit_on_the_disk_leaves_nothing_behind(path, monkeypatch):
    batch(path, 1)
    before = path.read_bytes()
    archive = TranslatedJournal(path)
    write = os.write

    def full(fd, data):
        if len(data) > 100:
            return write(fd, bytes(data[:100]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            archive.append([entry(2), entry(3)], {"at": 3})
    assert path.read_bytes() == before
    archive.append([entry(2)], {"at": 2})
    archive.close()

    with JournalReader(path) as reader:
        assert [record.seq for record in reader.read()] == [1, 2]


def test_a_state_of_many_kilobytes_is_found(path):
    archive = TranslatedJournal(path)
    state = {"files": {f"runs/{i}/events.out.tfevents.{i}": [i, i] for i in range(5_000)}}
    archive.append([entry(1)], state)
    archive.close()

    again = TranslatedJournal(path)
    again.close()
    assert (again.seq, again.state) == (1, state)


def test_a_journal_that_the_trainer_wrote_itself_is_never_touched(path):
    with Journal(path) as journal:
        journal.emit(EpisodeSummary(1, 1, 0, 1.0, 1))
    before = path.read_bytes()

    with pytest.raises(ConfigError, match="written by the trainer itself"):
        TranslatedJournal(path)
    assert path.read_bytes() == before
