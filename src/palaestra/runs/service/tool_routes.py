"""Routes of the runners, the machine, W&B tracking, TensorBoard and presets."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import asyncio
import time
from typing import Annotated

from fastapi import FastAPI, Path, Query
from pydantic import Field

from palaestra.config import parse_section
from palaestra.errors import LaunchRefused, UnknownRun
from palaestra.files.home import Home
from palaestra.runs.machine import MachineUsage
from palaestra.runs.presets import Preset, delete_preset, list_presets, save_preset
from palaestra.runs.process.machine_usage import MachineMonitor
from palaestra.runs.reader import RunReader
from palaestra.runs.runner import Finding, RunnerCapabilities
from palaestra.runs.service.doctor import examine
from palaestra.runs.service.schemas import (
    NOT_FOUND,
    FilterText,
    RequestBody,
    ResponseBody,
    RunId,
    RunIdText,
    new_router,
)
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.tools.wandb import Tracking, read_tracking
from palaestra.runs.wire import JsonObject, to_json

_PresetKind = Annotated[str, Path(max_length=300)]
_PresetName = Annotated[str, Path(max_length=200)]
_RunIds = Annotated[list[RunIdText] | None, Query(max_length=50)]


class TensorBoardBody(RequestBody):
    """Runs to show together."""

    run_ids: Annotated[list[Annotated[str, Field(max_length=90)]], Field(min_length=1, max_length=50)]


class PresetBody(RequestBody):
    """The values of a preset."""

    values: JsonObject


class TensorBoardResponse(ResponseBody):
    """A running TensorBoard."""

    url: str
    run_ids: list[str]
    """The runs that it shows."""


def add_tool_routes(
    app: FastAPI, supervisor: Supervisor, reader: RunReader, tensorboards: TensorBoards, closing: asyncio.Event
) -> None:
    """Add the routes to the application. Sampling of the machine ends when `closing` is set."""
    monitor = MachineMonitor(reader.home, lambda: supervisor.planner.slots.gpus, closing)
    runners_router = new_router("runners")
    service_router = new_router("service")
    tools_router = new_router("tools")

    @runners_router.get("/runners", response_model=dict[str, RunnerCapabilities])
    async def runners() -> JsonObject:
        """The runners and their capabilities, including those of packages installed since the service started."""
        await supervisor.planner.refresh_runners()
        return {name: to_json(runner.capabilities) for name, runner in supervisor.planner.runners.items()}

    @runners_router.get("/runners/{name}/schema", responses=NOT_FOUND)
    async def runner_schema(name: Annotated[str, Path(max_length=100)], script: FilterText = None) -> JsonObject:
        """JSON Schema of a runner's own keys; for some runners it depends on the script."""
        try:
            runner = await supervisor.planner.get_runner(name)
        except LaunchRefused as error:
            raise UnknownRun(error.place, error.value, error.reason, error.remedy) from None
        spec = parse_section(RunSpec, {"runner": name, "script": script}, place="spec")
        return await asyncio.to_thread(runner.config_schema, spec)

    @service_router.get("/doctor", response_model=list[Finding])
    def doctor() -> list[JsonObject]:
        """What works on this machine, what would fail, and how to fix it."""
        return [to_json(finding) for finding in examine(reader.home)]

    @service_router.get("/machine", response_model=MachineUsage)
    async def machine() -> JsonObject:
        """Usage of processor, memory, disk and GPUs, the queue, and the service itself.

        While it is requested, samples are taken in the background once a second, so a request costs next to nothing.
        """
        return to_json(MachineUsage.of(await monitor.usage(), supervisor.queue_status()))

    @tools_router.get("/runs/{run_id}/tracking", responses=NOT_FOUND, response_model=Tracking)
    def tracking(run_id: RunId) -> JsonObject:
        """The URL of the run on W&B, or the command that uploads an offline run."""
        return to_json(read_tracking(reader.paths(run_id), reader.run(run_id).tracking_url))

    @tools_router.post("/tools/tensorboard", operation_id="tensorboard", responses=NOT_FOUND)
    def start_tensorboard(body: TensorBoardBody) -> TensorBoardResponse:
        """Start a TensorBoard on these runs, or reuse the one that shows them.

        It ends with the service, on request, and after an hour without requests for it.
        """
        run_ids = [reader.paths(run_id).run_id for run_id in body.run_ids]
        return TensorBoardResponse(url=tensorboards.open(run_ids), run_ids=sorted(set(run_ids)))

    @tools_router.get("/tools/tensorboard", operation_id="tensorboards")
    def list_tensorboards() -> list[TensorBoardResponse]:
        """The running TensorBoards."""
        return [TensorBoardResponse(url=board.url, run_ids=list(board.run_ids)) for board in tensorboards.running()]

    @tools_router.delete("/tools/tensorboard", responses=NOT_FOUND)
    def stop_tensorboards(run: _RunIds = None) -> list[TensorBoardResponse]:
        """Stop the TensorBoard that shows exactly these runs, or all of them by default. Returns those stopped."""
        stopped = tensorboards.stop([reader.run(run_id).run_id for run_id in run or ()])
        return [TensorBoardResponse(url=board.url, run_ids=list(board.run_ids)) for board in stopped]

    app.include_router(runners_router)
    app.include_router(service_router)
    app.include_router(tools_router)
    _add_preset_routes(app, reader.home)


def _add_preset_routes(app: FastAPI, home: Home) -> None:
    router = new_router("presets")

    @router.get("/presets", response_model=list[Preset])
    def presets(kind: Annotated[str | None, Query(max_length=300)] = None) -> list[JsonObject]:
        """Named values of forms, by kind and name. A kind says what a form is for, such as `train/cleanrl/dqn`."""
        return [to_json(preset) for preset in list_presets(home, kind)]

    @router.put("/presets/{kind:path}/{name}", operation_id="save_preset", response_model=Preset)
    def put_preset(kind: _PresetKind, name: _PresetName, body: PresetBody) -> JsonObject:
        """Create or replace a preset. The kind may hold slashes; the name is the last part of the path."""
        return to_json(save_preset(home, kind, name, body.values, time.time))

    @router.delete(
        "/presets/{kind:path}/{name}", operation_id="delete_preset", responses=NOT_FOUND, response_model=Preset
    )
    def remove_preset(kind: _PresetKind, name: _PresetName) -> JsonObject:
        """Delete a preset."""
        return to_json(delete_preset(home, kind, name))

    app.include_router(router)
