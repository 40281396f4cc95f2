"""Turns that answer the same prompt go through the network together."""

from types import SimpleNamespace

import numpy as np

from palaestra.learner.trajectories.scoring import split_microbatches
from palaestra.learner.trajectories.update import split_minibatches


def turn(prompt, answer, picture="p"):
    ids = np.array(prompt, np.int32)
    own = SimpleNamespace(prompt_ids=ids, token_ids=np.array(answer, np.int32), pictures=(picture,))
    return SimpleNamespace(turn=own)


def split(prompts, count, seed=0):
    """The minibatches of one sample for each named prompt."""
    samples = [SimpleNamespace(name=name, turn=number) for number, name in enumerate(prompts)]
    turns = [turn(prompt, [1]) for prompt in prompts.values()]
    return split_minibatches(samples, turns, count, np.random.default_rng(seed))


def test_short_prompts_come_first_and_equal_ones_together_short_answers_first():
    turns = [turn([1, 2, 3], [9, 9]), turn([5, 6], [9]), turn([1, 2, 4], [9]), turn([1, 2, 3], [9]), turn([5, 6], [9])]
    (order,) = split_microbatches(turns, size=len(turns))
    assert order[:2] == [1, 4]
    assert order.index(3) + 1 == order.index(0)


def _padding_share(turns, parts):
    """Share of padding in the forward passes, each as wide as its longest turn."""
    lengths = [len(one.turn.prompt_ids) + len(one.turn.token_ids) for one in turns]
    widths = [max(lengths[place] for place in part) * len(part) for part in parts]
    return 1 - sum(lengths) / sum(widths)


def test_short_clicks_are_not_padded_to_the_length_of_typed_replies():
    rng = np.random.default_rng(0)
    replies = [int(rng.integers(60, 120)) if rng.random() < 0.3 else int(rng.integers(6, 12)) for _ in range(64)]
    turns = [turn([number] * int(rng.integers(145, 153)), [9] * length) for number, length in enumerate(replies)]
    parts = split_microbatches(turns, size=8)
    assert sorted(place for part in parts for place in part) == list(range(64))
    by_prompt = sorted(range(64), key=lambda place: len(turns[place].turn.prompt_ids))
    assert _padding_share(turns, [by_prompt[start : start + 8] for start in range(0, 64, 8)]) > 0.2
    assert _padding_share(turns, parts) < 0.05


def test_a_group_stays_together_when_its_replies_differ_in_length():
    group = [turn([7] * 20, [9] * length) for length in (40, 5, 30, 6)]
    others = [turn([number] * 20, [9] * 8) for number in range(4)]
    assert split_microbatches([*group, *others], size=4) == [[4, 5, 6, 7], [1, 3, 2, 0]]


def test_the_same_words_about_another_picture_are_another_prompt():
    turns = [turn([1], [9], "a"), turn([1], [9], "b"), turn([1], [9], "a")]
    assert split_microbatches(turns, size=3) == [[0, 2, 1]]


def test_minibatches_are_equal_and_keep_answers_to_one_prompt_together():
    prompts = {f"{group}{member}": [group] for member in range(4) for group in range(8)}
    parts = split(prompts, 4)
    assert [len(part) for part in parts] == [8, 8, 8, 8]
    assert sorted(one.name for part in parts for one in part) == sorted(prompts)
    for part in parts:
        assert len({one.name[0] for one in part}) == 2


def test_another_draw_is_another_order():
    prompts = {str(number): [number] for number in range(16)}
    orders = [[one.name for one in split(prompts, 1, seed)[0]] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_parts_of_samples_that_do_not_divide_differ_by_at_most_one():
    prompts = {str(number): [number] for number in range(10)}
    assert sorted(len(part) for part in split(prompts, 4)) == [2, 2, 3, 3]
