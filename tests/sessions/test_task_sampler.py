"""Samplers draw what they should, and go on exactly where they were put away."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.actor.episode_source import EpisodeScheduler
from palaestra.errors import ConfigError
from palaestra.sessions.task_sampler import HELD_OUT, TRAINING_SEEDS, SamplerConfig, TaskChoice, TaskSampler, held_out

EASY, MIDDLE, HARD = (TaskChoice(task="click_target/button", params={"difficulty": rung}) for rung in (1, 2, 3))


def sampler(name, choices=(EASY, HARD), **more):
    return TaskSampler(choices, SamplerConfig(name=name, **more), seed=1)


def drawn(made, count=4000):
    return Counter(made.draw()[0].key for _ in range(count))


def test_a_task_is_counted_under_its_name_and_params():
    assert EASY.key == "click_target/button[difficulty=1]"
    assert TaskChoice(task="miniwob/click-test").key == "miniwob/click-test"


def test_a_weight_of_3_is_drawn_three_times_as_often():
    heavy = TaskChoice(task="miniwob/click-test", weight=3.0)
    counts = drawn(sampler("uniform", (EASY, heavy)))
    assert 0.72 < counts[heavy.key] / 4000 < 0.78


def test_error_weighting_draws_what_fails_and_keeps_a_tenth_for_what_is_solved():
    made = sampler("error_weighted", window=10)
    for _ in range(10):
        made.report(EASY.key, True)
        made.report(HARD.key, False)
    assert list(made.shares()) == [0.1, 1.0]
    assert made.success() == {EASY.key: 1.0, HARD.key: 0.0}


def test_a_curriculum_opens_the_next_task_at_80_percent_of_a_full_window():
    made = sampler("curriculum", (EASY, MIDDLE, HARD), window=5)
    assert list(made.shares()) == [1.0, 0.0, 0.0]
    for success in (True, True, True, True):
        made.report(EASY.key, success)
    assert made.rung == 0  # four of four, but the window is five
    made.report(EASY.key, False)
    assert made.rung == 1
    assert list(made.shares()) == [0.25, 0.75, 0.0]
    for _ in range(5):
        made.report(MIDDLE.key, True)
    assert made.rung == 2
    assert list(made.shares()) == [0.125, 0.125, 0.75]


def test_results_of_passed_tasks_do_not_open_the_next_one():
    made = sampler("curriculum", (EASY, MIDDLE, HARD), window=2)
    for key in (EASY.key, EASY.key, EASY.key, EASY.key, MIDDLE.key):
        made.report(key, True)
    assert made.rung == 1


def test_training_never_draws_a_held_out_seed():
    made = sampler("uniform")
    assert all(made.draw()[1].seed in TRAINING_SEEDS for _ in range(1000))
    requests = held_out((EASY, HARD), 5)
    assert [request.seed for _, request in requests] == list(HELD_OUT[:5])
    assert [choice.key for choice, _ in requests] == [EASY.key, HARD.key, EASY.key, HARD.key, EASY.key]
    assert TRAINING_SEEDS.stop <= HELD_OUT.start


def test_a_limited_number_of_seeds_is_used_again_and_again():
    made = sampler("uniform", seeds=3)
    assert {made.draw()[1].seed for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("name", ["uniform", "error_weighted", "curriculum"])
def test_a_sampler_goes_on_exactly_where_it_was_put_away(name):
    made = sampler(name, window=4)
    for number in range(30):
        choice, _ = made.draw()
        made.report(choice.key, number % 3 != 0)
    state = json.loads(json.dumps(made.state()))
    again = sampler(name, window=4)
    again.load_state(state)
    assert [again.draw() for _ in range(20)] == [made.draw() for _ in range(20)]
    assert again.success() == made.success()


def test_nothing_to_train_on_and_a_task_listed_twice_are_refused():
    with pytest.raises(ConfigError, match="no task is given"):
        sampler("uniform", ())
    with pytest.raises(ConfigError, match="is listed twice"):
        sampler("uniform", (EASY, EASY))


def report(made, key, successes, failures):
    for success in [True] * successes + [False] * failures:
        made.report(key, success)


def test_dynamic_sampling_keeps_the_weight_of_tasks_between_10_and_90_percent():
    made = sampler("dynamic", (EASY, MIDDLE, HARD), window=20, warmup=10, floor=0.25)
    assert list(made.shares()) == [1.0, 1.0, 1.0]
    report(made, EASY.key, 9, 0)
    assert list(made.shares()) == [1.0, 1.0, 1.0]  # nine results are fewer than ten
    report(made, EASY.key, 10, 1)  # 19 of 20
    report(made, MIDDLE.key, 9, 1)  # 90 % is inside
    report(made, HARD.key, 1, 19)  # 5 %
    assert list(made.shares()) == [0.25, 1.0, 0.25]
    report(made, HARD.key, 2, 0)  # 3 of the last 20
    assert list(made.shares()) == [0.25, 1.0, 1.0]
    assert list(sampler("dynamic", (TaskChoice(task="a/b", weight=3.0), EASY)).shares()) == [3.0, 1.0]


def test_dynamic_sampling_counts_at_most_a_window_for_the_warmup():
    made = sampler("dynamic", window=4, warmup=16)
    report(made, EASY.key, 4, 0)
    assert list(made.shares()) == [0.1, 1.0]


def test_a_lowest_rate_above_the_highest_is_refused():
    with pytest.raises(ConfigError, match=r"sampler.low = 0.9: is not below sampler.high, which is 0.5"):
        sampler("dynamic", low=0.9, high=0.5)


@given(
    results=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60),
    cut=st.integers(0, 60),
    name=st.sampled_from(["uniform", "error_weighted", "dynamic", "curriculum"]),
)
def test_every_sampler_goes_on_from_its_state_as_if_it_had_not_stopped(results, cut, name):
    tasks, settings = (EASY, MIDDLE, HARD), {"window": 6, "warmup": 3}

    def go_on(made, some):
        draws = []
        for task, success in some:
            made.report(tasks[task].key, success)
            draws.append(made.draw()[1])
        return draws

    whole, part = sampler(name, tasks, **settings), sampler(name, tasks, **settings)
    expected = go_on(whole, results)[cut:]
    go_on(part, results[:cut])
    resumed = TaskSampler(tasks, SamplerConfig(name=name, **settings), seed=9)
    resumed.load_state(json.loads(json.dumps(part.state())))
    assert go_on(resumed, results[cut:]) == expected


@pytest.mark.parametrize("name", ["dynamic", "curriculum"])
def test_members_of_a_group_share_a_task_also_when_the_sampler_moves_on_meanwhile(name):
    made = sampler(name, (EASY, HARD), window=4, warmup=4)
    scheduler = EpisodeScheduler(made, group_size=4, seed=1)
    keys = []
    for _ in range(10):
        group = [scheduler.next()]
        for _ in range(3):
            made.report(group[0].key, group[0].key == EASY.key)  # solved, and in the middle of the group
            group.append(scheduler.next())
        made.report(group[0].key, group[0].key == EASY.key)
        assert len({(one.task.task, one.task.seed, one.group, one.key) for one in group}) == 1
        keys.append(group[0].key)
    assert HARD.key in keys
    if name == "curriculum":
        assert keys[0] == EASY.key
        assert made.rung == 1


@pytest.mark.parametrize("first", [-1, 999_999_999])
def test_held_out_tasks_beyond_the_held_out_seeds_are_refused(first):
    with pytest.raises(ConfigError, match="from 0 to 999999998"):
        held_out([TaskChoice(task="click_target/button")], 2, first=first)
