"""The name of a run becomes the name of a directory."""

import pytest

from palaestra.errors import UnknownRun
from palaestra.files.run_directory import check_run_id, new_run_id


@pytest.mark.parametrize(
    ("stem", "begins"),
    [("CartPole-v1", "cartpole-v1-"), ("ALE/Pong-v5", "ale-pong-v5-"), ("", "run-"), ("../..", "run-"), ("ü x", "x-")],
)
def test_whatever_it_is_named_after_it_is_a_safe_name(stem, begins):
    run_id = new_run_id(stem)
    assert run_id.startswith(begins)
    assert check_run_id(run_id) == run_id


def test_a_long_name_is_cut_and_two_are_never_the_same():
    names = {new_run_id("x" * 500) for _ in range(50)}
    assert len(names) == 50
    assert all(len(name) <= 90 for name in names)


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a/b", "../a", "A", "a b", "a\n", ".hidden", "a..b", "a" * 91, "-x", "ü"]
)
def test_nothing_else_is_the_id_of_a_run(text):
    with pytest.raises(UnknownRun, match="is not the id of a run"):
        check_run_id(text)
