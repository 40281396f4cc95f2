"""What is drawn: pages as pictures, small worlds as cells, and the screen of a task with its pointer."""

import pytest
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QColor, QImage, QKeyEvent
from PySide6.QtWidgets import QApplication, QLabel

from palaestra.errors import ConfigError
from palaestra.runs.play.state import CellGrid
from palaestra.studio.qt.application import take_screenshot
from palaestra.studio.qt.pages.play_page import format_outputs
from palaestra.studio.qt.theme import DARK
from palaestra.studio.qt.views.cell_painter import best_actions
from palaestra.studio.qt.views.render_view import RenderView


@pytest.mark.parametrize(("page", "theme"), [("runs", "light"), ("shortcuts", "dark"), ("trained", "dark")])
def test_a_page_is_drawn_into_a_file(qtbot, client, tmp_path, page, theme):
    path = tmp_path / "page.png"
    take_screenshot(client, path, page, theme)
    picture = QImage(str(path))
    assert (picture.width(), picture.height()) == (1440, 900)
    colours = {picture.pixelColor(x, y).name() for x in range(0, 1440, 40) for y in range(0, 900, 40)}
    assert len(colours) > 3


def test_a_page_that_does_not_exist_and_a_file_that_cannot_be_written_are_refused(qtbot, client, tmp_path):
    with pytest.raises(ConfigError, match="There are welcome, play, runs"):
        take_screenshot(client, tmp_path / "page.png", "nowhere", "dark")
    with pytest.raises(ConfigError, match="cannot be written"):
        take_screenshot(client, tmp_path / "absent" / "page.png", "welcome", "dark")


def test_no_text_of_the_first_page_is_cut_off(open_window):
    driver = open_window()
    driver.window.resize(1440, 900)
    driver.window.show_page("welcome")
    driver.settle()
    texts = [text for text in driver.window.pages["welcome"].findChildren(QLabel) if text.text()]
    assert len(texts) > 8
    for text in texts:
        needed = text.heightForWidth(text.width()) if text.hasHeightForWidth() else text.sizeHint().height()
        assert text.height() >= needed, text.text()


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"])
def test_a_small_world_is_drawn_as_cells_of_different_colours(open_window, env_id):
    driver = open_window()
    driver.studio.session.choose_environment(env_id)
    driver.studio.session.set_mode("human")
    driver.window.show_page("play")
    driver.studio.session.start()
    picture = driver.window.play_page.picture
    driver.wait(lambda: picture._cells is not None)
    image = picture.grab().toImage()
    colours = {image.pixelColor(x, y).name() for x in range(0, image.width(), 8) for y in range(0, image.height(), 8)}
    assert len(colours) >= 3


VALUED = CellGrid(
    columns=2,
    cells=("start", "ice", "hole", "goal"),
    agent=0,
    moves=("left", "down", "right", "up"),
    values=((0.0, 0.0, 0.5, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0,) * 4, (0.0,) * 4),
)


def test_cells_are_tinted_by_their_value_and_only_where_an_action_is_preferred(qtbot):
    view = RenderView(DARK)
    qtbot.addWidget(view)
    view.resize(224, 224)  # cells of 100 pixels and a margin of 12

    def colours():
        image = view.grab().toImage()
        return [image.pixelColor(12 + x, 12 + y).name() for x, y in ((8, 92), (108, 8), (8, 108), (108, 108))]

    view.show_cells(VALUED, with_values=False)
    plain = colours()
    view.show_cells(VALUED)
    tinted = colours()
    assert tinted[1] != plain[1]
    assert (tinted[0], *tinted[2:]) == (plain[0], *plain[2:])  # the lowest value, the hole and the goal


def test_the_best_actions_of_a_cell_are_all_that_share_the_highest_value():
    assert best_actions([0.0, 2.0, 1.0]) == [1]
    assert best_actions([2.0, 0.0, 2.0]) == [0, 2]
    assert best_actions([1.0, 1.0, 1.0]) == []


@pytest.fixture
def view(qtbot):
    """A screen of 100 by 50 pixels, shown larger."""
    view = RenderView(DARK)
    qtbot.addWidget(view)
    view.resize(400, 300)
    image = QImage(100, 50, QImage.Format.Format_RGB32)
    image.fill(QColor("white"))
    view.show_frame(image)
    view.show()
    return view


def test_a_click_is_reported_in_the_pixels_of_the_screen(qtbot, view):
    centre = view.rect().center()
    with qtbot.waitSignal(view.clicked) as clicked:
        qtbot.mouseClick(view, Qt.MouseButton.LeftButton, pos=centre)
    x, y, button, times = clicked.args
    assert (abs(x - 50) <= 1, abs(y - 25) <= 1, button, times) == (True, True, "left", 1)


def test_a_click_beside_the_screen_is_not_reported(qtbot, view):
    with qtbot.assertNotEmitted(view.clicked):
        qtbot.mouseClick(view, Qt.MouseButton.LeftButton, pos=QPoint(200, 2))


def test_a_drag_is_reported_with_both_ends(qtbot, view):
    centre = view.rect().center()
    with qtbot.waitSignal(view.dragged) as dragged:
        qtbot.mousePress(view, Qt.MouseButton.LeftButton, pos=centre)
        qtbot.mouseRelease(view, Qt.MouseButton.LeftButton, pos=centre + QPoint(80, 0))
    first_x, first_y, last_x, last_y = dragged.args
    assert last_x - first_x > 10
    assert first_y == last_y


@pytest.mark.parametrize(
    ("key", "text", "name"),
    [(0xC9, "é", "é"), (0x424, "ф", "ф"), (0, "ç", "ç"), (Qt.Key.Key_A, "A", "a"), (Qt.Key.Key_F7, "", None)],
)
def test_printable_characters_of_every_script_are_reported(qtbot, view, key, text, name):
    reported = []
    view.key_pressed.connect(lambda *values: reported.append(values))
    QApplication.sendEvent(view, QKeyEvent(QEvent.Type.KeyPress, key, Qt.KeyboardModifier.NoModifier, text))
    assert reported == ([] if name is None else [(name, text, [])])


def test_outputs_that_are_not_numbers_are_shown_as_they_are():
    outputs = {"names": ["a"], "nothing": [None], "nested": [[1.0, 2.0]], "values": [1, 0.123], "is_sure": [True]}
    assert format_outputs(outputs) == (
        "names [a] · nothing [None] · nested [[1.0, 2.0]] · values [1.00, 0.12] · is_sure [True]"
    )
