"""Scripts, environments and readiness over HTTP and by the client, also of a runner that a package adds."""

import sys
from pathlib import Path

import pytest
from tests.runs.runners import example_runner
from tests.runs.runners.test_cleanrl import CHECKOUT
from tests.runs.runners.test_registry import install
from tests.runs.serving import service_thread

from palaestra.errors import ConfigError
from palaestra.runs import TrainerService
from palaestra.runs.catalogue import EnvironmentInfo, Readiness, ScriptInfo, TaskInfo
from palaestra.runs.play.spec import PlaySpec


def test_the_client_reads_the_catalogues(served):
    trainer = served.trainer

    scripts = trainer.runner_scripts("sb3")
    environments = trainer.environments("sb3")
    assert all(isinstance(info, ScriptInfo) for info in scripts)
    assert scripts[0].name == "ppo"
    assert {type(info) for info in environments} == {EnvironmentInfo}
    assert trainer.environments("sb3", refresh=True) == environments
    assert "miniwob/click-button" in {info.env_id for info in trainer.environments()}
    assert trainer.environment_parameters("FrozenLake-v1", "sb3")["properties"]["is_slippery"]["default"] is True
    assert trainer.environment_parameters("click_target/button")["properties"]["difficulty"]["maximum"] == 8
    assert trainer.runner_readiness("echo") == Readiness(
        level="ready", text="Nothing is missing", findings=trainer.runner_readiness("echo").findings
    )
    assert "gamma" in trainer.runner_schema("sb3", "ppo")["properties"]["algorithm"]["properties"]
    (button,) = [task for task in trainer.tasks() if task.task == "click_target/button"]
    assert (type(button), button.suite) == (TaskInfo, "click_target")


def test_the_client_sends_the_checkout_of_its_own_environment(served, monkeypatch):
    monkeypatch.delenv("PALAESTRA_CLEANRL", raising=False)
    with pytest.raises(ConfigError, match="no CleanRL checkout"):
        served.trainer.runner_scripts("cleanrl")
    assert served.trainer.runner_readiness("cleanrl").level == "missing"
    monkeypatch.setenv("PALAESTRA_CLEANRL", str(CHECKOUT))
    # The service has the environment of this test as well; the request must be enough without it.
    path = f"/runners/cleanrl/scripts?checkout={CHECKOUT}"
    names = [info.name for info in served.trainer.runner_scripts("cleanrl")]
    monkeypatch.delenv("PALAESTRA_CLEANRL")
    assert [row["name"] for row in served.ask("GET", path).json] == names
    assert "q_learning" in names


@pytest.mark.parametrize(
    ("path", "status", "part"),
    [
        ("/runners/ecko/scripts", 404, "Did you mean 'echo'?"),
        ("/runners/ecko/readiness", 404, "Did you mean 'echo'?"),
        ("/environments?runner=ecko", 404, "Did you mean 'echo'?"),
        ("/environments/CartPol-v1/parameters", 404, "CartPole-v1"),
        ("/environments/CartPol-v1/parameters?runner=ecko", 404, "Did you mean 'echo'?"),
        ("/environments/a/b/c/parameters", 404, "cannot be found"),
        ("/environments/CartPole-v1/parameters?python=/nowhere", 422, "virtualenv"),
        ("/environments?python=/nowhere", 422, "virtualenv"),
        ("/environments?python=%00", 422, "control character"),
        ("/environments?refresh=perhaps", 422, "refresh"),
        (f"/environments?runner={'x' * 201}", 422, "runner"),
        (f"/environments/{'x' * 301}/parameters", 422, "env_id"),
        ("/runners/cleanrl/scripts?checkout=/nowhere", 422, "is not a CleanRL checkout"),
    ],
)
def test_bad_input_is_refused_with_the_reason(served, path, status, part):
    answer = served.ask("GET", path)

    assert (answer.status, part in answer.body.decode()) == (status, True), answer.body


def test_readiness_answers_even_if_everything_is_missing(served):
    answer = served.ask("GET", "/runners/sb3/readiness?python=/nowhere").json

    assert (answer["level"], answer["remedy"]) == ("missing", "Give an interpreter or a virtualenv directory")


def test_a_runner_that_a_package_adds_needs_no_code_of_ours(home, tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    install(site, "example", Path(example_runner.__file__).read_text() + "\n    Runner = ExampleRunner\n")
    try:
        with service_thread(home):
            trainer = TrainerService(home)
            assert trainer.runners()["example"].offline_inference
            assert [info.name for info in trainer.runner_scripts("example")] == ["second"]
            assert [info.env_id for info in trainer.environments("example")] == ["CartPole-v1"]
            assert trainer.environment_parameters("CartPole-v1", "example")["properties"]["speed"]["default"] == 1.0
            assert trainer.runner_readiness("example").remedy == "Renew it"
            assert "steps" in trainer.runner_schema("example")["properties"]
            run_id = trainer.start_run({"steps": 10}, runner="example", script="second")
            assert trainer.wait(run_id, timeout_s=30).phase == "succeeded"
            (checkpoint,) = trainer.checkpoints(run=run_id)
            spec = PlaySpec(env_id="CartPole-v1", mode="agent", speed=100.0, checkpoint=checkpoint.checkpoint_id)
            play = trainer.start_play(spec)
            episode = _wait_for_episode(trainer, play.play_id)
            state = next(record for record in trainer.plays() if record.play_id == play.play_id).state
            trainer.stop_play(play.play_id)
    finally:
        sys.modules.pop("example_package", None)
    assert (episode.outcome, episode.human_steps, episode.agent_steps) == ("terminated", 0, episode.steps)
    assert (episode.policy, episode.checkpoint) == ("second, 10 steps", checkpoint.checkpoint_id)
    assert (state.policy.state, state.policy.notes) == ("ready", ("It learned little.",))
    steps = [step.report for step in _steps(home, episode)][1:]
    assert {(step.action, step.actor, step.outputs["value"]) for step in steps} == {(1, "agent", 0.5)}


def _wait_for_episode(trainer, play_id, timeout_s=60.0):
    import time

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        finished = [row for row in trainer.episodes(play=play_id) if row.outcome == "terminated"]
        if finished:
            return finished[-1]
        time.sleep(0.05)
    raise AssertionError("no episode has ended")


def _steps(home, episode):
    from palaestra.runs.play.episode import open_episode

    return open_episode(home, episode.episode_id).steps(0, 1000)
