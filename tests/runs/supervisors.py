"""A supervisor in the process of the test, and echo runs for it."""

import asyncio
import contextlib
import json

from tests.runs.attempts import TIMEOUT_S, wait_until

from palaestra.runs.config import SupervisorConfig
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.telemetry.journal import JournalReader

_MAX_TEST_S = 180.0


@contextlib.asynccontextmanager
async def run_supervisor(home, *, runners=None, catalogue=None, clock=None, **config):
    """A started supervisor; runs are stopped at the end. A catalogue class is created with the registry."""
    registry = open_registry(home)
    config = SupervisorConfig(**{"min_free_disk_mb": 0, "alarm_every_s": 0.05, "max_running": 8, **config})
    options = {"catalogue": catalogue(registry) if isinstance(catalogue, type) else catalogue} | (
        {} if clock is None else {"clock": clock}
    )
    supervisor = Supervisor(home, registry, runners or {"echo": EchoRunner()}, config, **options)
    try:
        supervisor.report = await supervisor.start()
        supervisor.registry = registry
        # A broken test must fail, not hang.
        async with asyncio.timeout(_MAX_TEST_S):
            yield supervisor
    finally:
        for run_id in list(supervisor._runs):
            with contextlib.suppress(Exception):
                await supervisor.stop(run_id, grace_s=0)
        await supervisor.close()
        registry.close()


@contextlib.asynccontextmanager
async def run_and_close_supervisor(home, **config):
    """A supervisor that is closed at the end while its runs continue."""
    async with run_supervisor(home, **config) as supervisor:
        yield supervisor
        await supervisor.close()


def echo(**config):
    spec = {name: config.pop(name) for name in list(config) if name in RunSpec.model_fields}
    return RunSpec(runner="echo", config=config, **spec)


async def wait_for_phase(supervisor, run_id, *phases):
    """Wait until a run is in one of these phases; returns its row."""

    async def body():
        async for item in supervisor.subscribe(run_id):
            if getattr(item.item, "phase", None) in phases and not hasattr(item.item, "event"):
                return
        raise AssertionError(f"{run_id} ended as {supervisor.registry.get(run_id)}")

    await asyncio.wait_for(body(), TIMEOUT_S * 2)
    # The row is written after the event.
    await wait_until(lambda: supervisor.registry.get(run_id).phase in phases, "the row")
    return supervisor.registry.get(run_id)


async def wait_for_end(supervisor, run_id):
    """Wait until the end of a run is recorded; returns its row."""
    async for _ in supervisor.subscribe(run_id):
        pass
    return supervisor.get_run(run_id)


def event_kinds(home, run_id):
    return [event.kind for event in RunEventLog(home.run(run_id)).read()]


def read_journal(home, run_id, attempt=1):
    with JournalReader(home.run(run_id).attempt(attempt).journal) as reader:
        return reader.read()


def read_echo_report(home, run_id, attempt=1):
    return json.loads((home.run(run_id).attempt(attempt).work / "echo.json").read_text())
