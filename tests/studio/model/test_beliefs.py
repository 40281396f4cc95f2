"""The beliefs of a run over time: what is new, going back, following, and content of an unexpected kind."""

from palaestra.runs.record import BeliefHistory, BeliefRecord
from palaestra.studio.model.details import BeliefsModel, BeliefSnapshot, Intention


def record(seq, *beliefs, agent="walker", **more):
    return BeliefRecord(seq, float(seq), agent, {"beliefs": list(beliefs), **more})


def model_with(*records, attempt=1):
    model = BeliefsModel()
    model.open("run")
    model.add("run", BeliefHistory(records, f"{attempt}:100"), has_ended=False)
    return model


def test_a_snapshot_holds_what_the_agent_reported():
    snapshot = BeliefSnapshot.of(
        record(
            7,
            "at(3,4)",
            intentions=[{"goal": "reach(goal)", "plan": "walk"}],
            plan="walk",
            confidence=0.75,
            episode=2,
            step=11,
            q_values=[[0.5, 1], [0, 0]],
        )
    )
    assert snapshot.beliefs == ("at(3,4)",)
    assert snapshot.intentions == (Intention("reach(goal)", "walk"),)
    assert (snapshot.plan, snapshot.confidence, snapshot.moment) == ("walk", 0.75, "episode 2 · step 11")
    assert snapshot.q_values == ((0.5, 1.0), (0.0, 0.0))


def test_parts_of_an_unexpected_kind_are_left_out_and_other_agents_trees_are_shown():
    odd = BeliefRecord(1, 1.0, "a", {"door": "open", "intentions": 3, "confidence": "high", "q_values": [[1], [2, 3]]})
    snapshot = BeliefSnapshot.of(odd)
    assert snapshot.beliefs == ("door: open",)
    assert (snapshot.intentions, snapshot.confidence, snapshot.q_values, snapshot.moment) == ((), None, (), "")
    assert BeliefSnapshot.of(record(1, confidence=1.5)).confidence is None
    assert BeliefSnapshot.of(record(1, intentions=["wait"])).intentions == (Intention("wait", ""),)


def test_new_beliefs_are_those_that_the_same_agent_did_not_have_before():
    model = model_with(record(1, "a", "b"), record(2, "x", agent="other"), record(3, "b", "c"))
    assert model.new_beliefs() == {"c"}
    model.seek(0)
    assert model.new_beliefs() == frozenset()


def test_going_back_stays_there_while_new_records_arrive_and_the_end_follows_again():
    model = model_with(record(1, "a"), record(2, "b"))
    assert model.current.seq == 2
    model.seek(0)
    model.add("run", BeliefHistory((record(3, "c"),), "1:200"), has_ended=False)
    assert (model.current.seq, model.is_following, len(model)) == (1, False, 3)
    model.seek(99)
    model.add("run", BeliefHistory((record(4, "d"),), "1:300"), has_ended=False)
    assert (model.current.seq, model.is_following) == (4, True)


def test_the_newest_action_values_of_an_agent_stay_until_it_reports_others():
    model = model_with(record(1, q_values=[[1.0]]), record(2))
    assert model.q_values == ((1.0,),)


def test_a_resumed_attempt_begins_again_and_another_run_starts_empty():
    model = model_with(record(1, "a"), record(2, "b"))
    model.add("run", BeliefHistory((record(1, "z"),), "2:50"), has_ended=False)
    assert [model.current.beliefs, len(model)] == [("z",), 1]
    model.add("another", BeliefHistory((record(9, "y"),), "1:50"), has_ended=False)
    assert len(model) == 1
    model.open("another")
    assert (len(model), model.current, model.next) == (0, None, "")


def test_a_run_is_complete_when_nothing_followed_its_end():
    model = model_with(record(1, "a"))
    model.add("run", BeliefHistory((record(2, "b"),), "1:200"), has_ended=True)
    assert not model.is_complete
    model.add("run", BeliefHistory((), "1:200"), has_ended=True)
    assert model.is_complete


def test_of_very_many_snapshots_the_newest_thousand_are_kept():
    model = model_with(*(record(seq) for seq in range(1, 1003)))
    assert len(model) == 1000
    model.seek(0)
    assert model.current.seq == 3
