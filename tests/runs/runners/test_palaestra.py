"""The runner of our own trainer."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
from tests.runs.runners.conftest import run, start
from tests.runs.runners.corl_data import DATASET

from palaestra.runs.process.interpreter import trainer_environment
from palaestra.runs.runner import JournalFile, Machine
from palaestra.runs.runners.palaestra import PalaestraRunner, training_config
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, JournalReader, TrainingStep
from palaestra.telemetry.event import PhaseChanged

CONFIG = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"n_epochs": 1, "batch_size": 32},
    "trainer": {"total_timesteps": 2048, "rollout_length": 64},
}


@pytest.fixture(scope="module")
def runner():
    """Shared, because it caches checks."""
    return PalaestraRunner()


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Where it is invoked: shared, so that the configuration is checked once."""
    return tmp_path_factory.mktemp("there")


def _events(paths):
    with JournalReader(paths.attempt_dir / "metrics.jsonl") as reader:
        return [record.event for record in reader.read()]


def test_general_wishes_go_where_the_trainer_reads_them():
    spec = RunSpec(config=CONFIG, env_id="Acrobot-v1", seed=5, track="offline", script="ppo")

    document = training_config(spec)

    assert document["env"] == {"id": "Acrobot-v1", "num_envs": 2}
    assert document["trainer"]["seed"] == 5
    assert document["telemetry"] == {"wandb": "offline"}
    assert document["algorithm"]["name"] == "ppo"
    assert spec.config == CONFIG


def test_it_trains_in_the_prepared_attempt(runner, paths, machine, there):
    spec = RunSpec(config=CONFIG, invoked_from=there)
    assert {finding.level for finding in runner.preflight(spec, machine)} == {"ok"}

    plan = runner.plan(spec, paths, machine)
    code, output = run(plan)

    events = _events(paths)
    assert (code, plan.sources) == (0, (JournalFile(),)), output
    assert (plan.env_id, plan.algorithm, plan.total_steps) == ("CartPole-v1", "ppo", 2048)
    assert plan.env_signature["action_space"]["n"] == 2
    assert events[-1] == PhaseChanged("succeeded", "done")
    assert any(isinstance(event, EpisodeSummary) for event in events)
    assert json.loads((paths.run_dir / "resolved.json").read_text()) == plan.resolved
    assert list(there.iterdir()) == []


@pytest.mark.slow
def test_asked_to_stop_it_saves_and_the_next_attempt_goes_on(runner, paths, machine, tmp_path):
    config = {**CONFIG, "trainer": {"total_timesteps": 50_000_000, "rollout_length": 64}}
    spec = RunSpec(config=config, invoked_from=tmp_path)
    _stopped_while_it_trains(runner.plan(spec, paths, machine))
    saved = [event for event in _events(paths) if isinstance(event, CheckpointSaved)][-1]
    second = paths.run_dir / "attempt_2"
    again = replace(paths, attempt=2, attempt_dir=second, work_dir=second / "work", resume_from=saved.path)

    _stopped_while_it_trains(runner.plan(spec, again, machine))

    steps = [event.env_step for event in _events(again) if isinstance(event, TrainingStep)]
    assert _events(paths)[-1].phase == "stopped"
    assert _events(again)[0] == PhaseChanged("running", "resumed")
    assert steps[0] == saved.env_step + 128


def _stopped_while_it_trains(plan):
    with start(plan) as process:
        deadline = time.monotonic() + 120
        while not any(isinstance(event, TrainingStep) for event in _events(plan.paths)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 130


@pytest.mark.parametrize(
    ("config", "check", "words", "remedy"),
    [
        ({"env": {"id": "CartPole-v7"}}, "env", "CartPole-v7", "CartPole-v1"),
        ({**CONFIG, "trainer": {"rollout_lenght": 3}}, "flag", "unknown key", "rollout_length"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before(runner, machine, config, check, words, remedy):
    (finding,) = runner.preflight(RunSpec(config=config), machine)

    assert (finding.level, finding.check) == ("refused", check)
    assert words in finding.text
    assert remedy in finding.remedy


def test_an_interpreter_without_palaestra_or_a_missing_one_is_refused(runner, machine):
    missing, *_ = runner.preflight(RunSpec(config=CONFIG, python="/nowhere/python"), machine)
    strange, *_ = runner.preflight(RunSpec(config=CONFIG, python="/bin/true"), machine)

    assert (missing.check, missing.level, strange.check, strange.level) == ("python", "refused", "python", "refused")


def test_a_warm_start_names_the_checkpoint_and_a_resume_the_run(runner, paths, machine, there, tmp_path):
    checkpoint = tmp_path / "update_00000001"
    spec = RunSpec(config=CONFIG, warm_start=str(checkpoint), invoked_from=there)
    (refused,) = runner.preflight(spec, machine)
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")

    begun = runner.plan(spec, paths, machine)
    resumed = runner.plan(spec, replace(paths, attempt=2, resume_from=str(checkpoint)), machine)

    assert refused.check == "warm_start"
    assert begun.argv[-2:] == ("--warm-start", str(checkpoint))
    assert resumed.argv[-4:] == ("--resume", str(paths.run_dir), "--checkpoint", str(checkpoint))


def test_its_checkpoints_are_filmed_when_asked_for_and_can_be_drawn(runner, paths, machine, there):
    pytest.importorskip("imageio_ffmpeg")
    spec = RunSpec(config=CONFIG, video=True, invoked_from=there)

    assert {finding.level for finding in runner.preflight(spec, machine)} == {"ok"}
    assert runner.plan(spec, paths, machine).record_video
    assert not runner.plan(spec.model_copy(update={"video": False}), paths, machine).record_video
    drawn_by_nobody = spec.model_copy(update={"env_id": "compiled/CartPole-v1"})
    assert runner.preflight(drawn_by_nobody, machine)[-1].text == "compiled/CartPole-v1 cannot render images"


def test_a_gpu_for_a_torch_that_sees_none_is_refused(runner, machine):
    blind = Machine({**machine.environment, "CUDA_VISIBLE_DEVICES": ""}, 10**12, gpus=("0",))

    levels = {finding.check: finding.level for finding in runner.preflight(RunSpec(config=CONFIG, gpus=1), blind)}

    assert levels == {"python": "ok", "env": "ok", "config": "ok", "gpu": "refused"}


def test_only_our_own_trainer_gets_the_gateways_token(runner, paths, machine, there):
    with_token = Machine({**machine.environment, "PALAESTRA_GATEWAY_TOKEN": "secret-of-the-gateway"}, 10**12)
    plan = runner.plan(RunSpec(config=CONFIG, invoked_from=there), paths, with_token)

    assert plan.environment["PALAESTRA_GATEWAY_TOKEN"] == "secret-of-the-gateway"
    assert "secret-of-the-gateway" not in str(plan.to_redacted_dict())
    assert "PALAESTRA_GATEWAY_TOKEN" not in trainer_environment(RunSpec(), paths, with_token)


def test_the_schema_is_the_one_of_the_configuration(runner):
    schema = runner.config_schema(RunSpec())

    assert {"env", "algorithm", "trainer", "telemetry"} <= schema["properties"].keys()


def test_a_gpu_that_the_configuration_would_not_use_is_refused(runner, machine):
    config = {**CONFIG, "trainer": {**CONFIG.get("trainer", {}), "device": "cpu"}}
    two = Machine(machine.environment, 10**12, gpus=("0", "1"))

    findings = [f for f in runner.preflight(RunSpec(config=config, gpus=1), two) if f.check == "gpu"]

    assert findings[-1].text == "trainer.device is cpu: the run would lease the GPU and train on the CPU"
    assert findings[-1].level == "refused"


def test_a_device_beyond_the_leased_gpus_is_refused_before_the_run_is_queued(runner, machine):
    config = {**CONFIG, "trainer": {**CONFIG.get("trainer", {}), "device": "cuda"}}

    (refused,) = runner.preflight(RunSpec(config=config), machine)

    assert refused.level == "refused"
    assert "trainer.device = 'cuda'" in refused.text


def test_a_run_that_learns_from_a_dataset_alone_reports_no_episodes(runner, paths, machine, corl_home):
    config = {"algorithm": {"name": "bc"}, "dataset": {"id": DATASET}, "trainer": {"updates": 100}}
    offline = runner.plan(RunSpec(config=config), paths, machine)
    tuned = {"algorithm": {"name": "td3_bc"}, "dataset": {"id": DATASET}, "trainer": {"total_timesteps": 2_000}}
    online = runner.plan(RunSpec(config=tuned), paths, machine)

    assert (offline.has_episodes, online.has_episodes) == (False, True)
    assert offline.offline_dataset["dataset_id"] == online.offline_dataset["dataset_id"] == DATASET
    assert offline.total_steps == 100
