import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.runs.machine import MachineUsage
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.studio.model.runs import (
    COLUMNS,
    TONES,
    MachineModel,
    RunsModel,
    elapsed_s,
    format_count,
    format_duration,
    format_time,
    parse_search,
    progress,
    remaining_s,
    status_text,
)

NOW = 1000.0


def _run(run_id="a", **fields):
    fields = {"runner": "palaestra", "agent_id": "palaestra/ppo", "env_id": "CartPole-v1", **fields}
    return RunRecord(**{"run_id": run_id, "phase": Phase.RUNNING, **fields})


def _model(*records):
    model = RunsModel(clock=lambda: NOW)
    model.set_all(records)
    return model


def _ids(records):
    return [record.run_id for record in records]


# ---------------------------------------------------------------------- numbers in words


def test_a_run_takes_time_from_its_start_to_its_end_or_until_now():
    assert elapsed_s(_run(), NOW) is None
    assert elapsed_s(_run(started=940.0), NOW) == 60.0
    assert elapsed_s(_run(started=940.0, ended=950.0), NOW) == 10.0
    assert elapsed_s(_run(started=1100.0), NOW) == 0.0  # the clock of another machine


def test_what_is_left_follows_from_the_pace_so_far():
    run = _run(started=900.0, env_step=250, total_steps=1000)

    assert remaining_s(run, NOW) == 300.0  # 100 s for 250 steps, 750 steps left
    assert progress(run) == 0.25


@pytest.mark.parametrize(
    "changes",
    [{"started": None}, {"started": NOW}, {"total_steps": None}, {"env_step": 0}, {"phase": Phase.SUCCEEDED}],
)
def test_what_is_left_is_unknown_without_a_pace_a_total_or_a_future(changes):
    assert remaining_s(replace(_run(started=900.0, env_step=250, total_steps=1000), **changes), NOW) is None


def test_a_run_that_made_more_steps_than_planned_is_complete_and_has_nothing_left():
    run = _run(started=900.0, env_step=1100, total_steps=1000)

    assert (progress(run), remaining_s(run, NOW)) == (1.0, 0.0)
    assert progress(_run()) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3840, "1 h 4 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_a_duration_is_shown_in_two_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10 k"),
        (123_456, "123 k"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (1_234_567, "1.23 M"),
        (999_999_999, "1 G"),
        (12_345_000_000, "12.3 G"),
        (1_234_567_000_000, "1,230 G"),
    ],
)
def test_a_large_number_is_shown_in_few_characters(number, text):
    assert format_count(number) == text


def test_a_moment_is_shown_in_local_time(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    import time

    time.tzset()
    try:
        assert format_time(1_700_000_000.0) == "14 Nov 22:13"
        assert format_time(0.0) == ""
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_status_has_the_phase_the_time_so_far_and_an_estimate():
    assert status_text(_run(phase=Phase.QUEUED), NOW) == "queued"
    assert status_text(_run(started=900.0, env_step=250, total_steps=1000), NOW) == (
        "running · 1 min 40 s · about 5 min 0 s left"
    )
    assert status_text(_run(phase=Phase.FAILED, started=900.0, ended=930.0), NOW) == "failed · 30 s"


def test_every_phase_has_a_tone():
    assert set(TONES) == set(Phase)


def test_every_column_has_a_text_for_a_run_without_and_with_values():
    empty = _run(phase=Phase.QUEUED)
    full = _run(name="Best", tags=("x", "y"), seed=3, episode_return=475.126, env_step=20_000, started=900.0)

    texts = {column.name: (column.text(empty, NOW), column.text(full, NOW)) for column in COLUMNS}

    assert texts == {
        "phase": ("queued", "running"),
        "name": ("a", "Best"),
        "agent": ("palaestra/ppo",) * 2,
        "env": ("CartPole-v1",) * 2,
        "return": ("", "475.1"),
        "steps": ("0", "20 k"),
        "seed": ("", "3"),
        "time": ("", "1 min 40 s"),
        "tags": ("", "x, y"),
        "created": ("", ""),
    }


# ---------------------------------------------------------------------- the order of the table


_NUMBERS = st.none() | st.floats()
_RUNS = st.lists(
    st.builds(
        _run,
        run_id=st.text("abc", min_size=1, max_size=3),
        name=st.sampled_from(["", "x", "Y"]),
        phase=st.sampled_from(Phase),
        episode_return=_NUMBERS,
        seed=st.none() | st.integers(0, 3),
        created=st.sampled_from([0.0, 1.0, 2.0]),
        started=st.none() | st.floats(0, 2000),
        ended=st.none() | st.floats(0, 2000),
        tags=st.sampled_from([(), ("a",), ("a", "b"), ("b",)]),
    ),
    max_size=8,
    unique_by=lambda run: run.run_id,
)


@pytest.mark.parametrize("column", [column.name for column in COLUMNS])
@given(runs=_RUNS)
def test_the_order_does_not_depend_on_the_order_of_arrival_and_puts_missing_values_last(column, runs):
    key = next(one.sort_key for one in COLUMNS if one.name == column)

    def is_missing(run):
        value = key(run, NOW)
        return value is None or value != value

    for is_descending, arrival in itertools.product((False, True), (runs, runs[::-1], sorted(runs, key=hash))):
        model = _model(*arrival)
        model.sort_column, model.is_descending = column, is_descending
        visible = model.visible()
        order = [is_missing(run) for run in visible]
        values = [key(run, NOW) for run in visible if not is_missing(run)]

        assert order == sorted(order)
        assert values == sorted(values, reverse=is_descending)
        assert _ids(visible) == _ids(_sorted(runs, column, is_descending))


def _sorted(runs, column, is_descending):
    model = _model(*runs)
    model.sort_column, model.is_descending = column, is_descending
    return model.visible()


def test_live_runs_are_sorted_by_the_time_that_is_shown():
    long_ended = _run("ended", phase=Phase.SUCCEEDED, started=0.0, ended=50.0)
    model = _model(_run("young", started=990.0), long_ended, _run("old", started=900.0), _run("queued"))

    model.sort_by("time")

    assert _ids(model.visible()) == ["old", "ended", "young", "queued"]  # 100 s, 50 s, 10 s, none


def test_a_number_that_is_not_a_number_is_neither_best_nor_worst():
    model = _model(
        _run("nan", episode_return=math.nan), _run("low", episode_return=1.0), _run("high", episode_return=2.0)
    )
    model.sort_by("return")
    assert _ids(model.visible()) == ["high", "low", "nan"]

    model.sort_by("return")

    assert _ids(model.visible()) == ["low", "high", "nan"]


def test_the_newest_run_is_first_until_the_user_sorts_and_a_second_click_turns_the_order_around():
    model = _model(_run("b", created=1.0, env_step=5), _run("a", created=2.0, env_step=3))
    assert _ids(model.visible()) == ["a", "b"]

    model.sort_by("name")
    assert (_ids(model.visible()), model.is_descending) == (["a", "b"], False)
    model.sort_by("name")
    assert (_ids(model.visible()), model.is_descending) == (["b", "a"], True)
    model.sort_by("steps")
    assert (_ids(model.visible()), model.is_descending) == (["b", "a"], True)


def test_an_unknown_column_changes_nothing():
    model = _model(_run())
    before = (model.sort_column, model.is_descending, model.revision)
    model.sort_by("zzz")

    assert (model.sort_column, model.is_descending, model.revision) == before


# ---------------------------------------------------------------------- search


SOME = (
    _run("alpha-1", env_id="CartPole-v1", seed=1, tags=("baseline", "two words"), phase=Phase.FAILED),
    _run("alpha-10", env_id="LunarLander-v3", agent_id="sb3/sac", runner="sb3", seed=10, notes="Too slow"),
    _run("beta", env_id="CartPole-v1", name="Gamma's best", phase=Phase.SUCCEEDED, favorite=True),
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["alpha-1", "alpha-10", "beta"]),
        ("ALPHA", ["alpha-1", "alpha-10"]),
        ("alpha cart", ["alpha-1"]),
        ("env:cartpole", ["alpha-1", "beta"]),
        ("env:", ["alpha-1", "alpha-10", "beta"]),
        ("phase:failed", ["alpha-1"]),
        ("runner:sb3", ["alpha-10"]),
        ("agent:sac", ["alpha-10"]),
        ("tag:baseline", ["alpha-1"]),
        ('tag:"two words"', ["alpha-1"]),
        ("seed:1", ["alpha-1"]),
        ("seed:", ["alpha-1", "alpha-10", "beta"]),
        ("seed", []),
        ("-env:cartpole", ["alpha-10"]),
        ("-slow", ["alpha-1", "beta"]),
        ("--slow", ["alpha-10"]),
        ("-", ["alpha-1", "alpha-10", "beta"]),
        ("gamma's", ["beta"]),
        ("favorite:yes", ["beta"]),
        ('"too sl', ["alpha-10"]),
        ("zzz:1", []),
    ],
)
def test_a_search_holds_words_columns_quotations_and_exclusions(text, found):
    match = parse_search(text)

    assert _ids(run for run in SOME if match(run)) == found


@given(text=st.text())
def test_any_text_that_is_typed_is_a_search(text):
    match = parse_search(text)

    assert all(match(run) in (True, False) for run in SOME)


# ---------------------------------------------------------------------- the model


def test_what_the_user_has_chosen_survives_a_new_list_as_far_as_the_runs_do():
    model = _model(_run("a"), _run("b"), _run("c"))
    model.show("a")
    model.choose(["b", "zzz", "a", "b"])
    assert model.chosen == ("b", "a")

    model.set_all([_run("a"), _run("b")])
    assert (model.current, model.chosen) == ("a", ("b", "a"))
    model.set_all([_run("b"), _run("d")])

    assert (model.current, model.current_record, model.chosen, len(model)) == ("", None, ("b",), 2)


def test_a_deleted_run_is_no_longer_shown_or_chosen():
    model = _model(_run("a"), _run("b"))
    model.show("a")
    model.choose(["a", "b"])

    model.remove("a")

    assert (model.current, model.chosen, _ids(model.all())) == ("", ("b",), ["b"])


def test_removing_another_run_keeps_the_one_that_is_shown():
    model = _model(_run("a"), _run("b"))
    model.show("a")
    model.remove("b")

    assert (model.current, model.current_record) == ("a", model.get("a"))


def test_only_a_change_counts_as_one():
    model = _model(_run("a"), _run("b"))
    model.show("a")
    model.choose(["a"])
    model.set_search("x")
    before = model.revision

    model.show("a")
    model.choose(["a"])
    model.set_search("x")
    model.update(_run("a"))
    model.remove("zzz")
    assert model.revision == before
    model.update(_run("a", env_step=1))

    assert model.revision == before + 1
    assert model.get("a").env_step == 1


def test_a_search_filters_the_table_and_not_the_list_of_all_runs():
    model = _model(*SOME)
    model.set_search("beta")

    assert (_ids(model.visible()), len(model.all()), model.is_loaded) == (["beta"], 3, True)


def test_live_runs_are_those_that_have_not_ended_oldest_first():
    model = _model(
        _run("new", created=3.0), _run("done", phase=Phase.SUCCEEDED), _run("old", created=1.0, phase=Phase.QUEUED)
    )

    assert _ids(model.live()) == ["old", "new"]


# ---------------------------------------------------------------------- the machine


def _usage(**fields):
    known = {
        "time": 0.0,
        "cpu_percent": 50.0,
        "core_percent": (50.0,),
        "memory_used_bytes": 3,
        "memory_total_bytes": 4,
        "disk_free_bytes": 10,
        "disk_total_bytes": 20,
        "gpus": (),
        "slots": 1,
        "running": 0,
        "num_queued": 0,
        "queued": (),
        "draining": False,
        "service_pid": 1,
        "service_memory_bytes": 1,
    }
    return MachineUsage(**{**known, **fields})


def test_the_machine_keeps_the_newest_sample_and_two_minutes_for_the_gauges():
    model = MachineModel()
    for index in range(130):
        model.receive(_usage(cpu_percent=index / 2))

    assert model.usage.cpu_percent == 64.5
    assert (len(model.cpu), model.cpu[0], model.cpu[-1], model.memory[-1]) == (120, 0.05, 0.645, 0.75)
    assert model.revision == 130


def test_a_machine_that_does_not_know_its_memory_has_no_share_of_it():
    model = MachineModel()
    model.receive(_usage(memory_total_bytes=0))

    assert (len(model.cpu), len(model.memory)) == (1, 0)
