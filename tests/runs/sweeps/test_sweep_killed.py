"""The service is killed while a sweep runs: every run exists once, ran once, and counts once."""

import json
import random
import time

import pytest
from tests.runs.serving import killed_service
from tests.runs.supervisors import echo, event_kinds

from palaestra.runs.sweeps.spec import SweepSpec


def _sweep_with_kills(home, steps, seeds, kills, seed, **fields):
    """Kill the service at random moments of a sweep, then let it finish; returns its details."""
    chance = random.Random(seed)
    base = echo(rate=100)
    spec = SweepSpec(base=base, parameters={"steps": steps}, seeds=seeds, **fields)
    with killed_service(home, max_running=4) as client:
        sweep_id = client.start_sweep(spec).sweep_id
        time.sleep(chance.uniform(0.0, 0.8))  # the moment is what is tried here, not waited for
    for _ in range(kills - 1):
        with killed_service(home, max_running=4):
            time.sleep(chance.uniform(0.0, 1.2))
    with killed_service(home, max_running=4) as client:
        return client.wait_for_sweep(sweep_id, timeout_s=240)


def _check_nothing_lost_or_doubled(home, details, steps, seeds):
    sweep_id = details.sweep.sweep_id
    expected = sorted(f"{sweep_id}-t{trial:04}-s{seed}" for trial in range(len(steps)) for seed in seeds)
    assert sorted(path.name for path in home.runs.iterdir() if not path.name.startswith(".")) == expected
    for run_id in expected:
        kinds = event_kinds(home, run_id)
        assert (kinds.count("launched"), kinds[-1]) == (1, "succeeded"), (run_id, kinds)
    values = {trial.parameters["steps"]: trial.values for trial in details.trials}
    # Episode e returns e and takes ten updates, so the mean of n episodes is (n + 1) / 2.
    assert values == {count: ((count // 10 + 1) / 2,) * len(seeds) for count in steps}
    lines = [json.loads(line) for line in (home.sweeps / sweep_id / "trials.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds.count("trial") == kinds.count("ended") == len(steps)
    assert kinds.count("submitted") == len(expected)


def test_a_sweep_of_twelve_runs_whose_service_is_killed_twice_loses_and_doubles_nothing(home):
    steps, seeds = [10, 20, 30, 40], (1, 2, 3)
    details = _sweep_with_kills(home, steps, seeds, kills=2, seed=1)
    assert details.sweep.state == "finished"
    _check_nothing_lost_or_doubled(home, details, steps, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_sweep_of_forty_runs_whose_service_is_killed_five_times_loses_and_doubles_nothing(home, seed):
    steps, seeds = [10, 20, 30, 40, 50, 60, 70, 80], (1, 2, 3, 4, 5)
    details = _sweep_with_kills(home, steps, seeds, kills=5, seed=seed)
    _check_nothing_lost_or_doubled(home, details, steps, seeds)
    assert details.sweep.best.parameters == {"steps": 80}


@pytest.mark.slow
def test_a_sweep_of_forty_runs_chosen_by_optuna_loses_and_doubles_nothing(home):
    steps, seeds = [10 * count for count in range(1, 41)], (1,)
    fields = {"sampler": "optuna", "trials": 40, "pruning": {"method": "median", "startup_trials": 40}}
    details = _sweep_with_kills(home, steps, seeds, kills=5, seed=7, **fields)
    runs = sorted(path.name for path in home.runs.iterdir() if not path.name.startswith("."))
    assert runs == [f"{details.sweep.sweep_id}-t{number:04}-s1" for number in range(40)]
    assert all(event_kinds(home, run_id).count("launched") == 1 for run_id in runs)
    assert details.sweep.trials == {"succeeded": 40}
