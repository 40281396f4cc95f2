"""Routes of runners and their catalogues, datasets, the machine, W&B tracking, TensorBoard, presets and webhooks."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import asyncio
import os
import time
from typing import Annotated, TypeAlias

from fastapi import FastAPI, Path, Query
from pydantic import Field

from palaestra.config import parse_section
from palaestra.errors import LaunchRefused, UnknownEnvironment, UnknownRun
from palaestra.files.home import Home
from palaestra.runs.catalogue import DatasetInfo, EnvironmentInfo, Readiness, ScriptInfo, TaskInfo
from palaestra.runs.datasets import list_dataset_infos, verify_dataset
from palaestra.runs.machine import MachineUsage
from palaestra.runs.notifications.webhooks import Webhooks, WebhookStatus, WebhookTest
from palaestra.runs.presets import Preset, delete_preset, list_presets, save_preset
from palaestra.runs.process.machine_usage import MachineMonitor
from palaestra.runs.reader import RunReader
from palaestra.runs.runner import Finding, Machine, Runner, RunnerCapabilities
from palaestra.runs.runners.catalogues import (
    environment_parameters_of,
    environments_of,
    list_tasks,
    readiness_of,
    scripts_of,
)
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
_RunnerName = Annotated[str, Path(max_length=100)]
_PathText = Annotated[str | None, Query(max_length=4096)]
_DEFAULT_RUNNER = "palaestra"
JsonList: TypeAlias = list[JsonObject]


class TestWebhooksBody(RequestBody):
    """Has no keys."""


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
    _add_runner_routes(app, supervisor)
    _add_environment_routes(app, supervisor)
    _add_dataset_routes(app, reader)
    monitor = MachineMonitor(reader.home, lambda: supervisor.planner.slots.gpus, closing)
    service_router = new_router("service")
    tools_router = new_router("tools")

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

    app.include_router(service_router)
    app.include_router(tools_router)
    _add_preset_routes(app, reader.home)


def _add_preset_routes(app: FastAPI, home: Home) -> None:
    router = new_router("presets")

    @router.get("/presets", response_model=list[Preset])
    def presets(kind: Annotated[str | None, Query(max_length=300)] = None) -> list[JsonObject]:
        """Named values of forms, by kind and name. A kind says what a form is for, such as `train/cleanrl/dqn`."""
        return [to_json(preset) for preset in list_presets(home, kind)]

    # A path with a line break reaches no route.
    @router.put("/presets/{kind:path}/{name}", operation_id="save_preset", responses=NOT_FOUND, response_model=Preset)
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


def _add_runner_routes(app: FastAPI, supervisor: Supervisor) -> None:
    router = new_router("runners")

    @router.get("/runners", response_model=dict[str, RunnerCapabilities])
    async def runners() -> JsonObject:
        """The runners and their capabilities, including those of packages installed since the service started."""
        await supervisor.planner.refresh_runners()
        return {name: to_json(runner.capabilities) for name, runner in supervisor.planner.runners.items()}

    @router.get("/runners/{name}/schema", responses=NOT_FOUND)
    async def runner_schema(
        name: _RunnerName,
        script: FilterText = None,
        env: FilterText = None,
        python: _PathText = None,
        checkout: _PathText = None,
    ) -> JsonObject:
        """JSON Schema of a runner's own keys; for some runners it depends on the script and the environment."""
        runner = await _get_runner(supervisor, name)
        spec = _catalogue_spec(name, python, checkout, script=script, env_id=env)
        return await asyncio.to_thread(runner.config_schema, spec)

    @router.get("/runners/{name}/scripts", responses=NOT_FOUND, response_model=list[ScriptInfo])
    async def runner_scripts(name: _RunnerName, python: _PathText = None, checkout: _PathText = None) -> JsonList:
        """The scripts or algorithms of a runner, and what their checkpoints can be used for."""
        runner = await _get_runner(supervisor, name)
        spec = _catalogue_spec(name, python, checkout)
        return [to_json(info) for info in await asyncio.to_thread(scripts_of, runner, spec, _machine())]

    @router.get("/runners/{name}/readiness", responses=NOT_FOUND, response_model=Readiness)
    async def runner_readiness(name: _RunnerName, python: _PathText = None, checkout: _PathText = None) -> JsonObject:
        """Whether a runner could start a run here, and what is missing. Quick; a preflight checks one run in full."""
        runner = await _get_runner(supervisor, name)
        spec = _catalogue_spec(name, python, checkout)
        return to_json(await asyncio.to_thread(readiness_of, runner, spec, _machine()))

    app.include_router(router)


def _add_environment_routes(app: FastAPI, supervisor: Supervisor) -> None:
    router = new_router("environments")

    @router.get("/environments", responses=NOT_FOUND, response_model=list[EnvironmentInfo])
    async def environments(
        runner: FilterText = None, python: _PathText = None, checkout: _PathText = None, refresh: bool = False
    ) -> JsonList:
        """The environments that a runner can train in (default: `palaestra`, whose environments can also be played).

        An answer is kept until packages are installed or removed, and at most ten minutes; `refresh` asks anew.
        """
        chosen = await _get_runner(supervisor, runner or _DEFAULT_RUNNER)
        spec = _catalogue_spec(chosen.name, python, checkout)
        infos = await asyncio.to_thread(environments_of, chosen, spec, _machine(), refresh=refresh)
        return [to_json(info) for info in infos]

    @router.get("/environments/{env_id:path}/parameters", responses=NOT_FOUND)
    async def environment_parameters(
        env_id: Annotated[str, Path(max_length=300)],
        runner: FilterText = None,
        python: _PathText = None,
        checkout: _PathText = None,
    ) -> JsonObject:
        """JSON Schema of the parameters of an environment or a screen task."""
        chosen = await _get_runner(supervisor, runner or _DEFAULT_RUNNER)
        spec = _catalogue_spec(chosen.name, python, checkout)
        try:
            return await asyncio.to_thread(environment_parameters_of, chosen, env_id, spec, _machine())
        except UnknownEnvironment as error:
            raise UnknownRun(error.place, error.value, error.reason, error.remedy) from None

    @router.get("/tasks", response_model=list[TaskInfo])
    def tasks() -> JsonList:
        """The screen tasks, and their parameters."""
        return [to_json(info) for info in list_tasks()]

    app.include_router(router)


def add_webhook_routes(app: FastAPI, webhooks: Webhooks) -> None:
    """Add the routes of notifications to the application."""
    router = new_router("service")

    @router.get("/webhooks", response_model=list[WebhookStatus])
    def list_webhooks() -> JsonList:
        """The configured webhooks, and what was sent to them since the service started."""
        return [to_json(status) for status in webhooks.statuses()]

    @router.post("/webhooks/test", response_model=list[WebhookTest])
    async def test_webhooks(body: TestWebhooksBody) -> JsonList:
        """Send a test notification to every webhook, with one try each, and wait for the answers."""
        return [to_json(result) for result in await webhooks.test()]

    app.include_router(router)


def _add_dataset_routes(app: FastAPI, reader: RunReader) -> None:
    router = new_router("datasets")

    @router.get("/datasets", response_model=list[DatasetInfo])
    def datasets(env: FilterText = None) -> JsonList:
        """The datasets to learn from, sorted by id, with the state of their files. Reads no data."""
        return [to_json(info) for info in list_dataset_infos(reader, env)]

    @router.post(
        "/datasets/{dataset_id:path}/verify",
        operation_id="verify_dataset",
        responses=NOT_FOUND,
        response_model=DatasetInfo,
    )
    def verify(dataset_id: Annotated[str, Path(max_length=200)]) -> JsonObject:
        """Read every byte of a dataset and compare it with its manifest; `state` and `problem` hold the result."""
        return to_json(verify_dataset(reader, dataset_id))

    app.include_router(router)


async def _get_runner(supervisor: Supervisor, name: str) -> Runner:
    try:
        return await supervisor.planner.get_runner(name)
    except LaunchRefused as error:
        raise UnknownRun(error.place, error.value, error.reason, error.remedy) from None


def _catalogue_spec(name: str, python: str | None, checkout: str | None, **fields: str | None) -> RunSpec:
    data = {"runner": name, "python": python, "checkout": checkout, **fields}
    return parse_section(RunSpec, data, place="query")


def _machine() -> Machine:
    return Machine(environment=dict(os.environ), free_disk_bytes=0)
