"""Recorded episodes as videos."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from palaestra.errors import ConfigError
from palaestra.runs.play.episode import EpisodeReader
from palaestra.runs.video.encoder import Encoder, require_encoder

VIDEO = "episode.webm"
_MAX_FPS = 60.0


def export_video(episode: EpisodeReader, path: Path | None = None) -> Path:
    """Write the pictures of an episode as a video, beside its files unless a path is given. Encodes only once."""
    from PIL import Image

    target = path or episode.directory / VIDEO
    if path is None and target.exists() and episode.record.ended is not None:
        return target
    require_encoder()
    steps = [step for step in episode.steps() if step.picture is not None]
    if not steps:
        raise ConfigError("episode", episode.record.episode_id, "holds no pictures", "The environment cannot render")
    # A play that ran faster has fewer pictures than steps; the video keeps its pace.
    share = len(steps) / max(1, episode.record.steps)
    with Encoder(target, fps=max(1.0, min(_MAX_FPS, episode.record.fps * share))) as encoder:
        size: tuple[int, int] | None = None
        for step in steps:
            with Image.open(io.BytesIO(episode.picture(step))) as picture:
                frame = picture.convert("RGB")
                size = size or frame.size
                encoder.add(np.asarray(frame if frame.size == size else frame.resize(size)))
        return encoder.finish()
