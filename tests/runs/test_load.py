"""Eight runs at a thousand events a second each: nothing is dropped on any of the ways through."""

import threading

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.ingest.stream import Ring
from palaestra.runs.series.reader import SeriesReader

from .ingest.echo_trainer import SOURCES, metric_name, start_echo

RUNS, PER_SECOND = 8, 1_000


class Follower:
    """Takes everything out of a ring as it comes, as a stream to a client does."""

    def __init__(self):
        self.ring = Ring()
        self.key = (1, 0)
        self.seqs = []
        self.fell_behind = 0
        self.lock = threading.Lock()
        self.ring.subscribe(self.look)

    def look(self):
        with self.lock:
            newer = self.ring.since(self.key)
            if newer is None:
                self.fell_behind += 1
                return
            self.seqs += [keyed.record.seq for keyed in newer]
            self.key = newer[-1].key if newer else self.key


def load(directory, seconds, speak):
    # Each tenth update ends an episode. In an event file every number is an event of its own.
    rate = PER_SECOND / (4.2 if speak == "tensorboard" else 1.1)
    updates = int(seconds * rate)
    attempts = {f"{speak}-{i}": Attempt(directory / f"{speak}-{i}" / "attempt_1") for i in range(RUNS)}
    followers = {run_id: Follower() for run_id in attempts}
    with Pump(lambda run_id, attempt, records: followers[run_id].ring.publish(attempt, records)) as pump:
        trainers = []
        for run_id, attempt in attempts.items():
            options = ("--steps", updates, "--rate", rate, "--metrics", 4)
            trainers.append(start_echo(attempt, *options, speak=speak))
            pump.watch(run_id, attempt, SOURCES[speak])
        assert [trainer.wait() for trainer in trainers] == [0] * RUNS
        progress = [pump.finish(run_id) for run_id in attempts]

    assert [(one.env_step, one.episodes, one.problem) for one in progress] == [(10 * updates, updates // 10, "")] * RUNS
    for run_id, attempt in attempts.items():
        series = SeriesReader(attempt.series)
        for number in range(4):
            values = [point.value for point in series.recent(metric_name(number, speak), 10 * updates)]
            assert values == [float(update + number) for update in range(1, updates + 1)]
        follower = followers[run_id]
        assert follower.fell_behind == 0
        assert follower.seqs == list(range(1, len(follower.seqs) + 1))
        # Two more say that it is running and that it succeeded; event files have no words for that.
        assert speak == "tensorboard" or len(follower.seqs) == updates + updates // 10 + 2


@pytest.mark.parametrize("speak", SOURCES)
def test_nothing_is_dropped_in_a_second_and_a_half(tmp_path, speak):
    load(tmp_path, 1.5, speak)


@pytest.mark.slow
@pytest.mark.parametrize("speak", SOURCES)
def test_nothing_is_dropped_in_a_minute(tmp_path, speak):
    load(tmp_path, 60.0, speak)
