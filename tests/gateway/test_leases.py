"""Leases: every session is in one state, none is forgotten, and a lease runs out exactly when its clock says so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.leases import MAX_REMEMBERED, LeaseState, LeaseTable


def _leased(table, session_id="a", ttl_s=60.0, now=0.0):
    table.reserve(session_id, "browser", ttl_s, now)
    return table.mark_opened(session_id, now)


def _refusal(doing, *arguments):
    with pytest.raises(SessionRefused) as caught:
        doing(*arguments)
    return caught.value


def test_a_lease_of_60_s_holds_just_before_60_s_and_not_at_60_s():
    table = LeaseTable(1)
    _leased(table)

    assert table.expire(math.nextafter(60.0, 0.0)) == []
    assert table.expire(60.0) == ["a"]
    assert table.expire(60.0) == []  # it is being removed already


def test_a_request_after_the_end_is_refused_even_before_the_reaper_came_by():
    table = LeaseTable(1)
    _leased(table)

    refusal = _refusal(table.begin_request, "a", 60.0)

    assert (refusal.status, refusal.code) == (404, "no_session")
    assert "lease expired" in str(refusal)
    assert table.expire(60.0) == ["a"]


def test_a_request_renews_the_lease_from_its_end():
    table = LeaseTable(1)
    lease = _leased(table, ttl_s=10.0)

    table.begin_request("a", 5.0)
    table.end_request(lease, 8.0)

    assert table.next_expiry() == 18.0
    assert table.expire(17.9) == []
    assert table.expire(18.0) == ["a"]


def test_a_lease_does_not_run_out_under_a_request():
    table = LeaseTable(1)
    lease = _leased(table, ttl_s=10.0)

    table.begin_request("a", 5.0)

    assert table.expire(1000.0) == []
    assert table.next_expiry() == math.inf
    table.end_request(lease, 1000.0)
    assert table.expire(1009.0) == []
    assert table.expire(1010.0) == ["a"]


def test_renewing_can_shorten_a_lease():
    table = LeaseTable(1)
    _leased(table, ttl_s=60.0)

    table.renew("a", 5.0, 1.0)

    assert table.expire(5.9) == []
    assert table.expire(6.0) == ["a"]


def test_the_term_begins_when_the_session_is_there_not_when_it_was_asked_for():
    table = LeaseTable(1)
    table.reserve("a", "browser", 10.0, 0.0)

    assert table.expire(50.0) == []
    table.mark_opened("a", 50.0)
    assert table.next_expiry() == 60.0


def test_the_seventeenth_of_sixteen_is_refused_with_a_time_to_retry():
    table = LeaseTable(16)
    for number in range(16):
        _leased(table, str(number), ttl_s=10.0 + number)

    refusal = _refusal(table.reserve, "17", "browser", 60.0, 3.5)

    assert (refusal.status, refusal.code) == (429, "no_room")
    assert refusal.retry_after == 5.0  # the first ends in 6.5 s, but may well be closed before
    assert _refusal(table.reserve, "17", "browser", 60.0, 7.5).retry_after == 3.0  # 2.5 s, in whole seconds
    table.close("8", 7.5)
    assert _refusal(table.reserve, "17", "browser", 60.0, 7.5).retry_after == 1.0  # one is being removed


def test_a_session_keeps_its_place_until_it_is_really_removed():
    table = LeaseTable(1)
    _leased(table)
    assert table.close("a", 1.0)

    assert _refusal(table.reserve, "b", "browser", 60.0, 1.0).status == 429
    table.mark_removed("a")
    table.reserve("b", "browser", 60.0, 1.0)


def test_a_lost_session_frees_its_place_and_says_why_for_one_more_lease():
    table = LeaseTable(1)
    _leased(table, ttl_s=10.0)

    assert table.mark_lost("a", "its server was killed", 4.0)

    assert table.num_active == 0
    with pytest.raises(SessionFailed, match="session_lost: its server was killed"):
        table.begin_request("a", 13.9)
    assert table.expire(14.0) == []
    assert "a" not in table
    assert "its server was killed" in str(_refusal(table.begin_request, "a", 14.0))


def test_closing_a_lost_session_leaves_nothing_to_remove():
    table = LeaseTable(1)
    _leased(table)
    table.mark_lost("a", "gone", 1.0)

    assert table.close("a", 2.0) is False
    assert len(table) == 0


def test_a_session_lost_while_it_is_closed_is_simply_removed():
    table = LeaseTable(1)
    _leased(table)
    table.close("a", 1.0)

    assert table.mark_lost("a", "gone", 1.0) is False
    table.mark_removed("a")
    assert len(table) == 0


def test_a_session_lost_while_it_opens_fails_its_opening():
    table = LeaseTable(1)
    table.reserve("a", "browser", 10.0, 0.0)
    table.mark_lost("a", "gone", 0.0)

    with pytest.raises(SessionFailed, match="gone"):
        table.mark_opened("a", 0.0)
    assert len(table) == 0


def test_an_opening_that_failed_frees_its_place():
    table = LeaseTable(1)
    table.reserve("a", "browser", 10.0, 0.0)

    table.mark_failed("a")

    assert (len(table), table.num_active) == (0, 0)


def test_what_is_still_opening_can_be_neither_used_nor_closed():
    table = LeaseTable(1)
    table.reserve("a", "browser", 10.0, 0.0)

    assert _refusal(table.begin_request, "a", 0.0).status == 409
    assert _refusal(table.close, "a", 0.0).status == 409
    assert _refusal(table.renew, "a", 5.0, 0.0).status == 409


def test_an_id_is_never_used_twice():
    table = LeaseTable(2)
    _leased(table)

    with pytest.raises(ValueError, match="used once"):
        table.reserve("a", "browser", 10.0, 0.0)


def test_an_impossible_event_is_an_error_of_ours():
    table = LeaseTable(1)
    _leased(table)

    with pytest.raises(ValueError, match="the event 'opened' cannot happen to a session that is leased"):
        table.mark_opened("a", 0.0)


def test_what_is_gone_is_remembered_up_to_a_bound():
    table = LeaseTable(1)
    for number in range(MAX_REMEMBERED + 1):
        _leased(table, str(number))
        table.close(str(number), 0.0)
        table.mark_removed(str(number))

    assert "there is no session '0'" in str(_refusal(table.begin_request, "0", 0.0))
    assert "it was closed" in str(_refusal(table.begin_request, "1", 0.0))


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=20))
def test_leases_run_out_in_the_order_of_their_ends(terms):
    table = LeaseTable(len(terms))
    for number, ttl_s in enumerate(terms):
        _leased(table, str(number), ttl_s)

    removed = []
    while table.next_expiry() < math.inf:
        removed += table.expire(table.next_expiry())

    assert [terms[int(name)] for name in removed] == sorted(terms)


class Interleavings(RuleBasedStateMachine):
    """Clients, the runtime, deaths and the clock in any order, beside a model that is a dictionary."""

    LIMIT = 4

    @initialize()
    def begin(self):
        self.table, self.now, self.numbers = LeaseTable(self.LIMIT), 0.0, 0
        self.state, self.ends, self.uses, self.leases = {}, {}, {}, {}

    def _in(self, *states):
        return sorted(name for name, state in self.state.items() if state in states)

    def _any(self, data, *states):
        return data.draw(st.sampled_from(self._in(*states)))

    def _run_out(self, name):
        """What the clock alone does to a session as soon as it is looked up."""
        if self.now >= self.ends[name] and not self.uses[name]:
            if self.state[name] == "leased":
                self.state[name] = "expired"
            elif self.state[name] == "lost":
                del self.state[name]

    @rule(ttl_s=st.sampled_from([1.0, 2.0, 5.0]))
    def admit(self, ttl_s):
        name = str(self.numbers)
        self.numbers += 1
        if len(self._in("opening", "leased", "expired", "closing")) >= self.LIMIT:
            with pytest.raises(SessionRefused):
                self.table.reserve(name, "browser", ttl_s, self.now)
            return
        self.leases[name] = self.table.reserve(name, "browser", ttl_s, self.now)
        self.state[name], self.ends[name], self.uses[name] = "opening", self.now + ttl_s, 0

    @precondition(lambda self: self._in("opening"))
    @rule(data=st.data(), well=st.booleans())
    def open(self, data, well):
        name = self._any(data, "opening")
        if well:
            self.table.mark_opened(name, self.now)
            self.state[name], self.ends[name] = "leased", self.now + self.leases[name].ttl_s
        else:
            self.table.mark_failed(name)
            del self.state[name]

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def use(self, data):
        name = self._any(data, *LeaseState)
        self._run_out(name)
        if self.state.get(name) == "leased":
            self.table.begin_request(name, self.now)
            self.uses[name] += 1
        else:
            with pytest.raises((SessionRefused, SessionFailed)):
                self.table.begin_request(name, self.now)

    @precondition(lambda self: any(self.uses.values()))
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(name for name, uses in self.uses.items() if uses)))
        self.table.end_request(self.leases[name], self.now)
        self.uses[name] -= 1
        if self.state.get(name) == "leased":
            self.ends[name] = self.now + self.leases[name].ttl_s

    @precondition(lambda self: self._in("leased", "lost"))
    @rule(data=st.data())
    def close(self, data):
        name = self._any(data, "leased", "lost")
        self._run_out(name)
        if self.state.get(name) == "leased":
            assert self.table.close(name, self.now)
            self.state[name] = "closing"
        elif self.state.get(name) == "lost":
            assert not self.table.close(name, self.now)
            del self.state[name]
        else:
            with pytest.raises(SessionRefused):
                self.table.close(name, self.now)

    @precondition(lambda self: self._in("closing"))
    @rule(data=st.data())
    def removed(self, data):
        name = self._any(data, "closing")
        self.table.mark_removed(name)
        del self.state[name]

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def die(self, data):
        name = self._any(data, *LeaseState)
        was = self.state[name]
        assert self.table.mark_lost(name, "died", self.now) == (was in ("opening", "leased"))
        if was in ("opening", "leased"):
            self.state[name], self.ends[name] = "lost", self.now + self.leases[name].ttl_s
        elif was in ("expired", "closing"):
            del self.state[name]
        if self.state.get(name) == "lost" and was == "opening":
            with pytest.raises(SessionFailed):
                self.table.mark_opened(name, self.now)
            del self.state[name]

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 10.0]))
    def tick(self, seconds):
        self.now += seconds
        for name in list(self.state):
            self._run_out(name)
        expired = self._in("expired")
        assert sorted(self.table.expire(self.now)) == expired
        for name in expired:
            self.state[name] = "closing"

    @invariant()
    def every_session_is_in_exactly_the_state_it_should_be_in(self):
        assert {lease.session_id: str(lease.state) for lease in self.table} == self.state
        assert self.table.num_active <= self.LIMIT
        assert sum(self.table.count_by_state().values()) == len(self.state)

    def teardown(self):
        """Left alone, every session comes to an end: none is leaked."""
        for name in self._in("opening"):
            self.table.mark_failed(name)
        for name, uses in self.uses.items():
            for _ in range(uses):
                self.table.end_request(self.leases[name], self.now)
        for name in [*self.table.expire(self.now + 100.0), *self._in("closing")]:
            self.table.mark_removed(name)
        assert len(self.table) == 0
        assert self.table.next_expiry() == math.inf


test_any_interleaving_keeps_every_session_in_one_state_and_leaks_none = Interleavings.TestCase
