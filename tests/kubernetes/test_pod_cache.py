"""The cache of pods, tried with every order of news, and with news that was missed."""

import dataclasses
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from palaestra.gateway.pods.informer import ChangeKind, PodCache
from palaestra.gateway.pods.status import Failure, Pod


def pod(name="a", uid="1", **facts):
    fresh = Pod(
        name=name, uid=uid, version="1", instance="i", session_id="s", session_type="browser", ip="10.0.0.1",
        ready=False, failure=None, unschedulable=None, waiting_for="phase Pending", deleting=False,
    )  # fmt: skip
    return dataclasses.replace(fresh, **facts)


CRASHED = Failure("crashed", "exit code 1")


def kinds(changes):
    """Kind and uid of each change, with the state of a pod that is ready or failed."""
    return [
        (change.kind.value, change.pod.uid, *(["ready"] if change.pod.ready else []), *_reason(change.pod))
        for change in changes
    ]


def _reason(pod):
    return [] if pod.failure is None else [pod.failure.reason]


def test_a_pod_appears_gets_ready_fails_and_goes_each_reported_once():
    cache = PodCache()
    assert kinds(cache.update(pod())) == [("appeared", "1")]
    assert kinds(cache.update(pod())) == []
    assert kinds(cache.update(pod(ready=True))) == [("changed", "1", "ready")]
    assert kinds(cache.update(pod(failure=CRASHED))) == [("changed", "1", "crashed")]
    assert kinds(cache.update(pod(failure=Failure("deleted", "later")))) == []
    (gone,) = cache.remove("a")
    assert (gone.kind, gone.pod.failure) == (ChangeKind.GONE, CRASHED)
    assert cache.remove("a") == []


def test_what_failed_does_not_get_ready_again():
    cache = PodCache()
    cache.update(pod(failure=CRASHED))
    cache.update(pod(ready=True, version="2"))
    assert (cache.get("a").ready, cache.get("a").failure) == (False, CRASHED)


def test_a_pod_seen_for_the_first_time_as_ready_is_both_new_and_ready():
    assert kinds(PodCache().update(pod(ready=True))) == [("appeared", "1", "ready")]


def test_another_pod_of_the_same_name_is_another_pod():
    cache = PodCache()
    cache.update(pod(ready=True))
    assert kinds(cache.update(pod(uid="2"))) == [("gone", "1", "deleted"), ("appeared", "2")]


def test_a_list_tells_what_was_missed():
    cache = PodCache()
    cache.replace([pod("a", "1"), pod("b", "2"), pod("c", "3", ready=True)])
    changes = cache.replace([pod("a", "1", ready=True), pod("c", "3", failure=CRASHED), pod("d", "4")])
    assert kinds(changes) == [
        ("gone", "2", "deleted"),
        ("changed", "1", "ready"),
        ("changed", "3", "crashed"),
        ("appeared", "4"),
    ]


class MissedNews(RuleBasedStateMachine):
    """A cluster that changes, and a listener that gets its events, or nothing until the next list."""

    names = Bundle("names")

    def __init__(self):
        super().__init__()
        self.cache, self.truth, self.history, self.hears = PodCache(), {}, {}, True
        self.uids = 0

    def record(self, changes):
        for change in changes:
            self.history.setdefault(change.pod.uid, []).append(change)

    def happened(self, name):
        if self.hears:
            self.record(self.cache.update(self.truth[name]) if name in self.truth else self.cache.remove(name))

    @rule(target=names, name=st.sampled_from("abc"))
    def made(self, name):
        if name not in self.truth:
            self.uids += 1
            self.truth[name] = pod(name, str(self.uids))
            self.happened(name)
        return name

    @rule(name=names, ready=st.booleans())
    def changed(self, name, ready):
        if name in self.truth and self.truth[name].failure is None:
            self.truth[name] = dataclasses.replace(self.truth[name], ready=ready)
            self.happened(name)

    @rule(name=names)
    def failed(self, name):
        if name in self.truth:
            self.truth[name] = dataclasses.replace(self.truth[name], ready=False, failure=CRASHED)
            self.happened(name)

    @rule(name=names)
    def deleted(self, name):
        if self.truth.pop(name, None) is not None:
            self.happened(name)

    @rule()
    def stops_hearing(self):
        self.hears = False

    @rule()
    def lists(self):
        self.record(self.cache.replace(self.truth.values()))
        self.hears = True

    @invariant()
    def every_pod_is_reported_in_order_and_once(self):
        for changes in self.history.values():
            reported = [change.kind for change in changes]
            assert reported[0] is ChangeKind.APPEARED
            assert reported.count(ChangeKind.APPEARED) == 1
            assert ChangeKind.GONE not in reported[:-1]
            pods = [change.pod for change in changes if change.kind is not ChangeKind.GONE]
            assert all(before != after for before, after in pairwise(pods))
            assert len({change.pod.failure for change in changes if change.pod.failure is not None}) <= 1
            first = next((number for number, change in enumerate(changes) if change.pod.failure), len(changes))
            assert not any(change.pod.ready for change in changes[first:])

    @invariant()
    def the_listener_knows_exactly_what_exists(self):
        if self.hears:
            assert {one.name: one for one in self.cache} == self.truth
            present = {one.uid for one in self.truth.values()}
            known = {uid for uid, changes in self.history.items() if changes[-1].kind is not ChangeKind.GONE}
            assert known == present


TestMissedNews = MissedNews.TestCase
TestMissedNews.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
