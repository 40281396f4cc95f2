"""Optuna's study is an index of the trials: it can be behind, torn or gone."""

import asyncio

import optuna
import pytest
from tests.runs.supervisors import event_kinds
from tests.runs.sweeps.test_controller import run_both, sweep, wait_for

from palaestra.runs.sweeps.optuna_study import OptunaStudy, open_storage
from palaestra.runs.sweeps.trial_log import create_sweep, read_sweep

RANGES = {"steps": {"low": 1, "high": 50}, "rate": {"low": 0.5, "high": 2.0, "log": True}, "then": ["exit:0", "hang"]}


@pytest.fixture
def log(home):
    home.path.mkdir(parents=True)
    return create_sweep(home, sweep(RANGES, sampler="optuna", trials=30), {}, 100, 1.0)


def run_trials(home, log, count):
    """Trials whose value is their number of steps, each with a study that was opened anew."""
    for _ in range(count):
        study = OptunaStudy(open_storage(home), log)
        trial = log.add_trial(study.ask(log.next_number), 2.0)
        log.record_end(trial, "succeeded", {None: float(trial.parameters["steps"])}, "", 3.0)
        study.finish(trial)


def states(home, log):
    study = OptunaStudy(open_storage(home), log)._study
    return [(trial.state.name, trial.value) for trial in study.get_trials()]


def test_a_study_that_is_opened_again_and_again_repeats_no_draw(home, log):
    run_trials(home, log, 12)
    drawn = [trial.parameters["rate"] for trial in log.trials.values()]
    assert len(set(drawn)) == 12
    assert all(0.5 <= rate <= 2.0 for rate in drawn)


def test_a_study_that_is_gone_is_rebuilt_from_the_trials(home, log):
    run_trials(home, log, 3)
    expected = states(home, log)
    assert [state for state, _ in expected] == ["COMPLETE"] * 3
    home.optuna.unlink()
    assert states(home, read_sweep(log.path)) == expected


def test_a_torn_or_damaged_journal_is_repaired(home, log):
    run_trials(home, log, 2)
    expected = states(home, log)
    with open(home.optuna, "ab") as file:
        file.write(b'{"op_code":4,"worker')
    assert states(home, log) == expected
    home.optuna.write_bytes(b"not JSON\n" + home.optuna.read_bytes())
    assert states(home, log) == expected
    assert list(home.path.glob("optuna.corrupt-*.journal"))


def test_a_trial_that_was_asked_for_and_never_written_down_counts_as_failed(home, log):
    lost = OptunaStudy(open_storage(home), log).ask(0)
    study = OptunaStudy(open_storage(home), log)
    assert study.ask(0) == lost  # the same number, the same draw
    assert [state for state, _ in states(home, log)] == ["FAIL", "FAIL"]


def test_an_outcome_that_the_study_missed_is_reported_later(home, log):
    study = OptunaStudy(open_storage(home), log)
    trial = log.add_trial(study.ask(0), 2.0)
    log.record_end(trial, "succeeded", {None: 4.0}, "", 3.0)
    assert states(home, log) == [("COMPLETE", 4.0)]


def test_a_trial_below_the_median_is_stopped_and_the_journal_says_so(home):
    """Metric m0 is the number of the update; the trial before had a thousand at the same step."""
    home.path.mkdir(parents=True)
    pruning = {"method": "median", "every": 100, "startup_trials": 1}
    log = create_sweep(home, sweep({"steps": [20, 25]}, metric="m0", pruning=pruning, then="hang"), {}, 300, 1.0)
    first = log.add_trial({"steps": 20}, 2.0)
    log.record_submitted(first, None, 2.0)
    log.record_report(first, 100, 1000.0, 3.0)
    log.record_report(first, 200, 1000.0, 3.0)
    log.record_end(first, "succeeded", {None: 1000.0}, "", 4.0)

    async def body():
        async with run_both(home) as (_, controller):
            return await wait_for(controller, log.sweep_id)

    best, worse = asyncio.run(body()).trials
    assert (best.number, best.value) == (0, 1000.0)
    # An update is ten steps: at step 100 the mean of the updates 1 to 10 is 5.5.
    assert (worse.state, worse.pruned_at, read_sweep(log.path).trials[1].reports) == ("pruned", 100, {100: 5.5})
    assert event_kinds(home, worse.run_ids[0])[-2:] == ["stop_asked", "stopped"]
    study = optuna.load_study(study_name=log.sweep_id, storage=open_storage(home))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]


def test_hyperband_accepts_rungs_of_the_steps(home, log):
    spec = sweep({"steps": [1, 2]}, pruning={"method": "hyperband", "every": 10})
    other = create_sweep(home, spec, {}, 90, 1.0)
    study = OptunaStudy(open_storage(home), other, total_steps=90)
    trial = other.add_trial({"steps": 1}, 2.0)
    study.add(trial)
    assert study.report(trial, 10, float("nan")) in (True, False)
    (frozen,) = study._study.get_trials()
    assert list(frozen.intermediate_values) == [1]
