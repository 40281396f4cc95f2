"""`kill -9` of whatever process ingests, in the middle of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.series.reader import SeriesReader
from palaestra.telemetry.event import TrainingStep
from palaestra.telemetry.journal import Journal, JournalReader

from .echo_trainer import SOURCES, metric_name, start_echo

INGESTING = """
import sys
from pathlib import Path
from palaestra.runs.ingest.pump import Pump
from palaestra.files.run_directory import Attempt
from palaestra.runs.runner import EventFiles, JournalFile, StdoutLines
sources = {
    "journal": (JournalFile(),),
    "stdout": (StdoutLines("events"),),
    "tensorboard": (EventFiles("runs/**/events.out.tfevents.*", "cleanrl"),),
}
pump = Pump(lambda *_: None)
for word in sys.argv[1:]:
    speak, _, path = word.partition(":")
    pump.watch(path, Attempt(Path(path)), sources[speak])
sys.stdin.read()
"""


def points(attempts):
    return sum(info.points for a in attempts.values() for info in SeriesReader(a.series).names().values())


def wait_until(true, alive):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        assert alive.poll() is None
        time.sleep(0.002)


def test_killed_again_and_again_every_number_of_every_kind_of_trainer_is_there_once(tmp_path):
    updates = 2_000
    attempts, trainers = {}, []
    for round_number in range(3):
        before = points(attempts)
        for speak in SOURCES:
            attempt = attempts[speak, round_number] = Attempt(tmp_path / f"{speak}{round_number}" / "attempt_1")
            trainers.append(start_echo(attempt, "--steps", updates, "--rate", 1500, speak=speak))
        words = [f"{speak}:{attempt.path}" for (speak, _), attempt in attempts.items()]
        ingesting = subprocess.Popen([sys.executable, "-c", INGESTING, *words], stdin=subprocess.PIPE)
        wait_until(lambda before=before: points(attempts) > before, ingesting)
        ingesting.send_signal(signal.SIGKILL)
        ingesting.wait()
        ingesting.stdin.close()
    assert [trainer.wait() for trainer in trainers] == [0] * 9
    with Pump(lambda *_: None) as pump:
        for (speak, number), attempt in attempts.items():
            pump.watch(f"{speak}{number}", attempt, SOURCES[speak])
        progress = {key: pump.finish(f"{key[0]}{key[1]}") for key in attempts}

    for (speak, number), attempt in attempts.items():
        series = SeriesReader(attempt.series)
        for metric in (0, 1):
            found = series.recent(metric_name(metric, speak), 10 * updates)
            assert [(point.step, point.value) for point in found] == [
                (10 * update, float(update + metric)) for update in range(1, updates + 1)
            ]
        returns = [point.value for point in series.recent("episode/return", updates)]
        assert returns == [float(episode) for episode in range(1, updates // 10 + 1)]
        end = progress[speak, number]
        assert (end.env_step, end.episodes, end.corrupt, end.problem) == (10 * updates, updates // 10, 0, "")
        with JournalReader(attempt.journal) as reader:
            seqs = [record.seq for record in reader.read()]
        assert seqs == list(range(1, len(seqs) + 1))


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "palaestra-test", place], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(place):
    with (place / "ballast").open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def test_on_a_full_disk_nothing_is_lost_and_it_goes_on_when_there_is_room(small_disk):
    attempts = {
        "journal": Attempt(small_disk / "journal" / "attempt_1"),
        "stdout": Attempt(small_disk / "stdout" / "attempt_1"),
    }
    with Journal(attempts["journal"].journal) as journal:
        journal.emit_many(TrainingStep(u, 10 * u, {"m0": float(u), "m1": u + 1.0}) for u in range(1, 5001))
    assert start_echo(attempts["stdout"], "--steps", 5000, speak="stdout").wait() == 0
    fill(small_disk)
    with Pump(lambda *_: None) as pump:
        for speak, attempt in attempts.items():
            pump.watch(speak, attempt, SOURCES[speak])
        deadline = time.monotonic() + 60
        while not all(pump.progress(speak).disk_full for speak in attempts):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "No space left on device" in pump.progress("stdout").problem
        os.unlink(small_disk / "ballast")
        progress = [pump.finish(speak) for speak in attempts]

    assert [(one.problem, one.disk_full, one.corrupt) for one in progress] == [("", False, 0)] * 2
    for attempt in attempts.values():
        values = [point.value for point in SeriesReader(attempt.series).recent("m0", 10_000)]
        assert values == [float(update) for update in range(1, 5001)]


def test_an_end_on_a_disk_that_stays_full_is_told_with_its_reason(small_disk):
    attempt = Attempt(small_disk / "attempt_1")
    with Journal(attempt.journal) as journal:
        journal.emit_many(TrainingStep(u, u, {"m0": 0.0}) for u in range(1, 5001))
    fill(small_disk)
    with Pump(lambda *_: None) as pump:
        pump.watch("r", attempt, SOURCES["journal"])
        progress = pump.finish("r", timeout_s=0.0)
        assert progress.disk_full
        os.unlink(small_disk / "ballast")
        pump.watch("r", attempt, SOURCES["journal"])
        assert pump.finish("r").seq == 5000
