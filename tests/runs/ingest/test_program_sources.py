"""The metrics of any program: palaestra.log, event files of its own, JSON lines and printed text."""

import json
import os
import subprocess
import sys
import time

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.runner import LogFile, NewEventFiles, ProgramOutput
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import JournalReader

from .event_files import HEADER, framed, scalar

STARTED = 1_800_000_000.0


@pytest.fixture
def attempt(tmp_path):
    """An attempt that began at a known time, with the label `label`."""
    attempt = Attempt(tmp_path / "var" / "training" / "runs" / "run" / "attempt_1")
    attempt.work.mkdir(parents=True)
    attempt.process.write_text(json.dumps({"schema": 1, "started": STARTED, "label": "label"}))
    return attempt


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "project"
    path.mkdir()
    return path


def sources(directory):
    return (LogFile(), NewEventFiles(str(directory)), ProgramOutput())


def translate(attempt, directory, *, limit=1000):
    translator = Translator(attempt, sources(directory))
    while translator.pump(limit, final=True):
        pass
    translator.close()
    with JournalReader(attempt.journal) as reader:
        return translator, reader.read()


def metrics(records):
    return [
        (r.event.env_step, r.event.metrics if isinstance(r.event, TrainingStep) else r.event.episode_return)
        for r in records
    ]


def event_file(path, *payloads, created=int(STARTED), pid=0, written=STARTED + 5):
    path.mkdir(parents=True, exist_ok=True)
    file = path / (f"events.out.tfevents.{created}.host.{pid}.0" if pid else f"events.out.tfevents.{created}.host")
    file.write_bytes(framed(HEADER, *payloads))
    os.utime(file, (written, written))
    return file


def ended_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_lines_of_the_log_keep_the_time_at_which_they_were_reported(attempt, directory):
    attempt.log.write_text(
        '{"kind": "TrainingStep", "time": 1800000007.5, "env_step": 3, "metrics": {"loss": 0.5, "x": NaN}}\n'
        '{"kind": "EpisodeSummary", "env_step": 4, "episode_return": 21.0, "length": 9}\n'
    )
    translator, (step, episode) = translate(attempt, directory)

    assert (step.time, step.event.env_step, step.event.metrics["loss"]) == (1800000007.5, 3, 0.5)
    assert episode.event == EpisodeSummary(4, 1, 0, 21.0, 9)
    assert translator.find_origin("loss") == "log:loss"
    assert translator.counts.dropped == 0


def test_bad_lines_of_the_log_are_counted_and_the_others_are_read(attempt, directory):
    good = '{"kind": "TrainingStep", "env_step": 1, "metrics": {"loss": 0.5}}\n'
    bad = ["{", "[1]", '{"kind": "TrainingStep", "env_step": "a", "metrics": {}}', '{"kind": "Wish", "env_step": 1}']
    bad += ['{"kind": "TrainingStep", "env_step": 1, "metrics": {"loss": "much"}}', "\x00\x01"]
    attempt.log.write_bytes("\n".join([*bad, good]).encode() + b"\xff\xfe\n" + good.encode() + b'{"kind": "Trai')
    translator, records = translate(attempt, directory)

    assert metrics(records) == [(1, {"loss": 0.5}), (1, {"loss": 0.5})]
    assert translator.counts.dropped == len(bad) + 2
    assert translator.counts.first_dropped.startswith("byte 0 of log.jsonl: ")


def test_printed_numbers_are_read_unless_the_program_reports_in_another_way(attempt, directory):
    attempt.stdout.write_text('step 1: loss 0.5\n{"step": 2, "loss": 0.25}\nstep 3: loss 0.125\n')
    _, records = translate(attempt, directory)
    assert metrics(records) == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]

    attempt.journal.unlink()
    event_file(directory / "runs", scalar("train/loss", 7, 0.75))
    translator, records = translate(attempt, directory)
    assert metrics(records) == [(7, {"train/loss": 0.75})]
    assert translator.find_origin("train/loss") == "tensorboard:train/loss"

    attempt.journal.unlink()
    attempt.stdout.write_text('@palaestra {"kind": "TrainingStep", "env_step": 9, "metrics": {"a": 1}}\nstep 3: b 2\n')
    assert metrics(translate(attempt, directory)[1]) == [(7, {"train/loss": 0.75}), (9, {"a": 1.0})]


def test_text_is_searched_after_all_if_the_event_files_hold_no_numbers(attempt, directory):
    event_file(directory / "runs")
    attempt.stdout.write_text("step 1: loss 0.5\nstep 2: loss 0.25\n")
    translator = Translator(attempt, sources(directory))
    translator.pump(1000)
    translator.close()

    assert metrics(translate(attempt, directory)[1]) == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]


def test_only_event_files_of_this_program_since_its_start_are_read(attempt, directory):
    gone = ended_pid()
    mine = event_file(directory / "a" / "b", scalar("mine", 1, 0.5), pid=gone)
    event_file(directory / "old", scalar("old", 1, 0.5), created=int(STARTED) - 100, written=STARTED - 50)
    event_file(directory / "copied", scalar("copied", 1, 0.5), created=int(STARTED) - 100)
    event_file(directory / "other", scalar("other", 1, 0.5), pid=os.getpid())
    event_file(directory / ".git", scalar("hidden", 1, 0.5))
    event_file(directory / "node_modules", scalar("packages", 1, 0.5))
    event_file(attempt.path.parents[1] / "another" / "work", scalar("state", 1, 0.5))
    (directory / "loop").symlink_to(directory)
    (directory / "events.out.tfevents.odd").write_bytes(b"")

    _, records = translate(attempt, directory.parent)
    assert metrics(records) == [(1, {"mine": 0.5})]
    assert json.loads(attempt.journal.read_text().splitlines()[0])["from"]["file"] == str(mine)


def test_an_event_file_elsewhere_is_found_while_a_process_of_the_run_has_it_open(attempt, directory, tmp_path):
    file = tmp_path / "elsewhere" / f"events.out.tfevents.{int(STARTED)}.host"
    file.parent.mkdir()
    file.write_bytes(framed(HEADER, scalar("loss", 5, 0.5)))
    os.utime(file, (STARTED + 1, STARTED + 1))
    code = "import sys; file = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout.readline() == "open\n"
        trainer = {"pid": program.pid, "started": 1, "boot_id": "x"}
        attempt.process.write_text(json.dumps({"schema": 1, "started": STARTED, "label": "label", "trainer": trainer}))
        _, records = translate(attempt, directory)
    finally:
        program.communicate()
    assert metrics(records) == [(5, {"loss": 0.5})]


def test_episodes_of_cleanrl_are_episodes(attempt, directory):
    event_file(directory / "runs", scalar("charts/episodic_return", 19, 19.0), scalar("charts/episodic_length", 19, 19))
    ((record),) = translate(attempt, directory)[1]
    assert record.event == EpisodeSummary(19, 1, 0, 19.0, 19)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_every_number_is_read_once_however_often_the_service_is_killed(attempt, directory, size):
    lines = [f"Epoch {epoch} [{at}/10] loss: {epoch}.{at}" for epoch in (1, 2) for at in range(10)]
    lines += ["| time/ | |", "|  total_timesteps | 30 |", "|  fps | 2.5 |", "----------"]
    data = ("\n".join(lines) + "\n").encode()
    attempt.stdout.write_bytes(b"")
    for start in range(0, len(data), max(1, len(data) * size // 100)):
        with attempt.stdout.open("ab") as file:
            file.write(data[start : start + max(1, len(data) * size // 100)])
        translator = Translator(attempt, sources(directory))
        translator.pump(3)
        translator.close()
    _, records = translate(attempt, directory)

    expected = [((epoch - 1) * 10 + at, {"loss": float(f"{epoch}.{at}")}) for epoch in (1, 2) for at in range(10)]
    assert metrics(records) == [*expected, (30, {"time/fps": 2.5})]


def test_garbage_partial_lines_and_huge_lines_disturb_nothing(attempt, directory):
    generator = b"\x00\xff\xfe\x80step \xc3(: loss \x1b[31m\r\n" * 50
    huge = b"x" * (5 << 20) + b" loss=0.5\n"
    wide = json.dumps({f"k{number}": number for number in range(50_000)}).encode() + b"\n"
    attempt.stdout.write_bytes(generator + huge + b"step 1: loss 0.5\rstep 2: loss 0.25\r" + wide + b"step 3: lo")
    begun = time.perf_counter()
    translator, records = translate(attempt, directory)

    assert metrics(records[:2]) == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]
    assert [len(record.event.metrics) for record in records[2:]] == [2000 - 1]
    assert translator.counts.dropped == 0
    assert time.perf_counter() - begun < 10


def test_a_flood_of_text_leaves_other_runs_their_turn(attempt, directory):
    attempt.stdout.write_text("step 1: loss 0.5 and a lot of other text, 12 words = 3.5\n" * 20_000)
    translator = Translator(attempt, sources(directory))
    begun = time.perf_counter()
    count = translator.pump(100_000)
    elapsed = time.perf_counter() - begun
    translator.close()

    assert count == 100_000  # as if it had reached the limit, so that it is called again at once
    assert elapsed < 2
