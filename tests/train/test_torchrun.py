"""Training in several processes under torchrun: the same numbers as one process, one checkpoint, one message."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from palaestra.errors import ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.policy.device import choose_device
from palaestra.train.config import config_from
from palaestra.train.distributed import check_own_devices, check_rollout_ranks, collector_seed, refuse_transitions
from palaestra.train.vector import train
from palaestra.transport.ranks import ALONE, Ranks, join_ranks

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"@check\ndef (\w+)", Path(__file__).with_name("torchrun_checks.py").read_text())
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
CARTPOLE = {
    "env": {"id": "CartPole-v1", "num_envs": 4, "normalize_observation": True, "normalize_reward": True},
    "policy": {"hidden": [8]}, "algorithm": {"name": "ppo", "n_epochs": 2, "batch_size": 32},
    "trainer": {"total_timesteps": 256, "rollout_length": 32, "device": "cpu", "compiled": "off"},
    "telemetry": {"progress": False},
}  # fmt: skip


def launch(*words, home, **more):
    """Start two processes; returns the launcher."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PALAESTRA_HOME": str(home),
        "PYTHONPATH": f"{home}:{ROOT}",
    }
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": home, "env": environment}
    return subprocess.Popen([*LAUNCH, *map(str, words)], start_new_session=True, **options, **more)


def finish(launcher):
    """Exit status, output and errors; ends everything that is left."""
    try:
        out, err = launcher.communicate(timeout=270)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # it ends the processes that it has started
        _, err = launcher.communicate()
        pytest.fail(f"not finished after 270 s: {err[-3000:]}")
    return launcher.returncode, out, err


def write_config(path, config=CARTPOLE, **trainer):
    path.write_text(json.dumps({**config, "trainer": {**config["trainer"], **trainer}}))
    return path


def weights_of(run):
    return load_file(run.latest_checkpoint() / "policy.safetensors")


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_two_processes_compute_what_one_computes(tmp_path):
    # One launch for all checks: loading torch three times takes longer than most of them.
    code, out, err = finish(launch("tests.train.torchrun_checks", tmp_path / "found.json", home=tmp_path))
    assert code == 0, out + err.partition("Extension modules:")[0][-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == NAMES
    faults = {name: fault for name, fault in found.items() if fault}
    assert not faults, "\n".join(f"{name}:\n{fault}" for name, fault in faults.items())


def test_a_run_of_two_processes_is_a_run_of_one_and_goes_on_in_one(tmp_path):
    path = write_config(tmp_path / "run.json")
    code, out, err = finish(launch("palaestra", "train", path, "--json", home=tmp_path))
    assert code == 0, err[-3000:]
    told = json.loads(out)  # one process speaks
    run = RunDirectory(Path(told["run_dir"]))
    assert [path.name for path in run.path.parent.iterdir()] == [told["run_id"]]
    assert told["steps"] == 256

    alone = train(config_from(CARTPOLE), root=tmp_path, run_id="alone")
    assert alone.final["episodes"] == told["final"]["episodes"]
    assert alone.final["reward_scale"] == pytest.approx(told["final"]["reward_scale"], abs=1e-6)
    assert largest_difference(weights_of(alone.run), weights_of(run)) < 1e-5

    # Environments, noise and shuffles continue where they were: 2 + 2 updates of both are 4 of one.
    longer = {**CARTPOLE, "trainer": {**CARTPOLE["trainer"], "total_timesteps": 512}}
    resumed = train(config_from(longer), root=tmp_path, run_id="-", resume=run)
    whole = train(config_from(longer), root=tmp_path, run_id="whole")
    assert resumed.steps == whole.steps == 512
    assert resumed.final["episodes"] == whole.final["episodes"]
    assert largest_difference(weights_of(resumed.run), weights_of(whole.run)) < 1e-5


BROKEN = """
import os
import gymnasium
class Broken(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps = 0
    def step(self, action):
        self.steps += os.path.exists("var/training/runs")  # not while the environment is inspected
        if self.steps == 80 and os.environ.get("RANK") == "1":
            {action}
        return super().step(action)
"""


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two(tmp_path):
    first = train(config_from(CARTPOLE), root=tmp_path / "var" / "training" / "runs", run_id="first")
    words = ("train", "--resume", "first", "trainer.total_timesteps=512", "--json")
    code, out, err = finish(launch("palaestra", *words, home=tmp_path))
    assert code == 0, err[-3000:]
    assert json.loads(out)["steps"] == 512
    longer = {**CARTPOLE, "trainer": {**CARTPOLE["trainer"], "total_timesteps": 512}}
    whole = train(config_from(longer), root=tmp_path, run_id="whole")
    assert largest_difference(weights_of(first.run), weights_of(whole.run)) < 1e-5


def run_broken(tmp_path, action):
    (tmp_path / "broken.py").write_text(BROKEN.format(action=action))
    config = {**CARTPOLE, "env": {**CARTPOLE["env"], "id": "broken:Broken", "max_episode_steps": 500}}
    path = write_config(tmp_path / "run.json", config, total_timesteps=512)
    launcher = launch("palaestra", "train", path, home=tmp_path)
    code, _, err = finish(launcher)
    run = next((tmp_path / "var" / "training" / "runs").iterdir())
    return code, err, RunDirectory(run)


def test_a_failure_of_one_process_ends_both_with_one_message_and_a_checkpoint(tmp_path):
    code, err, run = run_broken(tmp_path, 'raise OSError("the cable was pulled")')
    assert code == 1
    lines = [line for line in err.splitlines() if "the cable was pulled" in line]
    assert len(lines) == 1, err[-3000:]
    assert "process 1 of 2 (numbered from 0) failed" in lines[0]
    assert re.search(r"Resume with: \S*python -m palaestra train --resume", lines[0]), lines[0]
    # The third rollout failed, of 32 steps each.
    assert run.latest_checkpoint().name == "update_00000002"


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_which_saves_what_was_learned(tmp_path):
    code, err, run = run_broken(tmp_path, "os.kill(os.getpid(), 9)")
    assert code == 1
    assert run.latest_checkpoint().name == "update_00000002", err[-3000:]
    longer = {**CARTPOLE, "trainer": {**CARTPOLE["trainer"], "total_timesteps": 512}}
    longer["env"] = {**CARTPOLE["env"], "max_episode_steps": 500}
    resumed = train(config_from(longer), root=tmp_path, run_id="-", resume=run)
    assert resumed.steps == 512


@pytest.mark.slow
def test_sigterm_stops_both_after_the_update_with_a_checkpoint(tmp_path):
    path = write_config(tmp_path / "run.json", total_timesteps=10_000_000)
    launcher = launch("palaestra", "train", path, home=tmp_path)
    runs = tmp_path / "var" / "training" / "runs"
    while not list(runs.glob("*/attempt_1/metrics.jsonl")) or not _journal_has_a_step(runs):
        assert launcher.poll() is None, finish(launcher)
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    _, _, err = finish(launcher)
    run = RunDirectory(next(runs.iterdir()))
    events = [json.loads(line) for line in run.attempts()[0].journal.read_text().splitlines()]
    assert '"stopped"' in json.dumps(events[-1]), err[-2000:]
    assert int(run.latest_checkpoint().name.removeprefix("update_")) >= 1


def _journal_has_a_step(runs):
    return any('"TrainingStep"' in path.read_text() or "policy_loss" in path.read_text()
               for path in runs.glob("*/attempt_1/metrics.jsonl"))  # fmt: skip


# ---------------------------------------------------------------- what is refused, without processes


def pretend(monkeypatch, **more):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **more}.items():
        monkeypatch.setenv(name, value)


def changed(section, **keys):
    return config_from({**CARTPOLE, section: {**CARTPOLE[section], **keys}})


def test_settings_that_do_not_suit_several_processes_are_refused_with_a_remedy():
    ranks = Ranks(0, 3)
    with pytest.raises(ConfigError, match=r"env.num_envs = 4: cannot be divided among the 3 .*: 3 and 6"):
        check_rollout_ranks(config_from(CARTPOLE), ranks)
    with pytest.raises(ConfigError, match=r"trainer.compiled = 'on': the compiled update is for one process"):
        check_rollout_ranks(changed("trainer", compiled="on"), Ranks(0, 2))
    with pytest.raises(ConfigError, match=r"env.normalize_reward = True: the asynchronous collectors"):
        check_rollout_ranks(changed("trainer", collection="asynchronous"), Ranks(0, 2))
    check_rollout_ranks(changed("trainer", compiled="on"), ALONE)
    check_rollout_ranks(config_from(CARTPOLE), Ranks(1, 2))


def test_learning_from_transitions_is_refused_under_torchrun(monkeypatch):
    config = config_from({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}})
    refuse_transitions(config)
    pretend(monkeypatch)
    with pytest.raises(ConfigError, match=r"algorithm.name = 'dqn': learns from transitions in one process"):
        refuse_transitions(config)


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [str(choose_device(name)) for name in ("auto", "cuda", "cuda:3")] == ["cuda:0", "cuda:0", "cuda:3"]
    pretend(monkeypatch)
    assert [str(choose_device(name)) for name in ("auto", "cuda", "cuda:3")] == ["cuda:1", "cuda:1", "cuda:3"]
    with pytest.raises(ConfigError, match="all processes of a machine would use the same GPU"):
        check_own_devices("cuda:3", place="trainer.device")
    pretend(monkeypatch, LOCAL_WORLD_SIZE="1")  # one process on each machine
    check_own_devices("cuda:3", place="trainer.device")


def test_an_environment_of_torchrun_that_is_incomplete_is_refused(monkeypatch):
    pretend(monkeypatch)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ConfigError, match="the environment has WORLD_SIZE but not MASTER_ADDR, MASTER_PORT"),
        join_ranks(1),
    ):
        pass


def test_synchronous_collectors_share_a_seed_and_asynchronous_ones_do_not():
    asynchronous = changed("trainer", collection="asynchronous").asynchronous
    assert [collector_seed(5, Ranks(rank, 2), None) for rank in (0, 1)] == [5, 5]
    first, second = (collector_seed(5, Ranks(rank, 2), asynchronous) for rank in (0, 1))
    assert first == 5
    assert second != 5
