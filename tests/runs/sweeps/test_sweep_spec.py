"""What a sweep is made of: seeds, grids, ranges, and refusals that name the key."""

import pytest

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.runs.spec import RunSpec
from palaestra.runs.sweeps.sampling import sample_parameters
from palaestra.runs.sweeps.spec import SweepSpec, parse_grid, parse_seeds, split_values

BASE = RunSpec(runner="echo", config={"steps": 5, "nested": {"a": 1, "b": 2}}, tags=("mine",))


def build(**fields):
    return parse_section(SweepSpec, {"base": BASE, **fields}, place="sweep")


def points(spec):
    return [sample_parameters(spec, number) for number in range(spec.num_trials)]


@pytest.mark.parametrize(
    ("text", "seeds"), [("1..5", (1, 2, 3, 4, 5)), ("7", (7,)), ("1,3, 7", (1, 3, 7)), ("1..3,10", (1, 2, 3, 10))]
)
def test_seeds_are_ranges_and_lists(text, seeds):
    assert parse_seeds(text) == seeds
    assert build(seeds=text).seeds == seeds


@pytest.mark.parametrize("text", ["", "1..", "5..1", "a", "-1", "1.5", "1,,2", "0..100000"])
def test_other_texts_are_no_seeds(text):
    with pytest.raises(ValueError, match=r"not a seed|downwards|more than"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("[64,64],[128,128]", ["[64,64]", "[128,128]"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b',c", ["'a,b'", "c"]),
        ("{x: [1, 2]},3", ["{x: [1, 2]}", "3"]),
        ("it's,here", ["it's", "here"]),
    ],
)
def test_commas_separate_values_unless_they_are_in_quotes_or_brackets(text, parts):
    assert split_values(text) == parts


def test_a_grid_is_told_from_one_value():
    words = ["lr=1e-3,3e-4", "net=[64,64]", 'note="a,b"', "n=4", "nets=[1],[2]", "flag=true,false"]
    plain, grid = parse_grid(words)
    assert plain == ["net=[64,64]", 'note="a,b"', "n=4"]
    assert grid == {"lr": (1e-3, 3e-4), "nets": ([1], [2]), "flag": (True, False)}


def test_an_empty_value_of_a_grid_is_refused_with_the_way_to_write_a_comma():
    with pytest.raises(ConfigError, match="empty value between two commas"):
        parse_grid(["note=a,,b"])


def test_a_grid_has_every_combination_once_and_the_last_key_varies_fastest():
    spec = build(parameters={"a": [1, 2], "b": {"low": 0.1, "high": 0.3, "step": 0.1}}, seeds=[1, 2])
    assert spec.num_runs == 12
    assert [(p["a"], round(p["b"], 9)) for p in points(spec)] == [
        (1, 0.1),
        (1, 0.2),
        (1, 0.3),
        (2, 0.1),
        (2, 0.2),
        (2, 0.3),
    ]


def test_seeds_alone_are_one_configuration():
    spec = build(seeds="1..3")
    assert (spec.num_trials, spec.num_runs, points(spec)) == (1, 3, [{}])


def test_random_values_are_within_their_ranges_and_the_same_for_the_same_number():
    spec = build(
        sampler="random",
        trials=200,
        parameters={
            "lr": {"low": 1e-5, "high": 1e-1, "log": True},
            "n": {"low": 1, "high": 4},
            "k": {"low": 1, "high": 1000, "log": True},
            "even": {"low": 0, "high": 10, "step": 2},
            "x": {"low": 0.0, "high": 1.0},
            "name": ["a", "b"],
        },
    )
    drawn = points(spec)
    assert drawn == points(spec)
    assert {p["n"] for p in drawn} == {1, 2, 3, 4}
    assert {p["even"] for p in drawn} == {0, 2, 4, 6, 8, 10}
    assert all(1e-5 <= p["lr"] <= 1e-1 and 0 <= p["x"] <= 1 and 1 <= p["k"] <= 1000 for p in drawn)
    # Half of a logarithmic range lies below its geometric mean, 1e-3.
    assert 70 < sum(p["lr"] < 1e-3 for p in drawn) < 130
    assert len({p["lr"] for p in drawn}) == 200


def test_a_run_of_a_trial_has_its_values_its_seed_and_the_tag_of_the_sweep():
    run = build(parameters={"nested.a": [7]}, seeds="4").build_run({"nested.a": 7}, 4, "sweep:x")
    assert run.config == {"steps": 5, "nested": {"a": 7, "b": 2}}
    assert (run.seed, run.tags) == (4, ("mine", "sweep:x"))
    assert BASE.config["nested"]["a"] == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parameters": {"lr": {"low": 0.0, "high": 1.0}}}, "a grid needs values"),
        ({"sampler": "random", "parameters": {"a": [1]}}, "needs a number of trials"),
        ({"sampler": "optuna", "trials": 3}, "needs parameters"),
        ({"parameters": {"a": {"low": 0, "high": 1, "log": True}}}, "starts above 0"),
        ({"parameters": {"a": {"low": 2, "high": 1}}}, "not the ends of a range"),
        ({"parameters": {"a": {"lo": 2}}}, "Did you mean 'low'"),
        ({"parameters": {"a": {"low": 1, "high": 3}, "b..c": [1]}}, "'b..c' is not a key"),
        ({"parameters": {"a": {"low": 1, "high": 10**6}}}, "more than 10,000"),
        ({"seeds": [1, 1]}, "given twice"),
        ({"sampelr": "grid"}, "Did you mean 'sampler'"),
    ],
)
def test_what_is_refused_and_why(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        build(**fields)
