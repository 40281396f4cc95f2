"""Images of the terminal output: the progress display, `--help`, an error. Written to docs/images/."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def _command(*words: str) -> str:
    # Found by its name, as a user calls it: hints repeat the program as it was called.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(["palaestra", *words], capture_output=True, text=True, check=False, env=environment)
    return f"$ palaestra {' '.join(words)}\n{done.stdout}{done.stderr}"


def _picture(name: str, title: str, content: str) -> None:
    console = Console(record=True, width=110, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Text.from_ansi(content))
    console.save_svg(str(IMAGES / f"{name}.svg"), title=title)


def _progress() -> None:
    """The display half way through a run, drawn from a real one."""
    from palaestra.telemetry import TrainingStep
    from palaestra.telemetry.progress import ProgressSink
    from palaestra.train import Trainer, build_trainer, config_from

    config = config_from(
        {
            "env": {"id": "CartPole-v1", "num_envs": 4},
            "algorithm": {
                "learning_rate": 2.5e-4,
                "learning_rate_schedule": "linear",
                "n_epochs": 4,
                "batch_size": 128,
            },
            "trainer": {"total_timesteps": 500_000, "rollout_length": 128},
        }
    )
    trainer = build_trainer(config)
    console = Console(record=True, width=110, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    sink = ProgressSink(config.total_timesteps, "cartpole")

    def after(trainer: Trainer, metrics: dict[str, float]) -> bool:
        sink.emit(TrainingStep(trainer.n_updates, trainer.total_timesteps, metrics))
        return trainer.total_timesteps < 300_000

    trainer.train(config.total_timesteps, config.rollout_length, callback=after)
    console.print(sink.panel(console, time.monotonic()))
    console.save_svg(str(IMAGES / "progress.svg"), title="palaestra train cartpole")


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    _picture("help", "palaestra --help", _command("--help"))
    _picture("error", "an error", _command("train", "cartpole", "algorithm.learning_rat=1e-3"))
    _progress()


if __name__ == "__main__":
    main()
