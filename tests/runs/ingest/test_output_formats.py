"""What lines of output mean."""

import json
import math

import pytest

from palaestra.runs.ingest.trainer_formats import OUTPUT_FORMATS, find_tracking_url
from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, LogLine, PhaseChanged, TrainingStep


@pytest.mark.parametrize(
    ("said", "event"),
    [
        (
            {"kind": "TrainingStep", "env_step": 8, "metrics": {"loss": 1, "kl": "NaN"}},
            lambda e: e.update == 0 and e.metrics["loss"] == 1.0 and math.isnan(e.metrics["kl"]),
        ),
        (
            {"kind": "TrainingStep", "schema": 1, "seq": 9, "time": 3.5, "update": 2, "env_step": 8, "metrics": {}},
            lambda e: e == TrainingStep(2, 8, {}),
        ),
        (
            {"kind": "EpisodeSummary", "env_step": 8, "episode_return": 3, "length": 4},
            lambda e: e == EpisodeSummary(8, 0, 0, 3.0, 4),
        ),
        (
            {"kind": "CheckpointSaved", "env_step": 8, "path": "a.zip"},
            lambda e: e == CheckpointSaved(0, 8, "a.zip", "", False, None),
        ),
        ({"kind": "PhaseChanged", "phase": "succeeded"}, lambda e: e == PhaseChanged("succeeded", "")),
        ({"kind": "LogLine", "text": "hi"}, lambda e: e == LogLine("info", "hi")),
    ],
)
def test_an_event_may_be_printed_with_no_more_than_what_it_says(said, event):
    (parsed,) = OUTPUT_FORMATS["events"].parse(f"@palaestra {json.dumps(said)}")
    assert event(parsed)


@pytest.mark.parametrize("line", ["Episode 3: return 17", "@palaestra", "@palaestra [1]", "@palaestra is a gymnasium"])
def test_a_line_that_is_no_event_is_output(line):
    assert OUTPUT_FORMATS["events"].parse(line) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("@palaestra {}", "without 'kind'"),
        ('@palaestra {"kind": "TrainingStep", "env_step": 8}', "without 'metrics'"),
        ('@palaestra {"kind": "TrainingStep", "env_step": "8", "metrics": {}}', "'8' is not a whole number"),
        ('@palaestra {"kind": "TrainingStep", "env_step": 8, "metrics": {"loss": null}}', "metrics.loss: None"),
        ('@palaestra {"kind": "Weather", "sun": 1}', "unknown kind 'Weather' .known: TrainingStep, EpisodeSummary"),
        ('@palaestra {"kind": "Frame", "schema": 9, "env_step": 8, "path": ""}', "schema 9 is newer than 1"),
        ('@palaestra {"kind": "TrainingStep", "env_ste', "Unterminated string"),
        ("@palaestra {" + '"a":{' * 100_000, "nested too deep"),
    ],
)
def test_a_line_that_is_marked_as_an_event_and_is_none_is_an_error(line, reason):
    for name in ("events", "sb3"):
        with pytest.raises(ValueError, match=reason):
            OUTPUT_FORMATS[name].parse(line)


def test_bare_nan_and_infinity_are_numbers():
    line = '@palaestra {"kind": "TrainingStep", "env_step": 8, "metrics": {"loss": NaN, "kl": Infinity}}'
    (step,) = OUTPUT_FORMATS["events"].parse(line)
    assert math.isnan(step.metrics["loss"])
    assert step.metrics["kl"] == math.inf


def test_the_time_and_the_number_of_an_event_are_ours_whatever_the_line_says():
    line = '@palaestra {"kind": "LogLine", "text": "hi", "seq": 0, "time": "noon"}'
    assert OUTPUT_FORMATS["events"].parse(line) == (LogLine("info", "hi"),)


def test_a_progress_bar_in_front_of_an_event_does_not_hide_it():
    line = '\r 40%|####   | 2/5@palaestra {"kind": "LogLine", "text": "hi"}'
    assert OUTPUT_FORMATS["events"].parse(line) == (LogLine("info", "hi"),)


def test_sb3s_names_become_ours_and_unknown_ones_stay():
    said = {"kind": "TrainingStep", "env_step": 8, "metrics": {"train/loss": 1, "rollout/ep_rew_mean": 2, "x/y": 3}}
    (step,) = OUTPUT_FORMATS["sb3"].parse(f"@palaestra {json.dumps(said)}")
    assert step.metrics == {"loss": 1.0, "episode_return": 2.0, "x/y": 3.0}
    assert OUTPUT_FORMATS["sb3"].parse("Using cpu device") is None
    assert OUTPUT_FORMATS["sb3"].parse('@palaestra {"kind": "LogLine", "text": "hi"}') == (LogLine("info", "hi"),)


@pytest.mark.parametrize(
    ("line", "understood", "counts"),
    [
        ("global_step=3568, episodic_return=[40.]", True, True),
        ("global_step=12, episodic_return=[-1.185e+03]", True, True),
        ("global_step=12, episodic_return=nan", True, True),
        ("MoviePy - Writing video 3%\rglobal_step=9, episodic_return=[9.]", True, True),
        ("eval_episode=3, episodic_return=[500.]", True, False),
        ("global_step=12, avg_episodic_return=3.0", True, False),
        ("global_step=12, first_0-episodic_return=3.0", True, False),
        ("SPS: 2411", True, False),
        ("/x/tyro/_fields.py:343: UserWarning: The field wandb-entity is annotated", False, False),
        ("error: XDG_RUNTIME_DIR is invalid or not set in the environment.", False, False),
    ],
)
def test_cleanrls_lines_are_counted_and_their_numbers_left_to_its_event_files(line, understood, counts):
    output_format = OUTPUT_FORMATS["cleanrl"]
    assert output_format.is_episode(line) is counts
    assert output_format.parse(line) == (() if understood else None)


def test_cleanrl_says_where_it_saved_its_model():
    line = "model saved to runs/CartPole-v1__dqn__1__17/dqn.cleanrl_model"
    assert OUTPUT_FORMATS["cleanrl"].parse(line) == (LogLine("info", line),)


def test_the_trackers_address_is_found_in_colours_too():
    assert find_tracking_url("wandb: 🚀 View run at https://wandb.ai/a/b/runs/c") == "https://wandb.ai/a/b/runs/c"
    coloured = "wandb: View run \x1b[33mdqn\x1b[0m at: \x1b[34m\x1b[4mhttps://wandb.ai/a/b/runs/c\x1b[0m"
    assert find_tracking_url(coloured) == "https://wandb.ai/a/b/runs/c"
    assert find_tracking_url("View run logs") == ""


def test_output_that_means_nothing_is_understood_as_such():
    assert OUTPUT_FORMATS["none"].parse("anything") == ()
