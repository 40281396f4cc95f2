"""Routes about runners, tools and the machine."""

# Annotations are evaluated here: FastAPI reads them.
import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query
from fastapi.responses import FileResponse

from palaestra.config import parse_section
from palaestra.errors import LaunchRefused, UnknownRun
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.reader import RunReader
from palaestra.runs.service.answers import RunId, RunName, errors
from palaestra.runs.service.doctor import examine
from palaestra.runs.service.documents import (
    ClipDocument,
    Filming,
    FindingDocument,
    RunnerDocument,
    Showing,
    ToolDocument,
    TrackingDocument,
)
from palaestra.runs.service.video_file import clip_answers, clip_file, clip_name
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.tools.wandb import tracking_of
from palaestra.runs.video.clip import Clip, clips_of
from palaestra.runs.video.filming import film_run
from palaestra.runs.wire import to_json

__all__ = ["add_tool_routes"]

_Word = Annotated[str | None, Query(max_length=200)]
_Range = Annotated[str | None, Header(alias="Range", max_length=80)]
_RunNames = Annotated[list[RunName] | None, Query(max_length=50)]


def add_tool_routes(app: FastAPI, supervisor: Supervisor, reading: RunReader, tensorboards: TensorBoards) -> None:
    """Add them."""

    @app.get("/runners", operation_id="runners", tags=["runners"])
    async def runners() -> dict[str, RunnerDocument]:
        """The runners and their capabilities, including those of packages installed since the service started."""
        await supervisor.refresh_runners()
        found = supervisor.runners.items()
        return {name: RunnerDocument.model_validate(asdict(runner.capabilities)) for name, runner in found}

    @app.get("/runners/{name}/schema", operation_id="runner_schema", tags=["runners"], responses=errors(404))
    async def runner_schema(name: Annotated[str, Path(max_length=100)], script: _Word = None) -> dict[str, Any]:
        """JSON Schema of a runner's own keys; of some runners it depends on the script."""
        try:
            runner = await supervisor.runner_named(name)
        except LaunchRefused as refused:
            raise UnknownRun(refused.place, refused.value, refused.reason, refused.remedy) from None
        spec = parse_section(RunSpec, {"runner": name, "script": script}, place="spec")
        return await asyncio.to_thread(runner.config_schema, spec)

    @app.get("/doctor", operation_id="doctor", tags=["service"])
    def doctor() -> list[FindingDocument]:
        """What works on this machine, what would fail, and what mends it."""
        return [FindingDocument.model_validate(asdict(finding)) for finding in examine(reading.home)]

    @app.get("/runs/{run_id}/tracking", operation_id="tracking", tags=["tools"], responses=errors(404))
    def tracking(run_id: RunId) -> TrackingDocument:
        """Where the run is on W&B, or the command that uploads what was kept on disk."""
        found = tracking_of(reading.paths(run_id), reading.run(run_id).tracking_url)
        return TrackingDocument.model_validate(asdict(found))

    @app.get("/runs/{run_id}/videos", operation_id="videos", tags=["tools"], responses=errors(404))
    def videos(run_id: RunId) -> list[ClipDocument]:
        """Clips of a run, newest first."""
        run = reading.paths(run_id)
        return [_clip(clip, run) for clip in clips_of(run)]

    @app.get(
        "/runs/{run_id}/videos/{name:path}", operation_id="video", tags=["tools"], response_class=FileResponse,
        responses=clip_answers(),
    )  # fmt: skip
    def video(run_id: RunId, name: Annotated[str, Path(max_length=1000)], wanted: _Range = None) -> FileResponse:
        """The bytes of a clip, by its `name` in the list; a part of them when a `Range` is asked for."""
        return clip_file(reading.paths(run_id), name, wanted)

    @app.post("/runs/{run_id}/videos", status_code=201, operation_id="film", tags=["tools"], responses=errors(404))
    def film(run_id: RunId, asked: Filming) -> ClipDocument:
        """Play a checkpoint and film it, in processes of their own. Answers when the clip is there."""
        run = reading.paths(run_id)
        return _clip(film_run(reading.home, run, asked.checkpoint_id, asked.frames), run)

    @app.post("/tools/tensorboard", operation_id="tensorboard", tags=["tools"], responses=errors(404))
    def tensorboard(asked: Showing) -> ToolDocument:
        """Start a TensorBoard on these runs, or use the one that shows them.

        It ends with the service, when it is told to, and when nobody has asked for it for an hour.
        """
        ids = [reading.paths(run_id).run_id for run_id in asked.run_ids]
        return ToolDocument(url=tensorboards.open(ids), run_ids=sorted(set(ids)))

    @app.get("/tools/tensorboard", operation_id="tensorboards", tags=["tools"])
    def shown() -> list[ToolDocument]:
        """The TensorBoards that are open."""
        return [ToolDocument(url=shown.url, run_ids=list(shown.run_ids)) for shown in tensorboards.shown()]

    @app.delete("/tools/tensorboard", operation_id="stop_tensorboards", tags=["tools"], responses=errors(404))
    def stop_tensorboards(run: _RunNames = None) -> list[ToolDocument]:
        """End the TensorBoard that shows exactly these runs, or all of them when none is named; those that ended."""
        ended = tensorboards.stop([reading.run(run_id).run_id for run_id in run or ()])
        return [ToolDocument(url=shown.url, run_ids=list(shown.run_ids)) for shown in ended]


def _clip(clip: Clip, run: RunDirectory) -> ClipDocument:
    return ClipDocument.model_validate({"name": clip_name(clip, run), **to_json(asdict(clip))})
