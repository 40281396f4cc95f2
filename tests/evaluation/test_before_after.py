"""The picture and the clip of an episode before and after show the right episode, and the click where it was."""

import hashlib

import pytest
from PIL import Image
from tests.evaluation.test_screens import E, F, S, T, compared
from tests.experience.episodes import HEIGHT, SHA, WIDTH, episode, png, turn

from palaestra.evaluation import before_after
from palaestra.evaluation.before_after import EpisodePair, choose_pair, draw_frames, draw_picture
from palaestra.experience.trajectory import Outcome

PANEL = (3 * WIDTH, 3 * HEIGHT)
"""The largest whole multiple of the screen that fits 480 by 420 pixels."""
TOP = before_after.MARGIN + before_after.HEADING + before_after.ROW_TITLE


def make_pair(*, before=1, after=1, last=SHA):
    return EpisodePair(
        episode(*[turn()] * before, outcome=Outcome.TRUNCATED, last_picture=last),
        episode(*[turn()] * after, outcome=Outcome.SUCCESS, last_picture=last),
    )


@pytest.mark.parametrize(
    ("a", "b", "seed"),
    [
        ([S, F, S, S], [S, S, F, F], 2),
        ([S, S], [T, F], 0),
        ([F, S], [F, S], 0),
        ([S, F, S], [E, F, F], 2),
    ],
    ids=["first that only A solved", "first seed", "none, so the first", "not one without a session"],
)
def test_the_first_episode_that_only_the_trained_policy_solved_is_chosen(a, b, seed):
    chosen = choose_pair(compared(a, b))
    assert [entry.seed for entry in chosen] == [seed, seed]


def test_without_pairs_there_is_nothing_to_choose():
    assert choose_pair(compared([], [])) is None


def test_a_pair_shows_an_improvement_only_if_the_second_alone_solved_it():
    pair = make_pair()
    assert pair.shows_improvement
    assert not EpisodePair(pair.after, pair.after).shows_improvement
    assert not EpisodePair(pair.after, pair.before).shows_improvement


def test_of_a_long_episode_the_first_and_the_last_steps_are_drawn():
    assert before_after.select_steps(3, 8) == [0, 1, 2]
    assert before_after.select_steps(8, 8) == list(range(8))
    assert before_after.select_steps(60, 5) == [0, 1, 2, 58, 59]
    assert before_after.select_steps(60, 1) == [0]


@pytest.mark.parametrize(
    ("screen", "panel"),
    [((160, 210), (320, 420)), ((160, 120), PANEL), ((1280, 720), (480, 270)), ((600, 9), (480, 7))],
)
def test_a_small_screen_is_enlarged_by_a_whole_number_and_a_large_one_is_made_to_fit(screen, panel):
    assert before_after.panel_size(screen) == panel


@pytest.mark.parametrize(("before", "after", "columns"), [(1, 1, 2), (2, 5, 6), (20, 1, before_after.MAX_STEPS + 1)])
def test_the_picture_has_a_row_per_policy_and_a_column_per_step_and_end(before, after, columns):
    picture = draw_picture(make_pair(before=before, after=after))
    width = 2 * before_after.MARGIN + columns * PANEL[0] + (columns - 1) * before_after.GAP
    row = before_after.ROW_TITLE + PANEL[1] + before_after.CAPTION
    assert picture.size == (width, 2 * before_after.MARGIN + before_after.HEADING + 2 * row)


def test_the_click_is_marked_where_it_was_in_its_step_and_not_in_the_final_screen():
    picture = draw_picture(make_pair())
    x, y = before_after.mark_place((60, 35), (WIDTH, HEIGHT))
    assert (x, y) == (181, 106)  # the middle of the nine pixels that show (60, 35)
    second = TOP + before_after.ROW_TITLE + PANEL[1] + before_after.CAPTION
    for top in (TOP, second):
        assert picture.getpixel((before_after.MARGIN + x, top + y)) == before_after.MARK
        final = before_after.MARGIN + PANEL[0] + before_after.GAP
        assert picture.getpixel((final + x, top + y)) == (40, 110, 200)


def test_a_drag_is_marked_along_its_path_and_typing_marks_nothing():
    drag = turn(action={"kind": "drag", "path": [[20, 80], [120, 80]]})
    typing = turn(action={"kind": "type", "text": "Rosa"})
    picture = draw_picture(EpisodePair(episode(drag), episode(typing)))
    x, y = before_after.mark_place((70, 80), (WIDTH, HEIGHT))
    assert picture.getpixel((before_after.MARGIN + x, TOP + y)) == before_after.MARK
    second = picture.crop((0, picture.height // 2, *picture.size))
    assert before_after.MARK not in {colour for _, colour in second.getcolors(10**6)}


def test_the_clip_shows_both_episodes_until_the_longer_one_has_ended(tmp_path):
    frames = draw_frames(make_pair(before=4, after=2))
    assert [seconds for _, seconds in frames] == [before_after.FRAME_S] * 4 + [before_after.LAST_FRAME_S]
    assert len({picture.size for picture, _ in frames}) == 1
    before_after.write_gif(make_pair(before=4, after=2), tmp_path / "clip.gif")
    with Image.open(tmp_path / "clip.gif") as clip:
        assert clip.size == frames[0][0].size
        assert clip.n_frames > 1


def test_an_episode_without_its_pictures_is_still_drawn():
    damaged = hashlib.sha256(b"x").hexdigest()
    broken = turn(pictures=(damaged,), action=None, unreadable="no call")
    pair = EpisodePair(
        episode(broken, pictures={damaged: b"not a picture"}, outcome=Outcome.UNREADABLE),
        episode(turn(), pictures={}, last_picture=SHA),
    )
    assert draw_picture(pair).width == 2 * before_after.MARGIN + 2 * PANEL[0] + before_after.GAP
    empty = EpisodePair(episode(outcome=Outcome.FAILURE, turns=()), episode())
    assert draw_picture(empty).width == 2 * before_after.MARGIN + PANEL[0]


def test_the_picture_is_written_as_png(tmp_path):
    before_after.write_picture(make_pair(), tmp_path / "deep" / before_after.PICTURE_NAME)
    with Image.open(tmp_path / "deep" / "before-after.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == draw_picture(make_pair()).size


def test_the_size_of_the_screen_counts_and_not_that_of_its_picture():
    data = png(width=2 * WIDTH, height=2 * HEIGHT)
    sha = hashlib.sha256(data).hexdigest()
    sharp = episode(turn(pictures=(sha,)), pictures={sha: data})
    picture = draw_picture(EpisodePair(sharp, sharp))
    x, y = before_after.mark_place((60, 35), (WIDTH, HEIGHT))
    assert picture.getpixel((before_after.MARGIN + x, TOP + y)) == before_after.MARK
