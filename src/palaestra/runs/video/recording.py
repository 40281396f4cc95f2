"""A clip of one of a run's checkpoints, for the service: played and encoded in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import palaestra
from palaestra.errors import ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.video.clip import KEEP, Clip, Pace, clips_of, pace_of, prune
from palaestra.runs.video.encoder import MAX_FRAMES, check_video_file

__all__ = ["film_pace", "record_clip"]

LIMIT_S = 600.0
_LOOK_EVERY_S = 0.5
_ROOT = str(Path(palaestra.__file__).parents[1])
_RETURNS = "episode/return"


def record_clip(
    run: RunDirectory,
    checkpoint: CheckpointRecord,
    *,
    frames: int = MAX_FRAMES,
    keep: int = KEEP,
    limit_s: float = LIMIT_S,
    nice: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> Clip:
    """Film a checkpoint into its attempt's `videos/`; blocks. Older clips than the newest `keep` go.

    `nice` lets it step back for others; when `cancelled` says so, it is given up.
    """
    if checkpoint.format != "palaestra":
        reason = f"is of the format {checkpoint.format}, which only its own trainer can play"
        remedy = "Start a new run with palaestra runs start --video: the trainer then films while it trains"
        raise ConfigError("checkpoint", checkpoint.checkpoint_id, reason, remedy)
    videos = run.attempt(checkpoint.attempt).videos
    videos.mkdir(parents=True, exist_ok=True)
    step = "unknown" if checkpoint.env_step is None else checkpoint.env_step
    file = videos / f"step_{step}_{checkpoint.checkpoint_id[:8]}.webm"
    check_video_file(file, frames, long=False)
    argv = [sys.executable, "-P", "-m", "palaestra", "eval", checkpoint.path, "--episodes", "1", "--json"]
    argv += ["--video", str(file), "--frames", str(frames)]
    # SDL would look for a display, and keep SIGTERM for itself.
    quiet = {"SDL_VIDEODRIVER": "dummy", "SDL_NO_SIGNAL_HANDLERS": "1", "PYTHONPATH": _ROOT}
    process = subprocess.Popen(
        argv, env={**os.environ, **quiet}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + limit_s
    try:
        if nice:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, complaints = process.communicate(timeout=_LOOK_EVERY_S)
                break
            if cancelled():
                raise ConfigError("video", str(file), "was given up")
            if time.monotonic() > deadline:
                raise ConfigError("video", str(file), f"was not ready after {limit_s:.0f} s", "Film fewer frames")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode or not file.is_file():
        said = (complaints.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError("video", str(file), f"could not be recorded ({said[:300]})")
    json.loads(out.splitlines()[-1])
    clip = next(clip for clip in clips_of(run) if clip.path == str(file))
    prune(run, max(keep, 1))
    return clip


def film_pace(run: RunDirectory) -> Pace | None:
    """How much filming slowed the trainer itself down; None when it filmed nothing, or there is nothing to compare."""
    filmed = [clip.created for clip in clips_of(run) if clip.report is None]
    if not filmed:
        return None
    from palaestra.runs.series.reader import RunSeries

    points = RunSeries(run).decimate(_RETURNS, 2000)
    return pace_of(sorted((point.time, point.step) for point in points), filmed)
