"""`palaestra eval --video`: record an episode of a checkpoint as a clip, and measure the slowdown."""

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

_DEFAULT_FPS = 30.0


class _RecordFirstEpisode(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Renders the first frames of one episode, and measures the time that takes."""

    def __init__(self, env: gymnasium.Env[Any, Any], file: Path, frames: int) -> None:
        super().__init__(env)
        fps = float(env.metadata.get("render_fps") or _DEFAULT_FPS)
        self.encoder, self.max_frames = Encoder(file, fps=fps), frames
        self.recording = False
        self.steps, self.render_s, self.episode_s = 0, 0.0, 0.0
        self.error: PalaestraError | None = None
        self._episode_start = 0.0

    def reset(self, **options: Any) -> Any:
        result = self.env.reset(**options)
        self._episode_start = time.perf_counter()
        self._add_frame()
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if self.recording:
            self.steps += 1
            self._add_frame()
            self.episode_s = time.perf_counter() - self._episode_start
            self.recording = self.recording and not (result[2] or result[3])
        return result

    def _add_frame(self) -> None:
        if not self.recording:
            return
        start = time.perf_counter()
        try:
            self.encoder.add(self.env.render())
        except PalaestraError as error:
            # Raised later: here it would look like an error of the environment's step.
            self.error, self.recording = error, False
        self.render_s += time.perf_counter() - start
        self.recording = self.recording and self.encoder.frames < self.max_frames


def record_episode(path: Path, file: Path, *, frames: int, seed: int | None, deterministic: bool) -> dict[str, Any]:
    """Play the first episode of an evaluation from this seed, and write its first frames to a file."""
    wrappers: list[_RecordFirstEpisode] = []

    def make_env(config: EnvConfig) -> VectorEnv:
        wrappers.append(_wrap_env(config, file, frames))
        env = InProcessEnv.from_envs(wrappers)
        wrappers[0].recording = True  # earlier resets only inspected the environment
        return env

    try:
        evaluation = evaluate_checkpoint(path, episodes=1, seed=seed, deterministic=deterministic, make=make_env)
        wrapper = wrappers[0]
        if wrapper.error is not None:
            raise wrapper.error
        encoder = wrapper.encoder
        encoder.finish()
    except BaseException:
        for wrapper in wrappers:
            wrapper.encoder.discard()
        raise
    with_video = wrapper.episode_s
    without_video = max(with_video - min(wrapper.render_s, with_video), 1e-9)
    report = ClipReport(
        frames=encoder.frames,
        seconds=encoder.frames / encoder.fps,
        encode_s=encoder.encode_s,
        sps_with=wrapper.steps / max(with_video, 1e-9),
        sps_without=wrapper.steps / without_video,
        slowdown=with_video / without_video,
        checkpoint=str(path),
        episode_return=evaluation.returns[0],
    )
    report.write(file)
    return {"file": str(file), **asdict(report)}


def _wrap_env(config: EnvConfig, file: Path, frames: int) -> _RecordFirstEpisode:
    reason = f"{config.id} cannot render images"
    is_known = config.id in gymnasium.registry and not config.kwargs
    if config.id in COMPILED or (config.backend == "envpool" and not is_known):
        raise ConfigError("--video", str(file), reason, "Leave --video out")
    kwargs = {**config.kwargs, "render_mode": "rgb_array"}
    env = EnvFactory(config.id, kwargs, config.max_episode_steps, config.action_chunk)()
    if env.render_mode != "rgb_array":
        env.close()
        raise ConfigError("--video", str(file), reason, "Leave --video out")
    return _RecordFirstEpisode(env, file, frames)
