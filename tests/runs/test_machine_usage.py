"""Usage of the machine: shares of processors, memory with limits, GPUs, and sampling only while it is asked for."""

import asyncio
import os
import shutil
import subprocess
import threading
import time

import pytest
from tests.runs.attempts import wait_until
from tests.runs.service.asking import ask
from tests.runs.serving import service, service_thread
from tests.runs.supervisors import echo, run_supervisor, wait_for_phase

from palaestra.processes.memory import memory_usage
from palaestra.runs import TrainerService
from palaestra.runs.machine import MachineUsage
from palaestra.runs.phase import Phase
from palaestra.runs.process.machine_usage import CpuTimes, MachineMonitor, read_cpu_times
from palaestra.runs.process.resource_usage import GpuUsage, read_gpus
from palaestra.runs.supervisor.queue import WaitingRun


def test_the_times_of_processors_are_busy_and_total_without_counting_guests_twice(tmp_path):
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest guest_nice
    stat.write_text("cpu  10 20 30 40 50 1 2 3 7 7\ncpu0 1 0 0 9 0 0 0 0 0 0\nintr 5\n")
    assert read_cpu_times(stat) == [CpuTimes(66, 156), CpuTimes(1, 10)]
    assert read_cpu_times(tmp_path / "nothing") == []


def test_memory_is_that_of_the_machine_or_of_a_limited_group(tmp_path):
    meminfo, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo.write_text(f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {total // 4096} kB\nHugePages: 0\n")
    own.write_text("0::/app\n")
    group = groups / "app"
    group.mkdir(parents=True)
    used, whole = memory_usage(groups, own, meminfo)
    assert (used, whole) == (total // 1024 * 1024 - total // 4096 * 1024, total // 1024 * 1024)
    (group / "memory.max").write_text("1000000")
    (group / "memory.current").write_text("900000")
    (group / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert memory_usage(groups, own, meminfo) == (600_000, 1_000_000)
    (group / "memory.current").unlink()
    assert memory_usage(groups, own, meminfo) == (1_000_000, 1_000_000)


def test_gpus_are_told_with_names_that_hold_commas_and_without_a_driver_by_their_index():
    def query(command, **options):
        lines = "0, NVIDIA, the big one, 81920, 1000, 35\n1, Other, 100, [N/A], [N/A]\n7, Hidden, 1, 1, 1\n"
        return subprocess.CompletedProcess(command, 0, lines, "")

    assert read_gpus(("0", "1"), query) == (GpuUsage("0", "NVIDIA,the big one", 81920, 1000, 35.0), GpuUsage("1"))
    assert read_gpus(("0",), lambda *words, **options: subprocess.CompletedProcess(words, 9, "", "")) == (
        GpuUsage("0"),
    )

    def no_driver(*words, **options):
        raise AssertionError("the driver is not asked when there is no GPU")

    assert read_gpus((), no_driver) == ()


def test_a_busy_core_shows_in_the_next_sample(home):
    async def body():
        monitor = MachineMonitor(home, tuple, asyncio.Event(), every_s=0.2)
        await monitor.usage()
        stop = threading.Event()
        burner = subprocess.Popen(["sh", "-c", "while :; do :; done"])
        try:
            before = (await monitor.usage()).time
            await wait_until(lambda: monitor._latest.time > before + 0.5, "a later sample")
            return await monitor.usage()
        finally:
            stop.set()
            burner.kill()
            burner.wait()

    usage = asyncio.run(body())
    assert len(usage.core_percent) == len(read_cpu_times()) - 1
    assert max(usage.core_percent) > 50
    assert 0 < usage.cpu_percent <= 100
    assert 0 < usage.memory_used_bytes < usage.memory_total_bytes
    assert 0 < usage.disk_free_bytes <= usage.disk_total_bytes
    assert usage.disk_total_bytes == shutil.disk_usage(home.base).total


def test_samples_are_taken_only_while_somebody_asks(home):
    async def body():
        now = [0.0]
        monitor = MachineMonitor(home, tuple, asyncio.Event(), every_s=0.01, idle_after_s=5.0, monotonic=lambda: now[0])
        assert not monitor.is_sampling
        first = await monitor.usage()
        assert monitor.is_sampling
        await wait_until(lambda: monitor._latest is not first, "a sample in the background")
        now[0] = 4.9
        await monitor.usage()
        now[0] = 9.8
        assert monitor.is_sampling
        now[0] = 10.0
        await wait_until(lambda: not monitor.is_sampling, "the sampling to stop")
        last = monitor._latest
        assert await monitor.usage() is not last
        assert monitor.is_sampling

    asyncio.run(body())


def test_sampling_ends_with_the_service(home):
    async def body():
        closing = asyncio.Event()
        monitor = MachineMonitor(home, tuple, closing, every_s=60.0)
        await monitor.usage()
        await wait_until(lambda: monitor.is_sampling, "sampling")
        closing.set()
        await wait_until(lambda: not monitor.is_sampling, "the sampling to stop")
        await monitor.usage()
        assert not monitor.is_sampling

    asyncio.run(body())


def test_a_driver_that_takes_long_does_not_delay_an_answer(home, monkeypatch):
    release = threading.Event()

    def slow(indices):
        release.wait(30)
        return (GpuUsage("0", "late", 10, 5, 1.0),)

    monkeypatch.setattr("palaestra.runs.process.machine_usage.read_gpus", slow)

    async def body():
        monitor = MachineMonitor(home, lambda: ("0",), asyncio.Event(), every_s=0.01)
        started = time.monotonic()
        usage = [await monitor.usage() for _ in range(5)][-1]
        took = time.monotonic() - started
        release.set()
        await wait_until(lambda: monitor._latest.gpus[0].name == "late", "the driver")
        return usage, took

    usage, took = asyncio.run(body())
    assert usage.gpus == (GpuUsage("0"),)
    assert took < 5


def test_the_queue_is_told_in_its_order_with_reasons(home):
    async def body():
        async with run_supervisor(home, max_running=1) as supervisor:
            first = (await supervisor.submit(echo(steps=1, then="hang"))).run_id
            await wait_for_phase(supervisor, first, Phase.RUNNING)
            later = [(await supervisor.submit(echo(steps=1, priority=p))).run_id for p in (0, 5)]
            busy = supervisor.queue_status()
            await supervisor.drain(True)
            return later, busy, supervisor.queue_status()

    later, busy, draining = asyncio.run(body())
    waits = "waits for a slot (1 of 1 in use)"
    assert (busy.slots, busy.running, busy.num_queued, busy.draining) == (1, 1, 2, False)
    assert busy.queued == (WaitingRun(later[1], waits), WaitingRun(later[0], waits))
    assert draining.draining
    assert all(run.reason.startswith("the service is draining") for run in draining.queued)


def test_a_client_sees_the_machine_the_queue_and_the_service(home):

    with service(home) as told:
        usage = TrainerService(home).machine()
        assert isinstance(usage, MachineUsage)
        assert (usage.service_pid, usage.slots, usage.running, usage.queued) == (told["pid"], 8, 0, ())
        assert 20 << 20 < usage.service_memory_bytes < 1 << 30
        assert len(usage.core_percent) == len(read_cpu_times()) - 1


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_the_machine_cannot_be_changed(home, method):

    with service_thread(home) as url:
        answer = ask(url, method, "/machine", token=home.token.read_text().strip())
        assert (answer.status, answer.headers["Allow"]) == (405, "GET")
        assert ask(url, "GET", "/machine").status == 401
