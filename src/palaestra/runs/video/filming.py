"""Which of a run's checkpoints is filmed when somebody wants to see it play."""

from __future__ import annotations

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.checkpoints.listing import all_checkpoints
from palaestra.runs.record import RunRecord
from palaestra.runs.video.clip import Clip
from palaestra.runs.video.recording import record_clip

__all__ = ["film_run", "how_to_film"]

_NONE_YET = "Let it train until it saves one; trainers that save none film with palaestra runs start --video"


def how_to_film(record: RunRecord, *, films_itself: bool) -> str:
    """How to get clips of a run that has none; `films_itself`: the run was started with `--video`."""
    if record.runner == "palaestra":
        return f"Film its newest checkpoint with: palaestra runs videos {record.run_id} --record"
    if films_itself:
        return "Its trainer films while it trains; the first clip comes with the first episode that it films."
    return (
        f"Only its own trainer ({record.runner}) can play its checkpoints. "
        "Start a new run with palaestra runs start --video: the trainer then films while it trains."
    )


def film_run(home: Home, run: RunDirectory, checkpoint_id: str | None = None, frames: int = 200) -> Clip:
    """Film the checkpoint whose id begins so, or the newest; blocks until the clip is there."""
    found = all_checkpoints(home, run_id=run.run_id)
    fitting = [one for one in found if checkpoint_id is None or one.checkpoint_id.startswith(checkpoint_id)]
    if not fitting:
        remedy = f"There are {', '.join(one.checkpoint_id for one in found[:5])}" if found else _NONE_YET
        what = "checkpoint yet" if checkpoint_id is None else "such checkpoint"
        raise ConfigError("checkpoint", checkpoint_id, f"{run.run_id} has no {what}", remedy)
    if checkpoint_id is not None and len({one.sha256 for one in fitting}) > 1:
        few = ", ".join(one.checkpoint_id for one in fitting[:4])
        raise ConfigError("checkpoint", checkpoint_id, f"several begin so ({few})", "Write more of the id")
    return record_clip(run, fitting[0], frames=frames)
