"""Sweeps of echo runs in the process of the test: what is submitted, recorded, stopped and resumed."""

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import replace

import pytest
from tests.runs.attempts import wait_until
from tests.runs.supervisors import echo, event_kinds, run_supervisor

from palaestra.errors import ConfigError, ConsentRequired, HostUnreachable, IllegalTransition, LaunchRefused, UnknownRun
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.sweeps.controller import SweepController
from palaestra.runs.sweeps.spec import SweepSpec
from palaestra.runs.sweeps.trial_log import SweepLog, create_sweep, read_sweep


@contextlib.asynccontextmanager
async def run_controller(home, supervisor):
    controller = SweepController(home, supervisor)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.close()


@contextlib.asynccontextmanager
async def run_both(home, **config):
    async with run_supervisor(home, **config) as supervisor, run_controller(home, supervisor) as controller:
        yield supervisor, controller


async def wait_for(controller, sweep_id, state="finished"):
    await wait_until(lambda: read_sweep(controller.reader.home.sweeps / sweep_id).state == state, state)
    await wait_until(lambda: not controller.is_busy, "its runs")
    return controller.reader.sweep(sweep_id)


def sweep(parameters=None, seeds=(), **fields):
    spec = {name: fields.pop(name) for name in list(fields) if name in SweepSpec.model_fields}
    return SweepSpec(base=echo(**fields), parameters=parameters or {}, seeds=seeds, **spec)


def run_ids(home):
    return sorted(path.name for path in home.runs.iterdir() if not path.name.startswith("."))


def row(supervisor, run_id):
    """The row of a run, which follows its directory; None before."""
    with contextlib.suppress(UnknownRun):
        return supervisor.get_run(run_id)


def lines(log):
    return [json.loads(line) for line in (log.path / "trials.jsonl").read_text().splitlines()]


def test_a_grid_of_two_by_three_runs_finishes_and_names_the_best(home):
    async def body():
        async with run_both(home) as (_, controller):
            record = await controller.create(sweep({"steps": [40, 20]}, seeds=(1, 2, 3)))
            assert (record.state, record.num_trials, record.num_runs) == ("running", 2, 6)
            return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    sweep_id = details.sweep.sweep_id
    # Episode e returns e, and an episode takes ten updates: the mean of 1 to 4 is 2.5, that of 1 and 2 is 1.5.
    assert [(t.parameters, t.state, t.value, t.values) for t in details.trials] == [
        ({"steps": 40}, "succeeded", 2.5, (2.5, 2.5, 2.5)),
        ({"steps": 20}, "succeeded", 1.5, (1.5, 1.5, 1.5)),
    ]
    assert (details.sweep.best.number, details.sweep.best.low, details.sweep.best.high) == (0, 2.5, 2.5)
    assert details.sweep.num_tied == 0
    assert run_ids(home) == [f"{sweep_id}-t{trial:04}-s{seed}" for trial in (0, 1) for seed in (1, 2, 3)]


def test_a_sweep_keeps_no_more_runs_unfinished_than_it_may(home):
    go = home.path / "go"

    async def body():
        async with run_both(home, max_running=8) as (supervisor, controller):
            spec = sweep({"metrics": [1, 2, 3]}, seeds=(1, 2), max_unfinished=2, steps=10, until=str(go))
            record = await controller.create(spec)
            await wait_until(lambda: len(run_ids(home)) == 2, "two runs")
            # A run outside of the sweep does not wait for all of it.
            other = await supervisor.submit(echo(steps=1))
            await wait_until(lambda: supervisor.get_run(other.run_id).phase.has_ended, "the other run")
            assert len(run_ids(home)) == 3
            go.touch()
            return await wait_for(controller, record.sweep_id)

    assert asyncio.run(body()).sweep.trials == {"succeeded": 3}
    assert len(run_ids(home)) == 7


def test_a_trial_that_was_written_down_and_not_submitted_is_submitted_once(home):
    home.path.mkdir(parents=True)
    log = create_sweep(home, sweep({"steps": [10, 20]}, seeds=(1,)), {}, 100, 1.0)
    log.add_trial({"steps": 10}, 2.0)

    async def body():
        async with run_both(home) as (_, controller):
            return await wait_for(controller, log.sweep_id)

    assert [trial.value for trial in asyncio.run(body()).trials] == [1.5, 1.0]
    assert run_ids(home) == [f"{log.sweep_id}-t0000-s1", f"{log.sweep_id}-t0001-s1"]


def test_a_run_that_was_submitted_and_not_written_down_is_found_and_not_doubled(home, monkeypatch):
    def crash(self, trial, seed, now):
        raise OSError("killed here")

    async def first():
        async with run_supervisor(home) as supervisor:
            with monkeypatch.context() as patch:
                patch.setattr(SweepLog, "record_submitted", crash)
                async with run_controller(home, supervisor) as controller:
                    record = await controller.create(sweep({"steps": [10]}, seeds=(1,)))
                    run_id = f"{record.sweep_id}-t0000-s1"
                    await wait_until(lambda: (run := row(supervisor, run_id)) and run.phase.has_ended, "its end")
            return record.sweep_id, run_id

    async def second(sweep_id):
        async with run_both(home) as (_, controller):
            return await wait_for(controller, sweep_id)

    sweep_id, run_id = asyncio.run(first())
    details = asyncio.run(second(sweep_id))
    assert [(t.state, t.value, t.run_ids) for t in details.trials] == [("succeeded", 1.0, (run_id,))]
    assert run_ids(home) == [run_id]
    assert event_kinds(home, run_id).count("launched") == 1


def test_a_torn_line_of_a_trial_is_written_again(home):
    home.path.mkdir(parents=True)
    log = create_sweep(home, sweep({"steps": [10, 20]}), {}, 100, 1.0)
    log.add_trial({"steps": 10}, 2.0)
    with open(log.path / "trials.jsonl", "a") as file:
        file.write('{"kind":"trial","time":3.0,"trial":1,"para')

    async def body():
        async with run_both(home) as (_, controller):
            return await wait_for(controller, log.sweep_id)

    assert [trial.value for trial in asyncio.run(body()).trials] == [1.5, 1.0]


def test_a_failed_seed_makes_its_trial_fail_and_not_look_better(home):
    async def body():
        async with run_both(home) as (_, controller):
            record = await controller.create(sweep({"then": ["exit:0", "exit:3"]}, seeds=(1, 2), steps=10))
            return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    assert [(t.state, t.value, t.reason) for t in details.trials] == [
        ("succeeded", 1.0, ""),
        ("failed", None, "2 of 2 runs failed"),
    ]
    assert details.sweep.best.parameters == {"then": "exit:0"}


def test_a_metric_that_no_run_reports_is_named_and_the_trial_has_no_value(home):
    async def body():
        async with run_both(home) as (_, controller):
            record = await controller.create(sweep(seeds=(1,), steps=1, metric="reward"))
            return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    (trial,) = details.trials
    assert (trial.state, trial.value) == ("succeeded", None)
    assert trial.reason == f"{trial.run_ids[0]} has no values of reward"
    assert details.sweep.best is None


def test_a_stopped_sweep_continues_where_its_runs_were(home):
    async def body():
        async with run_both(home) as (supervisor, controller):
            spec = sweep({"steps": [10, 20]}, seeds=(1,), max_unfinished=1, checkpoint_every=5, then="hang")
            record = await controller.create(spec)
            await wait_until(lambda: run_ids(home), "a run")
            (run_id,) = run_ids(home)
            await wait_until(lambda: (run := row(supervisor, run_id)) and run.env_step == 100, "its last update")
            stopped = await controller.stop(record.sweep_id)
            assert (stopped.state, stopped.trials, stopped.runs) == ("stopped", {"stopped": 1}, {})
            assert supervisor.get_run(run_id).phase == "stopped"
            with pytest.raises(IllegalTransition, match="is stopped and cannot be stopped"):
                await controller.stop(record.sweep_id)
            resumed = await controller.resume(record.sweep_id)
            assert resumed.state == "running"
            await wait_until(lambda: supervisor.get_run(run_id).attempt == 2, "its second attempt")
            with pytest.raises(IllegalTransition, match="is running"):
                await controller.resume(record.sweep_id)
            await controller.stop(record.sweep_id)
            return record.sweep_id, run_id

    sweep_id, run_id = asyncio.run(body())
    assert run_ids(home) == [run_id]  # continued from its checkpoint, and the second trial never began
    assert [line["kind"] for line in lines(read_sweep(home.sweeps / sweep_id))] == (
        ["trial", "submitted", "stopped", "ended", "resumed", "reopened", "stopped", "ended"]
    )


def test_a_stopped_run_without_a_checkpoint_is_started_anew_under_another_id(home):
    go = home.path / "go"

    async def body():
        async with run_both(home) as (_, controller):
            record = await controller.create(sweep(seeds=(1,), steps=10, until=str(go)))
            await wait_until(lambda: run_ids(home), "a run")
            await controller.stop(record.sweep_id)
            await controller.resume(record.sweep_id)
            go.touch()
            return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    assert [(t.state, t.value) for t in details.trials] == [("succeeded", 1.0)]
    assert run_ids(home) == [f"{details.sweep.sweep_id}-t0000-s1", f"{details.sweep.sweep_id}-t0000-s1-r2"]


def test_a_stop_that_keeps_running_runs_stops_only_those_that_wait(home):
    go = home.path / "go"

    async def body():
        async with run_both(home, max_running=1) as (supervisor, controller):
            record = await controller.create(sweep(seeds=(1, 2), max_unfinished=2, steps=10, until=str(go)))
            await wait_until(lambda: len(run_ids(home)) == 2, "both runs")
            await wait_until(lambda: (run := row(supervisor, run_ids(home)[0])) and run.phase == "running", "the first")
            stopped = await controller.stop(record.sweep_id, keep_running=True)
            assert stopped.runs == {"running": 1, "stopped": 1}
            go.touch()
            return await wait_for(controller, record.sweep_id, "stopped")

    (trial,) = asyncio.run(body()).trials
    assert (trial.state, trial.values) == ("stopped", (1.0,))


def test_a_mistyped_value_is_refused_before_anything_is_written(home):
    async def body():
        async with run_both(home) as (_, controller):
            with pytest.raises(LaunchRefused, match="flag"):
                await controller.create(sweep({"steps": [10, "many"]}))
            with pytest.raises(ConfigError, match="would be stored"):
                await controller.create(sweep({"then": ["http://me:planted123@host"]}))
            with pytest.raises(UnknownRun, match="no such sweep"):
                await controller.stop("nothing")

    asyncio.run(body())
    assert not home.sweeps.exists()
    assert os.listdir(home.runs) == []


def test_three_refusals_in_a_row_stop_a_sweep_with_the_reason(home):
    home.path.mkdir(parents=True)
    # Such a sweep can be left by a service whose runner has changed since.
    log = create_sweep(home, sweep({"stepz": [1, 2, 3, 4, 5]}), {}, None, 1.0)

    async def body():
        async with run_both(home) as (_, controller):
            return await wait_for(controller, log.sweep_id, "stopped")

    details = asyncio.run(body())
    assert details.sweep.trials == {"failed": 3}
    assert details.sweep.reason.startswith("3 runs in a row were refused: preflight = 'flag'")


def test_failed_trials_of_a_finished_sweep_are_retried_on_request(home):
    async def body():
        async with run_both(home) as (_, controller):
            record = await controller.create(sweep({"then": ["exit:0", "exit:3"]}, steps=10))
            await wait_for(controller, record.sweep_id)
            with pytest.raises(IllegalTransition, match=r"no trial of it can continue. --retry-failed"):
                await controller.resume(record.sweep_id)
            assert (await controller.resume(record.sweep_id, retry_failed=True)).state == "running"
            return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    assert details.sweep.trials == {"succeeded": 1, "failed": 1}
    sweep_id = details.sweep.sweep_id
    assert run_ids(home) == [f"{sweep_id}-t0000", f"{sweep_id}-t0001", f"{sweep_id}-t0001-r2"]


def test_a_sweep_that_needs_optuna_is_refused_without_it(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)

    async def body():
        async with run_both(home) as (_, controller):
            with pytest.raises(ConfigError, match=r"pip install 'palaestra\[sweeps\]'"):
                await controller.create(sweep({"steps": [1, 2]}, sampler="optuna", trials=2))

    asyncio.run(body())
    assert not home.sweeps.exists()


class _Killed(BaseException):
    """Ends the task of the controller, as a kill ends its process."""


def kill_at(write, moment):
    """A method in place of `SweepLog.<write>` that is killed before or after it has written."""
    original = getattr(SweepLog, write)

    def interrupt(self, *arguments, **fields):
        if moment == "after":
            original(self, *arguments, **fields)
        raise _Killed

    return interrupt


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("write", ["add_trial", "record_submitted", "record_end", "record_finish"])
def test_a_sweep_that_is_interrupted_at_any_write_has_every_run_once(home, monkeypatch, write, moment):
    async def body():
        async with run_supervisor(home) as supervisor:
            with monkeypatch.context() as patch:
                patch.setattr(SweepLog, write, kill_at(write, moment))
                async with run_controller(home, supervisor) as controller:
                    record = await controller.create(sweep({"steps": [10, 20]}, max_unfinished=1))
                    await wait_until(lambda: any(task.done() for task in controller._tasks), "the interruption")
            async with run_controller(home, supervisor) as controller:
                return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    assert [(trial.number, trial.value) for trial in details.trials] == [(1, 1.5), (0, 1.0)]
    assert run_ids(home) == [f"{details.sweep.sweep_id}-t0000", f"{details.sweep.sweep_id}-t0001"]
    assert [event_kinds(home, run_id).count("launched") for run_id in run_ids(home)] == [1, 1]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("write", ["record_resume", "record_reopened"])
def test_a_resume_that_is_interrupted_at_any_write_continues_every_run_once(home, monkeypatch, write, moment):
    async def body():
        async with run_supervisor(home) as supervisor:
            async with run_controller(home, supervisor) as controller:
                spec = sweep(seeds=(1,), steps=10, checkpoint_every=5, then="hang")
                record = await controller.create(spec)
                run_id = f"{record.sweep_id}-t0000-s1"
                await wait_until(lambda: (run := row(supervisor, run_id)) and run.env_step == 100, "its last update")
                await controller.stop(record.sweep_id)
                with monkeypatch.context() as patch, contextlib.suppress(_Killed):
                    patch.setattr(SweepLog, write, kill_at(write, moment))
                    await controller.resume(record.sweep_id)
                    await wait_until(lambda: any(task.done() for task in controller._tasks), "the interruption")
            async with run_controller(home, supervisor) as controller:
                if (write, moment) == ("record_resume", "before"):  # nothing was recorded: the user asks again
                    await controller.resume(record.sweep_id)
                await wait_until(lambda: supervisor.get_run(run_id).attempt == 2, "its second attempt")
                await wait_until(
                    lambda: "reopened" in [line["kind"] for line in lines(controller.reader.log(record.sweep_id))],
                    "the line",
                )
                return await controller.stop(record.sweep_id)

    stopped = asyncio.run(body())
    assert (stopped.state, stopped.trials) == ("stopped", {"stopped": 1})
    assert run_ids(home) == [f"{stopped.sweep_id}-t0000-s1"]
    assert event_kinds(home, run_ids(home)[0]).count("launched") == 2


def test_a_resume_waits_for_a_host_that_does_not_answer_and_keeps_the_checkpoints(home, monkeypatch):
    monkeypatch.setattr("palaestra.runs.sweeps.controller._IDLE_S", 0.05)
    answers = []

    async def body():
        async with run_both(home) as (supervisor, controller):
            record = await controller.create(sweep(seeds=(1,), steps=10, checkpoint_every=5, then="hang"))
            run_id = f"{record.sweep_id}-t0000-s1"
            await wait_until(lambda: (run := row(supervisor, run_id)) and run.env_step == 100, "its last update")
            await controller.stop(record.sweep_id)
            resume = supervisor.resume

            async def resume_when_reachable(*arguments):
                answers.append(len(answers) >= 2)
                if not answers[-1]:
                    raise HostUnreachable("preflight", "host", "box: cannot be reached")
                return await resume(*arguments)

            monkeypatch.setattr(supervisor, "resume", resume_when_reachable)
            resumed = await controller.resume(record.sweep_id)
            assert (resumed.state, resumed.runs) == ("running", {"planned": 1})
            await wait_until(lambda: supervisor.get_run(run_id).attempt == 2, "its second attempt")
            await controller.stop(record.sweep_id)
            return run_id

    run_id = asyncio.run(body())
    assert answers == [False, False, True]
    assert run_ids(home) == [run_id]


def test_a_log_of_an_earlier_version_whose_resume_does_not_name_trials_is_read(home):
    home.path.mkdir(parents=True)
    log = create_sweep(home, sweep({"steps": [10]}, seeds=(1, 2)), {}, 100, 1.0)
    trial = log.add_trial({"steps": 10}, 2.0)
    for seed in (1, 2):
        log.record_submitted(trial, seed, 3.0)
    log.record_stop("by the operator", keep_running=False, now=4.0)
    log.record_end(trial, "stopped", {}, "", 5.0)
    with open(log.path / "trials.jsonl", "a") as file:
        file.write('{"kind": "resumed", "time": 6.0}\n{"kind": "reopened", "time": 7.0, "trial": 0, "anew": [2]}\n')
    (trial,) = read_sweep(log.path).iterate_open()
    assert [(run.tries, run.submitted, run.resume) for run in trial.runs.values()] == [
        (1, True, False),
        (2, False, False),
    ]


class _ForeignRunner(EchoRunner):
    """Runs a script that is not ours; its hash is `sha256`."""

    name = "foreign"
    capabilities = replace(EchoRunner.capabilities, runs_foreign_code=True)
    sha256 = "one"

    def plan(self, spec, paths, machine):
        return replace(super().plan(spec, paths, machine), script_sha256=self.sha256)


def test_a_sweep_of_foreign_code_is_agreed_to_once_and_refuses_a_changed_script(home):
    runner = _ForeignRunner()

    async def body():
        config = {"runners": {"foreign": runner}, "max_running": 1}
        async with run_both(home, **config) as (supervisor, controller):
            base = RunSpec(runner="foreign", script="x", config={"until": str(home.path / "go")})
            spec = SweepSpec(base=base, parameters={"steps": [10, 20]}, max_unfinished=1)
            with pytest.raises(ConsentRequired) as asked:
                await controller.create(spec)
            assert not home.sweeps.exists()
            record = await controller.create(spec, asked.value.digest)
            run_id = f"{record.sweep_id}-t0000"
            await wait_until(lambda: (run := row(supervisor, run_id)) and run.phase == "running", "the first run")
            runner.sha256 = "another"
            (home.path / "go").touch()
            return await wait_for(controller, record.sweep_id)

    details = asyncio.run(body())
    by_number = sorted(details.trials, key=lambda trial: trial.number)
    assert [trial.state for trial in by_number] == ["succeeded", "failed"]
    assert "has changed since the sweep was agreed to" in by_number[1].reason
