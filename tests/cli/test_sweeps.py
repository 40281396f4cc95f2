"""`runs start` with several values or seeds, and `palaestra sweeps …`."""

import json

from palaestra.runs import TrainerService


def test_a_sweep_is_started_shown_and_listed(runs, palaestra, home):
    result = runs("start", "--runner", "echo", "--name", "lr", "steps=40,20", "metrics=1", "--seeds", "1..2")
    sweep_id, _, size = result.out.partition(" running: ")
    assert (result.code, size) == (0, "4 runs: 2 configurations of 2 seeds\n"), result
    assert f"palaestra sweeps show {sweep_id}" in result.err
    TrainerService(home).wait_for_sweep(sweep_id, timeout_s=60)
    shown = palaestra("sweeps", "show", "lr-sweep").out
    assert "Best: 2.5 [2.5, 2.5] with steps=40\n" in shown
    assert "    0  succeeded  40     2/2   2.5   [2.5, 2.5]\n    1  succeeded  20     2/2   1.5   [1.5, 1.5]" in shown
    (row,) = json.loads(palaestra("sweeps", "list", "--json").out)
    assert (row["sweep_id"], row["state"], row["trials"]) == (sweep_id, "finished", {"succeeded": 2})
    assert f"{sweep_id}  finished  grid     2/2     4     2.5 [2.5, 2.5]  steps=40" in palaestra("sweeps", "list").out
    tagged = json.loads(runs("list", "--tag", f"sweep:{sweep_id}", "--json").out)
    assert sorted(run["seed"] for run in tagged) == [1, 1, 2, 2]


def test_a_sweep_file_and_the_command_line_are_put_together(runs, palaestra, tmp_path):
    file = tmp_path / "search.yaml"
    file.write_text("sampler: random\ntrials: 3\nparameters: {steps: {low: 10, high: 30, step: 10}, metrics: [1]}\n")
    result = runs("start", "--runner", "echo", "--sweep", file, "metrics=2,3", "--follow", "--json")
    assert result.code == 0, result
    record = json.loads(result.out)
    assert (record["sampler"], record["num_runs"], record["trials"]) == ("random", 3, {"succeeded": 3})
    details = json.loads(palaestra("sweeps", "show", record["sweep_id"], "--json").out)
    assert {trial["parameters"]["metrics"] for trial in details["trials"]} <= {2, 3}
    single = runs("start", "--runner", "echo", "--name", "one", "steps=10", "--seeds", "1..2", "--follow")
    assert (single.code, "finished: 2 runs of 1 configuration: succeeded; mean 1 [1, 1]" in single.out) == (0, True)
    assert "Compare with: palaestra runs compare --sweep one-sweep-" in single.err
    assert "\nResult: 1 [1, 1]\n" in palaestra("sweeps", "show", "one-sweep").out
    assert "One seed says nothing about the spread" in palaestra("sweeps", "show", record["sweep_id"]).out


def test_a_sweep_is_stopped_and_resumed_by_its_prefix(runs, palaestra, home):
    result = runs("start", "--runner", "echo", "steps=10,20", "then=hang", "--json")
    sweep_id = json.loads(result.out)["sweep_id"]
    stopped = palaestra("sweeps", "stop", "echo-sweep", "--grace", "0")
    assert (stopped.code, stopped.out.startswith(f"{sweep_id} stopped (by the operator): ")) == (0, True), stopped
    assert palaestra("sweeps", "stop", sweep_id).code == 1
    assert json.loads(palaestra("sweeps", "resume", sweep_id, "--json").out)["state"] == "running"
    assert palaestra("sweeps", "stop", sweep_id, "--grace", "0").code == 0


def test_a_dry_run_prints_the_size_and_the_first_command_and_starts_nothing(runs, palaestra):
    result = runs("start", "--runner", "echo", "steps=10,20", "--seeds", "1..3", "--dry-run")
    assert result.out.startswith("6 runs: 2 configurations of 3 seeds; the first one:\n")
    assert "--steps=10" in result.out
    assert palaestra("sweeps", "list").out.startswith("No sweeps yet.")


def test_what_cannot_be_is_refused_with_exit_code_two(runs, palaestra, tmp_path):
    def refused(*words):
        result = palaestra(*words)
        assert (result.code, result.err.count("\n")) == (2, 1), result
        return result.err

    start = ("runs", "start", "--runner", "echo")
    assert "--seeds = '3..1': 3..1 counts downwards" in refused(*start, "--seeds", "3..1")
    assert "--seed = 4: contradicts the seeds of the sweep" in refused(*start, "--seed", "4", "--seeds", "1..2")
    assert "steps = 'a,,b': has an empty value" in refused(*start, "steps=a,,b")
    assert "no such sweep" in refused("sweeps", "show", "nothing")
    assert "unable to parse" in refused(*start, "steps=10,many")
    file = tmp_path / "bad.yaml"
    file.write_text("sampler: optuna\n")
    assert "sampler optuna needs a number of trials" in refused(*start, "--sweep", file)


def test_the_seeds_of_a_sweep_replace_the_seed_in_the_command_of_a_program(runs):
    command = ("--", "sh", "train.sh", "--lr", "0.1", "--seed", "0")
    result = runs("start", "lr=0.1,0.3", "--seeds", "4..5", "--dry-run", *command)
    assert "4 runs: 2 configurations of 2 seeds; the first one:\n" in result.out
    assert "train.sh --lr 0.1 --seed 4" in result.out
    refused = runs("start", "--seed", "1", "--seeds", "4..5", "--dry-run", *command)
    assert (refused.code, "--seed = 1: contradicts the seeds of the sweep" in refused.err) == (2, True)
