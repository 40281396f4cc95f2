"""Every example, run small, and what it is there to show."""

import importlib.util
import math
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def _main(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_basic_training_learns_to_balance(capsys):
    history = _main("basic_training")(total_timesteps=20_480, log_interval=5)
    assert [m["env_step"] for m in history] == [5120, 10240, 15360, 20480]
    assert history[-1]["episode_return"] > 2 * history[0]["episode_return"]
    assert "mean return" in capsys.readouterr().out


def test_a_custom_loop_learns_from_five_rollouts_at_once():
    history = _main("custom_loop")(rounds=4, n_steps=64)
    assert [m["steps"] for m in history] == [5 * 64 * 8] * 4
    assert [m["staleness"] for m in history] == [0.0] * 4  # all five were collected by the policy that learns
    assert history[-1]["episode_return"] > history[0]["episode_return"]


def test_four_trainers_improve_the_policy_they_share():
    returns = _main("several_environments")(rounds=12, n_steps=128)
    assert returns[-1] > 2 * returns[0]


def test_the_curriculum_reaches_a_level_that_chance_does_not():
    levels = _main("curriculum")(total_timesteps=30_000)
    assert levels[0] == 1
    assert levels[-1] >= 6  # chance opens this gate once in 64 tries
    assert sorted(levels) == levels


def test_rollouts_from_disk_are_learned_from_and_get_older(tmp_path):
    history = _main("replay_from_disk")(tmp_path, n_rollouts=2, n_steps=64, passes=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout_0.safetensors", "rollout_1.safetensors"]
    assert [m["staleness"] for m in history] == [0.0, 1.0, 2.0, 3.0]
    assert all(math.isfinite(m["loss"]) for m in history)


def test_meta_training_solves_both_tasks_with_one_policy():
    assert _main("meta_training")(rounds=30) == {0: 1.0, 1: 1.0}


def test_a_slow_policy_is_collected_from_in_the_background(capsys):
    _, _, history = _main("slow_policy")(updates=4, thinking=0.001)
    assert [m["env_step"] for m in history] == [64, 128, 192, 256]
    assert max(m["staleness_max"] for m in history) == 1.0
    assert "times as fast" in capsys.readouterr().out


def test_your_own_network_learns_like_ours():
    history = _main("your_own_network")(total_timesteps=12_288)
    assert history[-1]["episode_return"] > 1.5 * history[0]["episode_return"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_says_what_it_shows_and_how_it_is_run(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert text.startswith('"""')
    assert f"python examples/{path.name}" in text
    assert text.rstrip().endswith('if __name__ == "__main__":\n    main()')


def test_a_clone_does_what_the_agent_does_whose_steps_it_saw(monkeypatch, tmp_path):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    returns = _main("offline_learning")(total_timesteps=4_000, dataset_steps=1_500, updates=500, episodes=5)
    assert returns["DQN"] > 60  # chance balances about 22 steps
    assert returns["its clone"] > 0.5 * returns["DQN"]
