"""`palaestra train` and `palaestra eval`."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.telemetry import EpisodeSummary, JournalReader, TrainingStep

SPECIFICATION_003 = """{
  "trainer": {
    "buffer_size": 2048,
    "buffer_type": "standard",  // "standard" or "vla"
    "iterations": 500
  },
  "algorithm": {
    "name": "ppo",
    "cfg": {
      "learning_rate": 3e-4,
      "gamma": 0.99,
      "n_epochs": 10,
      "batch_size": 64
    }
  }
}
"""


def test_a_run_leaves_its_configuration_its_journal_and_its_checkpoints(palaestra, config, tmp_path):
    result = palaestra("train", config, "algorithm.learning_rate=1e-3", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    run = tmp_path / "var" / "training" / "runs" / document["run_id"]
    assert document["run_dir"] == str(run)
    assert document["steps"] == 256
    assert document["final"]["update"] == 4
    assert json.loads((run / "resolved.json").read_text())["algorithm"]["learning_rate"] == 1e-3
    assert (run / "config.yaml").read_text() == config.read_text()
    records = [record.event for record in JournalReader(run / "attempt_1" / "metrics.jsonl").read()]
    assert [event.env_step for event in records if isinstance(event, TrainingStep)] == [64, 128, 192, 256]
    episodes = [event.episode for event in records if isinstance(event, EpisodeSummary)]
    assert episodes == list(range(1, len(episodes) + 1))
    assert sorted(p.name for p in (run / "attempt_1" / "checkpoints").glob("update_*"))[-1] == "update_00000004"


def test_resuming_gives_the_weights_of_an_uninterrupted_run(palaestra, config):
    whole = json.loads(palaestra("train", config, "--json").out)
    half = json.loads(palaestra("train", config, "trainer.total_timesteps=128", "--json").out)
    resumed = json.loads(palaestra("train", "--resume", half["run_id"], "trainer.total_timesteps=256", "--json").out)
    assert resumed["run_id"] == half["run_id"]
    assert resumed["steps"] == 256
    files = [read_checkpoint_policy(document["checkpoint"]) for document in (whole, resumed)]
    assert files[0] == files[1]
    assert "attempt_2" in resumed["checkpoint"]


def test_options_win_over_overrides_of_the_same_key(palaestra, config):
    document = json.loads(palaestra("train", config, "trainer.total_timesteps=256", "--num-steps", "64", "--json").out)
    assert document["steps"] == 64


def test_two_configurations_are_refused(palaestra, config):
    result = palaestra("train", "--config", config, "--config", config)
    assert result.code == 2
    assert "was given already. Give one of them" in result.err


def test_a_warm_start_of_a_resumed_run_is_refused(palaestra, config):
    half = json.loads(palaestra("train", config, "trainer.total_timesteps=128", "--json").out)
    result = palaestra("train", "--resume", half["run_id"], "--warm-start", half["checkpoint"])
    assert result.code == 2
    assert "--warm-start" in result.err
    assert "a resumed run has the weights of its own checkpoint" in result.err


def test_a_warm_start_takes_the_id_of_a_run(palaestra, config):
    first = json.loads(palaestra("train", config, "trainer.total_timesteps=128", "--json").out)
    second = palaestra("train", config, "trainer.total_timesteps=128", "--json", "--warm-start", first["run_id"])
    assert second.code == 0, second.err
    unknown = palaestra("train", config, "--warm-start", "nothing")
    assert unknown.code == 2
    assert "nothing" in unknown.err


def test_a_resume_with_another_algorithm_is_refused(palaestra, config):
    half = json.loads(palaestra("train", config, "trainer.total_timesteps=128", "--json").out)
    result = palaestra("train", "--resume", half["run_id"], "algorithm.name=dqn")
    assert result.code == 2
    assert f"algorithm.name = 'dqn': run {half['run_id']} learns with ppo." in result.err


def test_a_resume_goes_on_from_the_checkpoint_that_is_named(palaestra, config):
    whole = json.loads(palaestra("train", config, "--json").out)
    words = ["train", "--resume", whole["run_id"], "--json"]

    again = json.loads(palaestra(*words, "--checkpoint", "update_00000002").out)

    # From step 128 on to 256, with the weights that the first attempt came to.
    assert again["steps"] == 256
    policies = [read_checkpoint_policy(document["checkpoint"]) for document in (whole, again)]
    assert policies[0] == policies[1]
    assert "attempt_2" in again["checkpoint"]
    refused = palaestra(*words, "--checkpoint", "update_9")
    assert refused.code == 2
    assert "has no such checkpoint. It has update_00000004, update_00000003" in refused.err
    assert "requires --resume" in palaestra("train", config, "--checkpoint", "update_00000002").err


def read_checkpoint_policy(path):
    return load_checkpoint(Path(path)).policy.read_bytes()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(palaestra, config):
    weights = [
        read_checkpoint_policy(json.loads(palaestra("train", config, "--seed", seed, "--json").out)["checkpoint"])
        for seed in (5, 5, 6)
    ]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_eval_plays_exactly_the_episodes_asked_for(palaestra, config):
    run = json.loads(palaestra("train", config, "--json").out)["run_id"]
    result = palaestra("eval", run, "--episodes", 7, "--json")
    assert result.code == 0
    report = json.loads(result.out)
    assert report["episodes"] == 7
    assert report["ci95"][0] <= report["mean_return"] <= report["ci95"][1]
    again = json.loads(palaestra("eval", run, "--episodes", 7, "--device", "cpu", "--json").out)
    assert again == report
    refused = palaestra("eval", run, "--device", "gpu")
    assert (refused.code, "device = 'gpu': names no device" in refused.err) == (2, True)


def test_one_episode_has_no_interval(palaestra, config):
    run = json.loads(palaestra("train", config, "--json").out)["run_id"]
    report = json.loads(palaestra("eval", run, "--episodes", 1, "--against", run, "--json").out)
    assert report["ci95"] is report["against"]["ci95"] is report["difference"]["ci95"] is None
    lines = palaestra("eval", run, "--episodes", 1, "--against", run).out.splitlines()
    assert lines[0] == f"{run}: mean return {report['mean_return']:.2f} (one episode, no interval)"
    assert lines[2] == "difference +0.00 (one episode, no interval)"


@pytest.fixture
def endless(tmp_path, config, monkeypatch):
    """The quick configuration with an environment whose episodes do not end."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "endless_env.py").write_text(
        "import gymnasium\nimport numpy as np\n\n\n"
        "class Endless(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n\n"
        "    def reset(self, *, seed=None, options=None):\n        return np.zeros(2, np.float32), {}\n\n"
        "    def step(self, action):\n        return np.zeros(2, np.float32), 1.0, False, False, {}\n"
    )
    config.write_text(config.read_text().replace("CartPole-v1", "endless_env:Endless"))
    return config


def test_episodes_that_do_not_end_are_reported_with_the_limit_to_set(palaestra, endless, monkeypatch):
    monkeypatch.setattr("palaestra.env.make.EPISODE_LIMIT", 50)
    trained = palaestra("train", endless)
    assert "No episode ended" in trained.out
    assert "env.max_episode_steps=" in trained.out
    run_id = re.search(r"palaestra eval (\S+)", trained.out)[1]
    evaluated = palaestra("eval", run_id, "--episodes", 3)
    assert "3 of 3 episodes were cut off after 50 steps." in evaluated.out
    limited = palaestra("train", endless, "env.max_episode_steps=50")
    assert "No episode ended" not in limited.out
    assert "cut off" not in palaestra("eval", re.search(r"palaestra eval (\S+)", limited.out)[1]).out


def test_eval_compares_two_runs_on_the_same_seeds(palaestra, config):
    run = json.loads(palaestra("train", config, "--json").out)["run_id"]
    report = json.loads(palaestra("eval", run, "--episodes", 4, "--against", run, "--json").out)
    assert report["difference"] == {"mean": 0.0, "ci95": [0.0, 0.0]}


def test_the_configuration_of_the_specification_trains_once_an_environment_is_named(palaestra, tmp_path):
    path = tmp_path / "my_config.json"
    path.write_text(SPECIFICATION_003)
    refused = palaestra("train", path)
    assert refused.code == 2
    assert "env.id=CartPole-v1" in refused.err
    result = palaestra("train", path, "env.id=CartPole-v1", "env.num_envs=1", "trainer.iterations=1", "--json")
    assert json.loads(result.out)["steps"] == 2048


def test_progress_goes_to_stderr_and_json_alone_to_stdout(palaestra, config):
    result = palaestra("train", config, "--json")
    json.loads(result.out)
    assert "256/256 steps" in result.err


def test_schema_explains_every_key(palaestra):
    schema = json.loads(palaestra("schema", "ppo").out)
    assert schema["properties"]["learning_rate"]["default"] == 3e-4
    assert all("description" in field for field in schema["properties"].values())


def test_envs_lists_what_can_be_named(palaestra):
    found = json.loads(palaestra("envs", "cartpole", "--json").out)
    assert {"CartPole-v1", "compiled/CartPole-v1"} <= {entry["id"] for entry in found}
    landers = palaestra("envs", "lunarlander-", "--backend", "envpool").out.split()
    assert landers == ["LunarLander-v2", "LunarLander-v3"]
    refused = palaestra("envs", "--backend", "isaac")
    assert refused.code == 2
    assert "Use gymnasium or envpool" in refused.err


def test_a_run_of_the_service_is_resumed_by_the_service_only(palaestra, config):
    run_id = json.loads(palaestra("train", config, "--json", "-q").out)["run_id"]
    run = RunDirectory(Home.default().runs / run_id)
    assert run.resume_command == f"palaestra train --resume {run_id}"
    (run.path / "spec.json").write_text("{}")
    refused = palaestra("train", "--resume", run_id, "trainer.total_timesteps=256")
    assert refused.code == 2
    message = f"error: --resume = '{run_id}': is a run of the run service. palaestra runs resume {run_id}.\n"
    assert refused.err == message
    assert [attempt.number for attempt in run.attempts()] == [1]


def test_version_and_help_answer(palaestra):
    assert palaestra("--version").out == "palaestra 0.1.0\n"
    assert "train" in palaestra("--help").out


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_saves_a_checkpoint_and_says_how_to_resume(config, tmp_path, which):
    command = [sys.executable, "-m", "palaestra", "train", str(config), "trainer.total_timesteps=100000000", "-q"]
    command += ["trainer.checkpoint_every=1000000"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = _wait_for_training(tmp_path, child)
    child.send_signal(which)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "palaestra train --resume" in out
    assert "Stopping after this update is finished and saved" in err
    run = journal.parents[1]
    newest = sorted((run / "attempt_1" / "checkpoints").glob("update_*"))[-1]
    assert load_checkpoint(newest).progress["updates"] > 0


def _wait_for_training(folder, child):
    """Wait until the journal contains an update."""
    while child.poll() is None:
        for journal in folder.glob("var/training/runs/*/attempt_1/metrics.jsonl"):
            if any(isinstance(record.event, TrainingStep) for record in JournalReader(journal).read()):
                return journal
        try:
            child.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(child.communicate())
