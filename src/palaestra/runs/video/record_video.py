"""Records clips of checkpoints: on request, and of new checkpoints while a run trains.

Playing and encoding happen in separate processes. While runs train, one clip is recorded at a time with low priority.
If several checkpoints of a run arrive meanwhile, only the newest is recorded next. A failed recording is logged as a
warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from palaestra.errors import ConfigError, PalaestraError
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue, list_checkpoints
from palaestra.runs.process.eval_process import last_error, run_eval
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.store.registry import Registry
from palaestra.runs.video.clip import MAX_CLIPS, Clip, list_clips, prune_clips
from palaestra.runs.video.encoder import MAX_FRAMES, check_video_file
from palaestra.telemetry.event import Record

_TIMEOUT_S = 600.0
_NICENESS = 19
_log = logging.getLogger(__name__)


def explain_recording(record: RunRecord, *, records_itself: bool) -> str:
    """Explain how to get clips of a run that has none; `records_itself`: the run was started with `--video`."""
    if record.runner == "palaestra":
        return f"Record its newest checkpoint with: palaestra runs videos {record.run_id} --record"
    if records_itself:
        return "Its trainer records while it trains; the first clip appears after the first recorded episode."
    return (
        "Clips are recorded of checkpoints of palaestra only. "
        "Start a new run with palaestra runs start --video: the trainer then records while it trains."
    )


def record_run(home: Home, run: RunDirectory, checkpoint_id: str | None = None, frames: int = MAX_FRAMES) -> Clip:
    """Record the checkpoint with this id prefix, or the newest one. Blocks until the clip is complete."""
    checkpoints = list_checkpoints(home, run_id=run.run_id)
    matching = [row for row in checkpoints if checkpoint_id is None or row.checkpoint_id.startswith(checkpoint_id)]
    if not matching:
        remedy = "Wait until it saves one; trainers that save none record with palaestra runs start --video"
        if checkpoints:
            remedy = f"Available: {', '.join(row.checkpoint_id for row in checkpoints[:5])}"
        what = "checkpoint yet" if checkpoint_id is None else "such checkpoint"
        raise ConfigError("checkpoint", checkpoint_id, f"{run.run_id} has no {what}", remedy)
    if checkpoint_id is not None and len({row.sha256 for row in matching}) > 1:
        ids = ", ".join(row.checkpoint_id for row in matching[:4])
        reason, remedy = f"several ids begin with it ({ids})", "Give more characters of the id"
        raise ConfigError("checkpoint", checkpoint_id, reason, remedy)
    return record_clip(run, matching[0], frames=frames)


def record_clip(
    run: RunDirectory,
    checkpoint: CheckpointRecord,
    *,
    frames: int = MAX_FRAMES,
    keep: int = MAX_CLIPS,
    timeout_s: float = _TIMEOUT_S,
    niceness: int = 0,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Clip:
    """Record a checkpoint into the `videos/` of its attempt, and delete all but the newest `keep` clips. Blocks.

    `niceness` lowers the CPU priority of the process. The recording stops once `is_cancelled` returns True.
    """
    if checkpoint.format != "palaestra":
        reason = f"has the format {checkpoint.format}; clips are recorded of checkpoints of palaestra only"
        remedy = "Start a new run with palaestra runs start --video, or load it into a play, which records its episodes"
        raise ConfigError("checkpoint", checkpoint.checkpoint_id, reason, remedy)
    videos = run.attempt(checkpoint.attempt).videos
    videos.mkdir(parents=True, exist_ok=True)
    step = "unknown" if checkpoint.env_step is None else checkpoint.env_step
    file = videos / f"step_{step}_{checkpoint.checkpoint_id[:8]}.webm"
    check_video_file(file, frames, long=False)
    try:
        process = run_eval(
            checkpoint.path,
            *("--video", str(file), "--frames", str(frames)),
            timeout_s=timeout_s,
            # SDL would look for a display and handle SIGTERM itself.
            variables={"SDL_VIDEODRIVER": "dummy", "SDL_NO_SIGNAL_HANDLERS": "1"},
            niceness=niceness,
            is_cancelled=is_cancelled,
        )
    except TimeoutError:
        if is_cancelled():
            raise ConfigError("video", str(file), "was cancelled") from None
        reason = f"was not ready after {timeout_s:.0f} s"
        raise ConfigError("video", str(file), reason, "Record fewer frames") from None
    if process.returncode or not file.is_file():
        raise ConfigError("video", str(file), f"could not be recorded ({last_error(process)})")
    clip = next(clip for clip in list_clips(run) if clip.path == str(file))
    prune_clips(run, max(keep, 1))
    return clip


class CheckpointRecorder(CheckpointCatalogue):
    """A catalogue that also records clips of announced checkpoints. `close` cancels the current recording."""

    def __init__(self, registry: Registry, home: Home, record: Callable[..., object] = record_clip) -> None:
        super().__init__(registry)
        self._home, self._record = home, record
        self._lock = threading.Lock()
        self._pending: dict[str, CheckpointRecord] = {}
        self._worker: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a clip is being recorded."""
        return self._worker is not None

    def add_announced(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Add announced checkpoints, and record the newest if its run asked for it."""
        super().add_announced(run, attempt, records)
        if not AttemptPlan.read(attempt).record_video:
            return
        checkpoints = self._registry.checkpoints(run_id=run.run_id)
        if not checkpoints:
            return
        with self._lock:
            self._pending[run.run_id] = checkpoints[0]
            if self._worker is None and not self._closed.is_set():
                self._worker = threading.Thread(target=self._work, name="checkpoint-recorder", daemon=True)
                self._worker.start()

    def close(self) -> None:
        """Stop recording and wait for the worker thread."""
        self._closed.set()
        worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            run = self._home.run(checkpoint.run_id)
            try:
                self._record(run, checkpoint, niceness=_NICENESS, is_cancelled=self._closed.is_set)
            except (PalaestraError, OSError) as error:
                if not self._closed.is_set():
                    _log.warning("%s: no clip of %s: %s", run.run_id, checkpoint.checkpoint_id, error)

    def _next(self) -> CheckpointRecord | None:
        with self._lock:
            if self._pending and not self._closed.is_set():
                return self._pending.pop(next(iter(self._pending)))
            self._worker = None
            return None
