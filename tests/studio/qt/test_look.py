"""Looking at runs in the window: table, curves, groups, differences, details, output, clips, exports."""

import csv
from pathlib import Path

import numpy as np
import pytest

from palaestra.runs.phase import Phase
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.runs import COLUMNS

CONFIG = {"env": {"num_envs": 4}, "trainer": {"total_timesteps": 2048, "rollout_length": 64}}


@pytest.fixture(scope="module")
def finished(client):
    """Two runs that differ in their seed, and one with another learning rate."""
    specs = [
        RunSpec(env_id="CartPole-v1", seed=1, config=CONFIG, tags=("paper",)),
        RunSpec(env_id="CartPole-v1", seed=2, config=CONFIG),
        RunSpec(env_id="CartPole-v1", seed=1, config={**CONFIG, "algorithm": {"learning_rate": 0.1}}),
    ]
    run_ids = [client.submit(spec).run_id for spec in specs]
    for run_id in run_ids:
        assert client.wait(run_id, timeout_s=120).phase is Phase.SUCCEEDED
    return run_ids


@pytest.fixture
def driver(open_window, finished):
    driver = open_window()
    driver.window.show_page("runs")
    driver.settle()
    return driver


def test_the_table_is_searched_sorted_and_shows_what_the_service_knows(driver, finished):
    table = driver.window.pages["runs"].table
    driver.wait(lambda: table.rows.rowCount() == 3)
    table.search.setText("tag:paper")
    driver.wait(lambda: table.rows.rowCount() == 1)
    assert table.rows.record(0).run_id == finished[0]
    table.search.setText("")
    seed = 1 + next(i for i, column in enumerate(COLUMNS) if column.name == "seed")
    table._sort(seed)
    driver.settle()
    assert [table.rows.record(i).seed for i in range(3)] == [2, 1, 1]


def test_ticked_runs_are_drawn_together_and_seeds_as_a_band(driver, finished):
    browser = driver.studio.browser
    browser.choose(finished)
    driver.wait(lambda: len(browser.charts.lines("value_loss")) == 3)
    browser.charts.set_options(grouped=True)
    lines = browser.charts.lines("value_loss")
    assert sorted(line.low is not None for line in lines) == [False, True]
    board = driver.window.pages["runs"].charts
    driver.wait(lambda: "value_loss" in board._views and board.chart("value_loss")._bands)
    (_, _, band), *others = board.chart("value_loss")._bands.values()
    assert not others
    driver.wait(lambda: band.boundingRect().height() > 0)


def test_differences_show_only_what_differs(driver, finished):
    driver.studio.browser.choose([finished[0], finished[2]])
    driver.wait(lambda: driver.studio.browser.details.comparison is not None)
    driver.window.pages["runs"].tabs.setCurrentIndex(1)
    table = driver.window.pages["runs"].comparison._table
    driver.wait(lambda: table.rowCount() > 0)
    rows = {
        table.item(i, 0).text(): [table.item(i, 1).text(), table.item(i, 2).text()] for i in range(table.rowCount())
    }
    assert rows["algorithm.learning_rate"][1] == "0.1"
    assert "trainer.seed" not in rows


def test_a_chart_is_saved_as_csv_and_png(driver, finished, tmp_path):
    driver.studio.browser.show(finished[0])
    board = driver.window.pages["runs"].charts
    driver.wait(lambda: "value_loss" in board._views and board.chart("value_loss")._lines)
    chart = board.chart("value_loss")
    chart.save_csv(tmp_path / "loss.csv")
    rows = list(csv.reader((tmp_path / "loss.csv").read_text().splitlines()))
    points = driver.studio.feed.service.metrics(finished[0], "value_loss")
    assert rows[0] == ["run", "step", "value_loss"]
    assert len(rows) - 1 == len(points)
    assert float(rows[1][2]) == pytest.approx(points[0].value)
    chart.save_png(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_log_scale_smoothing_and_the_x_axis_change_the_lines(driver, finished):
    browser = driver.studio.browser
    browser.show(finished[0])
    driver.wait(lambda: bool(browser.charts.lines("value_loss")))
    by_step = browser.charts.lines("value_loss")[0]
    browser.charts.set_options(x_axis="time")
    assert browser.charts.lines("value_loss")[0].x[0] < by_step.x[0]
    browser.charts.set_options(x_axis="step", smoothing=0.9)
    smoothed = browser.charts.lines("value_loss")[0]
    assert np.std(np.diff(smoothed.y)) < np.std(np.diff(by_step.y))
    browser.charts.set_options(smoothing=0.0, log_scale=True)
    board = driver.window.pages["runs"].charts
    driver.wait(lambda: "value_loss" in board._views)
    chart = board.chart("value_loss")
    driver.wait(lambda: chart.plot.getPlotItem().ctrl.logYCheck.isChecked())


def test_the_pointer_shows_the_values_of_all_runs(driver, finished):
    driver.studio.browser.choose(finished[:2])
    board = driver.window.pages["runs"].charts
    driver.wait(lambda: "value_loss" in board._views and len(board.chart("value_loss")._lines) == 2)
    chart = board.chart("value_loss")
    chart._show_values(chart.plot.getPlotItem().sceneBoundingRect().center())
    assert chart._hover_text.isVisible()
    assert len(chart._hover_text.text().splitlines()) == 3


def test_name_tags_and_notes_are_edited_in_place(driver, finished, client):
    driver.studio.browser.show(finished[1])
    facts = driver.window.pages["runs"].facts
    driver.window.pages["runs"].tabs.setCurrentWidget(facts)
    driver.wait(lambda: facts._shown_run == finished[1])
    facts._title.setText("baseline")
    facts._title.editingFinished.emit()
    driver.wait(lambda: client.run(finished[1]).name == "baseline")
    facts._tags.setText("a, b")
    facts._tags.editingFinished.emit()
    driver.wait(lambda: client.run(finished[1]).tags == ("a", "b"))
    driver.studio.browser.edit(finished[1], name="", tags=(), notes="")
    driver.settle()


def test_output_and_settings_of_a_run_are_shown(driver, finished):
    driver.studio.browser.show(finished[2])
    page = driver.window.pages["runs"]
    page.tabs.setCurrentWidget(page.facts)
    driver.wait(lambda: driver.studio.browser.details.config.get("algorithm.learning_rate") == 0.1)
    driver.settle()
    tree = page.facts._tree
    assert tree.topLevelItem(0).text(0) == "settings"
    page.facts._search.setText("learning_rate")
    texts = [tree.topLevelItem(0).child(i).text(0) for i in range(tree.topLevelItem(0).childCount())]
    assert "algorithm.learning_rate" in texts


def test_a_deleted_run_can_be_brought_back_from_its_notice(driver, finished, client):
    run_id = client.submit(RunSpec(env_id="CartPole-v1", seed=5, config=CONFIG)).run_id
    client.wait(run_id, timeout_s=120)
    driver.studio.browser.refresh()
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is not None)
    driver.studio.browser.delete(run_id)
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is None)
    next(one for one in driver.studio.notices.visible() if one.action == "Undo").perform()
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is not None)
    client.delete_run(run_id)


def test_a_clip_is_recorded_decoded_and_played(driver, finished):
    page = driver.window.pages["runs"]
    driver.studio.browser.show(finished[0])
    page.tabs.setCurrentWidget(page.clips)
    driver.studio.browser.record_video(finished[0])
    driver.wait(lambda: len(page.clips._frames) > 1, 120_000)
    assert page.clips._frames[0].width() == 480
    driver.wait(lambda: page.clips._position.value() > 0)
    directory = driver.studio.temporary_directory
    assert Path(page.clips._file).parent == directory
    assert directory.stat().st_mode & 0o077 == 0
    driver.window.close()
    assert not directory.exists()
