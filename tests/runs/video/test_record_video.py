import asyncio
import json
import os

import pytest
from tests.runs.checkpoints import evil
from tests.runs.checkpoints.own import own_checkpoint
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.errors import ConfigError
from palaestra.runs.checkpoints.catalogue import find_checkpoints
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.series.reader import RunSeries
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.video.clip import measure_recording_overhead
from palaestra.runs.video.record_video import record_clip, record_run

RUN = RunRecord(run_id="run", runner="palaestra", agent_id="palaestra/ppo", env_id="CartPole-v1", phase=Phase.SUCCEEDED)


def test_a_checkpoint_is_filmed_into_its_run_with_what_it_cost(home):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    run = home.run("run")
    own_checkpoint(run.attempt(1).path / "checkpoints" / "update_00000003")
    (checkpoint,) = find_checkpoints(RUN, run.attempt(1))
    for number in range(10):
        old = run.attempt(1).videos / f"{number}.webm"
        old.parent.mkdir(exist_ok=True)
        old.write_bytes(b"x")
        os.utime(old, (number, number))

    clip = record_clip(run, checkpoint, frames=5)

    assert clip.path == str(run.attempt(1).videos / f"step_4096_{checkpoint.checkpoint_id[:8]}.webm")
    assert clip.report.frames == 5
    assert clip.report.slowdown > 1
    assert clip.report.sps_without > clip.report.sps_with > 0
    names = sorted(os.listdir(run.attempt(1).videos))
    assert "0.webm" not in names  # eleven were too many
    assert len([name for name in names if name.endswith(".webm")]) == 10


def test_a_prefix_that_two_checkpoints_share_films_neither(home):
    run = home.run("run")
    for number in (1, 2):
        own_checkpoint(run.attempt(1).path / "checkpoints" / f"update_{number:08}", seed=number)
    (run.path / "resolved.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"several ids begin with it \([0-9a-f]{16}, [0-9a-f]{16}\)"):
        record_run(home, run, "")


def test_checkpoints_of_others_are_filmed_by_their_trainers(home):
    run = home.run("run")
    run.attempt(1).work.mkdir(parents=True)
    AttemptPlan(checkpoints=("*.pt",)).write(run.attempt(1))
    evil.torch_zip(run.attempt(1).work / "a.pt")
    (checkpoint,) = find_checkpoints(RUN, run.attempt(1))

    with pytest.raises(ConfigError, match="Start a new run with palaestra runs start --video"):
        record_clip(run, checkpoint)


def test_how_much_a_trainer_was_slowed_down_is_read_from_its_numbers(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            run = await supervisor.submit(echo(steps=400, rate=400, episodes_every=1))
            await wait_for_end(supervisor, run.run_id)
            return home.run(run.run_id)

    run = asyncio.run(body())
    assert measure_recording_overhead(run) is None

    attempt = run.attempt(1)
    plan = json.loads((attempt.path / "plan.json").read_text())
    (attempt.path / "plan.json").write_text(json.dumps({**plan, "videos": ["*.mp4"]}))
    middle = [point.time for point in RunSeries(run).decimate("episode/return", 400)]
    clip = attempt.work / "a.mp4"
    clip.write_bytes(b"x")
    os.utime(clip, (middle[200], middle[200]))

    pace = measure_recording_overhead(run)
    assert pace.sps_with > 0
    assert pace.sps_without > 0
