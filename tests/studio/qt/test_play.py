"""Playing in the window: by keyboard, by an agent, together, step by step; replayed afterwards."""

import os
import signal
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QFocusEvent
from PySide6.QtWidgets import QApplication

from palaestra.studio.model.settings import Settings


def start(driver, env_id, mode="human", **options):
    driver.studio.session.choose_environment(env_id)
    driver.studio.session.set_mode(mode)
    driver.window.show_page("play")
    driver.studio.session.start(**options)
    driver.wait(lambda: driver.studio.session.play.last_step is not None)


def wait_for_episode(driver, outcome):
    """The newest recorded episode of the play of the window with this outcome."""
    play_id = driver.studio.session.play.play_id

    def records():
        episodes = driver.studio.episodes.episodes.visible()
        return [one for one in episodes if one.play_id == play_id and one.outcome == outcome]

    driver.wait(records)
    return records()[0]


@pytest.fixture
def driver(open_window):
    return open_window()


def test_arrow_keys_push_the_cart_and_the_steps_are_listed(driver):
    start(driver, "CartPole-v1")
    picture, play = driver.window.play_page.picture, driver.studio.session.play
    assert driver.studio.session.play.state.waiting == "move"
    driver.wait(lambda: picture.image is not None)
    picture.setFocus()
    driver.qtbot.keyPress(picture, Qt.Key.Key_Right)
    driver.wait(lambda: play.last_step.step >= 3)
    driver.qtbot.keyRelease(picture, Qt.Key.Key_Right)
    assert {step.action for step in play.steps if step.step > 0} == {1}
    driver.window.play_page.toggle_steps()
    table = driver.window.play_page.steps._table
    driver.wait(lambda: table.rowCount() >= 3)
    assert table.item(0, 1).text() in ("you", "–")
    assert "push right" in {table.item(i, 2).text() for i in range(table.rowCount())}


def test_a_mouse_button_on_a_choice_acts_while_it_is_held(driver):
    start(driver, "CartPole-v1")
    controls = driver.window.play_page.controls
    driver.wait(lambda: controls.isVisible() and controls._flow.count() == 2)
    button = controls._flow.itemAt(0).widget()
    driver.qtbot.mousePress(button, Qt.MouseButton.LeftButton)
    driver.wait(lambda: driver.studio.session.play.last_step.step >= 2)
    driver.qtbot.mouseRelease(button, Qt.MouseButton.LeftButton)
    assert driver.studio.session.play.last_step.action in (0, None)


def test_a_slider_moves_one_number_of_the_action(driver):
    start(driver, "Pendulum-v1")
    controls = driver.window.play_page.controls
    driver.wait(lambda: controls.isVisible() and controls._flow.count() == 1)
    driver.studio.session.send(driver.studio.session.play.input.set_axis(0, 1.5))
    driver.wait(lambda: driver.studio.session.play.last_step.action == [1.5])
    driver.studio.session.send(driver.studio.session.play.input.set_axis(0, None))
    driver.wait(lambda: driver.studio.session.play.last_step.action == [0.0])


def test_a_toy_world_is_drawn_as_cells_or_as_its_picture(driver):
    start(driver, "FrozenLake-v1", "agent", checkpoint="random")
    picture = driver.window.play_page.picture
    driver.wait(lambda: picture._cells is not None)
    assert picture._cells.columns == 4
    driver.window.play_page.toggle_grid()
    driver.wait(lambda: picture._cells is None)


def test_pause_single_step_speed_and_reset_from_the_bar(driver):
    start(driver, "Pendulum-v1")
    session = driver.studio.session
    driver.window.commands.get("play.pause").perform()
    driver.wait(lambda: session.play.state.paused)
    before = session.play.last_step.step
    driver.window.commands.get("play.step").perform()
    driver.wait(lambda: session.play.last_step.step > before)
    driver.window.commands.get("play.faster").perform()
    driver.wait(lambda: session.play.state.speed == 2.0)
    driver.window.commands.get("play.reset").perform()
    driver.wait(lambda: session.play.last_step.episode == 2)


def test_in_hybrid_mode_a_held_key_overrides_the_agent_and_who_acted_is_recorded(driver):
    start(driver, "Pendulum-v1", "hybrid", checkpoint="random")
    session, picture = driver.studio.session, driver.window.play_page.picture
    driver.wait(lambda: session.play.last_step.actor == "agent")
    picture.setFocus()
    driver.qtbot.keyPress(picture, Qt.Key.Key_Right)
    driver.wait(lambda: session.play.last_step.actor == "human" and session.play.last_step.action == [2.0])
    driver.qtbot.keyRelease(picture, Qt.Key.Key_Right)
    driver.wait(lambda: session.play.last_step.actor == "agent")
    driver.window.commands.get("play.hand_over").perform()
    driver.wait(lambda: session.play.state.control == "human")
    driver.window.commands.get("play.end").perform()
    driver.wait(lambda: session.play.ended is not None)
    record = wait_for_episode(driver, "stopped")
    assert record.human_steps > 0
    assert record.agent_steps > 0


def test_losing_the_focus_releases_all_keys(driver):
    start(driver, "Pendulum-v1")
    picture, person = driver.window.play_page.picture, driver.studio.session.play.input
    picture.setFocus()
    driver.qtbot.keyPress(picture, Qt.Key.Key_Left)
    driver.wait(lambda: driver.studio.session.play.last_step.action == [-2.0])
    # Windows without a display are never active, so the focus cannot really move.
    QApplication.sendEvent(picture, QFocusEvent(QEvent.Type.FocusOut))
    driver.wait(lambda: driver.studio.session.play.last_step.action == [0.0])
    assert person.pressed_keys == ()


def test_tab_belongs_to_the_environment_and_escape_leaves_the_picture(driver):
    start(driver, "CartPole-v1")
    picture = driver.window.play_page.picture
    pressed = []
    picture.key_pressed.connect(lambda name, *_: pressed.append(name))
    picture.setFocus()
    driver.qtbot.keyClick(picture, Qt.Key.Key_Tab)
    assert (pressed, driver.window.focusWidget()) == (["Tab"], picture)
    driver.qtbot.keyClick(picture, Qt.Key.Key_Escape)
    assert (pressed, driver.window.focusWidget()) == (["Tab"], None)


def test_an_environment_that_does_not_exist_is_explained_in_the_page(driver):
    driver.window.show_page("play")
    driver.studio.session.choose_environment("NoSuchGame-v3")
    driver.studio.session.start()
    driver.wait(lambda: driver.studio.session.play.problem != "")
    empty = driver.window.play_page._empty
    driver.wait(lambda: empty.title.text() == "The play could not be started")
    assert "no environment has this name" in empty.text.text().lower()
    driver.studio.session.choose_environment("CartPole-v1")


def test_a_killed_worker_is_reported_with_a_way_to_start_again(driver):
    start(driver, "Pendulum-v1")
    record = driver.studio.feed.service.plays()[0]
    os.kill(record.pid, signal.SIGKILL)
    driver.wait(lambda: driver.studio.session.play.ended is not None)
    notice = next(one for one in driver.studio.notices.visible() if one.action == "Start again")
    assert "killed by signal 9" in notice.text
    notice.perform()
    driver.wait(lambda: driver.studio.session.play.is_open and driver.studio.session.play.last_step is not None)


def test_a_recorded_episode_is_replayed_step_by_step_and_exported(driver, tmp_path):
    start(driver, "CartPole-v1", "agent", checkpoint="random")
    session = driver.studio.session
    driver.wait(lambda: any(step.is_last for step in session.play.steps))
    session.end()
    driver.wait(lambda: session.play.ended is not None)
    record = wait_for_episode(driver, "terminated")
    driver.window.show_page("episodes")
    page = driver.window.pages["episodes"]
    driver.settle()
    row = next(i for i in range(page.list.count()) if page.list.item(i).data(Qt.ItemDataRole.UserRole) == record)
    page.list.setCurrentRow(row)
    replay = driver.studio.episodes.replay
    driver.wait(lambda: len(replay.steps) == record.steps + 1 and page.player.picture.image is not None)
    page.player.scrubber.setValue(record.steps)
    driver.wait(lambda: replay.position == record.steps)
    assert replay.step.report.is_last
    replay.toggle()
    driver.wait(lambda: replay.position == record.steps and not replay.is_playing)
    video = tmp_path / "episode.webm"
    driver.studio.episodes.export(record.episode_id, video)
    driver.wait(lambda: any("The video is in" in text for text in driver.notices()))
    assert video.read_bytes()[:4] == b"\x1a\x45\xdf\xa3"
    page.player._delete_episode()
    driver.wait(lambda: record not in driver.studio.episodes.episodes.visible())


def test_layout_theme_and_the_last_choices_survive_a_restart(open_window, tmp_path):
    path = tmp_path / "studio.json"
    first = open_window(Settings(path))
    first.studio.session.choose_environment("Taxi-v4")
    first.studio.session.set_mode("hybrid")
    first.window.show_page("runs")
    first.window.change_theme()
    first.window.close()
    again = open_window(Settings(path), theme="")
    assert again.studio.session.environments.chosen == "Taxi-v4"
    assert again.studio.session.mode == "hybrid"
    assert again.window.theme.name == "light"
    assert again.window._stack.currentWidget() is again.window.pages["runs"]


def test_every_shortcut_is_in_the_documentation(driver):
    page = (Path(__file__).parents[3] / "docs" / "studio.md").read_text()
    shortcuts = [command.shortcut for command in driver.window.commands if command.shortcut]
    assert len(shortcuts) > 15
    assert [shortcut for shortcut in shortcuts if f"`{shortcut}`" not in page] == []
