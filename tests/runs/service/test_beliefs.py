"""The beliefs of a run over HTTP: the last ones, what follows, and damage."""

import pytest

from palaestra.errors import UnknownRun
from palaestra.telemetry.event import Belief, LogLine
from palaestra.telemetry.journal import Journal


@pytest.fixture
def run(served):
    """A run that has ended, and a way to add events to its journal."""
    run_id = served.done()

    def write(*events):
        with Journal(served.home.run(run_id).attempt(1).journal) as journal:
            journal.emit_many(events)

    return run_id, write


def seen(history):
    return [(record.agent, record.beliefs) for record in history.records]


def test_a_run_without_beliefs_has_an_empty_history(served, run):
    run_id, _ = run
    assert served.trainer.beliefs(run_id).records == ()


def test_beliefs_are_read_in_order_and_continued_where_the_last_answer_ended(served, run):
    run_id, write = run
    write(Belief("a", {"step": 1}), LogLine("info", "text"), Belief("a", {"step": 2}))
    first = served.trainer.beliefs(run_id)
    assert seen(first) == [("a", {"step": 1}), ("a", {"step": 2})]
    assert served.trainer.beliefs(run_id, first.next).records == ()
    write(Belief("b", {"step": 3}))
    then = served.trainer.beliefs(run_id, first.next)
    assert seen(then) == [("b", {"step": 3})]
    assert then.records[0].seq == first.records[-1].seq + 1


def test_a_response_holds_the_newest_action_values_of_each_agent(served, run):
    run_id, write = run
    values = {"q_values": [[1.0]]}
    write(Belief("a", values), Belief("b", values), Belief("a", {"q_values": [[2.0]]}), Belief("a", {"step": 4}))
    expected = [("a", {}), ("b", values), ("a", {"q_values": [[2.0]]}), ("a", {"step": 4})]
    assert seen(served.trainer.beliefs(run_id)) == expected


def test_only_the_last_records_are_returned_up_to_the_limit(served, run):
    run_id, write = run
    write(*(Belief("a", {"step": step}) for step in range(10)))
    assert seen(served.trainer.beliefs(run_id, limit=2)) == [("a", {"step": 8}), ("a", {"step": 9})]


def test_a_journal_of_many_megabytes_is_searched_at_its_end_only(served, run):
    run_id, write = run
    write(Belief("a", {"step": 1}), *(LogLine("info", "x" * 1_000_000) for _ in range(5)), Belief("a", {"step": 2}))
    history = served.trainer.beliefs(run_id)
    assert seen(history) == [("a", {"step": 2})]
    assert history.next == f"1:{served.home.run(run_id).attempt(1).journal.stat().st_size}"


def test_a_damaged_line_and_an_incomplete_one_are_skipped(served, run):
    run_id, write = run
    write(Belief("a", {"step": 1}))
    journal = served.home.run(run_id).attempt(1).journal
    with journal.open("ab") as file:
        file.write(b'{"kind": "Belief", damaged\n{"schema":1,"kind":"Belief","seq":9')
    history = served.trainer.beliefs(run_id)
    assert seen(history) == [("a", {"step": 1})]


def test_a_position_in_another_attempt_or_beyond_the_end_starts_again(served, run):
    run_id, write = run
    write(Belief("a", {"step": 1}))
    for after in ("7:0", "1:999999999"):
        assert seen(served.trainer.beliefs(run_id, after)) == [("a", {"step": 1})]


@pytest.mark.parametrize("query", ["after=x", "after=1:-5", "limit=0", "limit=1001"])
def test_bad_positions_and_limits_are_refused(served, run, query):
    assert served.ask("GET", f"/runs/{run[0]}/beliefs?{query}").status == 422


def test_an_unknown_run_is_refused(served):
    with pytest.raises(UnknownRun):
        served.trainer.beliefs("absent")
