"""Turns that answer the same prompt go through the network together."""

from types import SimpleNamespace

import numpy as np

from palaestra.learner.trajectories.turn_order import by_prompt, minibatches


def turn(prompt, answer, picture="p"):
    ids = np.array(prompt, np.int32)
    own = SimpleNamespace(prompt_ids=ids, token_ids=np.array(answer, np.int32), pictures=(picture,))
    return SimpleNamespace(turn=own, input=None)


def sample(name, prompt, picture="p"):
    return SimpleNamespace(name=name, input=turn(prompt, [1], picture))


def test_short_prompts_come_first_and_equal_ones_together_short_answers_first():
    turns = [turn([1, 2, 3], [9, 9]), turn([5, 6], [9]), turn([1, 2, 4], [9]), turn([1, 2, 3], [9]), turn([5, 6], [9])]
    order = by_prompt(turns)
    assert order[:2] == [1, 4]
    assert order.index(3) + 1 == order.index(0)


def test_the_same_words_about_another_picture_are_another_prompt():
    turns = [turn([1], [9], "a"), turn([1], [9], "b"), turn([1], [9], "a")]
    assert by_prompt(turns) == [0, 2, 1]


def test_minibatches_are_equal_and_keep_answers_to_one_prompt_together():
    samples = [sample(f"{group}{member}", [group]) for member in range(4) for group in range(8)]
    parts = minibatches(samples, 4, np.random.default_rng(0))
    assert [len(part) for part in parts] == [8, 8, 8, 8]
    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in samples)
    for part in parts:
        assert len({one.name[0] for one in part}) == 2


def test_another_draw_is_another_order():
    samples = [sample(str(number), [number]) for number in range(16)]
    orders = [[one.name for one in minibatches(samples, 1, np.random.default_rng(seed))[0]] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_parts_of_samples_that_do_not_divide_differ_by_at_most_one():
    samples = [sample(str(number), [number]) for number in range(10)]
    assert sorted(len(part) for part in minibatches(samples, 4, np.random.default_rng(0))) == [2, 2, 3, 3]
