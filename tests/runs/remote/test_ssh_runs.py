"""Runs on another machine over SSH: events, logs, checkpoints and stops as at home, over a link that breaks."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.runs.attempts import wait_until
from tests.runs.remote.sshd import needs_sshd
from tests.runs.serving import killed_service
from tests.runs.supervisors import (
    echo,
    event_kinds,
    read_echo_report,
    read_journal,
    run_and_close_supervisor,
    run_supervisor,
    wait_for_end,
    wait_for_phase,
)

from palaestra.files.atomic import read_json, write_json
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.phase import Phase
from palaestra.runs.runners.palaestra import PalaestraRunner
from palaestra.runs.series.reader import RunSeries
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.resume import ResumeRequest
from palaestra.telemetry.event import TrainingStep

pytestmark = needs_sshd


def _there(home, **config):
    """An echo run on the host; its project is an empty directory, so that only our package is sent."""
    project = home.base / "project"
    project.mkdir(exist_ok=True)
    return echo(on="box", invoked_from=project, **config)


def _updates(home, run_id):
    return [r.event.update for r in read_journal(home, run_id) if isinstance(r.event, TrainingStep)]


def _attempt_there(sshd, run_id, number=1) -> Path:
    return sshd.remote / "var" / "training" / "runs" / run_id / f"attempt_{number}"


def _trainer(sshd, run_id) -> ProcessIdentity:
    return ProcessIdentity.from_json(read_json(_attempt_there(sshd, run_id) / "process.json")["trainer"])


def _alarms(supervisor, run_id):
    return {alarm.code: alarm.text for alarm in supervisor.get_run(run_id).alarms}


def _check_every_metric_once(home, run_id, updates):
    assert _updates(home, run_id) == list(range(1, updates + 1))
    points = {name.rpartition("/")[2]: info.points for name, info in RunSeries(home.run(run_id)).names().items()}
    assert (points["m0"], points["m1"]) == (updates, updates)


def test_a_run_over_ssh_has_the_metrics_output_checkpoints_and_end_of_one_at_home(home, sshd):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}, catalogue=CheckpointCatalogue) as supervisor:
            record = await supervisor.submit(_there(home, steps=50, checkpoint_every=25, env_id="There-v0"))
            assert record.host == "box"
            return await wait_for_end(supervisor, record.run_id), supervisor.registry.checkpoints()

    record, checkpoints = asyncio.run(body())
    assert (record.phase, record.reason, record.host, record.env_step) == (Phase.SUCCEEDED, "done", "box", 500)
    _check_every_metric_once(home, record.run_id, 50)
    assert read_echo_report(home, record.run_id)["episodes"] == 5
    assert event_kinds(home, record.run_id) == ["note", "launched", "first_sign", "succeeded"]
    assert sorted((row.env_step, row.step_source) for row in checkpoints) == [(250, "announced"), (500, "announced")]
    here, there = home.run(record.run_id).attempt(1).path, _attempt_there(sshd, record.run_id)
    for name in ("stdout.log", "metrics.jsonl", "exit.json", "work/echo.json"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


@pytest.mark.parametrize("speak", ["stdout", "tensorboard"])
def test_metrics_of_foreign_trainers_are_translated_here_from_files_that_grow_there(home, sshd, speak):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(_there(home, steps=40, speak=speak))
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert (record.phase, record.env_step, record.episodes) == (Phase.SUCCEEDED, 400, 4)
    points = {name.rpartition("/")[2]: info.points for name, info in RunSeries(home.run(record.run_id)).names().items()}
    assert (points["m0"], points["m1"]) == (40, 40)


def test_variables_of_a_run_are_translated_and_those_of_the_service_stay_here(home, sshd, monkeypatch):
    monkeypatch.setenv("PALAESTRA_SSH_OPTIONS", " ".join(sshd.options()))
    monkeypatch.setenv("TOKEN_FOR_THERE", "x")
    settings = {"ssh_options": (), "environment": {"OMP_NUM_THREADS": "4", "HF_HOME": "/data"}}

    async def body():
        hosts = {"box": sshd.host(forward=("TOKEN_FOR_THERE",), **settings)}
        async with run_supervisor(home, hosts=hosts) as supervisor:
            project = home.base / "project"
            variables = {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "3"}
            return await supervisor.preview(_there(home, steps=1, environment=variables))

    preview = asyncio.run(body())
    assert preview.refusal is None, preview.refusal
    variables = preview.plan.environment
    assert (variables["OMP_NUM_THREADS"], variables["HF_HOME"], variables["TOKEN_FOR_THERE"]) == ("3", "/data", "x")
    assert variables["PYTHONPATH"].endswith("/attempt_1/work")
    assert variables["PALAESTRA_HOME"] == str(sshd.remote)
    assert "PATH" not in variables


def test_a_stop_reaches_every_process_of_the_group_there_and_a_stubborn_one_is_killed(home, sshd):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(_there(home, steps=0, then="hang", ignore_term=True, fork="2:setsid"))
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            await wait_until(lambda: (_attempt_there(sshd, record.run_id) / "process.json").exists(), "its process")
            trainer = _trainer(sshd, record.run_id)
            assert trainer.is_alive()
            stopped = await supervisor.stop(record.run_id, grace_s=0.2)
            assert not trainer.is_alive()
            return stopped

    record = asyncio.run(body())
    assert (record.phase, record.reason) == (Phase.STOPPED, "stopped by the operator")
    exit_ = read_json(home.run(record.run_id).attempt(1).exit)
    # The fixture of this directory fails the test if one of the three orphans is left.
    assert (exit_["returncode"], exit_["stop_reason"]) == (-signal.SIGKILL, "operator")


def test_a_lost_link_is_not_a_failed_run_and_every_metric_arrives_once_when_it_is_back(home, sshd, tmp_path):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            config = {"steps": 300, "rate": 100, "until": str(tmp_path / "go")}
            record = await supervisor.submit(_there(home, **config))
            run_id = record.run_id
            await wait_until(lambda: len(_updates(home, run_id)) > 20, "metrics")
            # Cut connections come back by themselves.
            for _ in range(3):
                await wait_until(sshd.links, "the link to come back")
                assert sshd.cut_links() > 0
                await wait_until(lambda: not sshd.links(), "the agent to end")
            sshd.stop()
            await wait_until(lambda: "unreachable" in _alarms(supervisor, run_id), "the alarm")
            assert supervisor.get_run(run_id).phase is Phase.RUNNING
            text = _alarms(supervisor, run_id)["unreachable"]
            assert text.startswith(f"box ({sshd.address}) is unreachable since ")
            assert "cannot be reached (Connection " in text
            there = _attempt_there(sshd, run_id) / "metrics.jsonl"
            await wait_until(lambda: there.read_text().count('"TrainingStep"') >= 300, "the trainer to go on")
            sshd.start()
            await wait_until(lambda: len(_updates(home, run_id)) == 300, "everything")
            await wait_until(lambda: not _alarms(supervisor, run_id), "the alarm to end")
            (tmp_path / "go").touch()
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert (record.phase, record.reason) == (Phase.SUCCEEDED, "done")
    _check_every_metric_once(home, record.run_id, 300)


def test_a_stop_of_an_unreachable_run_is_pending_and_is_delivered_when_the_link_is_back(home, sshd):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(_there(home, steps=5, then="hang"))
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            trainer = _trainer(sshd, record.run_id)
            sshd.stop()
            pending = await supervisor.stop(record.run_id, grace_s=1)
            assert pending.phase is Phase.STOPPING
            assert "The stop is delivered when it answers" in pending.reason
            assert trainer.is_alive()
            sshd.start()
            record = await wait_for_end(supervisor, record.run_id)
            assert not trainer.is_alive()
            return record

    record = asyncio.run(body())
    assert (record.phase, record.reason) == (Phase.STOPPED, "stopped by the operator")


def test_a_killed_service_adopts_its_runs_elsewhere_with_every_metric_once(home, sshd, tmp_path):
    home.path.mkdir(parents=True)
    settings = {"hosts": {"box": sshd.host().model_dump()}}
    config = {"steps": 300, "rate": 100, "until": str(tmp_path / "go")}
    with killed_service(home, **settings) as first:
        run_id = first.submit(_there(home, **config)).run_id
        asyncio.run(wait_until(lambda: len(_updates(home, run_id)) > 20, "metrics"))
    with killed_service(home, **settings) as second:
        assert second.run(run_id).phase is Phase.RUNNING
        asyncio.run(wait_until(lambda: len(_updates(home, run_id)) > 100, "metrics"))
    (tmp_path / "go").touch()
    with killed_service(home, **settings) as third:
        record = third.wait(run_id, timeout_s=60)
    assert (record.phase, record.reason, record.host) == (Phase.SUCCEEDED, "done", "box")
    _check_every_metric_once(home, run_id, 300)
    assert event_kinds(home, run_id) == ["note", "launched", "first_sign", "adopted", "adopted", "succeeded"]


def test_a_service_killed_while_it_sends_the_code_starts_the_run_on_that_machine_and_not_at_home(
    home, sshd, monkeypatch
):
    sending = asyncio.Event()

    async def send_forever(*_):
        sending.set()
        await asyncio.Event().wait()

    async def start():
        async with run_and_close_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(_there(home, steps=1))
            await sending.wait()
            return record.run_id

    async def adopt(run_id):
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            return await wait_for_end(supervisor, run_id)

    with monkeypatch.context() as patch:
        patch.setattr("palaestra.runs.remote.machines.Machines._put_missing", send_forever)
        run_id = asyncio.run(start())
    assert not home.run(run_id).attempt(1).remote.exists()
    record = asyncio.run(adopt(run_id))
    assert (record.phase, record.host, record.attempt) == (Phase.SUCCEEDED, "box", 1)
    assert (_attempt_there(sshd, run_id) / "exit.json").exists()


@pytest.mark.parametrize("stopping", [True, False])
def test_a_start_that_was_never_confirmed_is_asked_about_and_never_forgotten(home, sshd, monkeypatch, stopping):
    async def start():
        async with run_and_close_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(_there(home, steps=5, then="hang"))
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            if stopping:
                sshd.stop()
                await supervisor.stop(record.run_id, grace_s=1)
                sshd.start()
            return record.run_id

    async def adopt(run_id):
        # A host that refuses new runs: that says nothing about one that it may have.
        hosts = {"box": sshd.host(min_free_disk_mb=1 << 40)}
        async with run_supervisor(home, hosts=hosts) as supervisor:
            if not stopping:
                await wait_until(lambda: "adopted" in event_kinds(home, run_id), "the link")
                assert trainer.is_alive()
                await supervisor.stop(run_id, grace_s=1)
            return await wait_for_end(supervisor, run_id)

    run_id = asyncio.run(start())
    trainer, remote = _trainer(sshd, run_id), home.run(run_id).attempt(1).remote
    write_json(remote, {**read_json(remote), "started": False})
    record = asyncio.run(adopt(run_id))
    assert (record.phase, record.reason) == (Phase.STOPPED, "stopped by the operator")
    assert not trainer.is_alive()


def test_a_run_that_ends_while_no_service_looks_is_told_as_it_ended(home, sshd, tmp_path):
    async def start():
        async with run_and_close_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            config = {"steps": 3, "until": str(tmp_path / "go"), "then": "signal:KILL"}
            record = await supervisor.submit(_there(home, **config))
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            return record.run_id

    async def adopt(run_id):
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            assert supervisor.report.adopted == [run_id]
            return await wait_for_end(supervisor, run_id)

    run_id = asyncio.run(start())
    (tmp_path / "go").touch()
    asyncio.run(wait_until(lambda: (_attempt_there(sshd, run_id) / "exit.json").exists(), "the trainer to end"))
    record = asyncio.run(adopt(run_id))
    assert (record.phase, record.reason) == (Phase.KILLED, "killed (SIGKILL)")


def test_a_killed_watchdog_is_an_alarm_and_a_killed_run_without_a_witness_is_lost(home, sshd):
    async def body():
        async with run_supervisor(home, hosts={"box": sshd.host()}) as supervisor:
            record = await supervisor.submit(_there(home, steps=5, then="hang"))
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            process = read_json(_attempt_there(sshd, record.run_id) / "process.json")
            os.kill(process["watchdog"]["pid"], signal.SIGKILL)
            await wait_until(lambda: "watchdog_gone" in _alarms(supervisor, record.run_id), "the alarm")
            os.kill(process["trainer"]["pid"], signal.SIGKILL)
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert (record.phase, record.code) == (Phase.LOST, "no_witness")


def test_a_resume_goes_to_the_same_host_and_with_on_to_another_that_gets_the_checkpoint(home, sshd, tmp_path, code):
    async def body():
        far = tmp_path / "far"
        far.mkdir()
        (far / "code").symlink_to(code)
        hosts = {"box": sshd.host(), "far": sshd.host(directory=str(far))}
        async with run_supervisor(home, hosts=hosts, catalogue=CheckpointCatalogue) as supervisor:
            record = await supervisor.submit(_there(home, steps=10, checkpoint_every=5, then="exit:3"))
            run_id = (await wait_for_end(supervisor, record.run_id)).run_id
            records = []
            for on, steps, then in ((None, 20, "exit:3"), ("far", 30, "exit:3"), ("", 40, "exit:0")):
                request = ResumeRequest(changes={"then": then, "steps": steps}, on=on)
                await supervisor.resume(run_id, request=request)
                records.append(await wait_for_end(supervisor, run_id))
            return records

    records = asyncio.run(body())
    assert [record.host for record in records] == ["box", "far", ""]
    assert [record.phase for record in records] == [Phase.FAILED, Phase.FAILED, Phase.SUCCEEDED]
    attempts = home.run(records[0].run_id)
    arguments = [read_json(attempts.attempt(number).command)["argv"] for number in (2, 3, 4)]
    resumed = [next(word for word in words if word.startswith("--resume-from=")) for words in arguments]
    assert resumed[0].startswith(f"--resume-from={sshd.remote}/var/training/runs/")
    assert resumed[1].startswith(f"--resume-from={tmp_path}/far/uploads/")
    assert resumed[2].startswith(f"--resume-from={home.path}/runs/")


@pytest.mark.slow
def test_our_own_trainer_trains_stops_and_resumes_on_another_machine(home, sshd):
    project = home.base / "project"
    project.mkdir()
    config = {"env": {"id": "CartPole-v1", "num_envs": 2}, "algorithm": {"name": "ppo"}}
    config["trainer"] = {"total_timesteps": 10_000_000, "rollout_length": 32}

    async def body():
        hosts, runners = {"box": sshd.host()}, {"palaestra": PalaestraRunner()}
        async with run_supervisor(home, hosts=hosts, runners=runners, catalogue=CheckpointCatalogue) as supervisor:
            spec = RunSpec(runner="palaestra", config=config, on="box", invoked_from=project)
            record = await supervisor.submit(spec)
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            await wait_until(lambda: len(_updates(home, record.run_id)) > 5, "updates")
            stopped = await supervisor.stop(record.run_id)
            assert stopped.phase is Phase.STOPPED
            steps = {"trainer.total_timesteps": stopped.env_step + 640}
            await supervisor.resume(record.run_id, request=ResumeRequest(changes=steps))
            return stopped, await wait_for_end(supervisor, record.run_id)

    stopped, resumed = asyncio.run(body())
    assert (resumed.phase, resumed.attempt, resumed.host) == (Phase.SUCCEEDED, 2, "box"), resumed.reason
    assert resumed.env_step >= stopped.env_step + 640
    paths = [Path(row) for row in home.run(resumed.run_id).attempt(2).checkpoints.iterdir()]
    assert any((path / "manifest.json").exists() for path in paths)
