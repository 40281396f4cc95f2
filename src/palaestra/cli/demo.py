"""`palaestra demo`: something learns before your eyes, and is compared with what it was before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = ["demo"]

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
"""Episodes before and after, on seeds that training never draws."""

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
    what: Annotated[
        Literal["screens", "cartpole"], typer.Argument(help="screens: a model learns to click. cartpole: 15 seconds.")
    ] = "screens",
) -> None:
    """Train something small, and compare before with after on seeds it never saw."""
    _screens() if what == "screens" else _cartpole()


def _screens() -> None:
    from palaestra.sessions.chromium import find_chromium

    find_chromium()
    print(
        "A vision-language model of 1.3 million weights looks at screenshots and answers with clicks. It learns by\n"
        "reward alone, in real browsers, on two tasks: find the button, find the text field. A few minutes.\n"
    )

    from palaestra.cli.evaluating_ui import judge
    from palaestra.cli.token_texts import run_texts
    from palaestra.evaluation import write_viewer
    from palaestra.experience.trajectory_archive import TrajectoryArchive
    from palaestra.files.home import Home
    from palaestra.files.run_directory import new_run_id
    from palaestra.train.screen_config import screen_config_from
    from palaestra.train.screens import train_screens

    config = screen_config_from(SCREENS)
    outcome = train_screens(config, root=Home.default().runs, run_id=new_run_id(config.experiment_name), argv=sys.argv)
    run = outcome.run
    if outcome.interrupted:
        print(f"Stopped. Go on with: palaestra train --resume {run.run_id}")
        return
    print(f"\n{HELD_OUT} episodes on seeds it never trained on, answers drawn as in training:")
    before = run.attempts()[-1].checkpoints / "update_00000000"
    judged = judge(outcome.checkpoint, before, episodes=HELD_OUT, greedy=False, names=("after", "before"))
    page = run.path / "trajectories.html"
    shown = (one for directory in judged.archives for one in TrajectoryArchive(directory).load())
    write_viewer(shown, page, title="Held-out episodes after and before training", texts=run_texts(run.path))
    print("\n".join(judged.lines))
    print(f"\nEpisodes to look at: {_shown(page)}\nReport:              {_shown(judged.page)}")
    print(f"The run is {run.run_id} in {run.path}")


def _shown(path: Path) -> str:
    return path.resolve().as_uri()


def _cartpole() -> None:
    print("CartPole-v1: keep a pole upright for 500 steps. Loading, and compiling kernels if this is the first run …")

    from palaestra.evaluation import Evaluation
    from palaestra.files.home import Home
    from palaestra.files.run_directory import Attempt, new_run_id
    from palaestra.train import config_from, evaluate_checkpoint, train

    config = config_from(CARTPOLE)
    outcome = train(config, root=Home.default().runs, run_id=new_run_id(config.name), argv=sys.argv)
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
