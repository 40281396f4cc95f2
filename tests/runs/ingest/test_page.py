"""What the page on numbers says is so."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.ingest.trainer_formats import OUTPUT_FORMATS, parse_event_line
from palaestra.runs.runner import JournalFile
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import Journal

PAGE = Path(__file__).parents[3] / "docs" / "run-metrics.md"


@pytest.fixture
def examples():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_lines_to_print_are_understood(examples):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(examples[1])
    events = [event for line in out.getvalue().splitlines() for event in OUTPUT_FORMATS["events"].parse(line)]
    assert events == [
        TrainingStep(0, 2048, {"loss": 0.25, "entropy": 0.6}),
        EpisodeSummary(2050, 0, 0, 195.0, 195),
    ]


def test_the_example_reads_a_run(examples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path,) = re.findall(r'Path\("(.*?)"\)', examples[2])
    attempt = Attempt(tmp_path / path / "attempt_1")
    with Journal(attempt.journal) as journal:
        journal.emit_many(TrainingStep(i, 1000 * i, {"loss": 1.0}) for i in range(100))
        journal.emit(EpisodeSummary(99_000, 1, 0, 1.0, 10))
    with Pump(lambda *_: None) as pump:
        pump.watch("r", attempt, (JournalFile(),))
        pump.finish("r")
    scope = {}
    exec(examples[2], scope)
    assert scope["series"].names()["loss"].points == 100
    assert len(scope["series"].decimate("loss", 2000, first=50_000)) == 50


def test_the_example_of_any_program_and_the_lines_of_other_languages_are_understood(examples, tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("PALAESTRA_LOG", str(path))
    exec(examples[0], {})
    events = [parse_event_line(line) for line in path.read_text().splitlines()]
    assert events[0] == TrainingStep(0, 0, {"loss": 0.25, "lr": 3e-4})
    assert events[-1] == EpisodeSummary(1000, 0, 0, 195.0, 195)
    assert len(events) == 1001
    (lines,) = re.findall(r"```text\n(\{\"kind\".*?)```", PAGE.read_text(), re.DOTALL)
    kinds = [type(parse_event_line(line)).__name__ for line in lines.splitlines()]
    assert kinds == ["TrainingStep", "EpisodeSummary", "CheckpointSaved"]
