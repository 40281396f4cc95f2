import io
import sys

import pytest

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.telemetry.config import TelemetryConfig, check_telemetry, open_telemetry
from palaestra.telemetry.event import Frame, LogLine, TrainingStep
from palaestra.telemetry.journal import Journal, JournalReader

from .test_wandb import FakeRun, FakeWandb


@pytest.fixture
def journal_path(tmp_path):
    return tmp_path / "attempt_1" / "metrics.jsonl"


@pytest.fixture
def open_sinks(tmp_path, journal_path):
    def open_with(stream=None, total_env_steps=100, **fields):
        config = TelemetryConfig(**fields)
        arguments = (config, tmp_path, "run-1", total_env_steps, {"seed": 1}, journal_path)
        return open_telemetry(*arguments, stream=stream)

    return open_with


def names(telemetry):
    return [type(sink).__name__ for sink in telemetry.sinks]


def test_the_journal_is_always_written(open_sinks, journal_path):
    with open_sinks(progress=False) as telemetry:
        assert names(telemetry) == ["Journal", "WarningSink"]
        telemetry.emit(Frame(1, "1.png"))

    with JournalReader(journal_path) as reader:
        assert [record.event for record in reader.read()] == [Frame(1, "1.png")]


def test_what_is_asked_for_is_opened(open_sinks, tmp_path):
    stream = io.StringIO()
    with open_sinks(stream, tensorboard=True) as telemetry:
        assert names(telemetry) == ["Journal", "TensorBoardSink", "ProgressSink"]
        telemetry.emit(TrainingStep(1, 50, {"loss": 1.0}))

    assert stream.getvalue().startswith("run-1  50/100 steps (50 %)")
    assert len(list((tmp_path / "attempt_1" / "tensorboard").iterdir())) == 1


def test_what_cannot_start_is_refused_before_a_file_is_written(open_sinks, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(ConfigError, match=r"palaestra\[wandb\]"):
        open_sinks(wandb="offline")

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"palaestra\[wandb\]"):
        check_telemetry(TelemetryConfig(wandb="online"))
    check_telemetry(TelemetryConfig())


def test_when_one_cannot_start_the_others_are_closed_again(open_sinks, journal_path):
    with pytest.raises(ConfigError, match="at least one step"):
        open_sinks(io.StringIO(), total_env_steps=0)

    Journal(journal_path).close()  # its lock is free


def test_wandb_is_opened_with_the_run_and_its_configuration(open_sinks, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    open_sinks(progress=False, wandb="offline", wandb_project="lab").close()

    asked = wandb.asked[0]
    assert (asked["project"], asked["name"], asked["dir"]) == ("lab", "run-1", str(tmp_path))
    assert asked["config"] == {"seed": 1}


def test_the_section_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        parse_section(TelemetryConfig, {"tensorbord": True}, place="telemetry")
    with pytest.raises(ConfigError, match=r"telemetry\.wandb"):
        parse_section(TelemetryConfig, {"wandb": "sometimes"}, place="telemetry")
    with pytest.raises(ConfigError, match=r"telemetry\.wandb_project"):
        parse_section(TelemetryConfig, {"wandb_project": ""}, place="telemetry")


def test_without_a_progress_display_warnings_still_reach_a_person():
    from io import StringIO

    from palaestra.telemetry.conformance import check_sink
    from palaestra.telemetry.event import LogLine, PhaseChanged
    from palaestra.telemetry.sink import WarningSink

    heard = StringIO()
    sink = WarningSink(heard)
    for event in (LogLine("info", "all is well"), PhaseChanged("running"), LogLine("warning", "look here")):
        sink.emit(event)
    assert heard.getvalue() == "warning: look here\n"
    check_sink(lambda: WarningSink(StringIO()))


def test_the_command_that_uploads_an_offline_run_is_shown_and_in_the_journal(open_sinks, journal_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    heard = io.StringIO()
    open_sinks(progress=True, stream=heard, wandb="offline").close()

    with JournalReader(journal_path) as reader:
        (line,) = (record.event for record in reader.read())
    assert "wandb sync " in line.text
    assert line.text in heard.getvalue()


def test_the_address_of_a_run_on_wandb_is_in_the_journal(open_sinks, journal_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setattr(FakeRun, "url", "https://wandb.ai/me/p/runs/x", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    open_sinks(progress=False, wandb="online").close()

    with JournalReader(journal_path) as reader:
        assert [record.event for record in reader.read()] == [
            LogLine("info", "View run at https://wandb.ai/me/p/runs/x")
        ]
