"""The benchmark of a pretrained language model: its configuration, its wordings and its table."""

import os

import pytest
from benchmarks import ui_smollm2
from benchmarks.ui_runs import write_results
from benchmarks.ui_smollm2 import OWN, WORDINGS, build_config, draw_table, load_results, measure, set_wording

from palaestra.train.screen_config import screen_config_from


def test_every_task_hides_the_bar_and_has_another_wording(tmp_path):
    config = screen_config_from(build_config(tmp_path))
    assert config.model.name == str(tmp_path)
    assert all(task.params["hide_bar"] for task in config.tasks)
    reworded = set_wording(config, "other words")
    assert {task.task: task.params["instruction"] for task in reworded.tasks} == WORDINGS["other words"]
    assert (len(config.tasks), len(reworded.tasks)) == (3, 3)
    assert set_wording(config, OWN) == config


def test_the_table_has_shares_with_intervals_and_a_paired_test():
    """Of 8 pairs, 6 are solved after training only, and none before only: p is 2 / 2^6."""
    before, after = {"a/b": "00000011"}, {"a/b": "11111111"}
    table = draw_table({"before": {OWN: before}, "after": {OWN: after}})
    assert f"| a/b | {OWN} | 25 (7 to 59) | 100 (68 to 100) | 0.031 |" in table


def test_results_of_other_wordings_or_numbers_of_episodes_are_not_continued(tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    monkeypatch.setattr(ui_smollm2, "RESULTS", file)
    results = load_results() | {"outcomes": {"before": {OWN: {"a/b": "01"}}}}
    write_results(file, results)
    assert load_results() == results
    with pytest.raises(SystemExit, match="Use --episodes 2"):
        measure(results, "after", None, None, 3)
    write_results(file, results | {"wordings": {}})
    with pytest.raises(SystemExit, match="other wordings"):
        load_results()


def test_results_are_written_with_lists_on_one_line_and_survive_a_failure(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError("no space")

    file = tmp_path / "results.json"
    write_results(file, {"run": {"curve": [0.5, None]}})
    assert '"curve": [ 0.5, null ]' in file.read_text()
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_results(file, {})
    assert '"curve": [ 0.5, null ]' in file.read_text()
    assert list(tmp_path.iterdir()) == [file]
