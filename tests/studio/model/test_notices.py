import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.studio.model.notices import Notices


class Clock:
    """A clock that the test turns."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def notices(clock):
    return Notices(clock)


def _texts(notices):
    return [notice.text for notice in notices.visible()]


@pytest.mark.parametrize(("level", "seconds"), [("info", 5), ("success", 5), ("warning", 10), ("error", 20)])
def test_a_notice_fades_after_the_time_of_its_level(notices, clock, level, seconds):
    notices.add(level, "text")
    clock.now += seconds - 0.1
    assert _texts(notices) == ["text"]
    before = notices.revision
    clock.now += 0.1

    assert _texts(notices) == []
    assert notices.revision == before + 1


def test_a_lasting_notice_stays_until_it_is_dismissed(notices, clock):
    notices.add("error", "The service does not answer.", key="connection", lasting=True)
    clock.now += 10_000
    assert _texts(notices) == ["The service does not answer."]

    notices.dismiss(key="connection")

    assert _texts(notices) == []


def test_a_lasting_notice_does_not_give_way_to_those_that_fade(notices):
    notices.add("error", "lasting", lasting=True)
    for number in range(20):
        notices.add("info", f"{number}")

    assert _texts(notices) == ["lasting", "16", "17", "18", "19"]
    for number in range(5):
        notices.add("error", f"lasting {number}", lasting=True)
    assert _texts(notices) == [f"lasting {number}" for number in range(5)]


def test_a_newer_notice_with_the_same_key_replaces_the_old_one_and_comes_last(notices):
    notices.add("info", "Encoding …", key="export")
    notices.add("info", "other")
    notices.add("success", "Saved.", key="export")

    assert _texts(notices) == ["other", "Saved."]
    assert [notice.text for notice in notices.history] == ["Encoding …", "other", "Saved."]


def test_a_repetition_starts_the_time_again_and_is_one_entry_of_the_history(notices, clock):
    notices.add("info", "text")
    clock.now += 4
    notices.add("info", "text")
    clock.now += 4
    assert _texts(notices) == ["text"]
    assert len(notices.history) == 1
    clock.now += 4
    assert _texts(notices) == []

    notices.add("info", "text")

    assert len(notices.history) == 2


def test_the_same_text_at_another_level_is_another_notice(notices):
    notices.add("info", "text")
    notices.add("error", "text", "detail")

    assert [(notice.level, notice.detail) for notice in notices.visible()] == [("info", ""), ("error", "detail")]


def test_one_of_several_is_dismissed_by_its_number(notices):
    for text in "abc":
        notices.add("info", text)
    notices.dismiss(number=notices.visible()[1].number)
    assert _texts(notices) == ["a", "c"]
    before = notices.revision
    notices.dismiss(number=999)
    notices.dismiss(key="zzz")
    notices.dismiss()

    assert (_texts(notices), notices.revision) == (["a", "c"], before)


def test_an_action_comes_with_its_notice(notices):
    performed = []
    notices.add("info", "Deleted.", action="Undo", perform=lambda: performed.append(1))
    (notice,) = notices.visible()
    notice.perform()

    assert (notice.action, performed) == ("Undo", [1])


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["info", "success", "warning", "error"]),
        st.sampled_from("abcdefgh"),
        st.sampled_from(["", "key 1", "key 2"]),
        st.booleans(),
        st.floats(0, 12),
    ),
    max_size=60,
)


@given(events=_EVENTS)
def test_at_most_five_are_shown_the_newest_always_is_and_each_fades_by_its_level(events):
    clock = Clock()
    notices = Notices(clock)
    times = {"info": 5, "success": 5, "warning": 10, "error": 20}
    for level, text, key, lasting, pause in events:
        notices.add(level, text, key=key, lasting=lasting)
        visible = notices.visible()
        assert visible[-1].text == text
        assert len(visible) <= 5
        assert len({notice.key for notice in visible}) == len(visible)
        assert [notice.number for notice in visible] == sorted(notice.number for notice in visible)
        clock.now += pause
        for notice in notices.visible():
            assert notice.lasting or clock.now - notice.created < times[notice.level]
    clock.now += 1000

    assert all(notice.lasting for notice in notices.visible())


def test_the_history_is_bounded_and_keeps_the_newest(notices):
    for number in range(300):
        notices.add("info", f"{number}")

    assert [notices.history[0].text, notices.history[-1].text, len(notices.history)] == ["100", "299", 200]
