"""Beginning with a checkpoint by its id: the one that is meant, whoever made it, or none."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.runs.checkpoints.own import own_checkpoint
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.errors import LaunchRefused
from palaestra.files.home import Home
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runners.echo import EchoRunner


class Beginner(EchoRunner):
    """Echo, which is told what it begins with."""

    name = "echo"
    capabilities = replace(EchoRunner.capabilities, warm_start=True, resume=True)

    def __init__(self):
        super().__init__()
        self.seen = []

    def plan(self, spec, paths, machine):
        self.seen.append(spec.warm_start)
        return super().plan(spec, paths, machine)


def _known(supervisor, sha256, tmp_path):
    path = tmp_path / sha256
    path.write_bytes(b"weights")
    supervisor.registry.put_checkpoint(
        CheckpointRecord(
            checkpoint_id=sha256[:16],
            run_id="another",
            agent_id="echo",
            env_id="",
            attempt=1,
            env_step=1000,
            path=str(path),
            sha256=sha256,
            size_bytes=7,
            format="unknown",
            created=1.0,
        )
    )
    return str(path)


def test_the_beginning_of_an_id_means_one_checkpoint_and_the_request_keeps_all_of_it(home, tmp_path):
    runner = Beginner()

    async def body():
        async with run_supervisor(home, runners={"echo": runner}) as supervisor:
            first = _known(supervisor, "3a" * 32, tmp_path)
            _known(supervisor, "3f" * 32, tmp_path)
            for name, reason in (
                ("3", "several ids begin with it"),
                ("4", "no such checkpoint"),
                ("3" * 60, "no such"),
            ):
                looked = await supervisor.preview(echo(warm_start=name))
                assert (looked.plan, looked.refusal.check) == (None, "warm_start")
                with pytest.raises(LaunchRefused, match=rf"checkpoint {name}: {reason}"):
                    await supervisor.submit(echo(warm_start=name))
            assert list(home.runs.iterdir()) == []
            looked = await supervisor.preview(echo(warm_start="3a"))
            run_id = (await supervisor.submit(echo(steps=1, warm_start="3a"))).run_id
            await wait_for_end(supervisor, run_id)
            return first, looked, json.loads(home.run(run_id).spec.read_text())

    first, looked, spec = asyncio.run(body())

    assert looked.findings[0].text == f"begins with {'3a' * 8}: echo, step 1,000, of run another"
    assert set(runner.seen) == {first}
    assert spec["warm_start"] == "3a" * 8


def test_a_checkpoint_of_a_run_without_a_row_and_a_path_are_known(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beef").write_text("a path that could be an id")
    run = home.runs / "cartpole-1"
    path = run / "attempt_1" / "checkpoints" / "update_00000003"
    sha256 = own_checkpoint(path)
    (run / "resolved.json").write_text(json.dumps({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}))
    (run / "attempt_1" / "metrics.jsonl").write_text("")
    runner = Beginner()

    async def body():
        async with run_supervisor(home, runners={"echo": runner}) as supervisor:
            for name in (sha256[:6], "beef", str(path)):
                assert (await supervisor.preview(echo(warm_start=name))).plan is not None

    asyncio.run(body())
    assert runner.seen == [str(path), "beef", str(path)]


def test_a_run_is_resumed_though_what_it_began_with_is_gone(tmp_path):
    home, runner = Home(tmp_path / "var" / "training"), Beginner()

    async def body():
        async with run_supervisor(home, runners={"echo": runner}) as supervisor:
            gone = tmp_path / "gone"
            gone.write_bytes(b"weights")
            asked = echo(steps=20, checkpoint_every=10, then="exit:1", warm_start=str(gone))
            run_id = (await supervisor.submit(asked)).run_id
            await wait_for_end(supervisor, run_id)
            gone.unlink()
            await supervisor.resume(run_id)
            await wait_for_end(supervisor, run_id)

    asyncio.run(body())
    assert runner.seen[-1] is None
