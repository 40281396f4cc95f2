"""Specification 003, "RL Training Framework": its snippets as it writes them, with our import lines."""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from palaestra.experience import ArraySpec
from palaestra.train import config_from

pytestmark = pytest.mark.timeout(120)

MODELS = Path(__file__).parent / "models"
NUMBER = ArraySpec((), np.dtype(np.float32))

QUICK_START = """
{
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

VLA = """
{
  "trainer": {
    "buffer_type": "vla",
    "buffer_size": 2048
  },
  "policy": {
    "name": "vla",
    "action_dim": 7,
    "vla_config": {
      "model_path": "checkpoints/pretrained_vla_model.pth",
      "model_class": "vla_models.GPTVLAModel",
      "model_config": {
        "vision_encoder": "resnet50",
        "language_model": "gpt2-medium",
        "freeze_vision_encoder": false
      }
    }
  },
  "algorithm": {
    "name": "ppo",
    "cfg": {
      "learning_rate": 1e-5
    }
  }
}
"""


def test_configuration_and_run_training(command):
    path = Path("configs/agents/rl/my_config.json")
    path.parent.mkdir(parents=True)
    path.write_text(QUICK_START)
    # The document names no environment; ours asks for one.
    assert "Name one: env.id=CartPole-v1" in command("train", "--config", path)
    # 500 iterations of 2048 steps would take minutes.
    report = command("train", "--config", path, "env.id=CartPole-v1", "env.num_envs=1", "--num-steps", 4096)
    assert (report["steps"], report["final"]["update"], report["final"]["minibatches"]) == (4096, 2, 320)


@pytest.mark.parametrize(("mode", "asynchronous"), [("standard", False), ("vla", True)])
def test_training_modes(mode, asynchronous):
    config = config_from({"env": {"id": "CartPole-v1"}, "trainer": {"buffer_type": mode}})
    assert (config.asynchronous is not None) is asynchronous


def test_circular_overwrite_example():
    from palaestra import VLABuffer

    buffer = VLABuffer(4, 1, NUMBER, NUMBER)
    drawn = []
    for number in range(6):
        step = np.full(1, number, np.float32)
        buffer.add({"observation": step, "action": step, "reward": step})
        held = [f"T{int(s.reward[0, 0])}" if s.position else "_" for s in buffer.segments]
        drawn.append(",".join(held))
    assert drawn == ["T0,_,_,_", "T0,T1,_,_", "T0,T1,T2,_", "T0,T1,T2,T3", "T4,T1,T2,T3", "T4,T5,T2,T3"]


@pytest.mark.parametrize("buffer_type", ["standard", "vla"])
def test_core_api_trainer(buffer_type):
    from palaestra import PPO, ActorCritic, Trainer

    env = gymnasium.make("CartPole-v1")
    policy, algorithm = ActorCritic(env.observation_space, env.action_space), PPO(batch_size=512)
    trainer = Trainer(
        policy,
        env,
        algorithm,
        buffer_size=2048,
        buffer_type=buffer_type,  # or "vla"
        batch_size=64,
    )
    # A million steps would take minutes.
    history = trainer.train(total_timesteps=4096)
    assert [metrics["minibatches"] for metrics in history] == [320, 320]
    assert algorithm.config.batch_size == 512  # the argument replaces it for this trainer alone


def test_buffer_interface_in_standard_mode():
    from palaestra import PPOTrainer, RolloutBuffer
    from palaestra.policy import ActorCritic

    env = gymnasium.make("CartPole-v1")
    trainer = PPOTrainer(ActorCritic(env.observation_space, env.action_space), env)
    rollout, trained = trainer.collect_rollouts(64), []
    buffer = RolloutBuffer(64, **trainer.collector.shape())

    def train():
        trained.append(trainer.learn(rollout))

    # Add data
    buffer.add(rollout)  # Standard mode: complete rollout

    # Get data
    data = buffer.get(flatten=True)  # Returns [batch, ...]

    # Check status
    if buffer.is_full():
        train()
    assert data.batch_size == (64,)
    assert torch.equal(data["observations"], rollout["observations"].flatten(0, 1))
    assert len(trained) == 1


def test_buffer_interface_in_vla_mode():
    from palaestra import VLABuffer

    buffer = VLABuffer(2, 3, NUMBER, NUMBER)
    for number in range(2):
        transition = {key: np.arange(3, dtype=np.float32) + 10 * number for key in ("observation", "action", "reward")}
        buffer.add(transition)  # VLA mode: single transition
    assert buffer.is_full()
    data = buffer.get(flatten=True)
    assert data["rewards"].tolist() == [0, 1, 2, 10, 11, 12]


def test_vla_model_requirements(monkeypatch):
    monkeypatch.syspath_prepend(str(MODELS))
    from vla_models import Arm, MyVLAModel

    from palaestra.policy import VLAPolicy, check_vla_model

    env = Arm()
    check_vla_model(MyVLAModel(), env.observation_space, env.action_space)
    policy = VLAPolicy(MyVLAModel(), env.observation_space, env.action_space)
    assert policy.action_dim == 7


def test_configuration_example_of_a_vla_model(command, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(MODELS))
    monkeypatch.delitem(sys.modules, "vla_models", raising=False)
    from vla_models import GPTVLAModel

    path, weights = tmp_path / "train_config.json", tmp_path / "checkpoints" / "pretrained_vla_model.pth"
    path.write_text(VLA)
    weights.parent.mkdir()
    settings = {"vision_encoder": "resnet50", "language_model": "gpt2-medium", "freeze_vision_encoder": False}
    pretrained = GPTVLAModel(**settings, action_dim=7)
    torch.save(pretrained.state_dict(), weights)
    # Rollouts of 2048 steps of 8 environments would take minutes.
    small = ["trainer.buffer_size=16", "trainer.collector=thread", "algorithm.batch_size=16", "--num-steps", 64]
    report = command("train", "--config", path, "env.id=vla_models:Arm", "env.num_envs=2", *small)
    assert (report["steps"], report["final"]["update"]) == (64, 2)


def test_load_vla_model(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(MODELS))
    from vla_models import MyVLAModel

    from palaestra import load_vla_model

    trained, path = MyVLAModel(), tmp_path / "model.pth"
    torch.save(trained.state_dict(), path)
    loaded = load_vla_model(model_path=str(path), model_class="vla_models.MyVLAModel", action_dim=7)
    assert torch.equal(loaded.action_head.weight, trained.action_head.weight)


def test_placeholders_are_no_configuration(command, tmp_path):
    path = tmp_path / "dots.json"
    path.write_text('{"trainer": {"buffer_type": "vla", ...}}')
    assert "is not JSON: Expecting property name" in command("train", "--config", path)
