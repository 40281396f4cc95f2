"""The newest records in memory."""

from palaestra.runs.ingest.stream import Ring
from palaestra.telemetry.event import LogLine, Record, TrainingStep


def records(*seqs):
    return [Record(seq, 0.0, LogLine("info", str(seq))) for seq in seqs]


def keys(found):
    return None if found is None else [keyed.key for keyed in found]


def test_a_follower_gets_what_came_since_it_last_looked():
    ring = Ring(10)
    ring.publish(1, records(1, 2, 3))
    assert keys(ring.since((1, 0))) == [(1, 1), (1, 2), (1, 3)]
    assert keys(ring.since((1, 2))) == [(1, 3)]
    assert keys(ring.since((1, 3))) == []


def test_one_that_fell_behind_is_sent_to_the_file_and_one_that_did_not_is_not():
    ring = Ring(3)
    ring.publish(1, records(*range(1, 7)))
    assert ring.since((1, 2)) is None
    assert keys(ring.since((1, 3))) == [(1, 4), (1, 5), (1, 6)]


def test_before_the_first_record_nothing_is_known():
    assert Ring(3).since((1, 0)) is None


def test_after_a_restart_it_knows_only_what_it_was_told():
    ring = Ring(10)
    ring.publish(2, records(50, 51))
    assert ring.since((1, 400)) is None
    assert ring.since((2, 48)) is None
    assert keys(ring.since((2, 49))) == [(2, 50), (2, 51)]


def test_attempts_follow_each_other():
    ring = Ring(10)
    ring.publish(1, records(8, 9))
    ring.publish(2, records(1, 2))
    assert keys(ring.since((1, 8))) == [(1, 9), (2, 1), (2, 2)]


def test_what_is_published_again_is_there_once():
    ring = Ring(10)
    ring.publish(1, records(1, 2, 3))
    ring.publish(1, records(2, 3, 4))
    assert keys(ring.since((1, 0))) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_followers_are_woken_once_per_publication_until_they_leave():
    ring, woken = Ring(10), []
    end = ring.subscribe(lambda: woken.append("a"))
    ring.subscribe(lambda: woken.append("b"))
    ring.publish(1, records(1, 2))
    end()
    end()
    ring.publish(1, records(3))
    assert woken == ["a", "b", "b"]


def test_records_of_many_numbers_are_kept_up_to_a_number_of_them():
    ring = Ring(10, max_values=100)
    metrics = {f"m{i}": 1.0 for i in range(40)}
    ring.publish(1, [Record(seq, 0.0, TrainingStep(seq, seq, metrics)) for seq in range(1, 6)])
    assert ring.since((1, 2)) is None
    assert keys(ring.since((1, 3))) == [(1, 4), (1, 5)]
    huge = {f"m{i}": 1.0 for i in range(400)}
    ring.publish(1, [Record(6, 0.0, TrainingStep(6, 6, huge))])
    assert keys(ring.since((1, 5))) == [(1, 6)]
    ring.publish(1, records(7, 8))
    assert keys(ring.since((1, 6))) == [(1, 7), (1, 8)]
