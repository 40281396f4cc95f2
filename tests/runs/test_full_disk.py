"""A trainer fills the disk: its end is recorded, the service lives, and nothing that was measured is lost."""

import asyncio
import contextlib
import json
import os
import subprocess

import pytest
from tests.runs.attempts import create_attempt, run_attempt, wait_until, with_timeout
from tests.runs.supervisors import echo, read_journal, run_supervisor, wait_for_end

from palaestra.files.home import Home
from palaestra.runs.phase import Phase
from palaestra.telemetry.event import TrainingStep


@pytest.fixture
def small_disk(tmp_path):
    """16 MB of file system that is the test's own."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "palaestra-test", str(place)], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield Home(place / "var" / "training")
    subprocess.run(["umount", "-l", str(place)], check=True)


FILL = """
import os
with contextlib.suppress(OSError):
    with open('filler', 'wb', buffering=0) as file:
        while True: file.write(bytes(1 << 16))
with contextlib.suppress(OSError):
    with open('crumbs', 'wb', buffering=0) as file:
        while True: file.write(b'x')
"""


def test_an_end_is_recorded_on_a_disk_without_a_byte_to_spare(small_disk):
    attempt = create_attempt(small_disk)

    async def body():
        async with run_attempt(attempt, f"import contextlib\n{FILL}\nimport sys; sys.exit(9)") as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    with contextlib.suppress(FileNotFoundError), pytest.raises(OSError, match="No space left"):
        (attempt.work / "more").write_bytes(bytes(1 << 16))
    assert json.loads(attempt.exit.read_text())["returncode"] == 9


def _printed(home, run_id):
    """The updates that the trainer managed to print, whole lines only."""
    lines = home.run(run_id).attempt(1).stdout.read_text().split("\n")[:-1]
    events = [json.loads(line.removeprefix("@palaestra ")) for line in lines if line.startswith("@palaestra {")]
    return [line["update"] for line in events if line["kind"] == "TrainingStep"]


def test_the_service_lives_through_it_and_takes_in_the_rest_when_there_is_space(small_disk):
    async def body():
        async with run_supervisor(small_disk, min_free_disk_mb=1) as supervisor:
            run_id = (await supervisor.submit(echo(speak="stdout", steps=200, fill_disk=True))).run_id
            attempt = small_disk.run(run_id).attempt(1)
            await wait_until(attempt.exit.exists, "exit.json")
            # The disk is full: writes wait, and the service still responds.
            assert supervisor.registry.get(run_id) is not None
            (attempt.work / "filling").unlink()
            record = await wait_for_end(supervisor, run_id)
            last = 10 * _printed(small_disk, run_id)[-1]
            await wait_until(lambda: supervisor.registry.get(run_id).env_step == last, "the last telemetry")
            other = await supervisor.submit(echo(steps=2))
            assert (await wait_for_end(supervisor, other.run_id)).phase is Phase.SUCCEEDED
            return record

    record = asyncio.run(body())
    assert record.phase.has_ended
    steps = [r.event.update for r in read_journal(small_disk, record.run_id) if isinstance(r.event, TrainingStep)]
    assert steps == _printed(small_disk, record.run_id) != []


def test_who_fills_the_disk_can_be_stopped_while_it_is_full(small_disk):
    async def body():
        async with run_supervisor(small_disk, min_free_disk_mb=1) as supervisor:
            run_id = (await supervisor.submit(echo(steps=10, fill_disk=True, then="hang", until="/nowhere"))).run_id
            attempt = small_disk.run(run_id).attempt(1)
            await wait_until(lambda: supervisor.registry.get(run_id).trainer, "the trainer")
            trainer = supervisor.registry.get(run_id).trainer
            await wait_until(lambda: (attempt.work / "filling").exists() and not _fits(small_disk), "a full disk")
            await with_timeout(supervisor.stop(run_id, grace_s=5))
            assert not trainer.is_alive()
            (attempt.work / "filling").unlink(missing_ok=True)
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.code) == (Phase.STOPPED, "operator")


def _fits(home):
    facts = os.statvfs(home.path)
    return facts.f_bavail * facts.f_frsize >= 1 << 14
