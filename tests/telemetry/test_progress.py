import io
import math
import re
import time

import pytest

from palaestra.errors import ConfigError
from palaestra.telemetry.conformance import check_sink
from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, LogLine, PhaseChanged, TrainingStep
from palaestra.telemetry.progress import ProgressRate, ProgressSink

METRICS = {
    "steps_per_second": 2000.0,
    "policy_loss": -0.0123,
    "value_loss": 12.345,
    "entropy": 0.6543,
    "approx_kl": 0.0081,
    "explained_variance": 0.93,
    "learning_rate": 0.0003,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clock():
    return Clock()


def episode(env_step, number, episode_return):
    return EpisodeSummary(env_step, number, 0, episode_return, int(episode_return))


def last_drawn(stream):
    """The display as it stands at the end, without its colours."""
    drawing = stream.getvalue().split("\x1b[?25h")[0]
    drawing = re.split(r"\x1b\[2K", drawing)[-1]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawing)


def redraws(stream):
    return stream.getvalue().count(" steps/s")


def test_pace_tells_the_share_the_rate_and_the_time_left():
    pace = ProgressRate(1000, now=0.0)
    assert pace.remaining_seconds(0.0) is None

    pace.advance(100, now=10.0)
    assert pace.rate(10.0) is None
    pace.advance(300, now=20.0)

    assert pace.fraction() == 0.3
    assert pace.rate(20.0) == 20.0  # 200 steps in 10 s
    assert pace.remaining_seconds(20.0) == 35.0  # 700 steps at 20 a second
    assert pace.elapsed_seconds(20.0) == 20.0


def test_a_resumed_run_is_judged_by_what_this_attempt_did():
    pace = ProgressRate(1000, now=0.0)
    pace.advance(800, now=1.0)
    pace.advance(810, now=2.0)

    assert pace.remaining_seconds(2.0) == 19.0  # 190 steps at 10 a second


def test_more_steps_than_planned_is_still_a_hundred_percent():
    pace = ProgressRate(100, now=0.0)
    pace.advance(128, now=1.0)

    assert pace.fraction() == 1.0
    pace.reported_rate = 10.0
    assert pace.remaining_seconds(1.0) == 0.0


def test_a_run_of_no_steps_is_refused():
    with pytest.raises(ConfigError, match="at least one step"):
        ProgressSink(0, "run")


def test_a_terminal_shows_the_bar_the_time_and_the_numbers_that_matter(clock):
    stream = Terminal()
    sink = ProgressSink(10_000, "ppo-cartpole", stream, clock=clock)
    for number, value in enumerate([10.0, 20.0, 30.0], start=1):
        sink.emit(episode(100 * number, number, value))
    clock.now = 2.0
    sink.emit(TrainingStep(1, 4_300, METRICS))
    drawn = last_drawn(stream)
    sink.close()

    assert "ppo-cartpole" in drawn
    assert "4,300 / 10,000 steps" in drawn
    assert "43 %" in drawn
    # 4,200 steps in 2 s since the first event: 5,700 more take 2.7 s.
    assert "2,000 steps/s · 0:02 elapsed · 0:03 left" in drawn
    for label, value in {
        "return": "20.0",
        "length": "20.0",
        "episodes": "3",
        "policy loss": "-0.0123",
        "value loss": "12.35",
        "explained variance": "0.930",
        "approx KL": "0.0081",
        "entropy": "0.654",
        "learning rate": "0.0003",
    }.items():
        assert re.search(rf"{label} +{re.escape(value)}(\s|$)", drawn, re.MULTILINE), (label, drawn)


def test_a_run_that_collects_in_the_background_says_how_well_the_two_overlap(clock):
    behind = {"staleness": 0.75, "queue_depth": 1.0, "collector_utilisation": 0.982, "learner_utilisation": 0.5}
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        sink = ProgressSink(100, "run", stream, clock=clock)
        sink.emit(TrainingStep(1, 50, METRICS | behind))
        drawn = last_drawn(stream)
        sink.close()
        if stream is terminal:
            shown = " ".join(drawn.split())
    assert "staleness 0.75 collector busy 98 % learner busy 50 %" in shown
    assert "staleness 0.75" in file.getvalue()


def test_the_return_shown_is_the_mean_of_the_last_hundred_episodes(clock):
    stream = Terminal()
    sink = ProgressSink(1000, "run", stream, clock=clock)
    for number in range(1, 151):
        sink.emit(episode(number, number, 0.0 if number <= 50 else 40.0))
    clock.now = 1.0
    sink.emit(TrainingStep(1, 150, {"episode_return": 1.0}))
    sink.close()

    assert re.search(r"return +40\.0\s", last_drawn(stream))


def test_without_episodes_the_trainers_own_mean_is_shown_and_what_is_missing_is_a_dash(clock):
    stream = Terminal()
    sink = ProgressSink(1000, "run", stream, clock=clock)
    sink.emit(TrainingStep(1, 100, {"episode_return": 7.25}))
    sink.close()

    assert re.search(r"return +7\.25\s", last_drawn(stream))
    assert re.search(r"entropy +–", last_drawn(stream))


def test_it_redraws_at_most_ten_times_a_second(clock):
    stream = Terminal()
    sink = ProgressSink(100_000, "run", stream, clock=clock)
    for update in range(1000):
        clock.now = update * 0.001
        sink.emit(TrainingStep(update, update, {"steps_per_second": 1.0}))

    assert redraws(stream) == 10
    sink.close()
    assert redraws(stream) == 11


def test_the_last_words_are_the_end_of_the_run_and_the_cursor_comes_back(clock):
    stream = Terminal()
    sink = ProgressSink(100, "run", stream, clock=clock)
    sink.emit(TrainingStep(1, 50, {}))
    sink.emit(TrainingStep(2, 100, {}))
    sink.close()
    sink.close()
    sink.emit(TrainingStep(3, 150, {}))

    assert "100 %" in last_drawn(stream)
    assert " left" not in last_drawn(stream)
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_growing_return_is_drawn_as_a_rising_curve(clock):
    stream = Terminal()
    sink = ProgressSink(1000, "run", stream, clock=clock)
    for update in range(1, 9):
        sink.emit(TrainingStep(update, update, {"episode_return": float(update)}))
    sink.close()

    assert "▁▂▃▄▅▆▇█  1.00 … 8.00" in last_drawn(stream)


def test_nan_is_shown_as_it_is_and_spoils_neither_the_curve_nor_the_time(clock):
    stream = Terminal()
    sink = ProgressSink(1000, "run", stream, clock=clock)
    for update, value in enumerate([1.0, math.nan, 2.0], start=1):
        metrics = {"episode_return": value, "policy_loss": math.nan, "steps_per_second": math.inf}
        sink.emit(TrainingStep(update, update, metrics))
    sink.close()

    assert re.search(r"policy loss +nan", last_drawn(stream))
    assert "▁█" in last_drawn(stream)


def test_warnings_and_facts_appear_above_the_bar_and_small_talk_does_not(clock):
    stream = Terminal()
    sink = ProgressSink(1000, "run", stream, clock=clock)
    sink.emit(LogLine("warning", "the disk is nearly full [95%]\x1b[2J"))
    sink.emit(LogLine("info", "Learning rate 0.001, as configured."))
    sink.emit(LogLine("debug", "all is well"))
    sink.close()

    assert "warning: the disk is nearly full [95%] [2J" in stream.getvalue()
    assert "Learning rate 0.001, as configured." in stream.getvalue()
    assert "info:" not in stream.getvalue()
    assert "all is well" not in stream.getvalue()


def test_the_latest_checkpoint_and_phase_are_noted(clock):
    stream = Terminal()
    sink = ProgressSink(10_000, "run", stream, clock=clock)
    sink.emit(CheckpointSaved(4, 5_000, "checkpoints/4", "0" * 64, best=True, metric=487.31))
    clock.now = 1.0
    sink.emit(TrainingStep(1, 6_000, {}))
    assert "best checkpoint saved at step 5,000, 487.3" in last_drawn(stream)

    sink.emit(PhaseChanged("stopping", "interrupted"))
    sink.flush()
    assert "stopping: interrupted" in last_drawn(stream)
    sink.close()


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    sink = ProgressSink(10_000_000, "a-rather-long-name-for-a-run-20260101-120000", stream, clock=clock)
    for update in (1, 2):
        sink.emit(TrainingStep(update, 4_300_000, METRICS | {"episode_return": -1234.5 * update}))
    sink.close()

    lines = last_drawn(stream).splitlines()
    assert max(map(len, lines)) <= columns
    assert sum("return" in line for line in lines) == 2  # the number and the curve, neither of them wrapped


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "dumb terminal"])
def test_elsewhere_it_prints_a_plain_line_every_ten_seconds_and_one_at_the_end(stream, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    sink = ProgressSink(10_000, "ppo-cartpole", stream, clock=clock)
    for second in range(1, 26):
        clock.now = float(second)
        sink.emit(episode(second * 100, second, 50.0))
        sink.emit(TrainingStep(second, second * 100, {"steps_per_second": 100.0}))
        sink.flush()
    sink.close()

    assert stream.getvalue().splitlines() == [
        "ppo-cartpole  1,000/10,000 steps (10 %)  return 50.0  length 50.0  100 steps/s  0:10 elapsed  1:30 left",
        "ppo-cartpole  2,000/10,000 steps (20 %)  return 50.0  length 50.0  100 steps/s  0:20 elapsed  1:20 left",
        "ppo-cartpole  2,500/10,000 steps (25 %)  return 50.0  length 50.0  100 steps/s  0:25 elapsed",
    ]


def test_plain_lines_can_be_asked_for_on_a_terminal_and_warnings_are_among_them(clock):
    stream = Terminal()
    sink = ProgressSink(100, "run", stream, plain=True, clock=clock)
    sink.emit(LogLine("error", "lost\nthe disk"))
    sink.close()

    assert stream.getvalue() == "error: lost the disk\n"


def test_stderr_is_the_default(capsys, clock):
    sink = ProgressSink(100, "run", clock=clock)
    sink.emit(TrainingStep(1, 100, {}))
    sink.close()

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "run  100/100 steps (100 %)  0:00 elapsed\n"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90_000, "1 d 1 h")]
)
def test_times_read_like_a_clock(seconds, shown, clock):
    stream = io.StringIO()
    sink = ProgressSink(100, "run", stream, clock=clock)
    sink.emit(TrainingStep(1, 100, {}))
    clock.now = seconds
    sink.close()

    assert stream.getvalue().endswith(f"  {shown} elapsed\n")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_progress_display_keeps_the_rules_of_a_sink(stream):
    check_sink(lambda: ProgressSink(1000, "run", stream()))


def test_an_episode_costs_little(clock):
    sink = ProgressSink(10**9, "run", io.StringIO(), clock=clock)
    began = time.perf_counter()
    for number in range(10_000):
        sink.emit(episode(number, number, 1.0))

    assert time.perf_counter() - began < 0.5  # 50 µs each, ten times what it takes


def test_one_line_is_rewritten_four_times_a_second_and_a_warning_stands_above_it(clock):
    stream = io.StringIO()
    sink = ProgressSink(1_000, "run", stream, clock=clock, rewrite=True)
    for step in range(1, 9):
        clock.now = step / 8
        sink.emit(episode(step * 100, step, 50.0))
    sink.emit(LogLine("warning", "slow"))
    clock.now = 2.0
    sink.close()

    first, *rewritten = stream.getvalue().split("\r")[1:]
    assert first.startswith("200/1,000 steps (20 %)  return 50.0  ")
    assert [line.split()[0] for line in rewritten if line.strip()] == [
        "400/1,000",
        "600/1,000",
        "800/1,000",
        "warning:",
        "800/1,000",
    ]
    assert stream.getvalue().count("\n") == 2
