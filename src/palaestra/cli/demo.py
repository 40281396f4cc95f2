"""`palaestra demo`: CartPole from nothing to solved, with the score before and after."""

from __future__ import annotations

import sys

__all__ = ["demo"]

CONFIG = {
    "name": "demo-cartpole",
    "env": {"id": "CartPole-v1", "num_envs": 4},
    "algorithm": {
        "name": "ppo",
        "learning_rate": 2.5e-4,
        "learning_rate_schedule": "linear",
        "n_epochs": 4,
        "batch_size": 128,
    },
    "trainer": {"total_timesteps": 500_000, "rollout_length": 128, "seed": 1},
}


def demo() -> None:
    """Train CartPole until it is solved, and compare before with after."""
    print("CartPole-v1: keep a pole upright for 500 steps. Loading, and compiling kernels if this is the first run …")

    from palaestra.actor import Evaluation
    from palaestra.cli.training import fresh_run_id
    from palaestra.train import config_from, evaluate_checkpoint, runs_root, train
    from palaestra.train.run_directory import Attempt

    config = config_from(CONFIG)
    outcome = train(config, root=runs_root(), run_id=fresh_run_id(config.name), argv=sys.argv)
    attempt: Attempt = outcome.run.attempts()[-1]
    before = evaluate_checkpoint(attempt.checkpoints / "update_00000000", episodes=100, seed=None)
    after = evaluate_checkpoint(outcome.checkpoint, episodes=100, seed=None)

    def line(name: str, found: Evaluation) -> str:
        low, high = found.ci95
        return f"  {name:<7} mean return {found.mean_return:6.1f} of 500   (95 % interval {low:.1f} to {high:.1f})"

    print("100 episodes on seeds it never trained on:")
    print(line("before", before))
    print(line("after", after))
    print(f"The run is in {outcome.run.path}")
