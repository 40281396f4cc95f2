"""Groups of runs at equal steps, with numbers that can be computed by hand."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.errors import ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.analysis.groups import compare_groups
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.sweeps.selection import select_compared


@pytest.fixture
def add_run(home):
    """Creates a run whose episodes end every 100 steps and return the given numbers; one episode takes a second."""

    def add(name, returns, *, lr=1.0, seed=0, env="A-v0", phase=Phase.SUCCEEDED, **changes):
        resolved = {"algorithm": {"lr": lr}, "trainer": {"seed": seed}}
        run = RunDirectory.create(home.runs, name, None, resolved)
        attempt = run.attempt(1)
        attempt.path.mkdir()
        lines = [
            {
                "schema": 1,
                "kind": "EpisodeSummary",
                "seq": index,
                "time": 1000.0 + index,
                "env_step": 100 * index,
                "episode": index,
                "env_index": 0,
                "length": 100,
                "episode_return": value,
            }
            for index, value in enumerate(returns, 1)
        ]
        attempt.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        record = RunRecord(
            run_id=name,
            runner="echo",
            agent_id="echo",
            env_id=env,
            phase=phase,
            attempt=1,
            started=1000.0,
            env_step=100 * len(returns),
            seed=seed,
            config_digest=f"{lr}-{env}",
        )
        return replace(record, **changes)

    return add


@pytest.fixture
def reader(home, monkeypatch):
    reader = RunReader(home)
    # The directories have no registry; the records are given.
    monkeypatch.setattr(reader, "paths", home.run)
    monkeypatch.setattr(reader, "run", lambda name: replace(_ENDED, run_id=name))
    return reader


_ENDED = RunRecord(run_id="", runner="", agent_id="", env_id="", phase=Phase.SUCCEEDED)


def test_runs_that_differ_only_in_their_seed_are_one_group_with_mean_and_intervals(add_run, reader):
    runs = [add_run(f"a{seed}", [value], lr=0.1, seed=seed) for seed, value in enumerate((0.0, 2.0))]
    runs += [add_run(f"b{seed}", [value], lr=0.2, seed=seed) for seed, value in enumerate((8.0, 1.0, 3.0, 1000.0))]
    comparison = compare_groups(reader, runs)
    best, other = comparison.groups
    assert (comparison.metric, comparison.step) == ("episode/return", 100)
    assert (best.label, best.parameters, best.num_values, best.mean, best.iqm) == (
        "A",
        {"algorithm.lr": 0.2},
        4,
        253.0,
        5.5,  # of 3 and 8
    )
    assert (other.label, other.mean, other.iqm) == ("B", 1.0, 1.0)
    assert (other.low, other.high) == pytest.approx((-11.706, 13.706), abs=1e-3)
    assert (other.iqm_low, other.iqm_high) == (0.0, 2.0)


def test_a_run_that_trained_longer_is_judged_at_the_step_of_the_others(add_run, reader):
    long, short = add_run("long", [1.0, 3.0, 100.0], lr=0.1), add_run("short", [4.0, 2.0], lr=0.2)
    comparison = compare_groups(reader, [long, short])
    assert comparison.step == 200
    assert [(group.mean, group.time_s) for group in comparison.groups] == [(3.0, 2.0), (2.0, 2.0)]
    assert [group.mean for group in compare_groups(reader, [long, short], step=100).groups] == [4.0, 1.0]


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.STOPPED, Phase.LOST])
def test_a_run_that_was_cut_short_does_not_shorten_the_others_and_is_named(add_run, reader, phase):
    runs = [add_run("a", [2.0, 4.0], seed=1), add_run("b", [9.0], seed=2, phase=phase)]
    comparison = compare_groups(reader, runs)
    (group,) = comparison.groups
    assert (comparison.step, group.mean, group.num_values, group.low) == (200, 3.0, 1, None)
    assert group.runs[1].problem == f"{phase} at step 100"
    assert comparison.notes[0].startswith("1 run has no value, which may flatter the group: A b: ")


def test_less_can_be_better_and_nan_is_no_value(add_run, reader):
    runs = [add_run("a", [1.0], lr=0.1), add_run("b", [2.0], lr=0.2), add_run("c", [float("nan")], lr=0.3)]
    comparison = compare_groups(reader, runs, direction="minimize")
    assert [group.mean for group in comparison.groups] == [1.0, 2.0, None]
    assert "its value is nan" in comparison.notes[0]


def test_the_pareto_front_has_what_is_not_beaten_in_value_and_time(add_run, reader):
    slow = add_run("slow", [9.0], lr=0.1, started=901.0)  # after 100 s
    fast = add_run("fast", [5.0], lr=0.2)  # after one second
    beaten = add_run("beaten", [4.0], lr=0.3, started=951.0)
    comparison = compare_groups(reader, [slow, fast, beaten])
    assert [(group.mean, group.time_s, group.on_front) for group in comparison.groups] == [
        (9.0, 100.0, True),
        (5.0, 1.0, True),
        (4.0, 50.0, False),
    ]


def test_environments_are_pooled_on_request_and_drawn_from_separately(add_run, reader):
    runs = [
        add_run(f"{env}{seed}", [value], env=env, seed=seed)
        for env, value in (("a-v0", 1.0), ("b-v0", 3.0))
        for seed in (1, 2)
    ]
    assert [group.mean for group in compare_groups(reader, runs).groups] == [3.0, 1.0]
    comparison = compare_groups(reader, runs, pool_envs=True)
    (group,) = comparison.groups
    assert (group.mean, group.iqm, group.iqm_low, group.iqm_high) == (2.0, 2.0, 2.0, 2.0)
    assert "should be normalised" in comparison.notes[-1]


def test_real_runs_are_grouped_by_the_digest_of_their_configuration(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            specs = [echo(steps=steps, seed=seed) for steps in (20, 40) for seed in (1, 2)]
            ids = [(await supervisor.submit(spec)).run_id for spec in specs]
            return [await wait_for_end(supervisor, run_id) for run_id in ids]

    comparison = compare_groups(RunReader(home), asyncio.run(body()))
    assert comparison.step == 200
    # Two episodes within 200 steps return 1 and 2, however long the run.
    assert [(group.num_values, group.mean) for group in comparison.groups] == [(2, 1.5), (2, 1.5)]
    assert sorted(group.parameters["steps"] for group in comparison.groups) == [20, 40]


def test_an_empty_comparison_is_refused(reader):
    with pytest.raises(ConfigError, match="1 to 1,000 runs"):
        compare_groups(reader, [])
    with pytest.raises(ConfigError, match=r"where = 'env=Nowhere-v1': no run matches\. palaestra runs list --where"):
        select_compared(reader, where="env=Nowhere-v1", at_least=2)
