"""Pictures of `palaestra demo`: episodes before and after training as a GIF, one step by step, and the viewer.

`python -m benchmarks.demo_pictures` trains the demo first, which takes minutes; `--run DIR` draws a run that exists.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from palaestra.evaluation.before_after import PICTURE_NAME, EpisodePair, draw_frames
from palaestra.evaluation.viewer import episode_key
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.files.atomic import write_bytes
from palaestra.sessions.browser.chromium import find_chromium

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WINDOW = (1280, 900)
BEFORE, AFTER = "update_00000000", "update_0000001"
"""How the names of the evaluated checkpoints begin."""
LABELS = ("before training", "after training")


def find_improved(run: Path) -> list[EpisodePair]:
    """For each task, the longest solved episode among those that failed before training, on held-out seeds."""
    before, after = (_load_episodes(run, prefix) for prefix in (BEFORE, AFTER))
    best: dict[str, EpisodePair] = {}
    for key in sorted(before.keys() & after.keys()):
        pair = EpisodePair(before[key], after[key], LABELS)
        if pair.shows_improvement and len(pair.after) > (len(best[key[0]].after) if key[0] in best else 0):
            best[key[0]] = pair
    return list(best.values())


def _find_evaluation(run: Path, prefix: str) -> Path:
    (directory,) = run.glob(f"attempt_1/evaluations/{prefix}*")
    return directory


def _load_episodes(run: Path, prefix: str) -> dict[tuple[str, int], Trajectory]:
    episodes = TrajectoryArchive(_find_evaluation(run, prefix) / "trajectories").load()
    return {(str(episode.task["task"]), int(episode.task["seed"])): episode for episode in episodes}


def write_animation(pairs: list[EpisodePair], path: Path) -> None:
    """One pair after the other as an animated GIF of few colours, which keeps it small."""
    frames = [frame for pair in pairs for frame in draw_frames(pair)]
    pictures = [picture.quantize(64) for picture, _ in frames]
    durations = [round(1000 * min(seconds, 2.4)) for _, seconds in frames]
    data = io.BytesIO()
    pictures[0].save(data, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True)
    write_bytes(path, data.getvalue(), durable=False)


def photograph(page: Path, key: str, picture: Path) -> None:
    """A screenshot of the viewer in Chromium, with an episode opened."""
    if not page.exists():
        raise FileNotFoundError(page)  # Chromium would photograph its own error page.
    command = [find_chromium().path, "--headless", "--no-sandbox", "--hide-scrollbars"]
    command += [
        f"--window-size={WINDOW[0]},{WINDOW[1]}",
        f"--screenshot={picture}",
        f"{page.resolve().as_uri()}#{quote(key, safe='')}/1",
    ]
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=120)


def train_demo(home: Path) -> Path:
    """Run `palaestra demo`, and return the directory of its run."""
    environment = {**os.environ, "PALAESTRA_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "palaestra", "demo"], check=True, env=environment)
    (run,) = home.glob("**/runs/demo-*")
    return run


def main() -> None:
    """Write docs/images/before-after.gif, before-after.png and viewer.png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="directory of a run of the demo")
    given = parser.parse_args().run
    with tempfile.TemporaryDirectory() as home:
        run = given or train_demo(Path(home))
        pairs = find_improved(run)
        write_animation(pairs, IMAGES / "before-after.gif")
        write_bytes(IMAGES / PICTURE_NAME, (_find_evaluation(run, AFTER) / PICTURE_NAME).read_bytes(), durable=False)
        key = episode_key(pairs[0].after.episode_id, LABELS[1])
        photograph(_find_evaluation(run, AFTER) / "episodes.html", key, IMAGES / "viewer.png")


if __name__ == "__main__":
    main()
