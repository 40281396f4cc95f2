import subprocess

import numpy as np
import pytest

from palaestra.errors import ConfigError
from palaestra.runs.video import encoder as module
from palaestra.runs.video.encoder import Encoder, check_video_file, require_encoder

pytest.importorskip("imageio_ffmpeg")


def decoded(path):
    """Width, height and number of frames, as ffmpeg itself reads the file."""
    argv = [require_encoder(), "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    return subprocess.run(argv, capture_output=True, check=True).stdout


def picture(shade, height=48, width=64):
    return np.full((height, width, 3), shade, np.uint8)


@pytest.mark.parametrize("name", ["clip.webm", "clip.mp4"])
def test_every_frame_is_in_the_file(name, tmp_path):
    with Encoder(tmp_path / name, fps=30) as encoder:
        for shade in range(0, 200, 10):
            encoder.add(picture(shade))
        path = encoder.finish()

    pixels = np.frombuffer(decoded(path), np.uint8).reshape(-1, 48, 64, 3)
    assert len(pixels) == encoder.frames == 20
    assert np.abs(pixels.mean(axis=(1, 2, 3)) - np.arange(0, 200, 10)).max() < 8
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_odd_sizes_are_filled_up(tmp_path):
    with Encoder(tmp_path / "clip.webm", fps=30) as encoder:
        encoder.add(picture(100, 47, 63))
        encoder.finish()

    assert len(decoded(tmp_path / "clip.webm")) == 48 * 64 * 3


def written(path, *pictures):
    with Encoder(path, fps=30) as encoder:
        for one in pictures:
            encoder.add(one)
        return encoder.finish()


def test_what_is_no_picture_is_refused_and_nothing_is_left(tmp_path):
    path = tmp_path / "a.webm"
    for bad in (None, [], np.zeros((4, 4)), np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), picture(0, 5000, 2)):
        with pytest.raises(ConfigError, match="not an RGB image"):
            written(path, picture(0), bad)
    with pytest.raises(ConfigError, match="after others of"):
        written(path, picture(0), picture(0, 10, 10))
    with pytest.raises(ConfigError, match="no frame"):
        written(path)
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_dies_is_told_with_what_it_said(tmp_path):
    with pytest.raises(ConfigError, match=r"ffmpeg could not write it \(.*No such file"):
        written(tmp_path / "gone" / "a.webm", *[picture(0, 480, 640)] * 100)
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_written_is_refused_before_anything_is_played(tmp_path, monkeypatch):
    for path, frames, long, reason in (
        (tmp_path / "a.avi", 10, False, "neither .webm nor .mp4"),
        (tmp_path / "none" / "a.webm", 10, False, "directory does not exist"),
        (tmp_path / "a.webm", 0, False, "between 1 and 200"),
        (tmp_path / "a.webm", 201, False, "between 1 and 200. Add --long"),
        (tmp_path / "a.webm", 100_001, True, "between 1 and 100000"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_video_file(path, frames, long=long)
    check_video_file(tmp_path / "a.webm", 5000, long=True)

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'palaestra\[video\]'"):
        check_video_file(tmp_path / "a.webm", 10, long=False)
