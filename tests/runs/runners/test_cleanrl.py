"""An unmodified CleanRL-style script, from its flags to its episodes, and the refusals of the preflight."""

import os
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.runs.runners.conftest import run

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.process.interpreter import choose_python, environment_findings, probe
from palaestra.runs.runner import Machine
from palaestra.runs.runners.cleanrl import CleanrlRunner
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import EpisodeSummary, JournalReader, TrainingStep

CHECKOUT = Path(__file__).parent / "checkout"
PYTHON = sys.executable if find_spec("tyro") else os.environ.get("PALAESTRA_CLEANRL_PYTHON")
needs_tyro = pytest.mark.skipif(PYTHON is None, reason="tyro is not installed, nor is PALAESTRA_CLEANRL_PYTHON set")


def _spec(**options):
    config = {"checkout": str(CHECKOUT), **options.pop("config", {})}
    return RunSpec(**{"runner": "cleanrl", "script": "shaped", "python": PYTHON, "config": config, **options})


def _levels(findings):
    return {finding.check: finding.level for finding in findings}


def _only_refusal(spec, machine):
    (refused,) = [finding for finding in CleanrlRunner().preflight(spec, machine) if finding.level == "refused"]
    return refused


def _events(plan):
    """The events that the service reads from the run."""
    attempt = Attempt(plan.paths.attempt_dir)
    translator = Translator(attempt, plan.sources, 1)
    while translator.pump(10_000):
        pass
    translator.close()
    with JournalReader(attempt.journal) as reader:
        return [record.event for record in reader.read()]


@needs_tyro
def test_an_unmodified_script_reports_every_episode(paths, machine):
    spec = _spec(env_id="CartPole-v1", seed=3, config={"total_timesteps": 600, "save_model": True})
    levels = _levels(CleanrlRunner().preflight(spec, machine))
    plan = CleanrlRunner().plan(spec, paths, machine)

    code, output = run(plan)

    events = _events(plan)
    episodes = [event for event in events if isinstance(event, EpisodeSummary)]
    assert code == 0, output
    assert plan.argv[1:] == (
        str(CHECKOUT / "cleanrl" / "shaped.py"), "--seed", "3", "--no-cuda", "--save-model", "--env-id", "CartPole-v1",
        "--total-timesteps", "600",
    )  # fmt: skip
    assert len(episodes) == output.count("episodic_return=") > 10
    assert all(0 < episode.length <= 500 for episode in episodes)
    assert sum(isinstance(event, TrainingStep) for event in events) >= 6
    assert "refused" not in levels.values()
    assert (plan.env_id, plan.algorithm, plan.total_steps) == ("CartPole-v1", "shaped", 600)
    assert len(list(plan.cwd.glob(plan.checkpoints[0]))) == 1
    assert plan.env_signature["action_space"] == {"type": "Discrete", "n": 2, "start": 0}


@needs_tyro
def test_the_shim_is_a_file_of_the_attempt_and_declared_with_its_hash(paths, machine):
    plan = CleanrlRunner().plan(_spec(), paths, machine)

    (injection,) = plan.injected
    assert injection.path == str(paths.attempt_dir / "shim" / "sitecustomize.py")
    assert plan.to_redacted_dict()["injected"][0]["sha256"] == injection.sha256
    assert plan.environment["PYTHONPATH"] == f"{paths.attempt_dir / 'shim'}:{CHECKOUT}"
    assert "final_info" in plan.files["shim/sitecustomize.py"]


@needs_tyro
def test_the_digest_is_of_the_command_wherever_it_runs_and_changes_with_the_script(paths, machine, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(CHECKOUT, copy)
    other = paths.run_dir.parent / "another" / "attempt_1"
    elsewhere = replace(paths, run_id="another", run_dir=other.parent, attempt_dir=other, work_dir=other / "work")
    spec = _spec(config={"checkout": str(copy)})
    before = CleanrlRunner().plan(spec, paths, machine)
    same = CleanrlRunner().plan(spec, elsewhere, machine)

    with open(copy / "cleanrl_utils" / "seeding.py", "a") as file:
        file.write("# changed\n")
    changed = CleanrlRunner().plan(spec, paths, machine)

    assert before.argv == same.argv
    assert before.environment != same.environment
    assert before.digest() == same.digest() != changed.digest()


def test_a_shell_in_a_value_stays_one_word(paths, machine):
    spec = _spec(config={"wandb_entity": "; touch x $(id)"}, python=sys.executable)

    assert "; touch x $(id)" in CleanrlRunner().plan(spec, paths, machine).argv


@pytest.mark.parametrize(
    ("options", "check", "words", "remedy"),
    [
        ({"script": "shaepd"}, "script", "is not in", "shaped"),
        ({"script": "../shaped"}, "script", "must be in the checkout", "dqn"),
        ({"script": None}, "script", "no script", "shaped"),
        ({"config": {"checkout": "/nowhere"}}, "script", "not a CleanRL checkout", "git clone"),
        ({"config": {"learning_rat": 1}}, "flag", "no such argument", "learning_rate"),
        ({"config": {"track": True}}, "flag", "option of runs start", "--track"),
        ({"config": {"exp_name": "../x"}}, "path", "outside", ""),
        ({"python": "/nowhere/python"}, "python", "not a program", "virtualenv"),
        ({"python": "/bin/true"}, "python", "exit code 0", "--python"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_the_remedy(machine, options, check, words, remedy):
    refused = _only_refusal(_spec(**{"python": sys.executable, **options}), machine)

    assert refused.check == check
    assert words in refused.text
    assert remedy in refused.remedy


def test_without_a_checkout_the_remedy_is_to_clone_one(machine):
    environment = {k: v for k, v in machine.environment.items() if k != "PALAESTRA_CLEANRL"}
    spec = RunSpec(runner="cleanrl", script="dqn")

    refused = _only_refusal(spec, Machine(environment, 10**12))

    assert "git clone https://github.com/vwxyzjn/cleanrl" in refused.remedy
    assert "PALAESTRA_CLEANRL is not set in the run service" in refused.text


def test_the_checkout_may_come_from_the_environment(machine):
    spec = RunSpec(runner="cleanrl", script="shaepd")
    there = Machine({**machine.environment, "PALAESTRA_CLEANRL": str(CHECKOUT)}, 10**12)

    assert "shaped" in _only_refusal(spec, there).remedy


def test_the_checkout_of_the_request_comes_before_that_of_the_service(machine, tmp_path):
    there = Machine({**machine.environment, "PALAESTRA_CLEANRL": str(tmp_path)}, 10**12)

    assert "shaped" in _only_refusal(RunSpec(runner="cleanrl", script="shaepd", checkout=str(CHECKOUT)), there).remedy
    assert "in the environment of the run service" in _only_refusal(RunSpec(runner="cleanrl", script="dqn"), there).text


def test_a_missing_script_is_not_called_none(machine):
    assert _only_refusal(_spec(script=None), machine).text == "no script given"


def test_a_missing_package_names_the_interpreter_to_install_it_into(machine, tmp_path):
    import venv

    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)

    findings = CleanrlRunner().preflight(_spec(python=str(tmp_path / "empty")), machine)

    missing = {finding.check: finding.remedy for finding in findings if finding.level == "refused"}
    assert {"dependency:gymnasium", "dependency:torch", "dependency:tyro", "dependency:tensorboard"} <= missing.keys()
    assert missing["dependency:tyro"] == f"{tmp_path / 'empty' / 'bin' / 'python'} -m pip install 'tyro'"


@needs_tyro
def test_an_environment_that_does_not_exist_names_the_nearest(machine):
    refused = _only_refusal(_spec(env_id="CartPole-v7"), machine)

    assert refused.check == "env"
    assert "CartPole-v1" in refused.remedy


@needs_tyro
def test_cuda_without_a_gpu_is_a_warning_and_a_flag(paths, machine):
    spec = _spec(config={"cuda": True})

    assert _levels(CleanrlRunner().preflight(spec, machine))["gpu"] == "warning"
    assert "--no-cuda" in CleanrlRunner().plan(spec, paths, machine).argv


@needs_tyro
def test_a_gpu_for_a_torch_that_sees_none_is_refused(machine):
    blind = Machine({**machine.environment, "CUDA_VISIBLE_DEVICES": ""}, 10**12, gpus=("0",))

    refused = _only_refusal(_spec(gpus=1), blind)

    assert (refused.check, "sees no GPU" in refused.text) == ("gpu", True)
    assert f"{PYTHON} -m pip install torch" in refused.remedy


def test_logging_online_needs_credentials_and_offline_does_not(paths, machine, tmp_path):
    bare = {k: v for k, v in machine.environment.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    spec = _spec(track="online", python=sys.executable)

    assert _levels(CleanrlRunner().preflight(spec, Machine(bare, 10**12)))["credentials"] == "refused"
    keyed = {**bare, "WANDB_API_KEY": "0123456789"}
    assert _levels(CleanrlRunner().preflight(spec, Machine(keyed, 10**12)))["credentials"] == "ok"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret-secret\n")
    assert _levels(CleanrlRunner().preflight(spec, Machine(bare, 10**12)))["credentials"] == "ok"

    plan = CleanrlRunner().plan(spec, paths, Machine(keyed, 10**12))
    assert (plan.environment["WANDB_MODE"], plan.environment["WANDB_API_KEY"]) == ("online", "0123456789")
    assert plan.to_redacted_dict()["environment"]["WANDB_API_KEY"] == "***"
    assert "--track" in plan.argv


def test_the_schema_is_the_scripts_own_without_what_every_runner_has():
    properties = CleanrlRunner().config_schema(_spec())["properties"]

    assert properties["learning_rate"]["default"] == 2.5e-4
    assert {"seed", "env_id", "track", "capture_video"}.isdisjoint(properties)
    assert list(CleanrlRunner().config_schema(RunSpec(runner="cleanrl"))["properties"]) == ["checkout"]


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose script evaluates the model it has saved, and uploads it, as CleanRL's do."""
    copy = tmp_path / "copy"
    shutil.copytree(CHECKOUT, copy)
    script = copy / "cleanrl" / "shaped.py"
    saved = '        print(f"model saved to {model_path}")\n'
    last = (
        "        from cleanrl_utils.play import evaluate\n"
        "        evaluate(model_path, run_name)\n"
        "        if args.upload_model:\n"
        "            from huggingface_hub import HfApi\n"
    )
    text = script.read_text().replace(saved, saved + last)
    text = text.replace("    env_id: str", "    upload_model: bool = False\n    env_id: str")
    script.write_text(text)
    (copy / "cleanrl_utils" / "play.py").write_text("def evaluate(path, name, capture_video: bool = True): ...\n")
    return copy


def _checks(machine, checkout, **config):
    script = config.pop("script", "shaped")
    spec = _spec(script=script, python=sys.executable, config={"checkout": str(checkout), **config})
    return {finding.check: finding for finding in CleanrlRunner().preflight(spec, machine)}


def test_what_the_last_step_needs_is_looked_for_before_the_first(machine, checkout):
    assert "dependency:moviepy" not in _checks(machine, checkout)
    found = _checks(machine, checkout, save_model=True)["dependency:moviepy"]

    if find_spec("moviepy"):
        assert found.level == "ok"
    else:
        assert (found.level, found.remedy) == ("refused", f"{sys.executable} -m pip install 'moviepy'")
    assert "dependency:huggingface-hub" not in _checks(machine, checkout, upload_model=True)
    assert "dependency:huggingface-hub" in _checks(machine, checkout, save_model=True, upload_model=True)


def test_an_upload_after_the_training_needs_credentials_before_it(machine, checkout, tmp_path):
    bare = {k: v for k, v in machine.environment.items() if not k.startswith("HF")} | {"HOME": str(tmp_path)}
    options = {"save_model": True, "upload_model": True}

    refused = _checks(Machine(bare, 10**12), checkout, **options)["credentials"]
    assert (refused.level, refused.remedy) == ("refused", "hf auth login, or leave upload_model out")
    assert "credentials" not in _checks(Machine(bare, 10**12), checkout, upload_model=True)
    assert _checks(Machine({**bare, "HF_TOKEN": "x"}, 10**12), checkout, **options)["credentials"].level == "ok"
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text("x")
    assert _checks(Machine(bare, 10**12), checkout, **options)["credentials"].level == "ok"


def test_a_script_for_atari_needs_the_emulator(machine, checkout):
    shutil.copy(checkout / "cleanrl" / "shaped.py", checkout / "cleanrl" / "shaped_atari.py")
    found = _checks(machine, checkout, script="shaped_atari")

    assert found["dependency:ale-py"].level == ("ok" if find_spec("ale_py") else "refused")
    assert found["dependency:opencv-python"].level == ("ok" if find_spec("cv2") else "refused")


def test_a_wrapper_that_gymnasium_does_not_have_is_refused_with_the_version_that_has_it(machine, checkout):
    script = checkout / "cleanrl" / "shaped.py"
    script.write_text(script.read_text() + "\nwrapped = gym.wrappers.MonitorOfOld(1)\n")
    found = _checks(machine, checkout)["wrappers"]

    assert found.level == "refused"
    assert "shaped.py uses gymnasium.wrappers.MonitorOfOld, which gymnasium" in found.text
    assert found.remedy == f"{sys.executable} -m pip install 'gymnasium==0.29.1'"


def test_an_environment_that_cannot_draw_is_refused_when_it_is_to_be_filmed(machine, tmp_path):
    (tmp_path / "blind.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Blind(CartPoleEnv):\n"
        "    def render(self):\n"
        "        raise RuntimeError('no eyes')\n"
        "gymnasium.register('Blind-v0', entry_point=Blind)\n"
    )

    def findings(render):
        python = choose_python(_spec(python=sys.executable))
        found = probe(
            python, machine, env_id="Blind-v0", register=("blind",), render=render, pythonpath=(str(tmp_path),)
        )
        return environment_findings(found, "Blind-v0")

    assert [finding.level for finding in findings(render=False)] == ["ok"]
    (refused,) = findings(render=True)
    assert (refused.level, refused.remedy) == ("refused", "Install what it names, or choose another environment")
    assert "RuntimeError: no eyes" in refused.text
