"""`palaestra.train`, `evaluate` and `load` as a notebook calls them."""

import asyncio
import io
import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

import palaestra as pal
from palaestra.api.event_loop import call_outside_event_loop
from palaestra.cli import main
from palaestra.env.toy import MixedSenses
from palaestra.errors import CheckpointError, ConfigError, UnknownEnvironment
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.telemetry.event import PhaseChanged
from palaestra.telemetry.journal import JournalReader

SMALL = {"env.num_envs": 2, "trainer.rollout_length": 32, "algorithm.batch_size": 32, "algorithm.n_epochs": 1}


class Corridor(gymnasium.Env):
    """Ten squares; action 1 goes right, and the right end pays 1."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=10):
        self._length, self._at, self._steps = length, 0, 0

    def _observation(self):
        return np.array([self._at / self._length], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = self._steps = 0
        return self._observation(), {}

    def step(self, action):
        self._steps += 1
        self._at = max(0, self._at + (1 if action == 1 else -1))
        done = self._at >= self._length
        return self._observation(), float(done), done, self._steps >= 100, {}


@pytest.fixture
def run():
    return pal.train("CartPole-v1", steps=256, seed=3, settings=SMALL, name="small")


def test_a_run_of_an_environment_id_has_its_steps_its_history_and_a_policy(run):
    assert run.steps == 256  # 4 updates of 32 steps in 2 environments
    assert [metrics["env_step"] for metrics in run.history] == [64, 128, 192, 256]
    assert run.config["trainer"]["seed"] == 3
    assert run.run_id.startswith("small-")
    observation = np.zeros(4)
    assert run.policy.predict(observation) in (0, 1)
    assert run.policy.predict(np.zeros((5, 4))).shape == (5,)
    assert isinstance(run.policy.predict(observation), int)


def test_a_run_made_in_python_is_listed_by_the_command_line(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["palaestra", "runs", "list", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run_id"], row["phase"]) == (run.run_id, "succeeded")


def test_the_default_rollout_gives_a_short_run_enough_updates_and_a_configuration_stays_as_it_is():
    assert pal.train("CartPole-v1", steps=2048).config["trainer"]["rollout_length"] == 256
    given = {"env": {"id": "CartPole-v1", "num_envs": 1}, "trainer": {"total_timesteps": 2048}}
    assert pal.train(given).config["trainer"]["rollout_length"] == 2048
    assert given == {"env": {"id": "CartPole-v1", "num_envs": 1}, "trainer": {"total_timesteps": 2048}}


def test_a_configuration_file_is_kept_as_it_was_given(tmp_path):
    path = tmp_path / "small.yaml"
    text = "env: {id: CartPole-v1, num_envs: 2}\nalgorithm: {batch_size: 32}\ntrainer: {rollout_length: 32}\n"
    path.write_text(text)
    run = pal.train(str(path), steps=64)
    assert run.steps == 64
    assert run.directory.config.read_text() == text


def test_a_saved_policy_acts_and_scores_as_the_run_it_was_copied_from(run, tmp_path):
    saved = run.save(tmp_path / "kept")
    copy = pal.load(saved)
    observations = np.random.default_rng(0).normal(size=(20, 4))
    assert (copy.policy.predict(observations) == run.policy.predict(observations)).all()
    one, other = (pal.evaluate(each, episodes=5, seed=7, device="cpu") for each in (run, copy))
    assert one.returns == other.returns
    low, high = one.ci95
    assert low <= one.mean_return <= high
    assert (copy.history, copy.directory) == ([], None)
    with pytest.raises(CheckpointError, match="exists and is never overwritten"):
        run.save(saved)


def test_a_run_is_loaded_by_the_beginning_of_its_id_and_continued_to_more_steps(run):
    again = pal.train(pal.load("small"), steps=384)
    assert again.run_id == run.run_id
    assert len(again.directory.attempts()) == 2
    assert [metrics["update"] for metrics in again.history] == [1, 2, 3, 4, 5, 6]
    assert read_unsupervised(again.directory).total_steps == 384


def test_a_name_for_a_run_that_is_continued_is_refused_with_what_to_do_instead(run):
    with pytest.raises(ConfigError, match=rf"train\(name\) = 'long': run {run.run_id} is continued .* warm_start=run"):
        pal.train(run, steps=384, name="long")
    assert len(run.directory.attempts()) == 1


def test_a_callback_sees_every_update_and_ends_the_training_with_a_checkpoint():
    seen = []

    def stop_at_128(metrics):
        seen.append(metrics["env_step"])
        return metrics["env_step"] < 128

    counted = []
    run = pal.train("CartPole-v1", steps=256, settings=SMALL, callback=[stop_at_128, counted.append])
    assert seen == [64, 128]
    assert (run.steps, run.interrupted, len(counted)) == (128, False, 2)
    events = [record.event for record in JournalReader(run.directory.attempts()[0].journal).read()]
    assert events[-1] == PhaseChanged("stopped", "ended by a callback")


@pytest.mark.parametrize(("answer", "steps"), [(np.bool_(False), 64), (False, 64), (0, 256), (None, 256)])
def test_only_a_false_of_python_or_numpy_ends_the_training(answer, steps):
    assert pal.train("CartPole-v1", steps=256, settings=SMALL, callback=lambda metrics: answer).steps == steps


def test_an_error_in_a_callback_is_raised_as_it_is():
    def fail(metrics):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        pal.train("CartPole-v1", steps=256, settings=SMALL, callback=fail)


def test_a_class_of_an_environment_is_named_by_its_address_and_learned():
    run = pal.train(Corridor, steps=8192, settings={"algorithm.learning_rate": 3e-3, "trainer.rollout_length": 128})
    assert run.config["env"]["id"] == f"{__name__}:Corridor"
    assert pal.evaluate(run, episodes=10).mean_return == 1.0
    assert run.policy.predict(np.array([0.5], np.float32)) == 1


def test_a_function_without_an_address_works_in_this_process_and_can_be_given_again_in_another(tmp_path):
    run = pal.train(lambda: Corridor(3), steps=64, settings=SMALL)
    assert run.config["env"]["vectorization"] == "in_process"
    assert pal.evaluate(run, episodes=2).lengths
    name = run.config["env"]["id"].partition(":")[2]
    assert name.startswith("lambda_")
    code = f"""
import palaestra as pal
from palaestra.env.toy import Countdown as Corridor
from palaestra.errors import UnknownEnvironment
try:
    pal.load({run.run_id!r}).policy
except UnknownEnvironment as error:
    print(error)
print(pal.load({run.run_id!r}, env=Corridor).policy.predict([0.5]) in (0, 1))
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "palaestra.load(…, env=function)" in lines[0]
    assert lines[1] == "True"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (Corridor(), "Give a function that makes one"),
        (3, "has type int, which makes no environment"),
        ("CartPoel-v1", "Nearest: CartPole-v1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_a_remedy(what, message, home):
    with pytest.raises(ConfigError, match=message):
        pal.train(what, steps=64)
    assert not home.runs.exists()


def test_a_checkpoint_that_was_copied_is_continued_only_as_a_new_run(run, tmp_path):
    copy = pal.load(run.save(tmp_path / "kept"))
    with pytest.raises(ConfigError, match="warm_start=run"):
        pal.train(copy, steps=512)
    warm = pal.train("CartPole-v1", steps=64, settings=SMALL, warm_start=copy)
    assert warm.run_id != run.run_id


def test_an_observation_of_another_shape_is_refused_with_both_shapes(run):
    with pytest.raises(ConfigError, match=r"has shape \(3,\), the observation space says \(4,\)"):
        run.policy.predict(np.zeros(3))


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ([0.0, np.nan, 0.0, np.inf], r"predict\(observation\)\[1\] = nan: is not finite"),
        (np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -np.inf]]), r"predict\(observation\)\[1, 3\] = -inf"),
        (np.array([0.0, 0.0, 1e300, 0.0]), r"predict\(observation\)\[2\] = 1e\+300: is not finite as float32"),
        ([0.0, None, 0.0, 0.0], r"predict\(observation\)\[1\] = None: is not finite as float32"),
        ([0.0, 0.0, 10**39, 0.0], r"predict\(observation\)\[2\] = 10{39}: is not finite as float32"),
        ([0.0, 0.0, 10**400, 0.0], r"predict\(observation\) = 'list': int too large to convert to float"),
        ({"speed": 1.0}, r"has shape \(\), the observation space says \(4,\)"),
    ],
)
def test_an_observation_that_is_not_finite_is_refused_with_its_place(run, observation, message):
    with pytest.raises(ConfigError, match=message):
        run.policy.predict(observation)


def test_an_observation_with_its_info_and_a_mask_without_a_choice_are_refused(run):
    observation = np.zeros(4, np.float32)
    with pytest.raises(ConfigError, match=r"observation, info = env\.reset\(\)"):
        run.policy.predict((observation, {}))
    with pytest.raises(ConfigError, match=r"has shape \(3,\); 1 observation needs 1 x 2"):
        run.policy.predict(observation, action_mask=[1, 1, 1])
    with pytest.raises(ConfigError, match="allows no action"):
        run.policy.predict(observation, action_mask=[0, 0])
    assert run.policy.predict(observation, action_mask=[0, 1]) == 1


def test_an_observation_with_other_keys_is_refused_with_the_missing_and_the_expected_ones():
    policy = pal.train(MixedSenses, steps=64, settings=SMALL).policy
    observation, _ = MixedSenses().reset(seed=0)
    assert policy.predict(observation).shape == (2,)
    misspelled = {**observation, "body": {"joints": np.zeros(2), "contct": np.ones(2)}}
    keys = "expected keys are 'body/contact', 'body/joints', 'camera', 'room'"
    with pytest.raises(ConfigError, match=f"lacks 'body/contact' and has 'body/contct', which is unknown; the {keys}"):
        policy.predict(misspelled)
    del observation["room"]
    with pytest.raises(ConfigError, match=f"'dict': the observation lacks 'room'; the {keys}"):
        policy.predict(observation)
    with pytest.raises(ConfigError, match=r"'list': the observation has type list, expected a dict with the keys"):
        policy.predict([1.0, 2.0])


def test_a_run_is_evaluated_in_another_environment_that_is_given(run):
    # Episodes of one step, whose return is 1.
    def short_pole():
        return gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1").unwrapped, 1)

    assert set(pal.evaluate(run, short_pole, episodes=3).returns) == {1.0}
    assert pal.evaluate(run, "CartPole-v1", episodes=3).returns == pal.evaluate(run, episodes=3).returns
    assert pal.evaluate(run.run_id, short_pole, episodes=3).lengths == (1, 1, 1)


def test_an_evaluation_ends_in_a_class_without_a_time_limit(monkeypatch):
    monkeypatch.setattr("palaestra.env.make.EPISODE_LIMIT", 30)
    run = pal.train(Corridor, steps=64, settings=SMALL)
    policy = run.policy.module
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()  # Both actions are equally likely, so it takes action 0 and stays at the left end.
    assert pal.evaluate(policy, f"{__name__}:Corridor", episodes=2).lengths == (30, 30)
    assert pal.evaluate(policy, Corridor, episodes=2).lengths == (30, 30)
    assert max(pal.evaluate(run.checkpoints[0], episodes=2).lengths) <= 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"episodes": "10"}, r"evaluate\(episodes\) = '10': must be a whole number"),
        ({"episodes": 2.5}, r"evaluate\(episodes\) = 2\.5: must be a whole number"),
        ({"seed": -1}, r"evaluate\(seed\) = -1: must be a whole number and at least 0"),
    ],
)
def test_numbers_that_an_evaluation_cannot_use_are_refused(run, arguments, message):
    with pytest.raises(ConfigError, match=message):
        pal.evaluate(run, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": ["algorithm.name=dqn"]}, "is not a dictionary with text as keys"),
        ({"callback": 3}, "has type int, which cannot be called"),
        ({"warm_start": 3}, "has type int, which names no run"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_before_a_run_is_made(arguments, message, home):
    before = set(home.runs.glob("*"))
    with pytest.raises(ConfigError, match=message):
        pal.train("CartPole-v1", steps=64, **arguments)
    assert set(home.runs.glob("*")) == before


def test_a_module_is_evaluated_in_the_environment_that_is_given(run):
    result = pal.evaluate(run.policy.module, "CartPole-v1", episodes=4, seed=1)
    assert len(result.returns) == 4
    assert pal.evaluate(run.policy, "CartPole-v1", episodes=4, seed=1).returns == result.returns
    with pytest.raises(ConfigError, match="a module has no environment of its own"):
        pal.evaluate(run.policy.module)


def test_unknown_runs_and_settings_name_what_is_near(run):
    with pytest.raises(ConfigError, match="no such run"):
        pal.load("other")
    with pytest.raises(ConfigError, match="learning_rate"):
        pal.train("CartPole-v1", settings={"algorithm.learning_rat": 1.0})
    with pytest.raises(UnknownEnvironment, match="another Python process"):
        pal.train({"env": {"id": "palaestra.api.environments:lambda_99"}})


def test_a_run_shows_its_score_its_speed_and_its_curve(run):
    text, html = repr(run), run._repr_html_()
    assert text.startswith(f"<TrainedRun {run.run_id}: CartPole-v1 with ppo, return ")
    assert "steps 256" in text
    assert any(bar in text for bar in "▁▂▃▄▅▆▇█")
    assert "<svg" in html
    assert html.count("<div") == html.count("</div>")


def test_names_in_a_notebook_card_are_escaped(run):
    run.config["env"]["id"] = "<script>alert(1)</script>"
    assert "<script>" not in run._repr_html_()


def test_training_is_quiet_without_a_terminal_and_shows_progress_when_asked(capsys):
    pal.train("CartPole-v1", steps=256, settings=SMALL)
    assert capsys.readouterr() == ("", "")
    pal.train("CartPole-v1", steps=256, settings=SMALL, progress=True)
    assert "256/256 steps (100 %)" in capsys.readouterr().err


def test_on_a_terminal_progress_is_one_line_that_is_rewritten(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    pal.train("CartPole-v1", steps=256, settings=SMALL)
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert "256/256 steps (100 %)  return" in shown.split("\r")[-1]


def test_in_a_notebook_functions_with_event_loops_run_in_another_thread():
    async def cell():
        return call_outside_event_loop(lambda: asyncio.run(asyncio.sleep(0, "done")))

    assert asyncio.run(cell()) == "done"
    assert call_outside_event_loop(lambda: asyncio.run(asyncio.sleep(0, "done"))) == "done"


def test_an_error_in_the_other_thread_is_raised_in_the_cell():
    async def cell():
        call_outside_event_loop(lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(cell())
