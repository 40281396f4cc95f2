"""Foreign trainers' output and event files become journals, each number once."""

import json
import math
import random

import pytest

from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.ingest.stdout import MAX_LINE_BYTES
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.runner import EventFiles, StdoutLines
from palaestra.runs.series.reader import SeriesReader
from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep
from palaestra.telemetry.journal import JournalReader

from .event_files import HEADER, framed, scalar, session_start

CLEANRL = (EventFiles("runs/**/events.out.tfevents.*", "cleanrl"), StdoutLines("cleanrl"))
EVENTS = (StdoutLines("events"),)


@pytest.fixture
def attempt(tmp_path):
    attempt = Attempt(tmp_path / "attempt_1")
    attempt.work.mkdir(parents=True)
    return attempt


def events(attempt):
    with JournalReader(attempt.journal) as reader:
        return [record.event for record in reader.read()]


def translate(attempt, sources, *, thin=1, limit=1000, final=True):
    translator = Translator(attempt, sources, thin)
    while translator.pump(limit, final=final):
        pass
    translator.close()
    return translator.counts


def event_file(attempt, *payloads, name="events.out.tfevents.17.host.4.0", mode="wb"):
    path = attempt.work / "runs" / "CartPole-v1__dqn__1__17" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(framed(*payloads))
    return path


def episode(step, value, length):
    return scalar("charts/episodic_return", step, value), scalar("charts/episodic_length", step, length)


def test_a_cleanrl_run_becomes_steps_and_episodes_under_our_names(attempt):
    event_file(
        attempt,
        HEADER,
        *episode(19, 19.0, 19),
        scalar("losses/value_loss", 100, 0.5, 50.0),
        scalar("losses/q_values", 100, 2.0, 51.0),
        scalar("charts/SPS", 200, 900.0, 60.0),
        *episode(240, 40.0, 41),
    )
    attempt.stdout.write_text(
        "global_step=19, episodic_return=[19.]\nSPS: 900\nsome warning\n"
        "wandb: View run at https://wandb.ai/me/p/runs/1\n"
        "global_step=240, episodic_return=[40.]\nmodel saved to runs/x/dqn.cleanrl_model\n"
    )
    counts = translate(attempt, CLEANRL)

    assert events(attempt) == [
        EpisodeSummary(19, 1, 0, 19.0, 19),
        TrainingStep(0, 100, {"value_loss": 0.5, "losses/q_values": 2.0}),
        TrainingStep(0, 200, {"steps_per_second": 900.0}),
        EpisodeSummary(240, 2, 0, 40.0, 41),
        LogLine("info", "model saved to runs/x/dqn.cleanrl_model"),
    ]
    assert (counts.episode_lines, counts.episodes, counts.unread_lines, counts.corrupt) == (2, 2, 1, 0)
    assert counts.tracking_url == "https://wandb.ai/me/p/runs/1"


def test_every_line_says_which_byte_of_which_file_it_comes_from(attempt):
    path = event_file(attempt, HEADER, scalar("losses/entropy", 1, 0.5))
    translate(attempt, CLEANRL)
    (line,) = attempt.journal.read_text().splitlines()

    assert json.loads(line)["from"] == {
        "source": "tensorboard:cleanrl",
        "file": str(path.relative_to(attempt.work)),
        "offset": len(framed(HEADER)),
    }
    assert json.loads(line)["time"] == 100.0


def test_two_values_of_a_metric_at_one_step_are_both_kept(attempt):
    event_file(attempt, scalar("a", 5, 1.0), scalar("b", 5, 2.0), scalar("a", 5, 3.0))
    translate(attempt, CLEANRL)
    assert [event.metrics for event in events(attempt)] == [{"a": 1.0, "b": 2.0}, {"a": 3.0}]


def test_a_trainer_that_starts_again_writes_another_file_and_both_are_read(attempt):
    event_file(attempt, HEADER, scalar("a", 1, 1.0), scalar("a", 2, 1.0))
    translator = Translator(attempt, CLEANRL)
    translator.pump(100)
    event_file(attempt, HEADER, session_start(2), scalar("a", 2, 5.0), name="events.out.tfevents.18.host.9.0")
    while translator.pump(100, final=True):
        pass
    translator.close()

    first, note, second = events(attempt)[0], events(attempt)[-2], events(attempt)[-1]
    assert (first.metrics, second.metrics) == ({"a": 1.0}, {"a": 5.0})
    assert note.level == "warning"
    assert "void from step 2 on" in note.text


def test_a_return_at_the_end_of_a_batch_waits_for_its_length_also_across_a_restart(attempt):
    returned, length = episode(30, 7.0, 8)
    event_file(attempt, scalar("a", 1, 1.0), returned)
    translator = Translator(attempt, CLEANRL)
    translator.pump(100)
    translator.close()
    event_file(attempt, length, mode="ab")
    translate(attempt, CLEANRL)

    assert events(attempt)[1:] == [EpisodeSummary(30, 1, 0, 7.0, 8)]


def test_what_is_unfinished_when_the_trainer_has_ended_is_taken_as_it_is(attempt):
    returned, _ = episode(30, 7.0, 8)
    path = event_file(attempt, scalar("a", 1, 1.0), returned)
    with path.open("ab") as file:
        file.write(framed(scalar("a", 2, 2.0))[:-3])
    attempt.stdout.write_text("model saved to there")
    counts = translate(attempt, CLEANRL)

    assert events(attempt)[0] == TrainingStep(0, 1, {"a": 1.0})
    assert set(map(type, events(attempt)[1:])) == {LogLine, EpisodeSummary}
    assert EpisodeSummary(30, 1, 0, 7.0, 0) in events(attempt)
    assert counts.corrupt == 1
    before = attempt.journal.read_bytes()
    translate(attempt, CLEANRL)
    assert attempt.journal.read_bytes() == before


def test_a_trainer_that_logs_every_gradient_step_is_thinned_alike_with_and_without_restarts(attempt, tmp_path):
    numbers = [scalar(f"losses/{name}", step, float(step)) for step in range(500) for name in ("a", "b")]
    event_file(attempt, *numbers)
    translate(attempt, CLEANRL, thin=100)
    kept = [(event.env_step, event.metrics) for event in events(attempt)]
    assert kept == [(s, {"losses/a": float(s), "losses/b": float(s)}) for s in (0, 100, 200, 300, 400)]

    other = Attempt(tmp_path / "attempt_2")
    other.work.mkdir(parents=True)
    event_file(other, *numbers)
    for _ in range(12):
        translator = Translator(other, CLEANRL, 100)
        translator.pump(70)
        translator.pump(70)
        translator.pump(70)
        translator.close()
    points = [(e.env_step, name) for e in events(other) for name in e.metrics]
    assert sorted(points) == sorted((s, name) for s, metrics in kept for name in metrics)


def test_killed_at_any_byte_of_its_writing_no_number_is_lost_or_doubled(attempt):
    rng = random.Random(7)
    written = []
    stdout = attempt.stdout.open("w")
    file_name = "events.out.tfevents.1.h.1.0"
    sources = (EventFiles("runs/**/events*", "none"), StdoutLines("events"))
    for step in range(300):
        said = {"kind": "TrainingStep", "env_step": step, "metrics": {"said": step}}
        stdout.write(f"@palaestra {json.dumps(said)}\nnoise\n")
        stdout.flush()
        event_file(attempt, scalar("seen", step, float(step)), name=file_name, mode="ab")
        written.append(step)
        if rng.random() < 0.2:
            translator = Translator(attempt, sources)
            translator.pump(rng.randrange(1, 40))
            translator.close()
            if rng.random() < 0.5:
                # The machine went down before the disk had it all.
                size = attempt.journal.stat().st_size
                with attempt.journal.open("r+b") as file:
                    file.truncate(rng.randrange(max(0, size - 3000), size + 1))
    stdout.close()
    counts = translate(attempt, sources)

    metrics = [(name, e.env_step, value) for e in events(attempt) for name, value in e.metrics.items()]
    assert sorted(metrics) == sorted((name, step, float(step)) for name in ("said", "seen") for step in written)
    assert counts.unread_lines == 300


def test_corrupt_event_files_are_counted_and_read_past(attempt):
    path = event_file(attempt, *(scalar("a", step, 1.0) for step in range(10)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    counts = translate(attempt, CLEANRL)

    assert len(events(attempt)) == 9
    assert counts.corrupt == 1


def test_episodes_are_numbered_for_a_trainer_that_does_not(attempt):
    attempt.stdout.write_text(
        '@palaestra {"kind":"EpisodeSummary","env_step":5,"episode_return":1,"length":5}\n'
        '@palaestra {"kind":"EpisodeSummary","env_step":9,"episode_return":2,"length":4}\n'
    )
    translate(attempt, EVENTS)
    assert [event.episode for event in events(attempt)] == [1, 2]


def test_the_pump_takes_a_foreign_run_to_series_with_provenance(attempt):
    event_file(attempt, HEADER, *episode(19, 19.0, 19), scalar("losses/clipfrac", 100, 0.5), *episode(40, 21.0, 21))
    attempt.stdout.write_text("global_step=19, episodic_return=[19.]\n" * 5)
    got = []
    with Pump(lambda *what: got.append(what)) as pump:
        pump.watch("r", attempt, CLEANRL)
        progress = pump.finish("r")

    assert (progress.episodes, progress.episode_lines, progress.episode_return) == (2, 5, 20.0)
    assert progress.source_bytes > progress.output_bytes > 0
    assert [record.seq for _, _, records in got for record in records] == [1, 2, 3]
    series = SeriesReader(attempt.series)
    assert {name: info.source for name, info in series.names().items()} == {
        "episode/return": "tensorboard:charts/episodic_return",
        "episode/length": "tensorboard:charts/episodic_length",
        "clip_fraction": "tensorboard:losses/clipfrac",
    }


def test_an_archive_that_lost_its_end_is_grown_back_and_the_series_with_it(attempt):
    for step in range(100):
        event_file(attempt, scalar("a", step, float(step)), mode="ab")

    def ingest():
        with Pump(lambda *_: None) as pump:
            pump.watch("r", attempt, CLEANRL)
            return pump.finish("r")

    ingest()
    with attempt.journal.open("r+b") as file:
        file.truncate(attempt.journal.stat().st_size // 2)
    event_file(attempt, scalar("a", 100, 100.0), mode="ab")
    progress = ingest()

    assert progress.problem == ""
    assert [point.value for point in SeriesReader(attempt.series).recent("a", 1000)] == [float(n) for n in range(101)]


def test_a_format_that_does_not_exist_is_refused_with_those_that_do(attempt):
    with pytest.raises(ConfigError, match="events, corl, sb3, cleanrl, none"):
        Translator(attempt, (StdoutLines("klingon"),))


def _step(step, **metrics):
    return f"@palaestra {json.dumps({'kind': 'TrainingStep', 'env_step': step, 'metrics': metrics})}\n"


def test_nan_and_infinity_are_kept_as_they_are(attempt):
    attempt.stdout.write_text(_step(8, loss=0.1) + _step(16, loss=math.nan, kl=-math.inf))
    counts = translate(attempt, EVENTS)

    last = events(attempt)[-1].metrics
    assert math.isnan(last["loss"])
    assert last["kl"] == -math.inf
    assert (counts.dropped, counts.unread_lines) == (0, 0)


def test_a_line_of_more_than_256_kib_is_read(attempt):
    metrics = {f"layer_{i:05}/gradient_norm": i / 8 for i in range(10_000)}
    attempt.stdout.write_text(_step(8, **metrics))
    counts = translate(attempt, EVENTS)

    assert attempt.stdout.stat().st_size > 300_000
    assert events(attempt) == [TrainingStep(0, 8, metrics)]
    assert counts.dropped == 0


def test_what_cannot_be_read_is_counted_and_the_first_is_remembered(attempt):
    good, bad = _step(8, loss=1.0), '@palaestra {"kind": "TrainingStep", "env_step": 16, "metr\n'
    long = _step(24, **{"x" * MAX_LINE_BYTES: 1.0})
    attempt.stdout.write_text(good + bad + '@palaestra {"kind": "Weather"}\nsome output\n' + long + good)
    counts = translate(attempt, EVENTS)

    assert events(attempt) == [TrainingStep(0, 8, {"loss": 1.0})] * 2
    assert (counts.dropped, counts.corrupt) == (3, 0)
    assert counts.first_dropped.startswith(f"byte {len(good)} of stdout.log: Unterminated string")
    assert Translator(attempt, EVENTS).counts.dropped == 3


def test_a_line_that_is_too_long_is_dropped_by_name(attempt):
    attempt.stdout.write_text(_step(24, **{"x" * MAX_LINE_BYTES: 1.0}))
    counts = translate(attempt, EVENTS)

    assert (counts.dropped, events(attempt)) == (1, [])
    assert counts.first_dropped == "byte 0 of stdout.log: the line is longer than 4,194,304 bytes"


def test_damage_in_an_event_file_is_counted_with_its_place(attempt):
    path = event_file(attempt, HEADER, scalar("losses/value_loss", 8, 1.0), scalar("losses/value_loss", 16, 2.0))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    counts = translate(attempt, CLEANRL)

    assert counts.corrupt == 1
    assert path.name in counts.first_dropped
