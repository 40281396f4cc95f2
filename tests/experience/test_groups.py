"""Groups: everything that comes in leaves exactly once, whole groups together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.learner.trajectories.toy import episode

from palaestra.errors import ExperienceError
from palaestra.experience.groups import Groups, whole_groups


def names(group):
    return [one.episode_id for one in group]


def test_a_group_of_three_leaves_when_its_third_member_comes():
    groups = Groups(3)
    assert groups.add(episode(name="a1", group="a")) == []
    assert groups.add(episode(name="b1", group="b")) == []
    assert groups.add(episode(name="a2", group="a")) == []
    assert len(groups) == 3
    assert names(groups.add(episode(name="a3", group="a"))) == ["a1", "a2", "a3"]
    assert len(groups) == 1


def test_a_lost_member_is_not_waited_for():
    groups = Groups(3)
    groups.add(episode(name="a1", group="a"))
    assert groups.mark_lost("a") == []
    assert names(groups.add(episode(name="a2", group="a"))) == ["a1", "a2"]


def test_a_member_that_comes_after_it_was_given_up_leaves_alone():
    groups = Groups(2)
    groups.mark_lost("a")
    assert names(groups.add(episode(name="a1", group="a"))) == ["a1"]
    assert names(groups.add(episode(name="a2", group="a"))) == ["a2"]
    assert len(groups) == 0


def test_episodes_without_a_group_are_collected_by_their_start_again_and_again():
    groups = Groups(2)
    for _ in range(2):
        assert groups.add(episode(name="x", seed=1)) == []
        assert groups.add(episode(name="z", seed=2)) == []
        assert names(groups.add(episode(name="y", seed=1))) == ["x", "y"]
        assert names(groups.add(episode(name="w", seed=2))) == ["z", "w"]


def test_a_group_has_a_member():
    with pytest.raises(ExperienceError, match="at least one member"):
        Groups(0)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["come", "come", "come", "lose"]), st.sampled_from("abc")), max_size=40),
)
def test_every_trajectory_leaves_exactly_once(size, events):
    groups, entered, left = Groups(size), [], []
    for number, (what, group) in enumerate(events):
        if what == "lose":
            released = groups.mark_lost(group)
        else:
            entered.append(str(number))
            released = groups.add(episode(name=str(number), group=group))
        assert len({one.group for one in released}) <= 1
        assert len(released) <= size
        left += names(released)
    assert len(groups) == len(entered) - len(left)
    assert sorted(names(groups.waiting())) == sorted(set(entered) - set(left))
    for rest in groups.drain():
        left += names(rest)
    assert sorted(left) == sorted(entered)
    assert len(groups) == 0


def test_a_batch_is_made_of_whole_groups():
    made = [episode(name=name, group=name[0]) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    batch, rest = whole_groups(made, 4)
    assert (names(batch), names(rest)) == (["a1", "a2", "a3", "b1", "b2"], ["c1"])
    assert [names(part) for part in whole_groups(made, 3)] == [["a1", "a2", "a3"], ["b1", "b2", "c1"]]
    assert [len(part) for part in whole_groups(made, 99)] == [6, 0]
