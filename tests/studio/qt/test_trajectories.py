"""The pages of trajectories and of recorded episodes: list, search, open, step by keys, groups, export, delete."""

import hashlib

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QFileDialog
from tests.experience.episodes import SCREEN, SHA, episode, png, turn

from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.runs.spec import RunSpec

OTHER = png(shade=90)
OTHER_SHA = hashlib.sha256(OTHER).hexdigest()
DRAG = {"kind": "drag", "path": [[10, 20], [30, 40]], "button": "left"}


@pytest.fixture(scope="module")
def run(client, module_home):
    """A run with three recorded episodes on screens, two of them in one group."""
    run_id = client.submit(RunSpec(runner="echo", config={"steps": 1})).run_id
    client.wait(run_id, timeout_s=60)
    archive = TrajectoryArchive(module_home.run(run_id).attempt(1).trajectories)
    turns = (
        turn(text="I click the box"),
        turn(pictures=(OTHER_SHA,), action=DRAG, text="I drag it", reward=1.0),
        turn(unreadable="no action in it", text="hm"),
    )
    pictures = {SHA: SCREEN, OTHER_SHA: OTHER}
    archive.append(episode(*turns, episode_id="long", group="g", pictures=pictures, started_at=3.0))
    archive.append(episode(episode_id="short", group="g", outcome=Outcome.FAILURE, started_at=2.0))
    other_task = {"task": "suite/other", "seed": 1, "params": {}, "instruction": "Type a name."}
    archive.append(episode(episode_id="alone", task=other_task, started_at=1.0))
    return module_home.run(run_id)


@pytest.fixture
def driver(open_window, run):
    driver = open_window()
    driver.window.show_page("trajectories")
    driver.studio.browser.show(run.run_id)
    driver.wait(lambda: len(driver.studio.trajectories.model) == 3)
    driver.settle()
    return driver


def press(driver, key, widget):
    driver.window.activateWindow()
    driver.wait(lambda: QApplication.activeWindow() is driver.window)
    widget.setFocus()
    QTest.keyClick(widget, key)


def open_long(driver):
    """Open the episode of three turns from the list."""
    page, model = driver.window.pages["trajectories"], driver.studio.trajectories.model
    entry = next(one for one in model.visible() if one.episode_id == "long")
    page.list.setCurrentRow([one.file for one in model.visible()].index(entry.file))
    driver.wait(lambda: len(model.turns) == 3 and model.picture(SHA) is not None)
    driver.settle()
    return page.viewer


def test_episodes_are_listed_with_outcome_and_reward_and_searched(driver):
    page = driver.window.pages["trajectories"]
    driver.wait(lambda: page.list.count() == 3)
    assert {page.list.item(i).text().splitlines()[0] for i in range(3)} == {
        "click_target/one · seed 7",
        "suite/other · seed 1",
    }
    page._search.setText("failure")
    driver.wait(lambda: page.list.count() == 1)
    assert page.list.item(0).text().splitlines()[1] == "failure · reward 0"


def test_turns_are_stepped_through_by_keys_with_screen_reply_and_points(driver):
    viewer, model, page = open_long(driver), driver.studio.trajectories.model, driver.window.pages["trajectories"]
    assert viewer._turn.text() == "turn 1 of 3 · reward 0"
    assert viewer._reply.toPlainText().startswith("I click the box\naction: kind=click at=[60, 35]")
    assert "2 tokens, log-probability -1.000, policy version 4" in viewer._reply.toPlainText()
    assert viewer.screenshot._points == [(60.0, 35.0)]
    assert viewer.screenshot._image.width() == 160
    press(driver, Qt.Key.Key_Right, page.list)
    driver.wait(lambda: viewer._turn.text() == "turn 2 of 3 · reward 1")
    driver.wait(lambda: model.picture(OTHER_SHA) is not None)
    driver.wait(lambda: viewer.screenshot._points == [(10.0, 20.0), (30.0, 40.0)])
    press(driver, Qt.Key.Key_Right, page.list)
    press(driver, Qt.Key.Key_Right, page.list)
    driver.wait(lambda: viewer._turn.text().startswith("turn 3 of 3"))
    assert "unreadable: no action in it" in viewer._reply.toPlainText()
    press(driver, Qt.Key.Key_Left, page.list)
    driver.wait(lambda: model.turn == 1)
    assert not driver.window.grab().isNull()


def test_the_other_episodes_of_a_group_are_one_click_away(driver):
    viewer, model = open_long(driver), driver.studio.trajectories.model
    driver.wait(lambda: viewer._group.count() == 2)
    buttons = [viewer._group.itemAt(i).widget() for i in range(2)]
    assert sorted(button.text() for button in buttons) == ["failure 0", "● success 1"]
    driver.click(next(button for button in buttons if button.text() == "failure 0"))
    driver.wait(lambda: model.entry.episode_id == "short" and len(model.turns) == 1)
    driver.wait(lambda: viewer._outcome.text() == "failure")


def test_an_episode_whose_file_is_damaged_is_a_notice_and_the_others_can_be_opened(driver, run):
    model = driver.studio.trajectories.model
    entry = next(one for one in model.visible() if one.episode_id == "alone")
    path = run.path / entry.file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        driver.studio.trajectories.open(entry.file)
        driver.wait(lambda: any(text.startswith("The episode cannot be read") for text in driver.notices()))
    finally:
        path.write_bytes(whole)
    open_long(driver)


def test_a_run_without_episodes_says_so(driver, client):
    run_id = client.submit(RunSpec(runner="echo", config={"steps": 1})).run_id
    client.wait(run_id, timeout_s=60)
    driver.studio.browser.refresh()
    driver.wait(lambda: driver.studio.browser.runs.get(run_id) is not None)
    driver.studio.browser.show(run_id)
    page = driver.window.pages["trajectories"]
    driver.wait(lambda: page._empty.isVisible() and page._empty.text.text() == "This run has no episodes on screens.")


def test_recorded_episodes_are_stepped_played_exported_and_deleted_after_a_question(driver, tmp_path):
    session, library, page = driver.studio.session, driver.studio.episodes, driver.window.pages["episodes"]
    session.choose_environment("CartPole-v1")
    session.set_mode("agent")
    session.start(checkpoint="random")
    driver.wait(lambda: sum(step.is_last for step in session.play.steps) >= 2)
    session.end()
    play_id = session.play.play_id

    def finished():
        return [one for one in library.episodes.visible() if (one.play_id, one.outcome) == (play_id, "terminated")]

    driver.wait(lambda: len(finished()) >= 2)
    driver.window.show_page("episodes")
    driver.wait(lambda: page.list.count() == len(library.episodes))
    first, second = finished()[:2]
    rows = [page.list.item(i).data(Qt.ItemDataRole.UserRole).episode_id for i in range(page.list.count())]
    page.list.setCurrentRow(rows.index(first.episode_id))
    replay, player = library.replay, page.player
    driver.wait(lambda: len(replay.steps) == first.steps + 1 and player.picture.image is not None)
    press(driver, Qt.Key.Key_Right, page.list)
    press(driver, Qt.Key.Key_Right, page.list)
    driver.wait(lambda: player._step_text.text().startswith(f"step 2 of {first.steps} · agent"))
    press(driver, Qt.Key.Key_Left, page.list)
    driver.wait(lambda: replay.position == 1)
    driver.click(player._back)
    driver.wait(lambda: replay.position == 0)
    player._speed.setCurrentIndex(player._speed.count() - 1)
    player._speed.activated.emit(player._speed.count() - 1)
    driver.click(player._play)
    driver.wait(lambda: replay.position == first.steps and not replay.is_playing)
    player._ask_for_file()
    dialog = player.findChild(QFileDialog)
    dialog.fileSelected.emit(str(tmp_path / "episode.webm"))
    dialog.close()
    dialog.deleteLater()
    driver.wait(lambda: any("The video is in" in text for text in driver.notices()))
    assert (tmp_path / "episode.webm").read_bytes()[:4] == b"\x1a\x45\xdf\xa3"
    library.export(first.episode_id, tmp_path / "absent" / "episode.webm")
    driver.wait(lambda: any("The video was not saved" in text for text in driver.notices()))
    driver.click(player._delete)
    page.list.setCurrentRow(rows.index(second.episode_id))
    driver.wait(lambda: replay.record.episode_id == second.episode_id and player._delete.text() == "Delete")
    driver.click(player._delete)
    assert player._delete.text() == "Really delete?"
    driver.click(player._delete)
    driver.wait(lambda: second.episode_id not in [one.episode_id for one in library.episodes.visible()])
    assert first.episode_id in [one.episode_id for one in library.episodes.visible()]
    driver.wait(lambda: replay.record is None)
