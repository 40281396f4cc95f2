"""The benchmark of forms pairs equal seeds, keeps what was measured, and draws what is there."""

import json

import pytest
from benchmarks import ui_forms
from benchmarks.ui_forms import Measurement, parse_seeds, read_outcomes
from benchmarks.ui_forms_report import (
    build_form_rows,
    build_stage_rows,
    count_outcomes,
    count_pairs,
    describe,
    paired_difference,
    smooth_with_gaps,
    write_report,
)
from tests.evaluation.test_screens import E, F, S
from tests.experience.episodes import episode

from palaestra.config.file import read_config_file
from palaestra.evaluation.screens import PairCounts
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.train.screen_config import screen_config_from

SETTINGS = {"updates": 3, "episodes": 8, "held_out": 0}


def stage(a, b, mean=0.0):
    return {"checkpoint": "x"} | {way: {"t/a": a, "t/b": b} for way in ("sampled", "greedy")} | {
        f"{way}_return": mean for way in ("sampled", "greedy")
    }  # fmt: skip


RUN = {"algorithm": "grpo", "minutes": 2.0, "curves": {"t/a": [0.5, None, 1.0], "t/b": [None, None, None]}}
RESULTS = {
    "settings": SETTINGS,
    "stages": {"pretrained": stage("0000", "00-0"), "warm_start": stage("0100", "00-1")},
    "runs": [RUN | {"seed": 1} | stage("1101", "0111"), RUN | {"seed": 2} | stage("1111", "0001")],
    "form": {"pretrained": stage("", "0000", -0.5)},
}


def test_outcomes_are_read_in_the_order_of_the_seeds_whatever_ended_first(tmp_path):
    archive = TrajectoryArchive(tmp_path)
    for task, seed, outcome in (("t/b", 4, S), ("t/a", 3, E), ("t/a", 1, S), ("t/a", 2, F)):
        archive.append(episode(episode_id=f"{task}{seed}", task={"task": task, "seed": seed}, outcome=outcome))
    assert read_outcomes(tmp_path) == {"t/a": "10-", "t/b": "1"}


def test_failed_sessions_are_in_no_share_and_in_no_pair():
    assert count_outcomes("110-") == (2, 3)
    assert count_pairs("1101-", "0-011") == PairCounts(both=1, only_a=1, only_b=0, neither=1)


def test_the_difference_of_one_run_is_that_of_its_pairs():
    pairs = count_pairs("1111", "0100")
    assert paired_difference(["1111"], "0100") == (0.75, *pairs.ci95)
    assert paired_difference(["----"], "0100") is None


def test_the_difference_of_several_runs_is_bootstrapped_over_seeds():
    middle, low, high = paired_difference(["1101", "1111"], "0100")
    assert middle == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert 0 <= low < middle < high <= 1
    assert paired_difference(["1-", "0-"], "11")[0] == -0.5


def test_a_table_has_a_row_per_task_and_compares_each_algorithm_with_every_stage_before():
    titles, everything, first, second = build_stage_rows(RESULTS, "sampled")
    against = ["against the pretrained model", "against the warm start"]
    assert titles == ["sampled", "pretrained", "warm start", "grpo", *against]
    assert [row[0] for row in (everything, first, second)] == ["all", "`t/a`", "`t/b`"]
    assert everything[1].startswith("0 (0 to")
    assert first[3].startswith("88 (")
    assert first[4].startswith("+88 (")
    assert first[5].startswith("+62 (")
    assert build_form_rows(RESULTS)[1][0] == "pretrained"
    assert build_form_rows(RESULTS)[1][2] == "-0.50"


@pytest.mark.parametrize("stages", [[], ["pretrained"], ["pretrained", "warm_start"]])
def test_a_measurement_that_has_only_begun_can_be_reported(tmp_path, stages):
    results = RESULTS | {"stages": {name: RESULTS["stages"][name] for name in stages}, "runs": [], "form": {}}
    write_report(results, tmp_path / "t.md", tmp_path / "c.png")
    assert (tmp_path / "t.md").read_text().count("pretrained") == 2 * bool(stages)
    assert not (tmp_path / "c.png").exists()


def test_the_report_draws_a_curve_per_task(tmp_path):
    write_report(RESULTS, tmp_path / "t.md", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert smooth_with_gaps([0.5, None, 1.0]) == [0.75] * 3


def test_the_report_says_which_demonstrations_and_updates_were_used():
    assert describe(RESULTS) == (
        "Measured by `python -m benchmarks.ui_forms`: held-out seeds from 0, 8 episodes per evaluation; "
        "3 updates of reinforcement. Per cent solved (95 % interval).\n"
    )
    warm = SETTINGS | {"demonstrations": 16, "warm_start": 12, "warm_start_rate": 3e-4}
    text = describe(RESULTS | {"settings": warm, "runs": []})
    assert "; 16 demonstrations per task, imitated in 12 updates with learning rate 0.0003. Per" in text
    mixed = SETTINGS | {"demonstrations": 16, "warm_start": 0, "share_percent": 25}
    assert "by `python -m benchmarks.ui_forms`: the model short; held-out" in describe(
        RESULTS | {"settings": RESULTS["settings"] | {"model": "short"}}
    )
    text = describe(RESULTS | {"settings": mixed})
    assert "; 16 demonstrations per task; 3 updates of reinforcement with 25 % of demonstrations. Per" in text


def test_results_of_other_settings_are_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(ui_forms, "RESULTS", tmp_path)
    measurement = Measurement("forms", tmp_path / "home", SETTINGS)
    measurement.results["runs"] = [{"curve": [0.1, None]}]
    measurement.save()
    assert '"curve": [ 0.1, null ]' in (tmp_path / "ui_forms.json").read_text()
    assert Measurement("forms", tmp_path / "home", SETTINGS).results == json.loads(
        (tmp_path / "ui_forms.json").read_text()
    )
    with pytest.raises(SystemExit, match="Use the same settings"):
        Measurement("forms", tmp_path / "home", SETTINGS | {"updates": 4})
    with pytest.raises(SystemExit, match="Give the --home"):
        measurement.find("nothing")


def test_seeds_are_a_range_or_a_list():
    assert parse_seeds("1..3") == [1, 2, 3]
    assert parse_seeds("1,5") == [1, 5]
    assert parse_seeds("4") == [4]


def test_every_stage_is_a_valid_configuration(tmp_path):
    config = dict(read_config_file(ui_forms.CONFIG))
    imitation = screen_config_from(ui_forms.imitate(config, tmp_path, {"num_training_steps": 12}))
    assert imitation.algorithm["name"] == "supervised"
    for algorithm in ui_forms.ALGORITHMS:
        reinforced = screen_config_from(ui_forms.reinforce(config, algorithm, 5))
        assert (reinforced.trainer.num_training_steps, reinforced.trainer.max_refills) == (5, 0)
        mixed = screen_config_from(ui_forms.reinforce(config, algorithm, 5, tmp_path, 0.25))
        assert (reinforced.demonstrations.path, mixed.demonstrations.path) == (None, tmp_path)
        assert mixed.demonstrations.share == 0.25


def test_reinforcement_has_the_settings_of_the_configuration_for_its_own_algorithm_only():
    config = {"algorithm": {"name": "rejection_sampling", "reward_threshold": 0.9}, "trainer": {}}
    assert ui_forms.reinforce(config, "rejection_sampling", 5)["algorithm"]["reward_threshold"] == 0.9
    assert "reward_threshold" not in ui_forms.reinforce(config, "grpo", 5)["algorithm"]
