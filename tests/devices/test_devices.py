"""Where a policy computes: choosing a device, refusing one that is not there, and placement on a fake GPU.

No real GPU is used. The placement checks run on the fake one of fake_gpu.py, in a separate process because it
changes torch.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch

from palaestra.cli.train import check_config
from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.compiled import device_notices
from palaestra.policy.device import choose_device, move_to
from palaestra.train.config import config_from
from palaestra.train.trainer import Trainer, build_trainer
from palaestra.train.vector import train

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"@check\ndef (\w+)", Path(__file__).with_name("device_checks.py").read_text())


def test_the_same_numbers_on_a_fake_gpu_without_mixing_devices():
    # One process for all checks: loading torch takes longer than they do.
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.device_checks"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert list(found) == NAMES, done.stderr[-2000:]
    faults = {name: fault for name, fault in found.items() if fault}
    assert not faults, "\n".join(f"{name}:\n{fault}" for name, fault in faults.items())


def _pretend(monkeypatch, *, built="12.8", count=0):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_the_first_gpu_that_torch_sees_and_else_the_cpu(monkeypatch):
    _pretend(monkeypatch, count=0)
    assert choose_device("auto") == torch.device("cpu")
    _pretend(monkeypatch, count=2)
    assert choose_device("auto") == torch.device("cuda:0")
    assert choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")


def test_a_gpu_that_is_not_there_is_refused_with_what_torch_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _pretend(monkeypatch, built=None)
    with pytest.raises(ConfigError, match=r"device = 'cuda': torch .* is built without CUDA. Install a CUDA build"):
        choose_device("cuda")
    _pretend(monkeypatch, count=0)
    with pytest.raises(ConfigError, match=r"torch sees no GPU \(CUDA_VISIBLE_DEVICES is '3'\). .*--gpus 1"):
        choose_device("cuda:0")
    _pretend(monkeypatch, count=1)
    with pytest.raises(ConfigError, match=r"'cuda:1': torch sees 1 GPU \(CUDA_VISIBLE_DEVICES is '3'\). Use cuda:0"):
        choose_device("cuda:1")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cuda:-1", "cpu\n", True, 1.5])
def test_a_name_of_no_device_is_refused_in_python_and_in_a_configuration(name):
    with pytest.raises(ConfigError, match="device = "):
        choose_device(name)
    with pytest.raises(ConfigError, match=r"trainer\.device = .*: names no device. Use 'auto'"):
        config_from({"env": {"id": "CartPole-v1"}, "trainer": {"device": name}})


def test_a_run_on_a_missing_gpu_is_refused_before_its_directory_exists(tmp_path, monkeypatch):
    _pretend(monkeypatch, count=0)
    config = config_from({"env": {"id": "CartPole-v1"}, "trainer": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda': torch sees no GPU"):
        train(config, root=tmp_path, run_id="one")
    assert list(tmp_path.iterdir()) == []


def test_a_model_on_screens_on_a_missing_gpu_is_refused_by_the_check_before_a_launch(monkeypatch):
    pytest.importorskip("transformers")
    _pretend(monkeypatch, count=0)
    with pytest.raises(ConfigError, match=r"model\.device = 'cuda:0': torch sees no GPU"):
        check_config({"model": {"name": "tiny", "device": "cuda:0"}})


def test_every_constructor_takes_a_device_and_moves_the_policy():
    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space, device="meta")
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    config = config_from({"env": {"id": "CartPole-v1", "num_envs": 2}, "trainer": {"device": "cpu"}})
    trainer = build_trainer(config)
    assert (trainer.device.type, device_notices(trainer.policy)) == ("cpu", [])
    moved = Trainer(ActorCritic(env.observation_space, env.action_space), [env], device="meta")
    assert moved.device.type == "meta"
    assert device_notices(moved.policy) == [
        "The policy acts and learns on meta.",
        "The compiled kernels run on the CPU only and are not used. For a network this small trainer.device=cpu is "
        "faster.",
    ]


def test_data_moves_as_arrays_tensors_and_mappings():
    there = move_to(torch.device("meta"), {"a": torch.zeros(2), "b": {"c": torch.zeros(3).numpy()}})
    assert (there["a"].device.type, there["b"]["c"].device.type, there["b"]["c"].shape) == ("meta", "meta", (3,))
    mine = torch.zeros(2)
    assert move_to(torch.device("cpu"), mine) is mine
