"""`PPOTrainer`: settings by keyword, checkpoints as it goes, rollouts by task, and otherwise a `Trainer`."""

import pytest
import torch

from palaestra.env import EnvConfig, make_env
from palaestra.env.toy import Gate
from palaestra.errors import ConfigError
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.specifications.ppo_trainer import TASK_ROLLOUTS, PPOTrainer
from palaestra.train import Trainer


def trainer(cls=PPOTrainer, *args, **settings):
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    return cls(ActorCritic(env.observation_space, env.action_space, seed=1), env, *args, seed=1, **settings)


def weights(one):
    return torch.cat([p.detach().reshape(-1) for p in one.policy.parameters()])


def test_it_learns_bit_for_bit_what_a_trainer_with_ppo_learns():
    mine, plain = trainer(n_epochs=2, batch_size=32), trainer(Trainer, PPO(n_epochs=2, batch_size=32))
    assert [m["loss"] for m in mine.train(256, 32)] == [m["loss"] for m in plain.train(256, 32)]
    assert torch.equal(weights(mine), weights(plain))


def test_it_collects_in_the_background_like_a_trainer():
    assert trainer(buffer_type="vla", batch_size=32).train(128, 32)[-1]["update"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learnin_rate": 1}, "PPOTrainer.learnin_rate = 1: unknown key. Did you mean 'learning_rate'"),
        ({"ent_coef": 0.0}, "Did you mean 'entropy_coef'"),
        ({"vf_coef": 0.5}, "Did you mean 'value_coef'"),
        ({"n_steps": 2048}, r"PPOTrainer.n_steps = 2048: unknown key. Use train\(rollout_length=…\)"),
        ({"clip_coef": 0.2}, "Use clip_range"),
        ({"gamma": 2}, "PPOTrainer.gamma = 2"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_does(settings, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**settings)


def test_checkpoints_are_named_by_updates_and_continue_exactly(tmp_path):
    whole = trainer(batch_size=32)
    whole.train(512, 32)
    first = trainer(batch_size=32, checkpoint_dir=tmp_path, save_interval=4)
    first.train(256, 32)
    assert [path.name for path in tmp_path.iterdir()] == ["update_00000004"]
    again = trainer(batch_size=32)
    assert again.load_checkpoint(tmp_path / "update_00000004")
    again.train(512, 32)
    assert torch.equal(weights(again), weights(whole))


def test_save_interval_of_train_comes_first_and_a_callback_still_ends_training(tmp_path):
    one = trainer(batch_size=32, checkpoint_dir=tmp_path, save_interval=100)
    one.train(512, 32, callback=lambda trainer, metrics: metrics["update"] < 2, save_interval=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update_00000001", "update_00000002"]


@pytest.mark.parametrize("call", [lambda one: one.save_checkpoint(), lambda one: one.train(64, 32, save_interval=1)])
def test_a_checkpoint_without_a_directory_is_refused_before_anything_is_collected(call):
    one = trainer(batch_size=32)
    with pytest.raises(ConfigError, match=r"no directory for checkpoints. Give PPOTrainer\(checkpoint_dir=…\)"):
        call(one)
    assert one.total_timesteps == 0


def test_rollouts_are_remembered_by_the_name_of_the_task_the_newest_only():
    env = Gate()
    one = PPOTrainer(ActorCritic(env.observation_space, env.action_space), env)
    known = one.get_task_trajectories("left")
    made = [one.collect_rollouts(4, task_trajectories=known) for _ in range(TASK_ROLLOUTS + 2)]
    assert [id(rollout) for rollout in one.get_task_trajectories("left")] == [id(r) for r in made[2:]]
    assert not one.get_task_trajectories("right")
