"""From the form to a trained policy that plays, in the window: our own trainer, and a script of CleanRL's shape."""

import json
import sys
from pathlib import Path

import pytest
from PySide6.QtWidgets import QInputDialog, QLineEdit, QToolButton

from palaestra.errors import ConfigError
from palaestra.runs.client.client import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.play.state import PolicyStatus
from palaestra.runs.spec import RunSpec
from palaestra.studio.qt.docks.trained_panel import StatusCard
from palaestra.studio.qt.theme import DARK

QUICK = {"trainer": {"total_timesteps": 4096, "rollout_length": 128}, "env": {"num_envs": 4}}


@pytest.fixture
def driver(open_window):
    driver = open_window()
    driver.window.show_page("play")
    driver.studio.session.choose_environment("CartPole-v1")
    driver.studio.session.set_mode("agent")
    driver.window.session_dock.show_purpose("train")
    driver.wait(lambda: driver.studio.training.launch.draft.has_schema)
    driver.settle()
    return driver


def enter(driver, path, text):
    """Type into a field of the form."""
    editor = driver.window.train_panel.form.editor(path)
    assert isinstance(editor.input, QLineEdit)
    editor.input.setText(text)
    editor.input.textEdited.emit(text)


def launch(driver):
    """Check and launch what the form holds; returns the run id."""
    panel, model = driver.window.train_panel, driver.studio.training.launch
    driver.click(panel.check)
    driver.wait(lambda: model.stage == "checked" and not model.refusal)
    driver.wait(lambda: panel.launch.isEnabled())
    driver.click(panel.launch)
    driver.wait(lambda: model.launched != "")
    return model.launched


def test_training_controls_are_hidden_until_an_agent_acts(driver):
    driver.studio.session.set_mode("human")
    driver.wait(lambda: driver.window.train_panel.isHidden() and driver.window.session_dock.purpose.isHidden())
    driver.studio.session.set_mode("hybrid")
    driver.wait(lambda: not driver.window.train_panel.isHidden())


def test_the_editors_of_a_closed_group_are_made_when_it_is_opened(driver):
    form = driver.window.train_panel.form
    groups = driver.studio.training.launch.form.groups("")
    name, fields = next((name, fields) for name, fields in groups.items() if fields[0].path in form._unfilled)
    head = next(one for one in form.findChildren(QToolButton) if one.accessibleName() == f"Group {name}")
    made = len(form._editors)
    driver.click(head)
    assert len(form._editors) == made + len(fields)
    assert form.editor(fields[0].path).isVisibleTo(form)


def test_the_catalogue_lists_every_runner_with_its_readiness(driver):
    launch_model = driver.studio.training.launch
    driver.wait(lambda: set(launch_model.readiness) == set(launch_model.runners))
    assert {"palaestra", "cleanrl", "sb3", "echo"} <= set(launch_model.runners)
    assert launch_model.readiness["palaestra"].level == "ready"
    driver.settle()
    cards = driver.window.train_panel.catalogue._cards
    assert cards.count() == len(launch_model.runners)


def test_a_wrong_value_is_explained_beside_its_field_and_launch_stays_disabled(driver):
    enter(driver, "trainer.total_timesteps", "a lot")
    editor = driver.window.train_panel.form.editor("trainer.total_timesteps")
    driver.wait(lambda: "is not a whole number" in editor._problem.text())
    assert not driver.window.train_panel.launch.isEnabled()
    enter(driver, "trainer.total_timesteps", "-5")
    driver.wait(lambda: "must lie" in editor._problem.text())


def test_a_finding_of_the_preflight_is_shown_and_launch_stays_disabled(driver):
    driver.studio.training.launch.load_values({**QUICK, "trainer": {"total_timesteps": 4096, "device": "cuda:7"}})
    driver.click(driver.window.train_panel.check)
    launch_model = driver.studio.training.launch
    driver.wait(lambda: launch_model.stage == "checked")
    assert any(finding.level == "refused" for finding in launch_model.findings)
    assert launch_model.refusal.startswith("trainer.device ")
    driver.wait(lambda: not driver.window.train_panel.launch.isEnabled())


def test_a_policy_is_trained_watched_and_lets_its_checkpoint_play(driver):
    studio = driver.studio
    studio.training.launch.load_values(QUICK)
    run_id = launch(driver)
    driver.wait(lambda: studio.browser.runs.current == run_id)
    driver.wait(lambda: studio.browser.runs.get(run_id).phase is Phase.SUCCEEDED)
    driver.wait(lambda: any(studio.browser.charts.lines(name) for name in studio.browser.details.charts))

    studio.library.refresh()
    driver.window.session_dock.show_purpose("trained")

    def records():
        known = studio.library.checkpoints.for_warm_start("palaestra", "CartPole-v1")
        return [one for one in known if one.run_id == run_id]

    driver.wait(lambda: records())
    newest = records()[0].checkpoint_id
    studio.library.choose(newest)
    driver.settle()
    studio.library.activate(newest)
    play = studio.session.play
    driver.wait(lambda: play.state is not None and play.state.policy is not None)
    assert play.state.policy.checkpoint == newest
    driver.wait(lambda: play.last_step is not None and play.last_step.actor == "agent")
    assert len(play.last_step.outputs["probabilities"]) == 2

    studio.session.choose_environment("Pendulum-v1")
    groups = studio.library.checkpoints.groups("Pendulum-v1", studio.training.launch.runners, {})
    card = next(card for group in groups for card in group.cards if card.record.checkpoint_id == newest)
    assert "trained in CartPole-v1" in card.mismatch
    studio.library.switch_environment(newest)
    driver.wait(lambda: play.is_open and play.state is not None and play.state.policy is not None)
    assert studio.session.environments.chosen == "CartPole-v1"


def test_a_policy_that_cannot_be_loaded_is_explained_and_the_previous_one_stays(driver, client):
    studio = driver.studio
    studio.session.start(checkpoint="random")
    play = studio.session.play
    driver.wait(lambda: play.state is not None and play.state.policy is not None)
    driver.window.session_dock.show_purpose("trained")
    studio.library.activate("00000000deadbeef")
    driver.wait(lambda: studio.library.checkpoints.activating is not None)
    assert studio.library.checkpoints.activating.state == "failed"
    driver.wait(lambda: "could not be loaded" in driver.window.trained_panel._status._title.text())
    assert "previous policy goes on acting" in driver.window.trained_panel._status._text.text()
    assert play.state.policy.name == "random actions"


def test_a_run_is_stopped_from_the_header_with_a_second_click(driver):
    studio = driver.studio
    studio.training.launch.load_values({**QUICK, "trainer": {"total_timesteps": 50_000_000, "rollout_length": 128}})
    run_id = launch(driver)
    driver.wait(lambda: studio.browser.runs.get(run_id).phase is Phase.RUNNING)
    driver.window._right.show()
    header = driver.window.telemetry_dock.header
    driver.wait(lambda: header.isVisible() and header._stop.isVisible())
    driver.click(header._stop)
    assert header._stop.text() == "Really stop?"
    driver.click(header._stop)
    driver.wait(lambda: studio.browser.runs.get(run_id).phase is Phase.STOPPED)
    driver.wait(lambda: "operator" in header._reason.text() or "stop" in header._reason.text())


def test_a_policy_that_stopped_acting_is_not_said_to_be_replaced(qtbot):
    card = StatusCard(None, DARK)
    qtbot.addWidget(card)
    failed = PolicyStatus(state="failed", name="ppo", checkpoint="a", text="It was killed.")
    card.show_status(failed, None, has_stopped=True)
    assert (card._title.text(), card._text.text()) == ("ppo has stopped", "It was killed.")
    card.show_status(failed)
    assert (card._title.text(), card._text.text()) == ("ppo could not be loaded", "It was killed.")


def test_a_preset_with_a_slash_in_its_name_is_a_notice(driver):
    driver.studio.training.save_preset("quick/look")
    driver.wait(lambda: any("contains a slash" in text for text in driver.notices()))


def test_a_file_of_a_remote_service_is_imported_by_its_path(driver, monkeypatch):
    monkeypatch.setattr(TrainerService, "is_remote", property(lambda _: True))
    panel = driver.window.trained_panel
    panel._ask_for_file()
    question = panel.findChild(QInputDialog)
    question.setTextValue("/no/such/checkpoint.pt")
    question.accept()
    driver.wait(lambda: any(text.startswith("The file was not imported") for text in driver.notices()))


def test_the_first_run_on_a_remote_service_names_no_directory_of_this_machine(driver, monkeypatch):
    specs = []

    def refuse(_, spec):
        specs.append(spec)
        raise ConfigError("run", spec.name, "is not started in this test")

    monkeypatch.setattr(TrainerService, "is_remote", property(lambda _: True))
    monkeypatch.setattr(TrainerService, "submit", refuse)
    driver.studio.first_steps.train()
    driver.wait(lambda: specs)
    assert specs[0].invoked_from == Path("/")


def test_presets_are_kept_apart_and_survive_looking_at_another_runner(driver):
    training = driver.studio.training
    training.launch.load_values({"algorithm": {"learning_rate": 0.125}})
    training.save_preset("fast")
    driver.wait(lambda: "fast" in training.presets.names(training.preset_kind))
    training.choose_runner("sb3")
    driver.wait(lambda: training.launch.draft.has_schema)
    assert training.launch.form.text("algorithm.learning_rate") != "0.125"
    training.choose_runner("palaestra")
    assert training.launch.form.text("algorithm.learning_rate") == "0.125"
    training.launch.load_values({})
    training.load_preset("fast")
    assert training.launch.form.text("algorithm.learning_rate") == "0.125"
    training.delete_preset("fast")
    driver.wait(lambda: "fast" not in training.presets.names(training.preset_kind))


CLEANRL_SCRIPT = '''
"""A script of the shape of CleanRL's: tyro arguments, TensorBoard events, a network with `--save-model`."""
from dataclasses import dataclass
import time
import tyro
from torch.utils.tensorboard import SummaryWriter

@dataclass
class Args:
    exp_name: str = "tiny"
    seed: int = 1
    torch_deterministic: bool = True
    cuda: bool = True
    track: bool = False
    wandb_project_name: str = "cleanRL"
    wandb_entity: str | None = None
    capture_video: bool = False
    env_id: str = "CartPole-v1"
    total_timesteps: int = 500
    learning_rate: float = 0.01

if __name__ == "__main__":
    args = tyro.cli(Args)
    writer = SummaryWriter(f"runs/{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    for step in range(0, args.total_timesteps, 50):
        writer.add_scalar("charts/episodic_return", step / 10, step)
        print(f"global_step={step}, episodic_return=[{step / 10}]", flush=True)
    writer.close()
'''


def test_a_script_of_cleanrls_shape_asks_for_consent_before_it_is_launched(driver, tmp_path, monkeypatch):
    checkout = tmp_path / "cleanrl"
    (checkout / "cleanrl").mkdir(parents=True)
    (checkout / "cleanrl" / "tiny.py").write_text(CLEANRL_SCRIPT)
    studio = driver.studio
    spec = RunSpec(runner="cleanrl", script="tiny", env_id="CartPole-v1", checkout=str(checkout), python=sys.executable)
    model = studio.training.launch
    model.choose_runner("cleanrl")
    preview = driver.studio.feed.service.prepare_training(spec)
    model.begin_check()
    model.finish_check(preview)
    if preview.command is None:
        pytest.fail(json.dumps([finding.text for finding in preview.findings]))
    assert model.refusal == "Agree to the command first"
    driver.wait(lambda: driver.window.train_panel.preflight._consent.isVisible())
    assert "tiny.py" in driver.window.train_panel.preflight._command.toPlainText()
    driver.window.train_panel.preflight._consent.setChecked(True)
    assert model.refusal == ""
    record = driver.studio.feed.service.submit(spec, preview.digest, preview.run_id)
    studio.browser.runs.update(record)
    studio.browser.show(record.run_id)
    driver.wait(lambda: studio.browser.runs.get(record.run_id).phase is Phase.SUCCEEDED)
    driver.wait(lambda: bool(studio.browser.charts.lines("episode/return")))


def test_first_steps_lead_from_nothing_to_a_playing_policy(open_window):
    driver = open_window()
    assert driver.window._stack.currentWidget() is driver.window.pages["welcome"]
    steps = driver.studio.first_steps
    steps.train()
    driver.wait(lambda: steps.can_watch, 120_000)
    driver.settle()
    steps.watch()
    play = driver.studio.session.play
    driver.wait(lambda: play.last_step is not None and play.last_step.actor == "agent")
    assert not steps.is_needed


def test_the_last_of_the_first_steps_trains_a_table_and_draws_its_values_on_the_cells(open_window):
    driver = open_window()
    steps, play = driver.studio.first_steps, driver.studio.session.play
    steps.train_lake()
    driver.wait(lambda: play.last_step is not None and play.last_step.grid and play.last_step.grid.values, 120_000)
    assert driver.studio.session.environments.chosen == "FrozenLake8x8-v1"
    grid = play.last_step.grid
    assert (len(grid.values), grid.moves) == (64, ("left", "down", "right", "up"))
    picture, bar = driver.window.play_page.picture, driver.window.play_page.bar
    driver.window.show_page("play")
    driver.wait(lambda: bar.values.isVisible() and picture._cells is not None and picture._cells.values)
    assert picture._with_values
    driver.click(bar.values)
    driver.wait(lambda: not picture._with_values and not bar.values.isChecked())
