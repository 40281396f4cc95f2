"""Encodes frames to a video file with ffmpeg in a separate process.

The pipe to ffmpeg is small, so the producer of frames waits instead of filling the memory. The file appears under its
name when it is complete. WebM files use VP9, which is royalty-free; MP4 files use H.264.
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

MAX_FRAMES = 200
"""Default limit of a clip; `--long` allows more."""

MAX_LONG_FRAMES = 100_000
_MAX_SIDE = 4096
_CODECS = {
    ".webm": ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-b:v", "0", "-crf", "40"),
    ".mp4": ("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-movflags", "+faststart"),
}
_FINISH_TIMEOUT_S = 120.0


def require_encoder() -> str:
    """Return the path of ffmpeg: that of imageio-ffmpeg, else of the system. Raises `ConfigError` without any."""
    try:
        path: str = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        path = shutil.which("ffmpeg") or ""
    if not path:
        raise ConfigError("--video", "", "no ffmpeg is installed", "pip install 'palaestra[video]'")
    return path


def check_video_file(path: Path, frames: int, *, long: bool) -> None:
    """Raise `ConfigError` for a file or a number of frames that could not be written, before anything is played."""
    if path.suffix not in _CODECS:
        raise ConfigError("--video", str(path), "is neither .webm nor .mp4", "Name it clip.webm")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            "--video", str(path), "its directory does not exist", "Create it, or choose another directory"
        )
    limit = MAX_LONG_FRAMES if long else MAX_FRAMES
    if not 1 <= frames <= limit:
        remedy = "" if long else "Add --long for more"
        raise ConfigError("--frames", frames, f"must lie between 1 and {limit}", remedy)
    require_encoder()


class Encoder:
    """Writes one video. As a context manager, it deletes the incomplete file after an error."""

    def __init__(self, path: Path, *, fps: float) -> None:
        self.path, self.fps = path, fps
        self.frames = 0
        self.encode_s = 0.0
        """Time spent waiting for ffmpeg."""
        self._shape: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the encoder
        self._temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")

    def add(self, frame: Any) -> None:
        """Append an RGB frame (height, width, 3; uint8). Raises `ConfigError` for others, or if ffmpeg failed."""
        shape = tuple(getattr(frame, "shape", ()))
        if len(shape) != 3 or shape[2] != 3 or str(frame.dtype) != "uint8" or not 0 < max(shape[:2]) <= _MAX_SIDE:
            kind = f"{shape} of {frame.dtype}" if shape else type(frame).__name__
            raise ConfigError("--video", str(self.path), f"the environment rendered {kind}, which is not an RGB image")
        if self._shape is None:
            self._shape = (shape[0], shape[1])
            self._process = self._start(self._shape)
        elif shape[:2] != self._shape:
            raise ConfigError("--video", str(self.path), f"a frame has size {shape[:2]} after others of {self._shape}")
        assert self._process is not None
        assert self._process.stdin is not None
        started = time.perf_counter()
        try:
            self._process.stdin.write(frame.tobytes())
        except BrokenPipeError:
            raise self._failure() from None
        self.encode_s += time.perf_counter() - started
        self.frames += 1

    def finish(self) -> Path:
        """Encode the remaining frames and move the file into place."""
        if self._process is None or self._process.stdin is None:
            self.discard()
            raise ConfigError("--video", str(self.path), "there was no frame to write")
        started = time.perf_counter()
        try:
            self._process.stdin.close()
            code = self._process.wait(_FINISH_TIMEOUT_S)
        except BrokenPipeError:
            code = self._process.wait(_FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -1
        self.encode_s += time.perf_counter() - started
        if code != 0:
            raise self._failure()
        # ffmpeg writes the file itself, so `files.atomic.atomic_file` cannot be used.
        os.replace(self._temporary, self.path)
        self._stderr.close()
        return self.path

    def discard(self) -> None:
        """Stop ffmpeg and delete the incomplete file."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
        self._temporary.unlink(missing_ok=True)
        self._stderr.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.discard()

    def _start(self, shape: tuple[int, int]) -> subprocess.Popen[bytes]:
        height, width = shape
        source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {self.fps:g} -i pipe:0"
        # Both codecs subsample colour, which needs even dimensions.
        output = "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2 -pix_fmt yuv420p -threads 1"
        argv = [require_encoder(), *"-hide_banner -loglevel error -nostdin -y".split(), *source.split()]
        argv += [*output.split(), *_CODECS[self.path.suffix], str(self._temporary)]
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._stderr, start_new_session=True
        )

    def _failure(self) -> ConfigError:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        self.discard()
        message = lines[-1][:300] if lines else "no error message"
        return ConfigError("--video", str(self.path), f"ffmpeg could not write it ({message})", "Is the disk full?")
