import os
import random
import signal
import subprocess
import sys
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.errors import ConfigError
from palaestra.telemetry import journal as journal_module
from palaestra.telemetry.conformance import check_sink
from palaestra.telemetry.event import EpisodeSummary, Frame, LogLine, TrainingStep, encode
from palaestra.telemetry.journal import Cursor, Journal, JournalReader


@pytest.fixture
def path(tmp_path):
    return tmp_path / "attempt_1" / "metrics.jsonl"


def frames(*numbers):
    return [Frame(number, f"{number}.png") for number in numbers]


def read_all(path):
    with JournalReader(path) as reader:
        return reader.read()


def test_records_are_numbered_from_one_and_carry_the_time_of_the_clock(path):
    ticks = count(100)
    with Journal(path, clock=lambda: next(ticks)) as journal:
        journal.emit(frames(1)[0])
        journal.emit_many(frames(2, 3))
        assert journal.seq == 3

    assert [(r.seq, r.time, r.event.env_step) for r in read_all(path)] == [(1, 100, 1), (2, 101, 2), (3, 101, 3)]


def test_a_batch_is_one_write_and_so_is_an_event(path, monkeypatch):
    sizes = []
    write = os.write
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(data.count(b"\n")) or write(fd, data))
        journal.emit(frames(1)[0])
        journal.emit_many(frames(2, 3, 4))
        journal.emit_many([])

    assert sizes == [1, 3]


def test_reopening_continues_the_sequence(path):
    for number in (1, 2, 3):
        with Journal(path) as journal:
            journal.emit(frames(number)[0])

    assert [r.seq for r in read_all(path)] == [1, 2, 3]


def test_a_torn_last_line_is_ended_and_skipped_and_its_number_is_used_again(path):
    with Journal(path) as journal:
        journal.emit_many(frames(1, 2))
    before = path.read_bytes()
    torn = encode(frames(3)[0], 3, 0.0)[:25].encode()
    path.write_bytes(before + torn)

    with Journal(path) as journal:
        assert journal.seq == 2
        journal.emit(frames(3)[0])

    assert path.read_bytes().startswith(before + torn + b"\n")
    with JournalReader(path) as reader:
        assert [r.seq for r in reader.read()] == [1, 2, 3]
        assert reader.corrupt_lines == 1


def test_a_last_line_that_lacks_only_its_newline_is_kept(path):
    with Journal(path) as journal:
        journal.emit_many(frames(1, 2))
    path.write_bytes(path.read_bytes()[:-1])

    with Journal(path) as journal:
        journal.emit(frames(3)[0])

    assert [r.seq for r in read_all(path)] == [1, 2, 3]


def test_the_sequence_is_found_behind_any_amount_of_damage(path):
    with Journal(path) as journal:
        journal.emit_many(frames(1, 2))
    path.write_bytes(path.read_bytes() + b"damage\n" * 50_000)

    with Journal(path) as journal:
        assert journal.seq == 2


def test_a_journal_of_nothing_but_damage_starts_at_one(path):
    path.parent.mkdir()
    path.write_bytes(b"damage\n" * 50_000)

    with Journal(path) as journal:
        journal.emit(frames(1)[0])

    assert [r.seq for r in read_all(path)] == [1]


def test_a_disk_that_fills_up_in_mid_line_costs_that_line_only(path, monkeypatch):
    write = os.write
    room = [0]

    def nearly_full(fd, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        part, room[0] = data[: room[0]], max(0, room[0] - len(data))
        return write(fd, part)

    with Journal(path, clock=lambda: 0.0) as journal:
        journal.emit(frames(1)[0])
        line = len(encode(frames(2)[0], 2, 0.0)) + 1
        monkeypatch.setattr(os, "write", nearly_full)
        room[0] = line + 10
        with pytest.raises(OSError, match="No space left"):
            journal.emit_many(frames(2, 3))
        with pytest.raises(OSError, match="No space left"):
            journal.emit(frames(3)[0])
        assert journal.seq == 2
        monkeypatch.setattr(os, "write", write)
        journal.emit(frames(3)[0])
        journal.emit(frames(4)[0])

    with JournalReader(path) as reader:
        assert [(r.seq, r.event.env_step) for r in reader.read()] == [(1, 1), (2, 2), (3, 3), (4, 4)]
        assert reader.corrupt_lines == 1


def test_a_second_writer_is_refused_with_the_process_of_the_first(path):
    with Journal(path) as journal:
        with pytest.raises(ConfigError, match=r"being written by process \d+.*new attempt") as refused:
            Journal(path)
        assert f"process {os.getpid()}" in str(refused.value)
        journal.emit(frames(1)[0])
    Journal(path).close()

    assert [r.seq for r in read_all(path)] == [1]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"cannot be opened.*Choose a directory"):
        Journal(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Journal(tmp_path)


def test_a_closed_journal_refuses_events(path):
    journal = Journal(path)
    journal.close()
    journal.close()

    with pytest.raises(ValueError, match="closed"):
        journal.emit(frames(1)[0])
    with pytest.raises(ValueError, match="closed"):
        journal.flush()


def test_a_durable_flush_reaches_the_disk(path, monkeypatch):
    synced = []
    with Journal(path) as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        journal.flush()
        assert synced == []
        journal.flush(durable=True)
        assert len(synced) == 1


def test_a_journal_is_a_sink(tmp_path):
    numbers = count()
    check_sink(lambda: Journal(tmp_path / f"{next(numbers)}.jsonl"))


WRITER = """
import sys
from palaestra.telemetry.event import EpisodeSummary
from palaestra.telemetry.journal import Journal
journal = Journal(sys.argv[1])
while True:
    batch = 1 + journal.seq % 5
    first = journal.seq + 1
    journal.emit_many([EpisodeSummary(n, n, 0, float(n), n) for n in range(first, first + batch)])
    sys.stdout.write(f"{journal.seq}\\n")
    sys.stdout.flush()
"""


def test_every_acknowledged_line_survives_kill_9_exactly_once(path):
    rng = random.Random(7)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        for _ in range(rng.randrange(1, 300)):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        # What it acknowledged before it died is still in the pipe; its last word may be torn.
        later = [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
        acknowledged = max([acknowledged, *later])
        child.stdout.close()
        child.wait()

        seqs = [r.seq for r in read_all(path)]

        assert seqs == list(range(1, len(seqs) + 1))
        assert len(seqs) >= acknowledged
        assert all(r.event == EpisodeSummary(r.seq, r.seq, 0, float(r.seq), r.seq) for r in read_all(path))


FORKER = """
import os, sys
from palaestra.telemetry.event import Frame
from palaestra.telemetry.journal import Journal
journal = Journal(sys.argv[1])
journal.emit(Frame(1, ""))
if os.fork() == 0:
    try:
        journal.emit(Frame(2, ""))
        sys.stdout.write("written\\n")
    except ValueError:
        sys.stdout.write("refused\\n")
    sys.stdout.flush()
    sys.stdin.read()  # lives until the test lets go
    os._exit(0)
os._exit(0)
"""


def test_a_forked_worker_neither_writes_nor_keeps_the_next_writer_out(path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FORKER, str(path)], **pipes) as parent:
        assert parent.stdout.readline() == b"refused\n"
        parent.wait()
        with Journal(path) as journal:
            assert journal.seq == 1
        parent.stdin.close()


def test_a_reader_gives_each_record_once_and_waits_for_a_file_to_appear(path):
    with JournalReader(path) as reader:
        assert reader.read() == []
        with Journal(path) as journal:
            journal.emit_many(frames(1, 2))
            assert [r.seq for r in reader.read()] == [1, 2]
            assert reader.read() == []
            journal.emit(frames(3)[0])
            assert [r.seq for r in reader.read()] == [3]


def test_a_saved_cursor_goes_on_where_another_reader_stopped(path):
    with Journal(path) as journal:
        journal.emit_many(frames(1, 2))
        with JournalReader(path) as first:
            first.read()
            saved = tuple(first.cursor)
        journal.emit(frames(3)[0])

    assert saved[2] == 2
    with JournalReader(path, Cursor(*saved)) as second:
        assert [r.seq for r in second.read()] == [3]
        assert second.restarts == 0


def test_a_limit_leaves_the_rest_for_the_next_read(path):
    with Journal(path) as journal:
        journal.emit_many(frames(*range(1, 8)))

    with JournalReader(path) as reader:
        assert [r.seq for r in reader.read(limit=3)] == [1, 2, 3]
        assert reader.cursor.seq == 3
        assert [r.seq for r in reader.read(limit=3)] == [4, 5, 6]
        assert [r.seq for r in reader.read(limit=3)] == [7]


def test_damage_in_the_middle_is_skipped_and_counted(path):
    with Journal(path) as journal:
        journal.emit_many(frames(1, 2, 3, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\x00" * (len(lines[1]) - 1) + b"\n"
    lines[2] = lines[2].replace(b'"seq"', b"\xff\xff\xff")
    path.write_bytes(b"".join(lines) + b"\n")

    with JournalReader(path) as reader:
        assert [r.seq for r in reader.read()] == [1, 4]
        assert reader.corrupt_lines == 2


def test_a_rotated_journal_is_finished_before_its_successor_is_begun(path):
    first = Journal(path)
    first.emit(frames(1)[0])
    with JournalReader(path) as reader:
        assert [r.event.env_step for r in reader.read()] == [1]
        first.emit(frames(2)[0])
        first.close()
        with path.open("ab") as file:
            file.write(b'{"unfinished')
        path.rename(path.with_name("old.jsonl"))
        assert [r.event.env_step for r in reader.read()] == [2]
        with Journal(path) as second:
            second.emit(frames(3)[0])
            assert [(r.seq, r.event.env_step) for r in reader.read()] == [(1, 3)]
        assert reader.restarts == 1
        assert reader.corrupt_lines == 1


def test_a_truncated_journal_is_read_from_its_beginning(path):
    with Journal(path) as journal:
        journal.emit_many(frames(1, 2, 3))
    whole = path.read_bytes()
    with JournalReader(path) as reader:
        reader.read()
        os.truncate(path, len(whole.splitlines(keepends=True)[0]))
        assert [r.seq for r in reader.read()] == [1]
        assert reader.restarts == 1


def test_a_cursor_of_another_file_is_not_believed(path):
    with Journal(path) as journal:
        journal.emit_many([LogLine("info", "a"), LogLine("info", "b")])
    inode = path.stat().st_ino

    for stale in (Cursor(inode + 1, 10, 9), Cursor(inode, 10, 9), Cursor(inode, 10_000, 9)):
        with JournalReader(path, stale) as reader:
            assert [r.seq for r in reader.read()] == [1, 2]
            assert reader.restarts == 1


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(0, 600), max_size=12), block=st.integers(1, 200))
def test_any_split_of_the_bytes_gives_the_same_records(tmp_path_factory, cuts, block):
    lines = [encode(event, seq, 0.5) for seq, event in enumerate(frames(1, 2, 3, 4), start=1)]
    data = "\n".join([*lines[:2], "damage", "", *lines[2:], "unfinish"]).encode()
    path = tmp_path_factory.mktemp("split") / "metrics.jsonl"
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    records = []
    with pytest.MonkeyPatch.context() as patch, JournalReader(path) as reader, path.open("ab", buffering=0) as file:
        patch.setattr(journal_module, "_BLOCK_BYTES", block)
        for start, end in zip([0, *edges], edges, strict=False):
            file.write(data[start:end])
            records += reader.read()

    assert [(r.seq, r.event) for r in records] == list(enumerate(frames(1, 2, 3, 4), start=1))
    assert reader.corrupt_lines == 1
    assert reader.cursor.offset == len(data) - len("unfinish")


def test_following_waits_only_when_there_is_nothing_and_looks_once_more_after_the_end(path):
    waits = []
    with Journal(path) as journal, JournalReader(path) as reader:
        journal.emit(frames(1)[0])

        def wait():
            # The writer speaks while the reader waits, and then the run is over.
            journal.emit(frames(len(waits) + 2)[0])
            waits.append("waited")

        followed = [r.event.env_step for r in reader.follow(lambda: len(waits) == 2, wait)]

    assert followed == [1, 2, 3]
    assert waits == ["waited", "waited"]


def test_a_limited_read_gives_a_few_megabytes_and_says_that_there_is_more(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = {f"layer_{i:05}/gradient_norm": 0.5 for i in range(10_000)}
    with Journal(path) as journal:
        for update in range(1, 41):
            journal.emit(TrainingStep(update, update, metrics))

    with JournalReader(path) as reader:
        sizes = []
        while records := reader.read(1000):
            sizes.append(len(records))
            assert reader.more is (sum(sizes) < 40)
    with JournalReader(path) as reader:
        everything = reader.read()

    assert path.stat().st_size > 12_000_000
    assert sum(sizes) == len(everything) == 40
    assert max(sizes) * path.stat().st_size / 40 < 5_000_000
    # The names are the same objects in all records: ten thousand of them are kept once.
    first, last = (list(everything[place].event.metrics) for place in (0, -1))
    assert all(one is other for one, other in zip(first, last, strict=True))
