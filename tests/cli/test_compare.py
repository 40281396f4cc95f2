"""`runs compare` with many runs, by query and by sweep."""

import json
import sys

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
        (["--by", "lost"], "no run has it; they have episode/return"),
    ):
        result = runs("plot", first, *words)
        assert (result.code, problem in result.err) == (2, True), result


def test_a_sweep_is_compared_by_its_own_metric_and_direction(runs, palaestra, home, tmp_path):
    code = "import sys; [print(f'step: {i} loss: {float(sys.argv[2]) / (i + 1)} acc: {i}') for i in range(3)]"
    (tmp_path / "fit.py").write_text(code)
    (tmp_path / "grid.yaml").write_text("parameters: {lr: [0.5, 0.1]}\nseeds: 1,2\nmetric: loss\ndirection: minimize\n")
    words = (
        "--sweep",
        "grid.yaml",
        "--name",
        "grid",
        "--follow",
        "--",
        sys.executable,
        "fit.py",
        "--lr",
        "1",
        "--seed",
        "0",
    )
    started = runs("start", *words)
    assert started.code == 0, started
    assert "Compare with: palaestra runs compare --sweep grid-" in started.err
    assert "--by" not in started.err
    result = runs("compare", "--sweep", "grid", "--json")
    document = json.loads(result.out)["groups"]
    assert (document["metric"], document["direction"]) == ("loss", "minimize")
    assert [group["parameters"]["lr"] for group in document["groups"]] == [0.1, 0.5]
    document = json.loads(runs("compare", "--sweep", "grid", "--maximize", "--json").out)["groups"]
    assert [group["parameters"]["lr"] for group in document["groups"]] == [0.5, 0.1]
    # The direction of the sweep says nothing about another metric.
    document = json.loads(runs("compare", "--sweep", "grid", "--by", "acc", "--json").out)["groups"]
    assert (document["metric"], document["direction"]) == ("acc", "maximize")
    assert TrainerService(home).compare_groups(sweep="grid").direction == "minimize"
    assert runs("plot", "--sweep", "grid", "--out", "curves.html").code == 0
    for words in (("compare", "--sweep", "grid", "--by", "return"), ("plot", "--where", "runner=script")):
        result = runs(*words)
        assert result.code == 2
        assert "--by = 'episode/return': no run has it; they have loss, acc. Use --by loss." in result.err
    result = runs("compare", "--where", "runner=script")
    assert "! no run has episode/return; they have loss, acc. Use --by loss" in result.out
