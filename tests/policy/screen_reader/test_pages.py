"""Synthetic pages: the same seed draws the same pages, and a goal's target is on its page."""

import hashlib
import random
import re

from palaestra.policy.screen_reader.pages import draw_page


def test_the_pages_of_a_seed_never_change():
    """A change here gives another model from the same recipe."""
    rng, digest = random.Random(1), hashlib.sha256()
    for _ in range(400):
        page = draw_page(rng)
        digest.update(page.html.encode())
        digest.update(repr(page.goals).encode())
    assert digest.hexdigest()[:16] == "0d4a24423815a06e"


def test_every_goal_says_one_thing_and_its_target_is_an_element():
    rng = random.Random(2)
    goals = 0
    for _ in range(300):
        page = draw_page(rng)
        for goal in page.goals:
            assert goal.instruction
            assert sum(map(bool, (goal.target, goal.text, goal.keys, goal.scroll))) == 1
            assert not goal.target or re.search(rf"id={goal.target}[ >]", page.html)
        goals += len(page.goals)
    assert goals > 250


def test_pages_of_text_alone_are_left_out_on_request():
    rng = random.Random(3)
    with_text = sum(not draw_page(rng).goals for _ in range(200))
    without = sum(not draw_page(rng, dense=False).goals for _ in range(200))
    assert with_text > 20 > without
