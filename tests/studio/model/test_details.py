from hypothesis import given
from hypothesis import strategies as st

from palaestra.runs.comparison import Comparison
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent
from palaestra.studio.model.details import MAX_LOG_CHARACTERS, RunDetails


def _event(number):
    return RunEvent(seq=number, time=float(number), attempt=1, kind="note", phase=Phase.RUNNING)


def _details(run_id="a"):
    details = RunDetails()
    details.open(run_id)
    return details


def test_what_arrives_for_a_run_that_is_no_longer_shown_is_ignored():
    details = _details("b")
    before = details.revision
    details.set_events("a", [_event(1)])
    details.add_event("a", _event(2))
    details.set_command("a", {"argv": ["x"]})
    details.set_config("a", {"x": 1})
    details.set_videos("a", ["clip"])
    details.append_log("a", "text")
    details.append_log("b", "")

    assert (details.events, details.command, details.config, details.videos, details.log) == ((), {}, {}, (), "")
    assert details.revision == before


def test_another_run_begins_empty_and_the_same_one_keeps_what_is_known():
    details = _details("a")
    details.set_command("a", {"argv": ["x"]})
    details.set_videos("a", ["clip"])
    details.append_log("a", "line\n")
    details.open("a")
    assert (details.command, details.videos, details.log) == ({"argv": ["x"]}, ("clip",), "line\n")

    details.open("b")

    assert (details.run_id, details.command, details.videos, details.log) == ("b", {}, (), "")


@given(order=st.permutations(range(6)), listed=st.integers(0, 6))
def test_events_are_in_order_and_each_once_whether_they_arrive_live_or_as_a_list(order, listed):
    details = _details()
    for position, number in enumerate(order):
        if position == 3:
            details.set_events("a", [_event(one) for one in range(listed)])
        details.add_event("a", _event(number))

    assert [event.seq for event in details.events] == list(range(6))


def test_a_known_event_is_no_change():
    details = _details()
    details.add_event("a", _event(1))
    before = details.revision
    details.add_event("a", _event(1))

    assert details.revision == before


def test_settings_are_dotted_keys_without_the_sections_that_hold_them():
    details = _details()
    details.set_config("a", {"env": {"id": "CartPole-v1", "kwargs": {}}, "seed": 1, "hidden": [64]})

    assert details.config == {"env.id": "CartPole-v1", "env.kwargs": {}, "seed": 1, "hidden": [64]}


def test_of_a_long_output_the_newest_whole_lines_are_kept_and_the_cut_is_counted():
    details = _details()
    line = "x" * 99 + "\n"
    whole = line * (MAX_LOG_CHARACTERS // 100 + 50)
    details.append_log("a", whole)
    details.append_log("a", "end")

    assert len(details.log) <= MAX_LOG_CHARACTERS
    assert details.log.startswith("x" * 99 + "\n")
    assert whole + "end" == whole[: details.log_start] + details.log


def test_a_line_that_is_longer_than_everything_that_is_kept_is_cut():
    details = _details()
    details.append_log("a", "x" * (MAX_LOG_CHARACTERS + 10))

    assert (len(details.log), details.log_start) == (MAX_LOG_CHARACTERS, 10)


@given(parts=st.lists(st.text("ab\n", max_size=300), max_size=30))
def test_what_is_shown_is_always_the_end_of_what_was_written(parts):
    details = _details()
    for part in parts:
        details.append_log("a", part)
    whole = "".join(parts)

    assert whole[details.log_start :] == details.log


def test_metrics_that_arrived_live_stay_when_the_list_arrives():
    details = _details()
    assert details.add_metrics("a", ["new", "loss"])
    details.set_metrics("a", {"loss": 5})
    assert not details.add_metrics("a", ["new"])
    assert details.add_metrics("b", ["entropy"])

    assert details.metrics_of("a") == {"new": None, "loss": 5}
    assert details.all_metrics(["a", "b", "zzz"]) == ["entropy", "loss", "new"]
    assert details.metrics_of("zzz") == {}


def test_usual_charts_are_drawn_until_the_user_chooses_others():
    details = _details()
    details.choose_charts(["loss", "entropy"])
    details.choose_charts([])
    assert details.charts == ("loss", "entropy")
    details.add_chart("value")
    details.add_chart("value")
    details.remove_chart("loss")

    details.choose_charts(["loss"])

    assert details.charts == ("entropy", "value")


def test_the_same_charts_are_no_change():
    details = _details()
    details.choose_charts(["loss"])
    before = details.revision
    details.choose_charts(["loss"])
    details.add_chart("loss")

    assert details.revision == before


def test_a_comparison_is_kept_until_the_next():
    details = _details()
    comparison = Comparison(runs=(), configuration={}, metrics={})
    details.set_comparison(comparison)

    assert details.comparison is comparison
