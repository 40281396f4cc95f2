"""Does it learn? Small tasks to their known best, on both paths."""

import numpy as np
import pytest

from palaestra.env import EnvConfig, as_vector_env
from palaestra.env.toy import Bandit, MaskedChoice, Pixels, TargetReach
from palaestra.evaluation import evaluate
from palaestra.learner import PPO
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.train import Trainer

PATHS = ["auto", "off"]


def _trainer(env, *, seed=0, compiled="auto", policy=None, normalize=False, normalize_reward=False, **settings):
    env = as_vector_env(env)
    config = PolicyConfig(**(policy or {}))
    policy = ActorCritic(env.observation_space, env.action_space, config, normalize_observation=normalize, seed=seed)
    return Trainer(policy, env, PPO(**settings), seed=seed, compiled=compiled, normalize_reward=normalize_reward)


@pytest.mark.parametrize("compiled", PATHS)
def test_the_best_arm_of_a_bandit_is_found_even_when_arms_are_counted_from_5(compiled):
    trainer = _trainer(
        [Bandit(5, best=3, first_arm=5) for _ in range(4)], compiled=compiled, learning_rate=1e-2, n_epochs=4
    )  # fmt: skip
    history = trainer.train(4000, rollout_length=32)
    assert history[-1]["episode_return"] > 0.95
    assert evaluate(trainer.policy, trainer.env, episodes=10, seed=1).mean_return == 1.0


CARTPOLE = {
    "learning_rate": 1e-3, "batch_size": 256, "gamma": 0.98, "gae_lambda": 0.9, "entropy_coef": 0.0
}  # fmt: skip


def _steps_until_195(env, **options):
    trainer = _trainer(env, **CARTPOLE, **options)
    reached = []

    def solved(trainer, metrics):
        if metrics.get("episode_return", 0.0) >= 195:
            reached.append(trainer.total_timesteps)
        return not reached

    trainer.train(60_000, rollout_length=128, callback=solved)
    return reached[0] if reached else np.inf


@pytest.mark.parametrize("seed", range(3))
def test_cartpole_reaches_195_within_60000_steps(seed):
    assert _steps_until_195("CartPole-v1", seed=seed) <= 60_000


def test_cartpole_reaches_195_within_60000_steps_on_the_plain_path():
    assert _steps_until_195("CartPole-v1", compiled="off") <= 60_000


def test_the_compiled_cartpole_reaches_195_within_60000_steps():
    assert _steps_until_195(EnvConfig(id="compiled/CartPole-v1", num_envs=8)) <= 60_000


@pytest.mark.parametrize("distribution", ["gaussian", "squashed_gaussian"])
def test_a_point_learns_to_walk_to_its_target(distribution):
    trainer = _trainer(
        [TargetReach() for _ in range(8)], policy={"distribution": distribution, "log_std_init": -0.5},
        learning_rate=2e-3, batch_size=128, n_epochs=6, gamma=0.9, entropy_coef=0.0,
    )  # fmt: skip
    before = evaluate(trainer.policy, as_vector_env([TargetReach()]), episodes=30, seed=7).mean_return
    trainer.train(24_000, rollout_length=80)
    after = evaluate(trainer.policy, as_vector_env([TargetReach()]), episodes=30, seed=7).mean_return
    # Standing still pays -1 per step on average, 10 in all; walking at full speed pays about -1/2 altogether.
    assert before < -6
    assert after > -2.5


def test_masked_choices_are_learned():
    trainer = _trainer([MaskedChoice() for _ in range(8)], learning_rate=5e-3, batch_size=128, n_epochs=6, gamma=0.0)
    history = trainer.train(8_000, rollout_length=64)
    assert history[-1]["episode_return"] > 5.5  # of 6


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_pixels_are_learned(precision):
    trainer = _trainer(
        [Pixels(size=5) for _ in range(8)],
        policy={"image_features": 32, "hidden": (32,), "image_precision": precision}, learning_rate=3e-3,
        batch_size=128, n_epochs=4, gamma=0.0,
    )  # fmt: skip
    history = trainer.train(8_000, rollout_length=64)
    assert history[-1]["episode_return"] > 6.5  # of 8


@pytest.mark.slow
def test_cartpole_reaches_the_published_return_with_the_published_settings():
    # CleanRL reports 490 +- 6 over three seeds for exactly these settings. Single runs do collapse late with bolder
    # ones (at a learning rate of 1e-3 about one in twelve, on either path), hence the mean.
    settings = {
        "learning_rate": 2.5e-4, "learning_rate_schedule": "linear", "gamma": 0.99, "gae_lambda": 0.95, "n_epochs": 4,
        "batch_size": 128, "clip_range": 0.2, "value_clip": 0.2, "entropy_coef": 0.01, "value_coef": 0.5,
        "max_grad_norm": 0.5, "grad_clip": "global",
    }  # fmt: skip
    returns = []
    for seed in range(3):
        trainer = _trainer(EnvConfig(id="CartPole-v1", num_envs=4), seed=seed, **settings)
        returns.append(trainer.train(500_000, rollout_length=128)[-1]["episode_return"])
    assert np.mean(returns) > 475, returns


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_pendulum_is_swung_up(seed):
    # Most implementations fail here because they treat the time limit as the end of the world.
    trainer = _trainer(
        "Pendulum-v1", seed=seed, learning_rate=1e-3, gamma=0.9, gae_lambda=0.95, n_epochs=10, batch_size=256,
        entropy_coef=0.0, normalize=True, normalize_reward=True, learning_rate_schedule="linear",
    )  # fmt: skip
    trainer.train(300_000, rollout_length=256)
    found = evaluate(trainer.policy, as_vector_env("Pendulum-v1"), episodes=40, seed=1000 + seed)
    assert found.mean_return > -250
