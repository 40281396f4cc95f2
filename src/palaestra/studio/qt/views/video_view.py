"""Clips of a run: decoded by ffmpeg in the background, played in the window."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices, QImage
from PySide6.QtWidgets import QComboBox, QSlider

from palaestra.errors import ConfigError
from palaestra.runs.client.client import TrainerService
from palaestra.runs.video.encoder import require_encoder
from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.parts import EmptyState, column, frame, icon_button, label, push_button, row
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.qt.views.render_view import RenderView
from palaestra.studio.studio import Studio

_MAX_FRAMES = 600
_WIDTH = 480
"""Clips are decoded at this width: the dock is narrow, and all frames are kept in memory."""
_DECODE_TIMEOUT_S = 60.0


class VideoView(View):
    """The clips of the current run."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.details])
        self.picture = RenderView(theme)
        self.picture.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.picture.setMinimumHeight(220)
        self._clips = QComboBox()
        self._clips.setAccessibleName("Clips")
        self._clips.activated.connect(lambda _: self._load())
        self._position = QSlider(Qt.Orientation.Horizontal)
        self._position.setAccessibleName("Position in the clip")
        self._position.valueChanged.connect(self._show)
        self._play = icon_button(theme, "play", self._toggle, tip="Play or pause the clip")
        self._open = push_button("Open outside", self._open_outside, role="link")
        self._record = push_button("Record a clip", lambda: studio.browser.record_video(studio.browser.runs.current))
        self._facts = label("", "muted", wrap=True)
        self._empty = EmptyState(theme, "film", "No clips", "A clip shows one episode of the newest checkpoint.")
        self._controls = frame(row(self._play, self._position, margins=(10, 4, 10, 4)), "panel")
        self._frames: list[QImage] = []
        self._fps = 30.0
        self._is_playing, self._clock = False, 0.0
        self._shown: tuple[Any, ...] = ()
        self._file = ""
        self.setLayout(
            column(
                row(self._clips, self._open, margins=(12, 8, 12, 0)),
                self._empty,
                self.picture,
                self._controls,
                row(self._facts, margins=(12, 0, 12, 0)),
                row(self._record, None, margins=(12, 0, 12, 10)),
                spacing=6,
            )
        )
        self.refresh()

    def refresh(self) -> None:
        """List the clips of the run."""
        details = self.studio.browser.details
        names = tuple(clip.name for clip in details.videos)
        has_clips = bool(names)
        for part in (self._clips, self._open, self.picture, self._controls, self._facts):
            part.setVisible(has_clips)
        self._empty.setVisible(not has_clips)
        if (details.run_id, names) != self._shown:
            self._shown = (details.run_id, names)
            self._clips.clear()
            self._clips.addItems([Path(name).name for name in names])
            self._frames, self._is_playing = [], False
            self.picture.clear()
            if has_clips:
                self._load()

    def refresh_if_changed(self) -> bool:
        """Let the clip go on."""
        if self._is_playing and self._frames and self.isVisible():
            elapsed = time.monotonic() - self._clock
            position = int(elapsed * self._fps)
            if position >= len(self._frames):
                self._is_playing = False
                self._play.setIcon(icon("play", self.theme.text))
            elif position != self._position.value():
                self._position.setValue(position)
        return super().refresh_if_changed()

    def _load(self) -> None:
        details, index = self.studio.browser.details, self._clips.currentIndex()
        if not 0 <= index < len(details.videos):
            return
        clip, run_id = details.videos[index], details.run_id
        directory = self.studio.temporary_directory
        self.picture.show_message("Loading the clip …")

        def read(service: TrainerService) -> tuple[list[QImage], str]:
            return decode_video(service.video_bytes(run_id, clip.name), Path(clip.name).suffix, directory)

        def receive(decoded: tuple[list[QImage], str]) -> None:
            self._frames, self._file = decoded
            self.picture.show_message("" if self._frames else "The clip has no frames.")
            self._fps = len(self._frames) / clip.seconds if getattr(clip, "seconds", 0) else 30.0
            self._position.setRange(0, max(0, len(self._frames) - 1))
            self._facts.setText(f"{len(self._frames)} frames")
            self._show(0)
            self._toggle()

        self.studio.ask("The clip cannot be shown", read, receive, key="clip")

    def _show(self, position: int) -> None:
        if 0 <= position < len(self._frames):
            self.picture.show_frame(self._frames[position])

    def _toggle(self) -> None:
        self._is_playing = not self._is_playing and len(self._frames) > 1
        if self._position.value() >= len(self._frames) - 1:
            self._position.setValue(0)
        self._clock = time.monotonic() - self._position.value() / self._fps
        self._play.setIcon(icon("pause" if self._is_playing else "play", self.theme.text))

    def _open_outside(self) -> None:
        if self._file:
            QDesktopServices.openUrl(QUrl.fromLocalFile(self._file))


def decode_video(data: bytes, suffix: str, directory: Path) -> tuple[list[QImage], str]:
    """The frames of a clip, and its new file in a directory. `ConfigError` if it cannot be decoded."""
    try:
        # A new name each time: a player outside may still show the previous clip.
        with tempfile.NamedTemporaryFile(dir=directory, suffix=suffix or ".webm", delete=False) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError("clip", suffix, f"cannot be written ({error.strerror})") from None
    command = [require_encoder(), *"-hide_banner -loglevel error -nostdin -i".split(), file.name]
    command += ["-frames:v", str(_MAX_FRAMES), "-vf", f"scale={_WIDTH}:-2", "-f", "image2pipe", "-c:v", "bmp", "-"]
    try:
        process = subprocess.run(command, capture_output=True, timeout=_DECODE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError("clip", suffix, f"cannot be decoded ({error})") from None
    if process.returncode:
        text = process.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError("clip", suffix, f"cannot be decoded ({text[-1] if text else 'no message'})")
    return list(_split_pictures(process.stdout)), file.name


def _split_pictures(data: bytes) -> list[QImage]:
    """The BMP pictures that follow each other; each begins with its length."""
    images, offset = [], 0
    while offset + 6 <= len(data) and data[offset : offset + 2] == b"BM":
        length = int.from_bytes(data[offset + 2 : offset + 6], "little")
        images.append(QImage.fromData(data[offset : offset + length]))
        offset += length
    return images
