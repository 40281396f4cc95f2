"""Specification 004, "PPO Trainer Refactoring Guide": its snippets as it writes them, with our import lines."""

from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch

from palaestra import ActorCritic, PPOTrainer, as_vector_env, combine_rollouts
from palaestra.env.toy import Gate

pytestmark = pytest.mark.timeout(120)


def create_env():
    return gymnasium.make("CartPole-v1")


def policy_for(env):
    return ActorCritic(env.observation_space, env.action_space, seed=0)


@pytest.fixture
def env():
    return create_env()


@pytest.fixture
def policy(env):
    return policy_for(env)


# ------------------------------------------------------------------------------------------- usage examples


def test_basic_training_loop(policy, env):
    # Standard training - works the same as before
    trainer = PPOTrainer(
        policy=policy,
        env=env,
        learning_rate=3e-4,
        n_epochs=10,
        batch_size=64,
    )

    # Simple training call
    history = trainer.train(
        total_timesteps=100000,
        rollout_length=2048,
        log_interval=10,
    )
    assert [metrics["update"] for metrics in history] == [10, 20, 30, 40, 49]
    assert history[-1]["episode_return"] > 100  # of 20 without learning


def test_custom_training_loop(policy, env):
    # Now you can create custom training loops!
    trainer = PPOTrainer(policy, env)

    # Collect more data before training
    all_rollouts = []
    for _i in range(5):
        rollout_data = trainer.collect_rollouts(n_steps=1000)
        all_rollouts.append(rollout_data)

    # Train on combined data
    combined_data = combine_rollouts(all_rollouts)
    metrics = trainer.learn(combined_data)
    assert combined_data.batch_size == (5000, 1)
    assert metrics["staleness"] == 0.0


def test_distributed_collection(policy):
    # Collect data on multiple environments in parallel
    envs = [create_env() for _ in range(4)]
    trainers = [PPOTrainer(policy, env) for env in envs]

    # Parallel collection
    rollouts = []
    for trainer in trainers:
        rollout = trainer.collect_rollouts(n_steps=512)
        rollouts.append(rollout)

    # Centralized learning
    combined_data = combine_rollouts(rollouts)
    metrics = trainers[0].learn(combined_data)
    assert combined_data.batch_size == (512, 4)
    assert metrics["minibatches"] == 10 * 2048 / 64


class CurriculumPPOTrainer(PPOTrainer):
    def collect_rollouts(self, n_steps, difficulty_level=1):
        # Adjust environment difficulty
        self.env.set_difficulty(difficulty_level)

        # Collect with current difficulty
        return super().collect_rollouts(n_steps)

    def train(self, total_timesteps, **kwargs):
        difficulty = 1

        while self.total_timesteps < total_timesteps:
            # Gradually increase difficulty
            if self.total_timesteps > total_timesteps * 0.3:
                difficulty = 2
            if self.total_timesteps > total_timesteps * 0.6:
                difficulty = 3

            # Collect at current difficulty
            rollout_data = self.collect_rollouts(n_steps=2048, difficulty_level=difficulty)

            # Learn from collected data
            metrics = self.learn(rollout_data)

            # Log progress
            print(
                f"Timesteps: {self.total_timesteps}, "
                f"Difficulty: {difficulty}, "
                f"Reward: {np.mean(self.episode_rewards):.2f}"
            )


def test_curriculum_learning_integration(capsys):
    env = Gate()
    CurriculumPPOTrainer(policy_for(env), env).train(total_timesteps=10_000)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("Difficulty: ")[1][0] for line in lines] == ["1", "1", "2", "3", "3"]
    assert env.difficulty == 3


# Save rollouts for later use
def save_rollouts_to_disk(trainer, n_rollouts=10):
    for i in range(n_rollouts):
        rollout_data = trainer.collect_rollouts(n_steps=2048)
        torch.save(rollout_data, f"rollout_{i}.pt")


# Train from saved rollouts
def train_from_saved_rollouts(trainer, rollout_files):
    for epoch in range(5):
        for file in rollout_files:
            rollout_data = torch.load(file)
            metrics = trainer.learn(rollout_data)
            print(f"Epoch {epoch}, File {file}: Loss={metrics['loss']:.4f}")


def test_experience_replay_from_disk(policy, env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = PPOTrainer(policy, env)
    save_rollouts_to_disk(trainer, n_rollouts=2)
    train_from_saved_rollouts(trainer, ["rollout_0.pt", "rollout_1.pt"])
    assert capsys.readouterr().out.count("Loss=") == 10


class MetaLearningPPOTrainer(PPOTrainer):
    def collect_task_specific_rollouts(self, task, n_steps):
        # Set task in environment
        self.env.set_task(task)

        # Get task representation
        task_trajectories = self.get_task_trajectories(task)

        # Collect rollouts for this task
        return self.collect_rollouts(n_steps=n_steps, task_trajectories=task_trajectories)

    def meta_train(self, tasks, steps_per_task=1000):
        for _epoch in range(10):
            for task in tasks:
                # Collect data for task
                rollout_data = self.collect_task_specific_rollouts(task, steps_per_task)

                # Learn from task data
                metrics = self.learn(rollout_data)

                print(f"Task {task.name}: {metrics}")


@dataclass(frozen=True)
class Task:
    name: str
    lever: int


class TaskGate(Gate):
    """Takes tasks as objects, and remembers what it was told of earlier rollouts."""

    known = 0

    def set_task(self, task):
        super().set_task(task.lever)

    def set_task_trajectories(self, rollouts):
        self.known = len(rollouts)


def test_meta_learning_with_task_specific_collection(capsys):
    env, tasks = TaskGate(), [Task("left", 0), Task("right", 1)]
    trainer = MetaLearningPPOTrainer(policy_for(env), env)
    trainer.meta_train(tasks)
    assert capsys.readouterr().out.count("Task right: {'policy_loss'") == 10
    assert len(trainer.get_task_trajectories(tasks[0])) == 8  # the newest of ten
    assert env.known == 8
    assert env.task == 1


# ------------------------------------------------------------------------------------------- details


def test_device_management(policy, env):
    trainer = PPOTrainer(policy, env)
    assert trainer.device == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert PPOTrainer(policy, env, device=torch.device("cpu")).device.type == "cpu"


def test_checkpointing(policy, env, tmp_path):
    class SavingPPOTrainer(PPOTrainer):
        def learn(self, rollout_data):
            metrics = super().learn(rollout_data)
            save_interval = 2
            # Save after learning phase
            if self.n_updates % save_interval == 0:
                self.save_checkpoint()
            return metrics

    SavingPPOTrainer(policy, env, checkpoint_dir=tmp_path).train(512, rollout_length=128)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update_00000002", "update_00000004"]


def test_for_basic_users(policy):
    trainer = PPOTrainer(policy, as_vector_env("compiled/CartPole-v1"))
    # This still works exactly the same
    trainer.train(total_timesteps=100000)
    assert trainer.total_timesteps >= 100000


def test_for_advanced_users(policy, env):
    # New way - just override what you need
    class CustomPPOTrainer(PPOTrainer):
        collected = 0

        def collect_rollouts(self, n_steps):
            # Custom collection logic
            self.collected += n_steps
            return super().collect_rollouts(n_steps)

    trainer = CustomPPOTrainer(policy, env)
    trainer.train(512, rollout_length=128)
    assert trainer.collected == 512


# ------------------------------------------------------------------------------------------- testing


@pytest.fixture
def mock_policy(policy):
    return policy


@pytest.fixture
def mock_env(env):
    return env


def create_fake_rollout_data(n_samples):
    generator = torch.Generator().manual_seed(0)
    return {
        "observations": torch.randn(n_samples, 4, generator=generator),
        "actions": torch.randint(2, (n_samples,), generator=generator),
        "rewards": torch.ones(n_samples),
        "values": torch.randn(n_samples, generator=generator),
        "log_probs": torch.full((n_samples,), -0.69),
        "dones": torch.rand(n_samples, generator=generator) < 0.05,
    }


def test_collection(mock_policy, mock_env):
    """Test rollout collection independently"""
    trainer = PPOTrainer(mock_policy, mock_env)
    rollout_data = trainer.collect_rollouts(n_steps=100)

    assert len(rollout_data["observations"]) == 100
    assert "actions" in rollout_data
    assert "rewards" in rollout_data


@pytest.mark.parametrize("judged", [False, True])
def test_learning(policy, mock_env, judged):
    """Test learning independently"""
    trainer = PPOTrainer(policy, mock_env)

    # Create fake rollout data
    fake_data = create_fake_rollout_data(n_samples=1000)
    if judged:  # as the original's buffer gives it
        fake_data |= {"advantages": torch.randn(1000), "returns": torch.randn(1000)}

    # Test learning
    metrics = trainer.learn(fake_data)

    assert metrics["loss"] > 0
    assert "policy_loss" in metrics
    assert "value_loss" in metrics
