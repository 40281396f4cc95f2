"""What the viewer is given: actions in words, tokens by vocabulary, nothing that is not JSON."""

import json

import pytest
from tests.experience.episodes import SHA, episode, turn

from palaestra.evaluation.viewer import Vocabulary, describe_action, episode_json, list_row
from palaestra.sessions.action import KINDS


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"kind": "click", "at": [3, 4]}, "click at (3, 4)"),
        ({"kind": "click", "at": None}, "click where the pointer is"),
        ({"kind": "click", "at": [3, 4], "times": 2, "button": "left"}, "double click at (3, 4)"),
        ({"kind": "click", "at": [3, 4], "button": "right"}, "right click at (3, 4)"),
        ({"kind": "click", "at": [3, 4], "held": ["Control"]}, "Control+click at (3, 4)"),
        ({"kind": "move", "at": [3, 4]}, "move to (3, 4)"),
        ({"kind": "drag", "path": [[1, 2], [3, 4]]}, "drag (1, 2) → (3, 4)"),
        ({"kind": "type", "text": "a 'b'"}, "type \"a 'b'\""),
        ({"kind": "press", "keys": ["Control", "a"]}, "press Control+a"),
        ({"kind": "scroll", "at": [1, 2], "dx": 0, "dy": -120}, "scroll up 120 at (1, 2)"),
        ({"kind": "scroll", "at": None, "dx": 5, "dy": 10}, "scroll down 10 and right 5"),
        ({"kind": "wait", "seconds": 0.5}, "wait 0.5 s"),
        ({"kind": "terminate", "success": True}, "declare it done"),
        ({"kind": "terminate", "success": False}, "give up"),
        ({"kind": "answer", "text": "42"}, "answer '42'"),
        ({"kind": "teleport", "to": 1}, "teleport {'to': 1}"),
    ],
)
def test_actions_in_words(action, words):
    assert describe_action(action) == words


def test_every_kind_of_action_has_words_of_its_own():
    assert {"click", "move", "drag", "type", "press", "scroll", "wait", "terminate", "answer"} == set(KINDS)


def test_a_vocabulary_keeps_every_text_once():
    vocabulary = Vocabulary(lambda ids: [f"<{token % 3}>" for token in ids])
    assert vocabulary.places([1, 2, 4, 5]) == [0, 1, 0, 1]
    assert vocabulary.words == ["<1>", "<2>"]
    assert not vocabulary.by_id


def test_without_a_tokenizer_a_token_is_its_number():
    vocabulary = Vocabulary()
    vocabulary.places([17, 4])
    assert vocabulary.words == ["17", "4"]
    assert vocabulary.by_id


def test_texts_that_do_not_fit_the_tokens_are_refused():
    with pytest.raises(ValueError, match="2 tokens were given 1 texts"):
        Vocabulary(lambda ids: ["all of it"]).places([1, 2])


def test_a_prompt_of_equal_tokens_is_written_as_a_run():
    made = episode_json(episode(turn(prompt_ids=[9, 7, 7, 7, 9])), Vocabulary(), {SHA: 0})
    assert made["turns"][0]["prompt"] == [[0, 1], [1, 3], [0, 1]]


def test_an_impossible_token_has_no_log_probability_instead_of_infinity():
    made = episode_json(episode(turn(log_probs=[-0.123456, -float("inf")])), Vocabulary(), {SHA: 0})
    assert made["turns"][0]["log_probs"] == [-0.1235, None]
    json.dumps(made, allow_nan=False)


def test_a_picture_that_was_not_kept_says_so():
    made = episode_json(episode(last_picture="f" * 64), Vocabulary(), {SHA: 5})
    assert made["turns"][0]["pictures"] == [5]
    assert made["last"] == -1
    assert episode_json(episode(), Vocabulary(), {})["last"] is None


def test_the_list_is_searched_by_the_first_two_thousand_characters():
    made = list_row(episode(turn(text="a" * 1999), turn(text="needle")))
    assert made["written"] == "a" * 1999 + "\n"
    assert made["task"] == "click_target/one"
