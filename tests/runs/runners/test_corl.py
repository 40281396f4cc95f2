"""Unmodified scripts in the shape of CORL's on a local dataset: their flags, metrics, checkpoints and refusals."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.runs.runners.conftest import run, start
from tests.runs.runners.corl_data import (
    CHECKOUT,
    DATASET,
    EPISODES,
    STEPS,
    find_refusal,
    make_short_spec,
    make_spec,
    map_findings,
    needs_pyrallis,
    read_events,
    write_dataset,
)

from palaestra.experience.datasets import find_dataset
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.catalogue import list_checkpoints
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.comparison import compare
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.runners.corl import CorlRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, TrainingStep


def _metric(events, name):
    return {e.env_step: e.metrics[name] for e in events if isinstance(e, TrainingStep) and name in e.metrics}


@needs_pyrallis
def test_an_unmodified_script_learns_from_a_local_dataset_and_reports_losses_scores_and_checkpoints(
    corl_home, corl_run, machine
):
    spec, plan, output, events = corl_run

    assert "refused" not in {finding.level for finding in CorlRunner().preflight(spec, machine)}
    assert plan.argv[1:] == (
        str(CHECKOUT / "algorithms" / "offline" / "regression.py"), "--env=Pendulum-v1", "--learning_rate=1e-05",
        "--betas=[0.8, 0.9]", "--max_timesteps=100", "--eval_freq=50", "--checkpoints_path=models", "--seed=3",
        "--device=cpu",
    )  # fmt: skip
    assert f"Dataset size: {EPISODES * STEPS}" in output
    # Means over ten updates: 2, 6, 10, 14 and 18 are logged with the updates 2, 4, 6, 8 and 10.
    odd = _metric(events, "odd_loss")
    assert (odd[10], odd[20]) == (10.0, 30.0)
    assert list(odd) == list(_metric(events, "actor_loss")) == list(range(10, 101, 10))
    returns, scores = _metric(events, "eval_return"), _metric(events, "eval_normalized_score")
    assert list(returns) == list(scores) == [50, 100]
    assert scores[100] == pytest.approx(100 * (returns[100] + 1000) / 1000)
    assert f"Evaluation over 2 episodes: {returns[100]:.3f} , D4RL score: {scores[100]:.3f}" in output
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert [(event.env_step, Path(event.path).name) for event in saved] == [
        (50, "checkpoint_49.pt"),
        (100, "checkpoint_99.pt"),
    ]
    assert saved[0].metric == pytest.approx(scores[50])
    assert (plan.env_id, plan.algorithm, plan.total_steps) == ("Pendulum-v1", "regression", 100)
    assert len(list(plan.cwd.glob(plan.checkpoints[0]))) == 2
    assert plan.offline_dataset["dataset_id"] == DATASET
    assert plan.offline_dataset["env_id"] == "Pendulum-v1"
    assert len(plan.offline_dataset["sha256"]) == 64


@needs_pyrallis
def test_the_same_seed_gives_the_same_metrics(corl_home, corl_run, paths, machine):
    spec, _, _, events = corl_run
    plan = CorlRunner().plan(spec, paths, machine)

    assert run(plan)[0] == 0

    again = [event.metrics for event in read_events(plan) if isinstance(event, TrainingStep)]
    assert again == [event.metrics for event in events if isinstance(event, TrainingStep)]


@needs_pyrallis
def test_a_script_with_epochs_and_no_step_counts_updates(corl_home, paths, machine):
    config = {"num_epochs": 3, "num_updates_on_epoch": 40, "log_every": 20, "eval_every": 2}
    plan = CorlRunner().plan(make_spec(script="epochs", seed=1, config=config), paths, machine)

    code, output = run(plan)

    events = read_events(plan)
    assert code == 0, output
    assert "--env_name=Pendulum-v1" in plan.argv
    assert "--train_seed=1" in plan.argv
    assert plan.total_steps == 120
    # Logged after the updates 1, 21, 41, 61, 81 and 101; evaluated after the first and the last epoch.
    assert _metric(events, "critic_loss") == {1: 0.0, 21: 20.0, 41: 40.0, 61: 60.0, 81: 80.0, 101: 100.0}
    assert _metric(events, "eval_return") == {40: -500.0, 120: -500.0}
    assert _metric(events, "eval_normalized_score") == {40: 50.0, 120: 50.0}
    assert _metric(events, "eval_return_std") == {40: 100.0, 120: 100.0}
    assert _metric(events, "size") == {40: EPISODES * STEPS, 120: EPISODES * STEPS}


@needs_pyrallis
def test_a_fine_tuning_script_reports_the_episodes_in_its_environment(corl_home, paths, machine):
    config = {"offline_iterations": 10, "online_iterations": 450, "eval_frequency": 460, "metrics_every": 100}
    plan = CorlRunner().plan(make_spec(script="finetune/online", config=config), paths, machine)

    code, output = run(plan)

    events = read_events(plan)
    episodes = [event for event in events if isinstance(event, EpisodeSummary)]
    assert code == 0, output
    # The script counts updates from 0: the second episode of 200 steps ends with update 10 + 400.
    assert [(episode.env_step, episode.length) for episode in episodes] == [(210, 200), (410, 200)]
    assert all(-2000 < episode.episode_return < 0 for episode in episodes)
    assert _metric(events, "eval_return") == {460: -460.0}
    assert _metric(events, "eval_normalized_score") == {460: 54.0}
    assert not plan.has_episodes
    assert plan.total_steps == 460


@needs_pyrallis
@pytest.mark.parametrize(
    ("eval_frequency", "expected"),
    # Evaluated after the updates 10, 20 (which ends the offline phase) and 30, or only after 25.
    [(10, [-20.0, -30.0, -10.0]), (25, [None, -25.0, None])],
)
def test_the_baseline_of_fine_tuning_is_the_last_evaluation_of_the_offline_phase(
    own_corl_home, eval_frequency, expected
):
    config = {"offline_iterations": 20, "online_iterations": 10, "eval_frequency": eval_frequency}
    with TrainerOrchestrator(own_corl_home.base) as orchestrator:
        keys = {"checkout": str(CHECKOUT), "dataset": DATASET}
        run_id = orchestrator.launch("corl", {**keys, **config}, consent=True, script="finetune/online")
        for _ in orchestrator.stream(run_id):
            pass

    evaluations = compare(RunReader(own_corl_home), [run_id, run_id]).evaluations

    assert [evaluations[f"eval_return/{name}"][0] for name in ("baseline", "final", "gain")] == expected


def test_the_injected_modules_are_declared_with_their_hashes_and_the_environment_names_the_dataset(
    corl_home, paths, machine
):
    plan = CorlRunner().plan(make_spec(), paths, machine)

    settings = json.loads(plan.environment["PALAESTRA_OFFLINE"])
    declared = plan.to_redacted_dict()["injected"]
    assert [Path(entry["path"]).name for entry in declared] == ["gym.py", "d4rl.py", "wandb.py"]
    assert all(len(entry["sha256"]) == 64 and entry["why"] for entry in declared)
    assert plan.environment["PYTHONPATH"] == f"{paths.attempt_dir / 'shim'}:{CHECKOUT}"
    assert settings["path"] == str(corl_home.datasets / DATASET)
    assert list(settings["files"]) == ["data/main_data.hdf5"]
    assert settings["action_range"] == [[-2.0], [2.0]]
    assert (settings["random_score"], settings["expert_score"]) == (-1000.0, 0.0)
    # A million updates are recorded as 2,000 means of 500.
    assert settings["metrics_every"] == 500


def test_a_run_has_the_arguments_and_the_time_limit_that_the_dataset_was_recorded_with(own_corl_home, paths, machine):
    about = {"env_kwargs": {"g": 5.0, "render_mode": "rgb_array"}, "max_episode_steps": 30}
    write_dataset(own_corl_home.datasets, "pendulum/short-v0", about=about)

    plan = CorlRunner().plan(make_spec(config={"dataset": "pendulum/short-v0"}), paths, machine)

    settings = json.loads(plan.environment["PALAESTRA_OFFLINE"])
    assert (settings["env_kwargs"], settings["max_episode_steps"]) == ({"g": 5.0}, 30)
    assert plan.offline_dataset["env_kwargs"] == {"g": 5.0}
    assert plan.env_signature["max_episode_steps"] == 30


def test_the_digest_changes_with_the_script_and_with_the_dataset(own_corl_home, paths, machine, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(CHECKOUT, copy)
    spec = make_spec(config={"checkout": str(copy)})
    before = CorlRunner().plan(spec, paths, machine).digest()
    with open(copy / "algorithms" / "offline" / "regression.py", "a") as file:
        file.write("# changed\n")
    changed_script = CorlRunner().plan(spec, paths, machine).digest()
    shutil.rmtree(own_corl_home.datasets / DATASET)
    write_dataset(own_corl_home.datasets, expert_score=10.0)
    changed_dataset = CorlRunner().plan(spec, paths, machine).digest()

    assert len({before, changed_script, changed_dataset}) == 3


@needs_pyrallis
def test_a_config_file_of_the_checkout_is_the_base_and_given_values_win(corl_home, paths, machine):
    config = {"config_path": "offline/epochs/small", "eval_every": 2, "log_every": 5}
    plan = CorlRunner().plan(make_spec(script="epochs", config=config), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    assert plan.argv[2] == f"--config_path={CHECKOUT / 'configs' / 'offline' / 'epochs' / 'small.yaml'}"
    # The file has 4 epochs of 10 updates, an evaluation in each epoch, and the environment of D4RL.
    assert plan.total_steps == 40
    assert {key: plan.resolved[key] for key in ("num_epochs", "eval_every", "env_name")} == {
        "num_epochs": 4,
        "eval_every": 2,
        "env_name": "Pendulum-v1",
    }
    assert list(_metric(read_events(plan), "eval_return")) == [10, 30, 40]


@needs_pyrallis
def test_a_warm_start_begins_with_the_saved_weights(corl_home, corl_run, paths, machine):
    _, first, _, events = corl_run
    (checkpoint,) = first.cwd.glob("models/*/checkpoint_99.pt")
    spec = make_short_spec(seed=3, warm_start=str(checkpoint), config={"learning_rate": 1e-12})

    findings = map_findings(spec, machine)
    plan = CorlRunner().plan(spec, paths, machine)
    assert run(plan)[0] == 0

    assert findings["warm_start"].level == "ok"
    assert "counts its updates from 0 again" in findings["warm_start"].text
    assert f"--load_model={checkpoint}" in plan.argv
    before, after = _metric(events, "eval_return"), _metric(read_events(plan), "eval_return")
    assert before[50] != before[100]
    assert list(after) == [50, 100]
    assert after[50] == pytest.approx(before[100], rel=1e-6)


@needs_pyrallis
def test_a_warm_start_from_another_script_or_environment_is_refused(own_corl_home, corl_run, machine):
    _, plan, _, _ = corl_run
    (first,), (second,) = plan.cwd.glob("models/*/checkpoint_49.pt"), plan.cwd.glob("models/*/checkpoint_99.pt")
    other = import_checkpoint(own_corl_home, first, Provenance(agent_id="corl/iql", env_id="Pendulum-v1"))
    own = import_checkpoint(own_corl_home, second, Provenance(agent_id="corl/regression", env_id="Pendulum-v1"))

    refused = find_refusal(make_short_spec(warm_start=other.path), machine)
    accepted = map_findings(make_short_spec(warm_start=own.path), machine)
    import_checkpoint(own_corl_home, second, Provenance(agent_id="corl/regression", env_id="Hopper-v5"))
    elsewhere = find_refusal(make_short_spec(warm_start=own.path), machine)

    assert refused.check == elsewhere.check == "warm_start"
    assert "was saved by corl/iql, this is corl/regression" in refused.text
    assert "it was trained in Hopper-v5, this is Pendulum-v1" in elsewhere.text
    assert accepted["warm_start"].level == "ok"


@needs_pyrallis
def test_sigterm_ends_a_run(corl_home, paths, machine):
    config = {"num_epochs": 10**9, "eval_every": 1000, "log_every": 10**9}
    plan = CorlRunner().plan(make_spec(script="epochs", config=config), paths, machine)

    with start(plan) as process:
        stdout = Attempt(plan.paths.attempt_dir).stdout
        while "eval_score" not in stdout.read_text():
            assert process.poll() is None, stdout.read_text()
        process.terminate()
        code = process.wait(30)

    assert code == -15
    assert _metric(read_events(plan), "eval_return")[1000] == -500.0


def test_the_schema_has_the_fields_of_the_script_with_their_comments(corl_home):
    schema = CorlRunner().config_schema(make_spec())

    properties = schema["properties"]
    assert properties["learning_rate"] == {
        "type": "number",
        "description": "step size of the optimizer, which is the same for all layers",
        "default": 0.001,
    }
    assert properties["betas"]["default"] == [0.9, 0.999]
    assert properties["max_timesteps"] == {
        "type": "integer",
        "description": "total gradient updates during training",
        "default": 1_000_000,
        "minimum": 1,
    }
    assert (properties["frac"]["exclusiveMinimum"], properties["frac"]["maximum"]) == (0, 1)
    assert properties["project"]["x-hidden"]
    assert properties["dataset"]["x-choices"] == "datasets"
    assert not {"env", "seed", "load_model"} & properties.keys()
    behind = CorlRunner().config_schema(make_spec(script="epochs"))["properties"]
    assert behind["eval_every"]["description"] == "epochs between evaluations"
    assert behind["num_epochs"]["description"] == ""


def test_the_scripts_of_a_checkout_are_listed(corl_home, machine):
    scripts = {script.name: script for script in CorlRunner().scripts(make_spec(script=None), machine)}

    assert list(scripts) == ["accelerated", "epochs", "regression", "finetune/online"]
    assert not scripts["accelerated"].installed
    assert scripts["accelerated"].remedy.endswith("-m pip install jax")
    assert not scripts["accelerated"].saves_checkpoints
    assert scripts["regression"].plays
    assert not scripts["epochs"].plays
    assert scripts["regression"].warm_start
    assert not scripts["epochs"].warm_start
    assert scripts["regression"].actions == ("continuous",)


@pytest.mark.parametrize(
    ("options", "check", "words", "remedy"),
    [
        ({"script": "regresion"}, "script", "is not in", "regression"),
        ({"script": "../regression"}, "script", "must be in the checkout", "td3_bc"),
        ({"script": None}, "script", "no script", "regression"),
        ({"config": {"checkout": "/nowhere"}}, "script", "not a CORL checkout", "git clone"),
        ({"config": {"learning_rat": 1}}, "flag", "no such argument", "learning_rate"),
        ({"config": {"max_timesteps": 1.5}}, "flag", "is not a whole number", "1000000"),
        ({"config": {"normalize": "yes"}}, "flag", "is not true or false", "True"),
        ({"config": {"env": "Pendulum-v1"}}, "flag", "option of runs start", "--env"),
        ({"config": {"load_model": "x.pt"}}, "flag", "option of runs start", "--warm-start"),
        ({"config": {"wandb": True}}, "flag", "option of runs start", "--track"),
        ({"config": {"name": "../x"}}, "path", "outside", ""),
        ({"config": {"metrics_every": 0}}, "metrics_every", "not a number of updates", "positive integer"),
        ({"config": {"config_path": "offline/epochs/smal"}}, "config_path", "is not in", "epochs/small"),
        (
            {"script": "epochs", "config": {"config_path": "offline/epochs/wrong"}},
            "flag",
            "num_epochs = '1e1': is not a whole number",
            "3000",
        ),
        (
            {"script": "epochs", "config": {"config_path": "offline/epochs/other"}},
            "config_path",
            "epochs.py has no field expectile",
            "for epochs",
        ),
        ({"config": {"config_path": "/etc/passwd"}}, "config_path", "must be a file", "relative"),
        ({"config": {"checkpoints_path": "elsewhere"}}, "checkpoints_path", "looks for checkpoints", "null"),
        ({"config": {"dataset": ""}}, "dataset", "no dataset given", "datasets list"),
        ({"config": {"dataset": "pendulum/rndom-v0"}}, "dataset", "there is none of this name", "pendulum/random-v0"),
        ({"config": {"buffer_size": 100}}, "flag", "smaller than the dataset of 200 steps", "buffer_size=200"),
        ({"env_id": "CartPole-v1"}, "env", "recorded in Pendulum-v1, not in CartPole-v1", "--env Pendulum-v1"),
        ({"script": "epochs", "warm_start": "x.pt"}, "warm_start", "has no load_model", "td3_bc"),
        ({"warm_start": "x.pt"}, "warm_start", "no such file", "checkpoint_N.pt"),
        ({"python": "/no/such/python"}, "python", "is not a program", "interpreter"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_a_remedy(corl_home, machine, options, check, words, remedy):
    refused = find_refusal(make_spec(**options), machine)

    assert refused.check == check
    assert words in refused.text
    assert remedy in refused.remedy


def test_without_a_checkout_the_remedy_is_the_command_that_fetches_it(corl_home, machine):
    environment = {name: value for name, value in machine.environment.items() if name != "PALAESTRA_CORL"}
    spec = RunSpec(runner="corl", script="td3_bc", config={"dataset": DATASET})

    refused = find_refusal(spec, replace(machine, environment=environment))

    assert "PALAESTRA_CORL is not set" in refused.text
    assert refused.remedy.startswith("git clone https://github.com/corl-team/CORL")


def test_a_flipped_byte_in_the_dataset_is_refused_before_the_launch(own_corl_home, machine):
    data = own_corl_home.datasets / DATASET / "data" / "main_data.hdf5"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    refused = find_refusal(make_spec(), machine)

    assert refused.check == "dataset"
    assert "main_data.hdf5 was changed" in refused.text
    assert refused.remedy


@needs_pyrallis
def test_a_dataset_that_changes_after_the_launch_ends_the_run_with_the_reason(own_corl_home, paths, machine):
    plan = CorlRunner().plan(make_spec(script="epochs"), paths, machine)
    with open(own_corl_home.datasets / DATASET / "data" / "main_data.hdf5", "r+b") as file:
        file.seek(3000)
        file.write(b"\xff" * 64)

    code, output = run(plan)

    assert code == 1
    assert "main_data.hdf5 of pendulum/random-v0 was changed or damaged since the launch" in output


def test_a_dataset_with_discrete_actions_is_refused(own_corl_home, machine):
    write_dataset(own_corl_home.datasets, "cartpole/random-v0", "CartPole-v1")

    refused = find_refusal(make_spec(config={"dataset": "cartpole/random-v0"}), machine)

    assert "its actions are Discrete(2)" in refused.text
    assert "palaestra train" in refused.remedy


def test_a_dataset_whose_environment_has_other_spaces_here_is_refused(own_corl_home, machine):
    # The dataset says that it comes from MountainCarContinuous, whose observations have 2 numbers.
    shutil.rmtree(own_corl_home.datasets / DATASET)
    write_dataset(own_corl_home.datasets, DATASET)
    manifest = own_corl_home.datasets / DATASET / "manifest.json"
    manifest.write_text(manifest.read_text().replace("Pendulum-v1", "MountainCarContinuous-v0"))

    refused = find_refusal(make_spec(), machine)

    assert refused.check == "dataset"
    assert "does not fit MountainCarContinuous-v0: its observations are 3 float, there they are 2 float" in (
        refused.text
    )


def test_a_dataset_holds_the_numbers_of_its_environment_in_another_precision(own_corl_home, machine):
    # The observations of HalfCheetah are float64, and datasets hold float32.
    box = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float32)
    write_dataset(own_corl_home.datasets, "cheetah/random-v0", "HalfCheetah-v5", observation_space=box)

    findings = CorlRunner().preflight(make_spec(config={"dataset": "cheetah/random-v0"}), machine)

    assert [finding for finding in findings if finding.level == "refused"] == []


def test_an_interpreter_without_pyrallis_is_refused_with_the_command_that_installs_it(corl_home, machine, bare_python):
    spec = make_spec(python=bare_python)

    refused = {f.check: f for f in CorlRunner().preflight(spec, machine) if f.level == "refused"}

    assert refused["dependency:pyrallis"].remedy == f"{bare_python} -m pip install 'pyrallis'"
    assert set(refused) == {f"dependency:{name}" for name in ("gymnasium", "h5py", "numpy", "pyrallis", "torch")}


def test_a_checkpoint_with_code_in_it_is_not_loaded(corl_home, machine, tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    path = tmp_path / "checkpoint_1.pt"
    path.write_bytes(pickle.dumps(Evil()))

    refused = find_refusal(make_spec(warm_start=str(path)), machine)

    assert refused.check == "warm_start"
    assert "would unpickle it" in refused.text


@needs_pyrallis
def test_a_supervised_run_registers_checkpoints_with_their_dataset_and_needs_no_episodes(own_corl_home, monkeypatch):
    config = {"num_epochs": 60, "log_every": 1000, "eval_every": 30}
    with TrainerOrchestrator(own_corl_home.base) as orchestrator:
        keys = {"checkout": str(CHECKOUT), "dataset": DATASET}
        run_id = orchestrator.launch("corl", {**keys, **config}, consent=True, script="epochs", seed=1)
        for _ in orchestrator.stream(run_id):
            pass
        record = orchestrator.run(run_id)

    checkpoints = sorted(list_checkpoints(own_corl_home, run_id=run_id), key=lambda row: row.env_step)
    # 60,000 updates without an episode would raise the alarm of a run that acts.
    assert (record.phase, record.reason, record.alarms) == (Phase.SUCCEEDED, "done", ())
    assert (record.agent_id, record.env_id, record.env_step) == ("corl/epochs", "Pendulum-v1", 60_000)
    assert [(row.env_step, row.metric, Path(row.path).name) for row in checkpoints] == [
        (1_000, 50.0, "0.pt"),
        (31_000, 50.0, "30.pt"),
        (60_000, 50.0, "59.pt"),
    ]
    dataset = find_dataset(DATASET, own_corl_home.datasets)
    assert checkpoints[0].offline_dataset == {
        "dataset_id": DATASET,
        "sha256": dataset.sha256,
        "env_id": "Pendulum-v1",
        "env_kwargs": {},
    }


def test_the_runner_uses_the_interpreter_of_the_service_without_another(corl_home, paths, machine):
    assert CorlRunner().plan(make_spec(), paths, machine).argv[0] == sys.executable
