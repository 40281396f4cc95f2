"""The tab of beliefs: shown only for runners that report them, live, and back in time."""

import pytest

from palaestra.runs.runner import RunnerCapabilities
from palaestra.runs.spec import RunSpec
from palaestra.telemetry.event import Belief
from palaestra.telemetry.journal import Journal

BELIEFS = {"beliefs": ["at(0,0)"], "intentions": [{"goal": "reach(3,3)", "plan": "walk"}], "plan": "walk"}


@pytest.fixture
def run_id(client):
    run_id = client.submit(RunSpec(runner="echo", config={"steps": 3})).run_id
    client.wait(run_id, timeout_s=60)
    return run_id


def add_beliefs(module_home, run_id, *beliefs):
    with Journal(module_home.run(run_id).attempt(1).journal) as journal:
        journal.emit_many(Belief("walker", one) for one in beliefs)


def declare_beliefs(driver):
    """Let the runner of the tests report beliefs."""
    driver.wait(lambda: driver.studio.training.launch.runners)
    driver.studio.training.launch.set_runners({"echo": RunnerCapabilities(title="Echo", live_beliefs=True)})


def is_tab_visible(driver):
    dock = driver.window.telemetry_dock
    return dock.tabs.isTabVisible(dock.tabs.indexOf(dock.beliefs))


def show_run(driver, run_id):
    driver.studio.settings.set("right_dock", True)
    driver.window.show_page("play")
    driver.studio.browser.show(run_id)
    driver.settle()


def test_the_tab_is_hidden_while_the_runner_is_unknown_or_reports_no_beliefs(open_window, run_id):
    driver = open_window()
    show_run(driver, run_id)
    driver.wait(lambda: driver.studio.training.launch.runners)
    assert not is_tab_visible(driver)
    driver.studio.training.launch.set_runners({})
    driver.settle()
    assert not is_tab_visible(driver)


def test_beliefs_appear_as_they_are_written_and_new_ones_are_marked(open_window, module_home, run_id):
    driver = open_window()
    declare_beliefs(driver)
    add_beliefs(module_home, run_id, {**BELIEFS, "confidence": 0.25, "episode": 1, "step": 0, "q_values": [[0, 1]]})
    show_run(driver, run_id)
    driver.wait(lambda: is_tab_visible(driver))
    dock = driver.window.telemetry_dock
    dock.tabs.setCurrentWidget(dock.beliefs)
    view = dock.beliefs
    driver.wait(lambda: view.beliefs.count() == 1)
    assert view.plan.text() == "walk"
    assert view.intentions.topLevelItem(0).text(0) == "reach(3,3)"
    assert view._confidence_text.text() == "25 %"
    assert view.values.isVisible()
    driver.studio.browser.beliefs.is_complete = False  # the run has ended; the test goes on writing
    add_beliefs(module_home, run_id, {**BELIEFS, "beliefs": ["at(0,0)", "at(0,1)"], "step": 1})
    driver.wait(lambda: view.beliefs.count() == 2)
    assert [view.beliefs.item(i).font().bold() for i in range(2)] == [False, True]
    assert view._confidence_text.text() == "unknown"
    assert not view._follow.isEnabled()
    view.history.setValue(0)
    driver.wait(lambda: view.beliefs.count() == 1)
    assert view._follow.isEnabled()
    driver.click(view._follow)
    driver.wait(lambda: view.beliefs.count() == 2)


def test_an_agent_that_has_reported_nothing_is_said_to_have_none(open_window, run_id):
    driver = open_window()
    declare_beliefs(driver)
    show_run(driver, run_id)
    driver.wait(lambda: is_tab_visible(driver))
    dock = driver.window.telemetry_dock
    dock.tabs.setCurrentWidget(dock.beliefs)
    driver.settle()
    assert dock.beliefs._empty.isVisible()
