"""`palaestra eval --video`: an episode of a checkpoint as a clip, and what filming it cost."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium

from palaestra.env import EnvConfig, VectorEnv
from palaestra.env.factory import EnvFactory
from palaestra.env.in_process import InProcessEnv
from palaestra.env.make import COMPILED
from palaestra.errors import ConfigError, PalaestraError
from palaestra.runs.video.clip import ClipReport
from palaestra.runs.video.encoder import Encoder
from palaestra.train import evaluate_checkpoint

__all__ = ["film"]

_FPS = 30.0


class _Camera(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws the first frames of one episode, and notes how long that took."""

    def __init__(self, env: gymnasium.Env[Any, Any], file: Path, frames: int) -> None:
        super().__init__(env)
        fps = float(env.metadata.get("render_fps") or _FPS)
        self.encoder, self.wanted = Encoder(file, fps=fps), frames
        self.rolling = False
        self.steps, self.camera_s, self.playing_s = 0, 0.0, 0.0
        self.failure: PalaestraError | None = None
        self._begun = 0.0

    def reset(self, **options: Any) -> Any:
        begun = self.env.reset(**options)
        self._begun = time.perf_counter()
        self._draw()
        return begun

    def step(self, action: Any) -> Any:
        stepped = self.env.step(action)
        if self.rolling:
            self.steps += 1
            self._draw()
            self.playing_s = time.perf_counter() - self._begun
            self.rolling = self.rolling and not (stepped[2] or stepped[3])
        return stepped

    def _draw(self) -> None:
        if not self.rolling:
            return
        begun = time.perf_counter()
        try:
            self.encoder.add(self.env.render())
        except PalaestraError as error:
            # Raised where it is known to be about the video, not about a step of the environment.
            self.failure, self.rolling = error, False
        self.camera_s += time.perf_counter() - begun
        self.rolling = self.rolling and self.encoder.frames < self.wanted


def film(path: Path, file: Path, *, frames: int, seed: int | None, deterministic: bool) -> dict[str, Any]:
    """Play one episode, the first that an evaluation from this seed plays, and write its first frames to a file."""
    cameras: list[_Camera] = []

    def filmed(config: EnvConfig) -> VectorEnv:
        cameras.append(_camera(config, file, frames))
        env = InProcessEnv.from_envs(cameras)
        cameras[0].rolling = True  # what was reset until here was to look at it
        return env

    try:
        found = evaluate_checkpoint(path, episodes=1, seed=seed, deterministic=deterministic, make=filmed)
        camera = cameras[0]
        if camera.failure is not None:
            raise camera.failure
        encoder = camera.encoder
        encoder.finish()
    except BaseException:
        for camera in cameras:
            camera.encoder.discard()
        raise
    filming_s = min(camera.camera_s, camera.playing_s)
    with_it, without = camera.playing_s, max(camera.playing_s - filming_s, 1e-9)
    report = ClipReport(
        frames=encoder.frames,
        seconds=encoder.frames / encoder.fps,
        encode_s=encoder.encode_s,
        sps_with=camera.steps / max(with_it, 1e-9),
        sps_without=camera.steps / without,
        slowdown=with_it / without,
        checkpoint=str(path),
        episode_return=found.returns[0],
    )
    report.write(file)
    return {"file": str(file), **asdict(report)}


def _camera(config: EnvConfig, file: Path, frames: int) -> _Camera:
    if config.id in COMPILED:
        raise ConfigError("--video", str(file), f"{config.id} draws nothing", "Leave --video out")
    kwargs = {**config.kwargs, "render_mode": "rgb_array"}
    env = EnvFactory(config.id, kwargs, config.max_episode_steps, config.action_chunk)()
    if env.render_mode != "rgb_array":
        env.close()
        raise ConfigError("--video", str(file), f"{config.id} cannot draw pictures", "Leave --video out")
    return _Camera(env, file, frames)
