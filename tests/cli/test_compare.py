"""`runs compare` with many runs, by query and by sweep."""

import json

from palaestra.runs import TrainerService


def test_twenty_runs_are_compared_as_groups_that_fit_the_screen(runs, palaestra, home):
    words = ("steps=20,30,40,50", "metrics=1", "rate=1000")
    started = runs("start", "--runner", "echo", *words, "--seeds", "1..5", "--json")
    sweep_id = json.loads(started.out)["sweep_id"]
    TrainerService(home).wait_for_sweep(sweep_id, timeout_s=120)
    result = runs("compare", "--sweep", sweep_id)
    lines = result.out.splitlines()
    assert lines[0].startswith(
        "20 runs of 4 configurations; episode/return at step 200 (mean of the last 100 episodes)"
    )
    assert lines[2].split()[:4] == ["GROUP", "steps", "RUNS", "MEAN"]
    assert len(lines) < 12
    assert max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines[3:7]] == ["A", "B", "C", "D"]
    assert all("[1.5, 1.5]" in line for line in lines[3:7])
    document = json.loads(runs("compare", "--where", f"tag=sweep:{sweep_id} and config.steps>30", "--json").out)
    assert {group["parameters"]["steps"] for group in document["groups"]["groups"]} == {40, 50}
    assert document["groups"]["step"] == 400
    assert len(document["runs"]) == 10
    service = TrainerService(home)
    groups = service.compare_groups(sweep=sweep_id, metric="m0", step=100).groups
    assert [group.mean for group in groups] == [5.5] * 4  # of the updates 1 to 10
    assert runs("compare", "--where", "env=nothing").code == 2


def test_plots_are_written_as_pictures_and_as_a_page(runs, started, tmp_path):
    first, second = started("steps=40", "--seed", "1"), started("steps=40", "--seed", "2")
    for name, magic in (("c.svg", b"<svg "), ("c.png", b"\x89PNG"), ("new/c.html", b"<!DOCTYPE html>")):
        result = runs("plot", first, second, "--out", tmp_path / name)
        assert (result.code, result.out) == (0, f"2 runs in {tmp_path / name}\n"), result
        assert (tmp_path / name).read_bytes().startswith(magic)
    document = json.loads(runs("plot", "--where", "runner=echo", "--pareto", "--out", "p.svg", "--json").out)
    assert document["runs"] == 2
    for words, problem in (
        (["--out", "c.jpg"], "is not .html, .svg or .png"),
        (["--pareto"], "The HTML page always has it"),
        (["--by", "lost"], "none of these runs has values of it"),
    ):
        result = runs("plot", first, *words)
        assert (result.code, problem in result.err) == (2, True), result
