"""Which run is launched next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.runs.supervisor.queue import HERE, Lease, QueuedRun, Slots, gpu_shortage, next_launches, waiting_reasons


def _launches(waiting, running, slots, **options):
    leases = {run_id: Lease(gpus) for run_id, gpus in running.items()}
    return {run_id: lease.gpus for run_id, lease in next_launches(waiting, leases, {HERE: slots}, **options).items()}


def _ids(*arguments, **options):
    return list(_launches(*arguments, **options))


def _reasons(waiting, running, slots, **options):
    leases = {run_id: Lease(gpus) for run_id, gpus in running.items()}
    return waiting_reasons(waiting, leases, {HERE: slots}, **options)


def test_higher_priority_first_then_first_come_first_served():
    waiting = [
        QueuedRun("late", 0, 3.0),
        QueuedRun("early", 0, 1.0),
        QueuedRun("urgent", 5, 9.0),
        QueuedRun("last", -1, 0.0),
    ]
    assert _ids(waiting, {}, Slots(10)) == ["urgent", "early", "late", "last"]


def test_no_more_than_the_limit_run_at_once():
    waiting = [QueuedRun(str(number), since=number) for number in range(5)]
    assert _ids(waiting, {"x": ()}, Slots(3)) == ["0", "1"]
    assert _ids(waiting, dict.fromkeys("xyz", ()), Slots(3)) == []
    # A limit that was lowered ends nothing; it starts nothing either.
    assert _ids(waiting, dict.fromkeys("vwxyz", ()), Slots(3)) == []


def test_nothing_starts_while_draining():
    assert _ids([QueuedRun("a")], {}, Slots(3), draining=True) == []


def test_every_gpu_belongs_to_one_run():
    waiting = [QueuedRun("two", since=1, gpus=2), QueuedRun("one", since=2, gpus=1)]
    assert _launches(waiting, {"x": ("1",)}, Slots(9, ("0", "1", "2", "3"))) == {
        "two": ("0", "2"),
        "one": ("3",),
    }


def test_small_gpu_runs_do_not_starve_a_large_one_but_others_go_past():
    waiting = [QueuedRun("large", since=1, gpus=2), QueuedRun("small", since=2, gpus=1), QueuedRun("none", since=3)]
    assert _ids(waiting, {"x": ("1",)}, Slots(9, ("0", "1"))) == ["none"]


@pytest.mark.parametrize(
    ("gpus", "have", "why"),
    [
        (0, (), ""),
        (2, ("0", "1"), ""),
        (1, (), "needs 1 GPU and this machine has none"),
        (3, ("0", "1"), "needs 3 GPUs and this machine has 2"),
    ],
)
def test_what_would_wait_for_ever_is_said(gpus, have, why):
    assert gpu_shortage(gpus, Slots(1, have)) == why


_waiting = st.lists(
    st.builds(QueuedRun, st.uuids().map(str), st.integers(-3, 3), st.floats(0, 9), st.integers(0, 3)), max_size=12
)


@given(_waiting, st.integers(1, 6), st.integers(0, 4))
def test_never_more_than_there_is_and_always_a_launch_when_there_is_room(waiting, limit, gpus):
    slots = Slots(limit, tuple(str(number) for number in range(gpus)))
    launches = _launches(waiting, {}, slots)
    leased_gpus = [gpu for leased in launches.values() for gpu in leased]
    assert len(launches) <= limit
    assert len(set(leased_gpus)) == len(leased_gpus) <= gpus
    assert all(len(launches[run.run_id]) == run.gpus for run in waiting if run.run_id in launches)
    if any(run.gpus == 0 for run in waiting):
        assert launches


def test_a_run_that_waits_is_told_what_for():
    waiting = [QueuedRun("a", since=1), QueuedRun("b", since=2)]
    assert _reasons(waiting, {"x": ()}, Slots(2)) == {"b": "waits for a slot (2 of 2 in use)"}
    assert _reasons(waiting, {}, Slots(2)) == {}
    assert set(_reasons(waiting, {}, Slots(2), draining=True).values()) == {
        "the service is draining: palaestra runs drain --off"
    }


def test_a_run_that_waits_for_gpus_is_told_how_many_are_free():
    waiting = [QueuedRun("large", since=1, gpus=2), QueuedRun("small", since=2, gpus=1)]
    assert _reasons(waiting, {"x": ("0",)}, Slots(9, ("0", "1"))) == {
        "large": "waits for 2 GPUs (1 of 2 free)",
        "small": "waits for 1 GPU (1 of 2 free, kept for a run before it)",
    }


def test_every_machine_has_slots_and_gpus_of_its_own():
    waiting = [
        QueuedRun("here", since=1),
        QueuedRun("box-1", since=2, gpus=1, machines=("box",)),
        QueuedRun("box-2", since=3, machines=("box",)),
        QueuedRun("either", since=4, machines=("box", "far")),
    ]
    machines = {HERE: Slots(1), "box": Slots(2, ("0",)), "far": Slots(1)}
    assert next_launches(waiting, {"x": Lease((), "box")}, machines) == {
        "here": Lease((), HERE),
        "box-1": Lease(("0",), "box"),
        "either": Lease((), "far"),
    }


def test_a_run_that_waits_is_told_which_machine_it_waits_for():
    machines = {HERE: Slots(1), "box": Slots(1, ("0", "1")), "far": Slots(3, problem="cannot be reached (refused)")}
    waiting = [
        QueuedRun("a", machines=("box",)),
        QueuedRun("b", machines=("far",)),
        QueuedRun("c", machines=("box", "far")),
    ]
    assert waiting_reasons(waiting, {"x": Lease((), "box")}, machines) == {
        "a": "waits for a slot on box (1 of 1 in use)",
        "b": "waits for far: cannot be reached (refused)",
        "c": "waits for a slot on box (1 of 1 in use); waits for far: cannot be reached (refused)",
    }
    gpus = {"box": Slots(2, ("0", "1"))}
    assert waiting_reasons([QueuedRun("g", gpus=2, machines=("box",))], {"x": Lease(("0",), "box")}, gpus) == {
        "g": "waits for 2 GPUs on box (1 of 2 free)"
    }


def test_a_large_gpu_run_reserves_the_machine_it_prefers_and_not_the_others():
    waiting = [
        QueuedRun("large", since=1, gpus=2, machines=("box", "far")),
        QueuedRun("small-box", since=2, gpus=1, machines=("box",)),
        QueuedRun("small-far", since=3, gpus=1, machines=("far",)),
    ]
    machines = {"box": Slots(9, ("0", "1")), "far": Slots(9, ("0", "1"))}
    running = {"x": Lease(("0",), "box"), "y": Lease(("0",), "far")}
    assert next_launches(waiting, running, machines) == {"small-far": Lease(("1",), "far")}
