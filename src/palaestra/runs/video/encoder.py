"""Frames into a video file, by an ffmpeg that runs as a process of its own.

The pipe to it holds little, so whoever makes frames waits rather than fills the memory. The file appears under its
name when it is complete. VP9 in WebM, which everybody may use; H.264 in MP4 when a file is called so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from palaestra.errors import ConfigError

__all__ = ["MAX_FRAMES", "Encoder", "check_video_file", "require_encoder"]

MAX_FRAMES = 200
"""A clip; longer ones must be asked for."""

MAX_LONG_FRAMES = 100_000
_MAX_SIDE = 4096
_CODECS = {
    ".webm": ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-b:v", "0", "-crf", "40"),
    ".mp4": ("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-movflags", "+faststart"),
}
_END_S = 120.0


def require_encoder() -> str:
    """The ffmpeg to use: the one that imageio-ffmpeg brings, else the machine's; `ConfigError` without any."""
    try:
        found: str = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        found = shutil.which("ffmpeg") or ""
    if not found:
        raise ConfigError("--video", "", "no ffmpeg is installed", "pip install 'palaestra[video]'")
    return found


def check_video_file(path: Path, frames: int, *, long: bool) -> None:
    """Refuse, before anything is played, what could not be written."""
    if path.suffix not in _CODECS:
        raise ConfigError("--video", str(path), "is neither .webm nor .mp4", "Name it clip.webm")
    if not path.absolute().parent.is_dir():
        raise ConfigError("--video", str(path), "its directory does not exist", "Make it, or name another one")
    if not 1 <= frames <= (MAX_LONG_FRAMES if long else MAX_FRAMES):
        limit = MAX_LONG_FRAMES if long else MAX_FRAMES
        remedy = "" if long else "Add --long for more"
        raise ConfigError("--frames", frames, f"must lie between 1 and {limit}", remedy)
    require_encoder()


class Encoder:
    """One video being written. Leaving it after an error removes what there is."""

    def __init__(self, path: Path, *, fps: float) -> None:
        self.path, self.fps = path, fps
        self.frames = 0
        self.encode_s = 0.0
        """Spent waiting for the encoder."""
        self._shape: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this does
        self._temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")

    def add(self, frame: Any) -> None:
        """One picture: an array of height, width and three bytes. `ConfigError` when it is none, or ffmpeg died."""
        shape = tuple(getattr(frame, "shape", ()))
        if len(shape) != 3 or shape[2] != 3 or str(frame.dtype) != "uint8" or not 0 < max(shape[:2]) <= _MAX_SIDE:
            kind = f"{shape} of {frame.dtype}" if shape else type(frame).__name__
            raise ConfigError("--video", str(self.path), f"the environment drew {kind}, which is no RGB picture")
        if self._shape is None:
            self._shape = (shape[0], shape[1])
            self._process = self._started(self._shape)
        elif shape[:2] != self._shape:
            raise ConfigError("--video", str(self.path), f"a frame is {shape[:2]} after others of {self._shape}")
        assert self._process is not None
        assert self._process.stdin is not None
        begun = time.perf_counter()
        try:
            self._process.stdin.write(frame.tobytes())
        except BrokenPipeError:
            raise self._failed() from None
        self.encode_s += time.perf_counter() - begun
        self.frames += 1

    def finish(self) -> Path:
        """Wait for the rest to be encoded; the file is there when this returns."""
        if self._process is None or self._process.stdin is None:
            self.discard()
            raise ConfigError("--video", str(self.path), "there was no frame to write")
        begun = time.perf_counter()
        try:
            self._process.stdin.close()
            code = self._process.wait(_END_S)
        except BrokenPipeError:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = -1
        self.encode_s += time.perf_counter() - begun
        if code != 0:
            raise self._failed()
        # ffmpeg wrote the file itself, so that `files.atomic.atomic_file` cannot.
        os.replace(self._temporary, self.path)
        self._complaints.close()
        return self.path

    def discard(self) -> None:
        """End it and leave nothing behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
        self._temporary.unlink(missing_ok=True)
        self._complaints.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.discard()

    def _started(self, shape: tuple[int, int]) -> subprocess.Popen[bytes]:
        height, width = shape
        argv = [
            require_encoder(), "-hide_banner", "-loglevel", "error", "-nostdin", "-y",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "pipe:0",
            # Both codecs halve the resolution of colour, which needs even sides.
            "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-threads", "1",
            *_CODECS[self.path.suffix], str(self._temporary),
        ]  # fmt: skip
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._complaints, start_new_session=True
        )

    def _failed(self) -> ConfigError:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        self.discard()
        said = lines[-1][:300] if lines else "it said nothing"
        return ConfigError("--video", str(self.path), f"ffmpeg could not write it ({said})", "Is the disk full?")
