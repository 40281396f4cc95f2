"""Session servers as processes: spread, watched, replaced, and nothing of them left behind."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.gateway.harness import SERVER, labelled

from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway import check_runtime
from palaestra.gateway.local.orphans import register, remove_orphans
from palaestra.gateway.local.runtime import LocalRuntime, Timeouts, backoff_s, make_client
from palaestra.gateway.local.server_process import ServerProcess
from palaestra.processes.procfs import list_descendants, read_stat


def test_a_server_that_keeps_failing_is_started_ever_more_rarely():
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 7, 50)] == [0.0, 0.2, 0.4, 0.8, 10.0, 10.0]


@contextlib.asynccontextmanager
async def _runtime(state_dir, *, command=SERVER, servers=1, warm=0, timeouts=None):
    lost = asyncio.Queue()
    async with make_client() as client:
        runtime = LocalRuntime(command, client, state_dir, "me", servers=servers, warm=warm, timeouts=timeouts)
        await runtime.start(lambda session_id, reason: lost.put_nowait((session_id, reason)))
        try:
            yield runtime, client, lost
        finally:
            await runtime.stop()
    assert labelled(state_dir) == {}
    assert list(state_dir.iterdir()) == []


async def _asked(client, address, path="/echo"):
    async with client.get(address.url + path) as response:
        return await response.json(content_type=None)


def test_sessions_are_spread_and_a_killed_server_takes_only_its_own_along(tmp_path):
    async def body():
        async with _runtime(tmp_path, servers=2, warm=0) as (runtime, client, lost):
            while runtime.counts()["ready"] < 2:
                await asyncio.sleep(0.01)
            addresses = {name: await runtime.create(name, "browser") for name in "abcd"}
            facts = {name: await _asked(client, address) for name, address in addresses.items()}
            pids = [facts[name]["pid"] for name in "abcd"]
            assert pids[0] == pids[2] != pids[1] == pids[3]
            directory = Path(facts["a"]["tmp"])
            assert directory.is_dir()
            browsers = list_descendants(pids[0])
            assert len(browsers) == 1

            os.kill(pids[0], signal.SIGKILL)

            reports = [await asyncio.wait_for(lost.get(), 10) for _ in range(2)]
            assert sorted(name for name, _ in reports) == ["a", "c"]
            assert reports[0][1] == "its session server was killed by signal 9"
            assert all(read_stat(pid) is None for pid in browsers)
            assert not directory.exists()
            assert (await _asked(client, addresses["b"]))["pid"] == pids[1]
            replaced = await runtime.create("e", "browser")
            assert (await _asked(client, replaced))["pid"] not in (pids[0],)
            assert lost.empty()

    asyncio.run(body())


def test_the_local_runtime_keeps_every_promise_of_the_kit(tmp_path):
    async def body():
        async with make_client() as client:
            names = iter(["one", "two", "three", "four", "five"])

            async def kill(runtime, session_id, address):
                os.kill((await _asked(client, address))["pid"], signal.SIGKILL)

            def make():
                return LocalRuntime(SERVER, client, tmp_path, next(names), servers=1, warm=0)

            await check_runtime(make, kill)

    asyncio.run(body())


def test_the_kit_notices_a_runtime_that_forgets_what_it_made(tmp_path):
    class Forgetful(LocalRuntime):
        async def list(self):
            return {}

    async def body():
        async with make_client() as client:
            with pytest.raises(AssertionError, match="list returns exactly the sessions that exist"):
                await check_runtime(lambda: Forgetful(SERVER, client, tmp_path, "one", servers=1, warm=0), None)

    asyncio.run(body())


def test_a_spare_takes_over_at_once_and_another_one_is_started(tmp_path):
    async def body():
        async with _runtime(tmp_path, servers=1, warm=1) as (runtime, client, lost):
            while runtime.counts()["spare"] < 1:
                await asyncio.sleep(0.01)
            first = await _asked(client, await runtime.create("a", "browser"))
            assert runtime.counts() == {"ready": 1, "spare": 1, "starting": 0, "restarted": 0}

            os.kill(first["pid"], signal.SIGKILL)
            await asyncio.wait_for(lost.get(), 10)

            assert runtime.counts() == {"ready": 1, "spare": 0, "starting": 1, "restarted": 1}
            assert (await _asked(client, await runtime.create("b", "browser")))["pid"] != first["pid"]

    asyncio.run(body())


def test_a_server_that_is_alive_and_deaf_is_replaced(tmp_path):
    async def body():
        timeouts = Timeouts(health_every_s=0.05, health_s=0.5, health_misses=2)
        async with _runtime(tmp_path, timeouts=timeouts) as (runtime, client, lost):
            address = await runtime.create("a", "browser")
            deaf = asyncio.create_task(_asked(client, address, "/deaf"))

            name, reason = await asyncio.wait_for(lost.get(), 20)

            assert (name, reason) == ("a", "its session server failed 2 health checks in a row and was replaced")
            await asyncio.gather(deaf, return_exceptions=True)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("print('hello')", "not {'port': number}"),
        ("import time; time.sleep(60)", "did not announce its port within 0.5 s"),
    ],
)
def test_a_server_that_does_not_come_up_is_an_environment_failure_that_says_why(tmp_path, code, why):
    async def body():
        command = (sys.executable, "-I", "-S", "-c", code)
        async with _runtime(tmp_path, command=command, timeouts=Timeouts(start_s=0.5)) as (runtime, _, _):
            for _ in range(10):
                with pytest.raises(SessionFailed) as caught:
                    await runtime.create("a", "browser")
                assert caught.value.reason == "no_server"
                if why in caught.value.detail:
                    return
            pytest.fail(caught.value.detail)

    asyncio.run(body())


def test_who_is_cancelled_while_a_server_ends_waits_for_its_end(tmp_path):
    async def body():
        server = await ServerProcess.start(SERVER, tmp_path / "1", {}, timeout_s=30)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert labelled(tmp_path) == {}

    asyncio.run(body())


def test_an_earlier_gateway_is_swept_by_its_label_and_a_living_one_is_left_alone(tmp_path):
    async def body():
        register(tmp_path, "living")
        dead = register(tmp_path, "dead")
        record = dead / "gateway.json"
        record.write_text(record.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))
        left = {}
        for label in ("living", "dead", "unknown"):
            environment = {"PATH": os.environ["PATH"], "PALAESTRA_GATEWAY": label}
            left[label] = await asyncio.create_subprocess_exec("sleep", "60", env=environment, start_new_session=True)

        removed = await asyncio.to_thread(remove_orphans, tmp_path)

        assert (removed.gateways, removed.processes) == (1, 1)
        assert await left["dead"].wait() == -signal.SIGKILL
        assert [path.name for path in tmp_path.iterdir()] == ["living"]
        for label in ("living", "unknown"):
            assert left[label].returncode is None
            left[label].kill()
            await left[label].wait()

    asyncio.run(body())


def test_a_gateway_of_before_the_last_boot_is_dead_whatever_has_its_number(tmp_path):
    directory = register(tmp_path, "before")
    record = directory / "gateway.json"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    record.write_text(record.read_text().replace(boot, "another boot"))

    assert remove_orphans(tmp_path).gateways == 1
    assert not directory.exists()


def test_a_record_that_cannot_be_read_is_left_alone(tmp_path):
    (tmp_path / "strange").mkdir()

    assert remove_orphans(tmp_path).gateways == 0
    assert (tmp_path / "strange").is_dir()


def test_a_state_directory_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)

    with pytest.raises(ConfigError, match="only this user can write to"):
        register(tmp_path, "me")
