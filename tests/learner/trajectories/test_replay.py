"""Past successes: what is kept, for how long, and what they are used for."""

import numpy as np
import pytest
from tests.learner.trajectories.toy import episode, turn

from palaestra.experience.groups import unpack_trajectories
from palaestra.experience.trajectory import Outcome
from palaestra.learner.trajectories.replay import ReplayConfig, SuccessReplay


def success(name, seed=7, version=0, **more):
    return episode(turn(reward=1.0, version=version), name=name, seed=seed, **more)


def failure(name, seed=7, version=0, **more):
    return episode(turn(reward=0.0, version=version), name=name, seed=seed, **more)


def names(group):
    return [one.episode_id for one in group]


def replay(**settings):
    return SuccessReplay(ReplayConfig(**({"fill_groups": True} | settings)))


def test_only_successes_are_kept_and_only_if_somebody_asked_for_replay():
    kept, unwanted = replay(), SuccessReplay()
    for one in (success("a"), failure("b"), success("c", outcome=Outcome.ENVIRONMENT_FAILED)):
        kept.add(one)
        unwanted.add(one)
    assert (len(kept), len(unwanted)) == (1, 0)


def test_the_oldest_member_of_a_group_of_failures_gives_way_to_the_newest_success_of_that_start():
    store = replay()
    for one in (success("first"), success("second"), success("elsewhere", seed=8)):
        store.add(one)
    group = [failure("x", version=3, group="g"), failure("y", version=2, group="g"), failure("z", version=3, group="g")]
    filled = store.fill_group(group, version=3)
    assert names(filled) == ["x", "second", "z"]
    assert [one.group for one in filled] == ["g", "g", "g"]
    assert filled[1].turns[0].versions.tolist() == [0, 0]
    assert names(group) == ["x", "y", "z"]


def test_a_group_with_a_success_of_its_own_and_one_of_a_new_start_stay_as_they_are():
    store = replay()
    store.add(success("old"))
    assert names(store.fill_group([failure("x"), success("y")], version=0)) == ["x", "y"]
    assert names(store.fill_group([failure("x", seed=9), failure("y", seed=9)], version=0)) == ["x", "y"]
    assert names(store.fill_group([failure("alone")], version=0)) == ["alone"]


def test_the_newest_are_kept_per_start_and_per_task():
    store = replay(per_start=2, per_task=3)
    for number, seed in enumerate((1, 1, 1, 2, 3)):
        store.add(success(str(number), seed=seed))
    assert len(store) == 3
    assert names(store.fill_group([failure("x", seed=1), failure("y", seed=1)], version=0))[0] == "2"
    assert sorted(one.episode_id for one in store._kept["toy/add"]) == ["2", "3", "4"]


def test_a_success_too_many_versions_old_is_forgotten():
    store = replay(max_age=4)
    store.add(success("old", version=1))
    assert names(store.fill_group([failure("x"), failure("y")], version=5))[0] == "old"
    assert names(store.fill_group([failure("x"), failure("y")], version=6))[0] == "x"
    assert len(store) == 0


def test_a_share_of_one_half_doubles_three_fresh_episodes_and_never_repeats_one():
    store = replay(share=0.5)
    for number in range(10):
        store.add(success(f"old{number}", seed=number))
    fresh = [success("a", seed=20), success("b", seed=21), success("old0", seed=0)]
    drawn = names(store.draw(fresh, version=0, rng=np.random.default_rng(0)))
    assert len(drawn) == len(set(drawn)) == 3
    assert "old0" not in drawn
    assert store.draw([], version=0, rng=np.random.default_rng(0)) == []


def test_what_is_kept_survives_a_checkpoint_in_its_order():
    store, again = replay(), replay()
    for number, seed in enumerate((1, 1, 2)):
        store.add(success(str(number), seed=seed, version=number))
    again.restore(store.tensors())
    assert len(again) == 3
    for seed, newest in ((1, "1"), (2, "2")):
        group = [failure("x", seed=seed), failure("y", seed=seed)]
        assert newest in names(again.fill_group(group, version=2))
    assert names(unpack_trajectories(again.tensors(), "replay")) == ["0", "1", "2"]
    assert [one.versions for one in unpack_trajectories(again.tensors(), "replay")] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("settings", [{"share": 1.0}, {"per_start": 0}, {"max_age": -1}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ReplayConfig(**settings)
