"""Advantages and values beside the trajectories: appended, joined by episode, trimmed, never a reason to fail."""

import math

from palaestra.experience.turn_credit import FILE, EpisodeCredit, append_credits, keep_credits, read_credits


def credit(name, version=1, advantages=(0.5, None), values=(None, None)):
    return EpisodeCredit(name, version, advantages, values)


def test_the_last_update_of_an_episode_counts(tmp_path):
    directory = tmp_path / "trajectories"
    append_credits(directory, [credit("a"), credit("b")])
    append_credits(directory, [credit("a", 2, (-1.0, 0.25))])
    assert read_credits(directory) == {"a": credit("a", 2, (-1.0, 0.25)), "b": credit("b")}


def test_no_file_and_damaged_lines_are_no_error(tmp_path):
    assert read_credits(tmp_path / "nowhere") == {}
    append_credits(tmp_path, [])
    assert not (tmp_path / FILE).exists()
    append_credits(tmp_path, [credit("a")])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"episode_id": "b", "version": "x"}\n[1]\n{"episode')
    assert list(read_credits(tmp_path)) == ["a"]


def test_numbers_that_are_not_finite_are_not_recorded(tmp_path):
    append_credits(tmp_path, [credit("a", 1, (math.nan, 1 / 3), (math.inf, 2.0))])
    assert read_credits(tmp_path)["a"] == credit("a", 1, (None, 0.3333), (None, 2.0))


def test_records_of_removed_episodes_are_removed(tmp_path):
    append_credits(tmp_path, [credit("a"), credit("b"), credit("c")])
    keep_credits(tmp_path, ["b", "other"])
    assert list(read_credits(tmp_path)) == ["b"]
