"""Training on EnvPool: compiled PPO, resuming, evaluation, and the same scores as on Gymnasium."""

import pytest

from palaestra.files.run_directory import RunDirectory
from palaestra.telemetry import JournalReader
from palaestra.telemetry.event import LogLine
from palaestra.train import config_from, train


def _config(env_id="CartPole-v1", env=None, algorithm=None, **trainer):
    defaults = {"total_timesteps": 6 * 64, "rollout_length": 16, "compiled": "on"}
    return config_from(
        {
            "env": {"id": env_id, "num_envs": 4, "backend": "envpool", **(env or {})},
            "algorithm": {"n_epochs": 1, "batch_size": 32, **(algorithm or {})},
            "trainer": defaults | trainer,
            "telemetry": {"progress": False},
        }
    )


def _weights(outcome):
    checkpoint = sorted((outcome.run.path / "attempt_1" / "checkpoints").glob("update_*"))[-1]
    return (checkpoint / "policy.safetensors").read_bytes()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_seed_gives_the_same_weights_with_compiled_kernels(env_id, tmp_path):
    one, two, other = (
        train(_config(env_id, seed=seed), root=tmp_path, run_id=name) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one.steps == 384
    assert _weights(one) == _weights(two) != _weights(other)


def test_normalisation_and_evaluation_work_on_envpool(tmp_path):
    env = {"normalize_observation": True, "normalize_reward": True, "max_episode_steps": 20}
    outcome = train(_config("Pendulum-v1", env, eval_every=3, eval_episodes=3), root=tmp_path, run_id="a")
    assert outcome.final["eval_length"] == 20.0
    assert outcome.final["reward_scale"] > 0


def test_a_resumed_run_says_that_its_episodes_are_new(tmp_path):
    first = train(_config(), root=tmp_path, run_id="a")
    again = train(_config(total_timesteps=8 * 64), root=tmp_path, run_id="a", resume=RunDirectory(first.run.path))
    assert again.steps == 512
    events = [record.event for record in JournalReader(again.run.attempts()[1].journal).read()]
    assert any("start new episodes" in event.text for event in events if isinstance(event, LogLine))


@pytest.mark.slow
def test_an_algorithm_on_transitions_collects_with_envpool(tmp_path):
    config = config_from(
        {
            "env": {"id": "CartPole-v1", "num_envs": 2, "backend": "envpool"},
            "algorithm": {"name": "dqn", "learning_starts": 50, "buffer_size": 1000, "batch_size": 16},
            "trainer": {"total_timesteps": 200},
            "telemetry": {"progress": False},
        }
    )
    assert train(config, root=tmp_path, run_id="a").steps >= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "steps", "settings", "least"),
    [
        ("CartPole-v1", 100_000, {"entropy_coef": 0.01, "learning_rate": 1e-3}, 450.0),
        ("Pendulum-v1", 200_000, {"n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9}, -400.0),
    ],
)
def test_ppo_learns_on_envpool_what_it_learns_in_process(env_id, steps, settings, least, tmp_path):
    algorithm = {"n_epochs": 4, "batch_size": 64, **settings}
    returns = []
    for backend in ("gymnasium", "envpool"):
        env = {"num_envs": 8, "backend": backend}
        config = _config(env_id, env, algorithm=algorithm, total_timesteps=steps, rollout_length=128, seed=1)
        returns.append(train(config, root=tmp_path, run_id=backend).final["episode_return"])
    assert min(returns) >= least
