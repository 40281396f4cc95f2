"""A trajectory proves where every token came from, and comes back from disk as it was."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Outcome, Trajectory, Turn

PICTURE = b"\x89PNG the first screen"
SHA = hashlib.sha256(PICTURE).hexdigest()


def turn(tokens=(5, 6), reward=0.0, **more):
    facts = {
        "pictures": (SHA,), "image_sizes": ((160, 208),), "prompt_ids": [1, 2, 3], "token_ids": list(tokens),
        "log_probs": [-0.5] * len(tokens), "versions": [4] * len(tokens), "text": "click", "reward": reward,
        "action": {"kind": "click", "at": [3, 4]}, "weights": "f00d",
    }  # fmt: skip
    return Turn(**(facts | more))


def episode(*turns, **more):
    facts = {
        "episode_id": "e1", "task": {"task": "click_target/one", "seed": 7}, "turns": turns or (turn(),),
        "outcome": Outcome.SUCCESS, "pictures": {SHA: PICTURE},
    }  # fmt: skip
    return Trajectory(**(facts | more))


def test_an_episode_of_rewards_1_and_minus_a_quarter_earned_three_quarters():
    made = episode(turn(reward=-0.25), turn(reward=1.0))
    assert len(made) == 2
    assert made.total_reward() == 0.75


def test_the_versions_of_an_episode_are_those_of_its_oldest_and_newest_token():
    assert episode(turn(versions=[3, 4]), turn(versions=[4, 6])).versions == (3, 6)
    assert episode(turns=()).versions == (-1, -1)


def test_nothing_can_be_learned_from_a_screen_that_broke():
    assert not episode(outcome=Outcome.ENVIRONMENT_FAILED).learnable
    assert episode(outcome=Outcome.UNREADABLE).learnable
    assert not episode(turns=()).learnable


def test_what_was_recorded_cannot_be_edited():
    made = turn()
    with pytest.raises(ValueError, match="read-only"):
        made.token_ids[0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.reward = 1.0


def test_a_turn_keeps_memory_of_its_own():
    tokens = np.array([5, 6], np.int32)
    made = turn(token_ids=tokens)
    tokens[0] = 9
    assert made.token_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"log_probs": [-0.5]}, "2 tokens, 1 log-probabilities and 2 versions"),
        ({"versions": []}, "2 tokens, 2 log-probabilities and 0 versions"),
        ({"image_sizes": ()}, "1 pictures and 0 sizes"),
        ({"action": None}, "an action, or the reason"),
        ({"unreadable": "no call"}, "an action, or the reason"),
    ],
)
def test_a_turn_without_provenance_cannot_be_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        turn(**wrong)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def turns(draw):
    count = draw(st.integers(0, 5))
    readable = draw(st.booleans())
    return turn(
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)),
        prompt_ids=draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)),
        log_probs=draw(arrays(np.float32, count, elements=st.floats(-50, 0, width=32))), versions=list(range(count)),
        text=draw(texts), reward=draw(st.floats(-1, 1)), action={"kind": "wait", "seconds": 1.5} if readable else None,
        unreadable="" if readable else "it is no call",
    )  # fmt: skip


@given(st.lists(turns(), max_size=4), st.sampled_from(Outcome), texts, st.lists(st.binary(), max_size=3))
def test_a_trajectory_comes_back_as_it_was(made_turns, outcome, reason, pictures):
    stored = {hashlib.sha256(data).hexdigest(): data for data in pictures}
    made = episode(turns=tuple(made_turns), outcome=outcome, reason=reason, pictures=stored, detail={"rows": [3, 7]})
    again = Trajectory.from_bytes(made.to_bytes())
    for field in dataclasses.fields(Trajectory):
        if field.name != "turns":
            assert getattr(again, field.name) == getattr(made, field.name)
    assert len(again) == len(made)
    for mine, theirs in zip(made.turns, again.turns, strict=True):
        for field in dataclasses.fields(Turn):
            assert np.array_equal(getattr(mine, field.name), getattr(theirs, field.name)), field.name


def test_a_file_that_was_altered_or_cut_is_refused(tmp_path):
    path = tmp_path / "one.safetensors"
    episode().save(path)
    assert Trajectory.load(path).total_reward() == 0.0
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with pytest.raises(ExperienceError, match="its digest differs"):
        Trajectory.from_bytes(bytes(data))
    for cut in (0, 4, len(data) // 2, len(data) - 1):
        with pytest.raises(ExperienceError, match="cannot be read as a trajectory"):
            Trajectory.from_bytes(bytes(data[:cut]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.safetensors"]


def test_a_newer_schema_is_refused():
    data = episode().to_bytes().replace(b'\\"schema\\":3', b'\\"schema\\":4')
    with pytest.raises(ExperienceError, match="has schema 4; this version reads 1 to 3"):
        Trajectory.from_bytes(data)


def test_an_episode_of_schema_1_is_read_without_the_penalty_that_it_took_for_a_reward():
    """Written by the version before: two turns, an unreadable one with a penalty of 0.1 and one that was paid 1."""
    made = Trajectory.load(Path(__file__).parent / "schema_1.safetensors")
    assert [turn.reward for turn in made.turns] == [0.0, 1.0]
    assert [turn.weights for turn in made.turns] == ["", ""]
    assert (made.outcome, made.turns[0].unreadable, made.turns[1].text) == (Outcome.SUCCESS, "no action", "click")
    assert Trajectory.from_bytes(made.to_bytes()).total_reward() == 1.0
