import builtins
import math
import sys
import threading
from itertools import count

import pytest

from palaestra.errors import ConfigError
from palaestra.telemetry.conformance import check_sink
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.tensorboard import TensorBoardSink, require_tensorboard

pytest.importorskip("tensorboard")


def scalars(directory):
    """What TensorBoard itself finds in the directory: (tag, step, value, wall time)."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    (file,) = directory.glob("events.out.tfevents.*")
    events = [event_pb2.Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]
    return [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in events
        for value in event.summary.value
    ]


def test_metrics_become_scalars_over_environment_steps(tmp_path):
    sink = TensorBoardSink(tmp_path / "tensorboard", clock=lambda: 12.5)
    sink.emit(TrainingStep(1, 256, {"policy_loss": -0.25, "entropy": 0.5}))
    sink.emit(TrainingStep(2, 512, {"policy_loss": 0.125}))
    sink.close()

    assert scalars(tmp_path / "tensorboard") == [
        ("policy_loss", 256, -0.25, 12.5),
        ("entropy", 256, 0.5, 12.5),
        ("policy_loss", 512, 0.125, 12.5),
    ]


def test_tensorboards_own_loader_reads_the_file(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoardSink(tmp_path)
    sink.emit(TrainingStep(1, 256, {"policy_loss": -0.25}))
    sink.close()
    (file,) = tmp_path.iterdir()

    found = [(v.tag, v.tensor.float_val[0]) for e in EventFileLoader(str(file)).Load() for v in e.summary.value]

    assert found == [("policy_loss", -0.25)]


def test_episodes_become_one_mean_per_update_unless_the_trainer_reports_its_own(tmp_path):
    sink = TensorBoardSink(tmp_path, clock=lambda: 0.0)
    sink.emit(EpisodeSummary(10, 1, 0, 1.0, 10))
    sink.emit(EpisodeSummary(20, 2, 0, 3.0, 20))
    sink.emit(TrainingStep(1, 32, {}))
    sink.emit(EpisodeSummary(40, 3, 0, 9.0, 40))
    sink.emit(TrainingStep(2, 64, {"episode_return": 4.0, "episode_length": 8.0}))
    sink.emit(TrainingStep(3, 96, {"entropy": 1.0}))
    sink.emit(EpisodeSummary(100, 4, 0, 7.0, 30))
    sink.close()

    assert [found[:3] for found in scalars(tmp_path)] == [
        ("episode_return", 32, 2.0),
        ("episode_length", 32, 15.0),
        ("episode_return", 64, 4.0),
        ("episode_length", 64, 8.0),
        ("entropy", 96, 1.0),
        ("episode_return", 100, 7.0),
        ("episode_length", 100, 30.0),
    ]


def test_what_was_flushed_is_in_the_file_before_close(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.emit(TrainingStep(1, 1, {"loss": math.nan}))
    sink.flush()

    ((tag, step, value, _),) = scalars(tmp_path)
    assert (tag, step) == ("loss", 1)
    assert math.isnan(value)
    sink.close()


def test_closing_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    TensorBoardSink(tmp_path).close()

    assert set(threading.enumerate()) == before


def test_without_the_package_the_remedy_is_a_pip_command(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    for start in (require_tensorboard, lambda: TensorBoardSink(tmp_path)):
        with pytest.raises(ConfigError, match=r"pip install 'palaestra\[tensorboard\]'"):
            start()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        TensorBoardSink(tmp_path / "file" / "inside")


def test_it_keeps_the_rules_of_a_sink(tmp_path):
    numbers = count()
    check_sink(lambda: TensorBoardSink(tmp_path / str(next(numbers))))


def test_torch_is_not_asked_for(tmp_path, monkeypatch):
    asked = []
    real = builtins.__import__

    def watching(name, *args, **kwargs):
        asked.append(name.split(".")[0])
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watching)
    sink = TensorBoardSink(tmp_path)
    sink.emit(TrainingStep(1, 1, {"loss": 1.0}))
    sink.close()

    assert "torch" not in asked
