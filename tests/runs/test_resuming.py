"""Resuming: from which checkpoint, with which changes, and that an outcome is never lost."""

import asyncio
import json
import zipfile
from dataclasses import replace

import pytest
from tests.runs.supervisors import echo, event_kinds, read_journal, run_supervisor, wait_for_end, wait_for_phase

from palaestra.errors import ConfigError, LaunchRefused
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.phase import Phase
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.state.event_log import RunEventLog, attempt_outcomes
from palaestra.runs.store.rebuild import read_run
from palaestra.runs.supervisor.resume import ResumeRequest, change_spec
from palaestra.telemetry.event import TrainingStep


async def done(supervisor, **config):
    """A run that has succeeded after 30 updates of 10 steps each, with checkpoints at 100, 200 and 300."""
    run_id = (await supervisor.submit(echo(**{"steps": 30, "checkpoint_every": 10, **config}))).run_id
    await wait_for_end(supervisor, run_id)
    return run_id


def damage(home, run_id, step):
    with open(home.run(run_id).attempt(1).path / "checkpoints" / f"step_{step}.json", "ab") as file:
        file.write(b"x")


def updates(home, run_id, attempt):
    return [one.event.update for one in read_journal(home, run_id, attempt) if isinstance(one.event, TrainingStep)]


def test_a_damaged_newest_checkpoint_is_passed_over_for_an_earlier_one(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            damage(home, run_id, 300)
            queued = await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 40}))
            return queued, await wait_for_end(supervisor, run_id)

    queued, record = asyncio.run(body())
    assert queued.reason.startswith("resumes from checkpoint ")
    assert "(step 200); skipped " in queued.reason
    assert queued.reason.endswith("(step 300): its SHA-256 differs: it was changed or damaged")
    assert (record.phase, record.attempt, record.env_step, record.total_steps) == (Phase.SUCCEEDED, 2, 400, 400)
    assert updates(home, record.run_id, 2) == list(range(21, 41))


def test_a_damaged_checkpoint_that_is_wanted_is_refused_and_the_run_stays_succeeded(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            damage(home, run_id, 300)
            before = supervisor.get_run(run_id), event_kinds(home, run_id)
            for name in ("step_300.json", str(home.run(run_id).attempt(1).path / "checkpoints" / "step_300.json")):
                with pytest.raises(LaunchRefused, match=f"differs.*palaestra runs resume {run_id} --checkpoint"):
                    await supervisor.resume(run_id, request=ResumeRequest(name, {"steps": 40}))
            for step in (100, 200):
                damage(home, run_id, step)
            with pytest.raises(LaunchRefused, match=r"none of its 3 checkpoints can be used .*Start a new run"):
                await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 40}))
            assert (supervisor.get_run(run_id), event_kinds(home, run_id)) == before
            return before[0].phase

    assert asyncio.run(body()) is Phase.SUCCEEDED


def test_a_torn_file_that_nobody_announced_is_recognised_too(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            newest = home.run(run_id).attempt(1).path / "checkpoints" / "step_9999.zip"
            with zipfile.ZipFile(newest, "w") as archive:
                archive.writestr("weights.bin", b"the numbers of a policy")
            newest.write_bytes(newest.read_bytes().replace(b"numbers", b"NUMBERS"))
            return (await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 40}))).reason

    reason = asyncio.run(body())
    assert "(step 300)" in reason
    assert "step 9,999): weights.bin in it is damaged: its checksum differs" in reason


def test_a_file_that_merely_lies_among_checkpoints_is_not_gone_on_from(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            (home.run(run_id).attempt(1).path / "checkpoints" / "normaliser.pkl").write_bytes(b"numbers")
            return (await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 40}))).reason

    assert asyncio.run(body()).endswith("(step 300)")


def test_a_succeeded_run_with_nothing_left_to_do_is_refused_with_the_command_that_helps(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            remedy = f"Give it more: palaestra runs resume {run_id} steps=60, or go back with --checkpoint ID"
            with pytest.raises(LaunchRefused, match=f"has taken 300 of 300 steps. {remedy}"):
                await supervisor.resume(run_id)
            with pytest.raises(LaunchRefused, match=r"has taken 300 of 200 steps\. Give it more: .* steps=60,"):
                await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 20}))
            with pytest.raises(ConfigError, match="unknown key"):
                await supervisor.resume(run_id, request=ResumeRequest(changes={"stepz": 60}))
            assert supervisor.get_run(run_id).phase is Phase.SUCCEEDED
            await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 60, "until": "go"}))
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            await supervisor.stop(run_id)
            # What an attempt that began was given holds for the next one, too.
            home.run(run_id).attempt(3).work.mkdir(parents=True)
            (home.run(run_id).attempt(3).work / "go").touch()
            await supervisor.resume(run_id)
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.attempt, record.env_step, record.total_steps) == (Phase.SUCCEEDED, 3, 600, 600)
    assert json.loads(home.run(record.run_id).spec.read_text())["config"]["steps"] == 30


def test_an_earlier_checkpoint_takes_the_run_back_to_its_step(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            (wanted,) = [row for row in supervisor.registry.checkpoints() if row.env_step == 100]
            for name in (f"{wanted.checkpoint_id}0", "nothing"):
                with pytest.raises(LaunchRefused, match=r"has no such checkpoint\. It has .* .step 300."):
                    await supervisor.resume(run_id, request=ResumeRequest(name))
            queued = await supervisor.resume(run_id, request=ResumeRequest(wanted.checkpoint_id[:8]))
            return queued, await wait_for_end(supervisor, run_id)

    queued, record = asyncio.run(body())
    assert (queued.env_step, record.env_step, record.phase) == (100, 300, Phase.SUCCEEDED)
    assert updates(home, record.run_id, 2) == list(range(11, 31))


@pytest.mark.parametrize("how", ["stopped while it waits", "damaged while it waits"])
def test_a_resume_that_never_begins_leaves_the_outcome_as_it_was(home, how):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            before = supervisor.get_run(run_id)
            await supervisor.drain(True)
            await supervisor.resume(run_id, request=ResumeRequest("step_200.json", {"steps": 40}))
            if how == "damaged while it waits":
                damage(home, run_id, 200)
                await supervisor.drain(False)
                await wait_for_end(supervisor, run_id)
            else:
                await supervisor.stop(run_id)
            return before, supervisor.get_run(run_id)

    before, after = asyncio.run(body())
    why = "stopped by the operator before it began" if how.startswith("stopped") else "its SHA-256 differs"
    assert after.reason.startswith("done; it was not resumed: ")
    assert why in after.reason
    kept = ("phase", "attempt", "env_step", "total_steps", "episodes", "started", "ended", "code")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    assert after.phase is Phase.SUCCEEDED
    # The directory alone tells the same, and forgets what the resume would have changed.
    assert read_run(home.run(after.run_id)) == after
    assert event_kinds(home, after.run_id)[-2:] == ["resumed", "resume_cancelled"]
    assert attempt_outcomes(RunEventLog(home.run(after.run_id)).read())[1].phase is Phase.SUCCEEDED


def test_an_attempt_that_fails_says_that_an_earlier_one_succeeded(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run_id = await done(supervisor)
            await supervisor.resume(run_id, request=ResumeRequest(changes={"steps": 40, "then": "exit:3"}))
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.reason) == (
        Phase.FAILED,
        "exit code 3: echo: exiting with 3 as requested; attempt 1 succeeded",
    )
    ended = attempt_outcomes(RunEventLog(home.run(record.run_id)).read())
    assert {number: one.phase for number, one in ended.items()} == {1: Phase.SUCCEEDED, 2: Phase.FAILED}


def test_changes_reach_into_sections_and_refuse_what_is_no_key():
    spec = echo(steps=1)
    assert change_spec(spec, {"a.b": 2, "steps": 3}).config == {"steps": 3, "a": {"b": 2}}
    for key in ("", "a.", ".b"):
        with pytest.raises(ConfigError, match="is not a key"):
            change_spec(spec, {key: 1})
    with pytest.raises(ConfigError, match="'steps' holds 1, which has no keys"):
        change_spec(spec, {"steps.x": 1})
    assert spec.config == {"steps": 1}


def test_another_environment_is_another_run(home):
    class Roaming(EchoRunner):
        def plan(self, spec, paths, machine):
            return replace(super().plan(spec, paths, machine), env_id=f"Echo-v{spec.config.get('metrics', 0)}")

    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue, runners={"echo": Roaming()}) as supervisor:
            run_id = await done(supervisor)
            with pytest.raises(LaunchRefused, match=r"was trained in Echo-v0\. Start a new run with --warm-start"):
                await supervisor.resume(run_id, request=ResumeRequest(changes={"metrics": 1, "steps": 40}))

    asyncio.run(body())
