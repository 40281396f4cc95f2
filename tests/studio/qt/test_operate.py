"""Operating runs and the window: stop, resume, delete, edit, compare; commands, shortcuts, themes, several windows."""

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QMenu

from palaestra.runs.phase import Phase
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.settings import Settings


@pytest.fixture(scope="module")
def submit(client):
    """Starts echo runs; those that still run are stopped at the end."""
    run_ids = []

    def submit(**config):
        run_ids.append(client.submit(RunSpec(runner="echo", config={"steps": 20, **config})).run_id)
        return run_ids[-1]

    yield submit
    for run_id in run_ids:
        if not client.run(run_id).phase.has_ended:
            client.stop_run(run_id, grace_s=0)


@pytest.fixture(scope="module")
def finished(client, submit):
    """Two runs that have ended, with 20 and 30 updates."""
    run_ids = [submit(), submit(steps=30)]
    assert [client.wait(run_id, timeout_s=120).phase for run_id in run_ids] == [Phase.SUCCEEDED] * 2
    return run_ids


@pytest.fixture
def driver(open_window, finished):
    driver = open_window()
    driver.window.show_page("runs")
    driver.settle()
    return driver


def show(driver, run_id):
    driver.studio.browser.refresh()
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is not None)
    driver.studio.browser.show(run_id)
    driver.settle()


def choose_from_menu(driver, text):
    """Open the menu of the selected run and choose an entry."""
    page = driver.window.pages["runs"]
    driver.click(page.table._more)
    menu = next(one for one in page.table.findChildren(QMenu) if one.isVisible())
    action = next(one for one in menu.actions() if one.text() == text)
    assert action.isEnabled()
    action.trigger()
    menu.close()


def press(driver, key, modifier=Qt.KeyboardModifier.NoModifier, widget=None):
    """Press a key as a person does in a window that is active."""
    driver.window.activateWindow()
    driver.wait(lambda: QApplication.activeWindow() is driver.window)
    QTest.keyClick(widget or driver.window, key, modifier)


def test_a_run_is_stopped_by_two_clicks_and_one_click_is_not_carried_over_to_another_run(driver, submit):
    first, second = submit(then="hang"), submit(then="hang")
    runs, header = driver.studio.browser.runs, driver.window.pages["runs"].header
    show(driver, first)
    driver.wait(lambda: runs.get(first).phase is Phase.RUNNING and header._stop.isVisible())
    driver.click(header._stop)
    assert header._stop.text() == "Really stop?"
    show(driver, second)
    driver.wait(lambda: runs.get(second).phase is Phase.RUNNING and header._stop.text() == "Stop")
    driver.click(header._stop)
    driver.click(header._stop)
    driver.wait(lambda: runs.get(second).phase is Phase.STOPPED)
    assert runs.get(first).phase is Phase.RUNNING
    show(driver, first)
    choose_from_menu(driver, "Stop")
    driver.wait(lambda: runs.get(first).phase is Phase.STOPPED)


def test_a_failed_run_says_why_and_is_resumed(driver, submit):
    run_id = submit(then="exit:3", checkpoint_every=5)
    show(driver, run_id)
    runs, header = driver.studio.browser.runs, driver.window.pages["runs"].header
    driver.wait(lambda: runs.get(run_id).phase is Phase.FAILED and header._resume.isVisible())
    driver.wait(lambda: "3" in header._reason.text())
    driver.click(header._resume)
    driver.wait(lambda: runs.get(run_id).attempt == 2)
    driver.wait(lambda: runs.get(run_id).phase is Phase.FAILED)


def test_a_resume_that_the_service_refuses_is_a_notice_and_the_run_stays_as_it_was(driver, finished):
    show(driver, finished[0])
    driver.click(driver.window.pages["runs"].header._resume)
    driver.wait(lambda: any(f"{finished[0]} was not resumed" in text for text in driver.notices()))
    assert driver.studio.browser.runs.get(finished[0]).phase is Phase.SUCCEEDED


def test_a_run_is_deleted_from_the_menu_and_comes_back_by_undo(driver, submit, client):
    run_id = submit()
    client.wait(run_id, timeout_s=60)
    show(driver, run_id)
    driver.wait(lambda: driver.studio.browser.runs.get(run_id).phase.has_ended)
    choose_from_menu(driver, "Delete")
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is None)
    assert run_id not in [record.run_id for record in client.runs()]
    undo = next(one for one in driver.studio.notices.visible() if one.action == "Undo")
    undo.perform()
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is not None)


def test_a_run_is_marked_as_a_favorite_in_the_menu_and_has_a_star_in_the_table(driver, finished, client):
    run_id = finished[0]
    show(driver, run_id)
    runs = driver.studio.browser.runs
    choose_from_menu(driver, "Mark as favorite")
    driver.wait(lambda: runs.get(run_id).favorite)
    rows = driver.window.pages["runs"].table.rows
    driver.wait(lambda: rows.index(rows.row_of(run_id), 2).data().startswith("★ "))
    assert client.run(run_id).favorite
    choose_from_menu(driver, "Remove from favorites")
    driver.wait(lambda: not runs.get(run_id).favorite)


def test_name_tags_and_notes_are_typed_and_kept(driver, finished, client):
    run_id = finished[1]
    show(driver, run_id)
    page = driver.window.pages["runs"]
    page.tabs.setCurrentWidget(page.facts)
    driver.wait(lambda: page.facts._shown_run == run_id)
    for field, text in ((page.facts._title, "long run"), (page.facts._tags, "a,b ,, c")):
        field.selectAll()
        driver.qtbot.keyClicks(field, text)
        driver.qtbot.keyClick(field, Qt.Key.Key_Return)
    driver.qtbot.keyClicks(page.facts._notes, "looks fine")
    driver.click(page.facts._save_notes)

    def is_kept():
        record = client.run(run_id)
        return (record.name, record.tags, record.notes) == ("long run", ("a", "b", "c"), "looks fine")

    driver.wait(is_kept)
    driver.wait(lambda: driver.studio.browser.runs.get(run_id).name == "long run")


def test_notes_that_are_typed_survive_refreshes_and_another_run_until_they_are_saved(driver, finished, client):
    run_id, other = finished[:2]
    show(driver, run_id)
    facts = driver.window.pages["runs"].facts
    driver.window.pages["runs"].tabs.setCurrentWidget(facts)
    driver.wait(lambda: facts._shown_run == run_id)
    facts._notes.setPlainText("half a sent")
    driver.studio.browser.edit(run_id, name="renamed elsewhere")
    driver.wait(lambda: facts._title.text() == "renamed elsewhere")
    assert facts._notes.toPlainText() == "half a sent"
    show(driver, other)
    assert facts._notes.toPlainText() == client.run(other).notes
    show(driver, run_id)
    assert facts._notes.toPlainText() == "half a sent"
    assert client.run(run_id).notes == ""
    facts._notes.editing_finished.emit()
    driver.wait(lambda: client.run(run_id).notes == "half a sent" and not facts._drafts)
    driver.studio.browser.edit(run_id, name="", notes="")
    driver.wait(lambda: facts._notes.toPlainText() == "")


def test_events_of_the_same_second_are_all_listed_and_a_refresh_without_a_change_keeps_the_tree(driver, finished):
    show(driver, finished[0])
    facts = driver.window.pages["runs"].facts
    driver.window.pages["runs"].tabs.setCurrentWidget(facts)
    details = driver.studio.browser.details
    driver.wait(lambda: details.run_id == finished[0] and details.events)
    driver.settle()
    details.events = (*details.events, *(replace(details.events[-1], reason=reason) for reason in ("one", "two")))
    facts.refresh()
    tops = [facts._tree.topLevelItem(index) for index in range(facts._tree.topLevelItemCount())]
    events = next(top for top in tops if top.text(0) == "events")
    assert events.childCount() == len(details.events)
    events.setExpanded(True)
    facts.refresh()
    assert events.isExpanded()


def test_a_typed_environment_is_chosen_when_the_focus_leaves_its_field(driver):
    dock = driver.window.session_dock
    driver.window.show_page("play")
    driver.window.activateWindow()
    dock.environment.setFocus()
    driver.wait(dock.environment.hasFocus)
    dock.environment.selectAll()
    driver.qtbot.keyClicks(dock.environment, "MountainCar-v0")
    dock.environment.completer().popup().hide()
    dock._seed.setFocus()
    assert driver.studio.session.environments.chosen == "MountainCar-v0"
    dock.environment.setFocus()
    dock.environment.selectAll()
    driver.qtbot.keyClick(dock.environment, Qt.Key.Key_Delete)
    dock.environment.completer().popup().hide()
    dock._seed.setFocus()
    assert driver.studio.session.environments.chosen == dock.environment.text() == "MountainCar-v0"


def test_a_play_that_is_started_by_key_is_in_the_environment_that_was_typed(driver):
    dock, session = driver.window.session_dock, driver.studio.session
    driver.window.show_page("play")
    driver.window.activateWindow()
    dock.environment.setFocus()
    driver.wait(dock.environment.hasFocus)
    dock.environment.selectAll()
    driver.qtbot.keyClicks(dock.environment, "Acrobot-v1")
    dock.environment.completer().popup().hide()
    driver.window.commands.get("play.start").perform()
    driver.wait(lambda: session.play.state is not None)
    assert session.play.state.environment.env_id == "Acrobot-v1"
    session.end()
    driver.wait(lambda: session.play.ended is not None)


def test_runs_that_are_ticked_are_drawn_together_and_compared(driver, finished):
    table = driver.window.pages["runs"].table
    driver.wait(lambda: all(table.rows.row_of(run_id) >= 0 for run_id in finished))
    for run_id in finished:
        index = table.rows.index(table.rows.row_of(run_id), 0)
        assert table.rows.setData(index, Qt.CheckState.Checked, Qt.ItemDataRole.CheckStateRole)
    driver.wait(lambda: len(driver.studio.browser.charts.lines("m0")) == 2)
    driver.wait(lambda: driver.window.pages["runs"].tabs.tabText(1) == "Differences (2)")
    comparison = driver.window.pages["runs"].comparison
    driver.window.pages["runs"].tabs.setCurrentWidget(comparison)
    driver.wait(lambda: comparison._table.rowCount() > 1)
    rows = {comparison._table.item(i, 0).text(): comparison._table.item(i, 2).text() for i in range(2)}
    assert rows["steps"] in ("20", "30")


def test_the_differences_show_baseline_final_and_gain_of_evaluations_above_the_metrics(driver, finished):
    page, browser = driver.window.pages["runs"], driver.studio.browser
    driver.wait(lambda: all(page.table.rows.row_of(run_id) >= 0 for run_id in finished))
    for run_id in finished:
        index = page.table.rows.index(page.table.rows.row_of(run_id), 0)
        page.table.rows.setData(index, Qt.CheckState.Checked, Qt.ItemDataRole.CheckStateRole)
    page.tabs.setCurrentWidget(page.comparison)
    driver.wait(lambda: browser.details.comparison is not None)
    driver.settle()
    evaluations = {
        "eval_return/baseline": [-1207.5, None],
        "eval_return/final": [-152.25, -900.0],
        "eval_return/gain": [1055.25, None],
        "eval_normalized_score/baseline": [3.5, None],
    }
    browser.details.set_comparison(replace(browser.details.comparison, evaluations=evaluations))

    table = page.comparison._table
    driver.wait(lambda: table.findItems("eval_return/gain", Qt.MatchFlag.MatchExactly))
    texts = [[table.item(row, column).text() for column in range(3)] for row in range(table.rowCount())]
    start = [row[0] for row in texts].index("eval_return/baseline")
    assert texts[start : start + 3] == [
        ["eval_return/baseline", "-1207.5", "–"],
        ["eval_return/final", "-152.25", "-900"],
        ["eval_return/gain", "+1055.2", "–"],
    ]
    assert texts[start - 1][0] in browser.details.comparison.configuration
    assert texts[start + 4][0] in browser.details.comparison.metrics
    assert all(table.item(row, 0).font().bold() for row in range(start, table.rowCount()))
    assert not table.item(start - 1, 0).font().bold()


def test_the_output_of_a_run_is_shown_and_searched(driver, finished):
    show(driver, finished[0])
    page = driver.window.pages["runs"]
    page.tabs.setCurrentWidget(page.log)
    driver.wait(lambda: "echo: 20 updates to go" in page.log._text.toPlainText())
    page.log._search.setText("updates")
    driver.qtbot.keyClick(page.log._search, Qt.Key.Key_Return)
    assert page.log._text.textCursor().selectedText() == "updates"


def test_the_palette_finds_commands_by_letters_and_performs_the_chosen_one(driver):
    palette = driver.window.palette_overlay
    driver.window.commands.get("view.palette").perform()
    assert palette.isVisible()
    driver.qtbot.keyClicks(palette._field, "episo")
    assert palette._list.item(0).text().startswith("Page: Episodes")
    driver.qtbot.keyClick(palette._field, Qt.Key.Key_Return)
    assert not palette.isVisible()
    assert driver.window._stack.currentWidget() is driver.window.pages["episodes"]
    palette.open()
    driver.qtbot.keyClick(palette._field, Qt.Key.Key_Down)
    assert palette._list.currentRow() == 1
    driver.qtbot.keyClick(palette._field, Qt.Key.Key_Up)
    driver.qtbot.keyClick(palette._field, Qt.Key.Key_Up)
    assert palette._list.currentRow() == palette._list.count() - 1
    driver.qtbot.keyClicks(palette._field, "xyzzy")
    assert palette._list.count() == 0
    driver.qtbot.keyClick(palette._field, Qt.Key.Key_Return)
    assert palette.isVisible()
    driver.qtbot.keyClick(palette._field, Qt.Key.Key_Escape)
    assert not palette.isVisible()


def test_the_palette_offers_nothing_that_needs_a_play_without_one(driver):
    titles = [command.title for command in driver.window.commands.search("")]
    assert "Start a play" in titles
    assert "Pause or continue" not in titles


def test_shortcuts_change_the_page_and_open_the_overlays(driver):
    control = Qt.KeyboardModifier.ControlModifier
    for key, page in ((Qt.Key.Key_3, "episodes"), (Qt.Key.Key_4, "trajectories"), (Qt.Key.Key_1, "play")):
        press(driver, key, control)
        driver.wait(lambda page=page: driver.window._stack.currentWidget() is driver.window.pages[page])
    is_left = driver.window._left.isVisible()
    press(driver, Qt.Key.Key_B, control)
    driver.wait(lambda: driver.window._left.isVisible() is not is_left)
    press(driver, Qt.Key.Key_K, control)
    driver.wait(driver.window.palette_overlay.isVisible)
    driver.window.palette_overlay.close_overlay()
    driver.window.commands.get("view.shortcuts").perform()
    driver.qtbot.keyClick(driver.window.shortcut_overlay, Qt.Key.Key_Escape)
    assert not driver.window.shortcut_overlay.isVisible()
    driver.window.shortcut_overlay.open()
    driver.qtbot.mouseClick(driver.window.shortcut_overlay, Qt.MouseButton.LeftButton)
    assert not driver.window.shortcut_overlay.isVisible()


def test_past_notices_are_listed_newest_first(driver):
    driver.window.notice_history.open()
    assert driver.window.notice_history.list.count() == 0
    driver.window.notice_history.close_overlay()
    driver.studio.notices.add("info", "the first")
    driver.studio.notices.add("error", "the second", "and its remedy")
    driver.wait(lambda: driver.window.notice_list.isVisible())
    for notice in driver.studio.notices.visible():
        driver.studio.notices.dismiss(number=notice.number)
    driver.wait(lambda: not driver.window.notice_list.isVisible())
    driver.window.commands.get("view.notices").perform()
    texts = [driver.window.notice_history.list.item(i).text() for i in range(2)]
    assert texts[0].endswith("the second\nand its remedy")
    assert texts[1].endswith("ago  the first")
    driver.qtbot.keyClick(driver.window.notice_history, Qt.Key.Key_Escape)
    assert not driver.window.notice_history.isVisible()


def test_the_theme_changes_while_curves_are_shown_and_nothing_is_lost(driver, finished):
    show(driver, finished[0])
    driver.wait(lambda: "m0" in driver.window.pages["runs"].charts._views)
    dark = driver.window.grab().toImage().pixelColor(720, 450).lightness()
    driver.window.change_theme()
    driver.wait(lambda: "m0" in driver.window.pages["runs"].charts._views)
    driver.wait(lambda: driver.window.pages["runs"].charts.chart("m0")._lines)
    driver.settle()
    assert driver.window.grab().toImage().pixelColor(720, 450).lightness() > dark + 100
    assert driver.studio.browser.runs.current == finished[0]
    assert driver.window._stack.currentWidget() is driver.window.pages["runs"]
    driver.window.commands.get("view.palette").perform()
    assert driver.window.palette_overlay.isVisible()
    driver.window.change_theme()
    assert driver.window.theme.name == "dark"


def test_settings_are_kept_for_the_next_window(open_window, finished, tmp_path):
    path = tmp_path / "studio.json"
    first = open_window(Settings(path))
    first.window.show_page("play")
    first.studio.session.set_seed(17)
    first.studio.session.choose_environment("Acrobot-v1")
    first.window._right.show()
    first.window.show_page("episodes")
    first.window.close()
    second = open_window(Settings(path))
    assert second.studio.session.environments.seed == 17
    assert second.studio.session.environments.chosen == "Acrobot-v1"
    assert second.window._stack.currentWidget() is second.window.pages["episodes"]
    second.window.show_page("play")
    assert second.window._right.isVisible()


def test_damaged_settings_are_kept_beside_the_new_ones_and_reported(open_window, tmp_path):
    path = tmp_path / "studio.json"
    path.write_text('{"schema": 1, "theme": ')
    driver = open_window(Settings(path))
    assert any("could not be read" in text for text in driver.notices())
    assert path.with_suffix(".unreadable.json").exists()


def test_two_windows_show_the_same_runs_and_one_goes_on_when_the_other_is_closed(open_window, submit, client):
    one, other = open_window(), open_window()
    run_id = submit()
    for driver in (one, other):
        driver.wait(lambda driver=driver: driver.studio.browser.runs.get(run_id) is not None)
    one.window.close()
    client.update_run(run_id, name="seen by the other")
    other.wait(lambda: other.studio.browser.runs.get(run_id).name == "seen by the other")


def test_a_chart_is_saved_and_a_file_that_cannot_be_written_is_a_notice(driver, finished, tmp_path):
    show(driver, finished[0])
    board = driver.window.pages["runs"].charts
    driver.wait(lambda: "m0" in board._views and board.chart("m0")._lines)
    chart = board.chart("m0")
    chart.save_png(tmp_path / "m0.png")
    assert (tmp_path / "m0.png").read_bytes()[:4] == b"\x89PNG"
    for save in (chart.save_png, chart.save_csv):
        save(tmp_path / "absent" / "m0")
    failures = [notice for notice in driver.studio.notices.history if notice.level == "error"]
    assert ["cannot be written" in notice.text for notice in failures] == [True]
