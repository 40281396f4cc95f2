"""`palaestra demo`: train a small model, and evaluate it before and after."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from palaestra.files.home import Home

SCREENS: dict[str, Any] = {
    "experiment_name": "demo",
    "model": {"name": "tiny", "max_new_tokens": 24, "history": 0, "lora_rank": 16},
    "tasks": [
        {"task": "click_target/button", "params": {"difficulty": 2, "step_limit": 1}},
        {"task": "miniwob/focus-text", "params": {"step_limit": 1}},
    ],
    "algorithm": {"name": "grpo", "group_size": 8},
    "trainer": {
        "batch_size": 64,
        "num_training_steps": 24,
        "learning_rate": 1e-3,
        "decay_updates": 24,
        "epochs": 2,
        "minibatches": 4,
        "microbatch_turns": 64,
        "collection": "asynchronous",
        "max_staleness": 1,
    },
    "inference": {"backend": "process"},
    "actor_pool": {"target_concurrent_actors": 16},
}
HELD_OUT = 160
"""Evaluation episodes before and after training, on seeds that training never uses."""

CARTPOLE: dict[str, Any] = {
    "name": "demo-cartpole",
    "env": {"id": "CartPole-v1", "num_envs": 4},
    "algorithm": {
        "name": "ppo",
        "learning_rate": 2.5e-4,
        "learning_rate_schedule": "linear",
        "n_epochs": 4,
        "batch_size": 128,
    },
    "trainer": {"total_timesteps": 500_000, "rollout_length": 128, "seed": 1, "device": "cpu"},
}


def demo(
    name: Annotated[
        Literal["screens", "cartpole"],
        typer.Argument(metavar="NAME", help="screens: UI agent (minutes). cartpole: policy (seconds)."),
    ] = "screens",
) -> None:
    """Train a small model, and evaluate it before and after."""
    _train_on_screens() if name == "screens" else _train_on_cartpole()


def _train_on_screens() -> None:
    from palaestra.sessions.browser.chromium import find_chromium

    find_chromium()
    print(
        "A vision-language model with 1.3 million weights sees screenshots and answers with clicks. It learns from\n"
        "reward alone, in real browsers, on two tasks: click the button, click the text field. Takes a few minutes.\n"
    )

    from palaestra.cli.eval_ui import evaluate_on_screens
    from palaestra.cli.recordings.trajectories import load_run_tokenizer
    from palaestra.evaluation import write_viewer
    from palaestra.experience.trajectory_archive import TrajectoryArchive
    from palaestra.files.run_directory import new_run_id
    from palaestra.train.screen_config import screen_config_from
    from palaestra.train.screens import train_screens

    config = screen_config_from(SCREENS)
    result = train_screens(config, root=Home.default().runs, run_id=new_run_id(config.experiment_name), argv=sys.argv)
    run = result.run
    if result.interrupted:
        print(f"Stopped. Resume with: palaestra train --resume {run.run_id}")
        return
    print(f"\n{HELD_OUT} episodes on seeds that training did not use, with sampled actions:")
    before = run.attempts()[-1].checkpoints / "update_00000000"
    report = evaluate_on_screens(result.checkpoint, before, episodes=HELD_OUT, greedy=False, names=("after", "before"))
    page = run.path / "trajectories.html"
    episodes = (episode for directory in report.archives for episode in TrajectoryArchive(directory).load())
    write_viewer(
        episodes, page, title="Held-out episodes after and before training", texts=load_run_tokenizer(run.path)
    )
    print("\n".join(report.lines))
    print(f"\nEpisodes: {page.resolve().as_uri()}\nReport:   {report.page.resolve().as_uri()}")
    print(f"Run {run.run_id} in {run.path}")


def _train_on_cartpole() -> None:
    print("CartPole-v1: keep a pole upright for 500 steps. The first run also compiles kernels …")

    from palaestra.files.run_directory import new_run_id
    from palaestra.train import config_from, evaluate_checkpoint, train

    config = config_from(CARTPOLE)
    result = train(config, root=Home.default().runs, run_id=new_run_id(config.name), argv=sys.argv)
    print("100 episodes on seeds that training did not use:")
    start = result.run.attempts()[-1].checkpoints / "update_00000000"
    for name, checkpoint in (("before", start), ("after", result.checkpoint)):
        evaluation = evaluate_checkpoint(checkpoint, episodes=100, seed=None)
        assert evaluation.ci95 is not None
        low, high = evaluation.ci95
        print(f"  {name:<7} mean return {evaluation.mean_return:6.1f} of 500   (95 % interval {low:.1f} to {high:.1f})")
    print(f"Run {result.run.run_id} in {result.run.path}")
