"""Choosing a dataset in the form: those of the environment, their integrity, and the spec of the run."""

import pytest
from PySide6.QtCore import Qt
from tests.experience.datasets.samples import make_dataset

from palaestra.studio.qt.views.form_view import DatasetEditor

FITTING, DAMAGED, OTHER = "cartpole/medium-v0", "cartpole/torn-v0", "pendulum/medium-v0"


@pytest.fixture(scope="module")
def datasets(module_home):
    root = module_home.datasets
    make_dataset(root, FITTING, env_id="CartPole-v1")
    make_dataset(root, OTHER, env_id="Pendulum-v1")
    torn = make_dataset(root, DAMAGED, env_id="CartPole-v1")
    data = next(torn.path.rglob("*.hdf5"))
    data.write_bytes(data.read_bytes()[:-1])
    return root


@pytest.fixture
def driver(open_window, datasets):
    driver = open_window()
    driver.window.show_page("play")
    driver.studio.session.choose_environment("CartPole-v1")
    driver.studio.session.set_mode("agent")
    driver.window.session_dock.show_purpose("train")
    driver.wait(lambda: driver.studio.training.launch.draft.has_schema)
    driver.studio.training.choose_script("iql")
    driver.wait(lambda: driver.studio.training.launch.draft.has_schema and driver.studio.training.datasets.all)
    driver.settle()
    return driver


def dataset_editor(driver):
    editor = driver.window.train_panel.form.editor("dataset.id")
    assert isinstance(editor, DatasetEditor)
    return editor


def choose(driver, dataset_id):
    box = dataset_editor(driver).input
    box.setCurrentIndex(box.findData(dataset_id))
    box.activated.emit(box.currentIndex())
    driver.settle()


def enabled_entries(driver):
    box = dataset_editor(driver).input
    return {box.itemData(i): box.model().item(i).isEnabled() for i in range(box.count())}


def test_only_whole_datasets_of_the_chosen_environment_can_be_chosen(driver):
    assert enabled_entries(driver) == {"": True, FITTING: True, DAMAGED: False, OTHER: False}
    box = dataset_editor(driver).input
    reason = box.itemData(box.findData(OTHER), Qt.ItemDataRole.ToolTipRole)
    assert reason == "Collected in Pendulum-v1"
    driver.studio.session.choose_environment("Pendulum-v1")
    driver.wait(lambda: enabled_entries(driver) == {"": True, OTHER: True, FITTING: False, DAMAGED: False})


def test_the_chosen_dataset_shows_its_integrity_and_becomes_part_of_the_run(driver):
    choose(driver, FITTING)
    editor, launch = dataset_editor(driver), driver.studio.training.launch
    assert editor.badge.text() in ("not verified", "verified")
    assert launch.form.changes()["dataset"] == {"id": FITTING}
    driver.click(editor.verify)
    driver.wait(lambda: editor.badge.text() == "verified")
    choose(driver, "")
    assert "dataset" not in launch.form.changes()
    assert editor.badge.isHidden()


def test_a_damaged_dataset_in_a_preset_is_shown_with_its_reason(driver):
    driver.studio.training.launch.load_values({"dataset": {"id": DAMAGED}})
    driver.settle()
    editor = dataset_editor(driver)
    assert editor.badge.text() == "damaged"
    assert editor._problem.text() == driver.studio.training.datasets.get(DAMAGED).problem
    assert editor._problem.isVisible()


def test_a_dataset_that_the_service_does_not_have_is_kept_and_called_unknown(driver):
    driver.studio.training.launch.load_values({"dataset": {"id": "gone/v0"}})
    driver.settle()
    editor = dataset_editor(driver)
    assert editor.input.currentText() == "gone/v0 (unknown)"
    assert driver.studio.training.launch.form.changes()["dataset"] == {"id": "gone/v0"}


def test_algorithms_that_learn_from_their_own_steps_ask_for_no_dataset(driver):
    driver.studio.training.choose_script("q_learning")
    launch = driver.studio.training.launch
    driver.wait(lambda: launch.script == "q_learning" and launch.draft.has_schema)
    assert not launch.form.has_kind("dataset")
