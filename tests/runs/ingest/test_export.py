"""Any run as TensorBoard shows it."""

import pytest

from palaestra.errors import ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.ingest.event_file import EventFileTail, parse_scalars
from palaestra.runs.tools.tensorboard import export_tensorboard
from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep
from palaestra.telemetry.journal import Journal
from palaestra.telemetry.tensorboard import TensorBoardSink


def attempt(run, number, *events):
    ticks = iter(range(1000 * number, 1000 * number + 500))
    with Journal(run.attempt(number).journal, clock=lambda: next(ticks)) as journal:
        for event in events:
            journal.emit(event)


def step(env_step, value):
    return TrainingStep(0, env_step, {"loss": value})


def scalars(directory):
    (path,) = directory.iterdir()
    records = [parse_scalars(framed.payload) for framed in EventFileTail(path).read(10_000)]
    return [(r.wall_time, tag, r.step, value) for r in records for tag, value in r.values]


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "runs" / "a")


def test_curves_carry_the_time_at_which_they_were_reported(run, tmp_path):
    attempt(run, 1, step(10, 0.5), LogLine("info", "x"), EpisodeSummary(15, 1, 0, 4.0, 8), step(20, 0.25))
    report = export_tensorboard(run, tmp_path / "out")

    assert scalars(tmp_path / "out") == [
        (1000.0, "loss", 10, 0.5),
        (1002.0, "episode/return", 15, 4.0),
        (1002.0, "episode/length", 15, 8.0),
        (1003.0, "episode_return", 20, 4.0),
        (1003.0, "episode_length", 20, 8.0),
        (1003.0, "loss", 20, 0.25),
    ]
    assert report == (6, tmp_path / "out")


def test_every_single_episode_is_exported(run, tmp_path):
    attempt(run, 1, *(EpisodeSummary(8 * n, n, 0, float(n), 8) for n in range(1, 401)), step(4000, 0.5))
    report = export_tensorboard(run, tmp_path / "out")

    found = [(at, value) for _, tag, at, value in scalars(tmp_path / "out") if tag == "episode/return"]
    assert found == [(8 * n, float(n)) for n in range(1, 401)]
    assert report.points == 2 * 400 + 3


def test_steps_that_a_resume_took_again_come_from_the_resume(run, tmp_path):
    attempt(run, 1, *(step(number, 1.0) for number in range(0, 100, 10)))
    attempt(run, 2, *(step(number, 2.0) for number in range(60, 120, 10)))
    report = export_tensorboard(run, tmp_path / "out")

    found = [(number, value) for _, _, number, value in scalars(tmp_path / "out")]
    assert found == [*((n, 1.0) for n in range(0, 60, 10)), *((n, 2.0) for n in range(60, 120, 10))]
    assert report.points == 12


def test_episodes_behind_the_last_update_are_counted_too(run, tmp_path):
    attempt(run, 1, EpisodeSummary(15, 1, 0, 4.0, 8), EpisodeSummary(25, 2, 0, 6.0, 8))
    assert export_tensorboard(run, tmp_path / "out").points == 6
    assert [(tag, at, value) for _, tag, at, value in scalars(tmp_path / "out")][4:] == [
        ("episode_return", 25, 5.0),
        ("episode_length", 25, 8.0),
    ]


def test_an_export_replaces_the_one_before_and_nothing_else(run, tmp_path):
    attempt(run, 1, step(10, 0.5))
    export_tensorboard(run, tmp_path / "out")
    export_tensorboard(run, tmp_path / "out")
    assert len(scalars(tmp_path / "out")) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match=r"contains thesis.txt"):
        export_tensorboard(run, tmp_path / "mine")
    with pytest.raises(ConfigError, match="is a file"):
        export_tensorboard(run, tmp_path / "mine" / "thesis.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out", "runs"]


def test_a_run_without_records_is_exported_empty(run, tmp_path):
    assert export_tensorboard(run, tmp_path / "out").points == 0


def test_an_export_that_fails_leaves_the_one_before(run, tmp_path, monkeypatch):
    attempt(run, 1, step(10, 0.5))
    export_tensorboard(run, tmp_path / "out")

    def full(_sink, _event):
        raise OSError("No space left on device")

    monkeypatch.setattr(TensorBoardSink, "emit", full)
    with pytest.raises(ConfigError, match="No space"):
        export_tensorboard(run, tmp_path / "out")
    assert len(scalars(tmp_path / "out")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]
