"""JSON from outside: what is ambiguous or cannot be stored is refused."""

import pytest

from palaestra.strict_json import find_lone_surrogate, read_json


def test_ordinary_json_is_read_as_the_standard_library_reads_it():
    text = '{"a": [1, 2.5, true, null], "b": {"a": "\\ud83d\\ude00 \\u00e4"}}'
    assert read_json(text) == read_json(text.encode()) == {"a": [1, 2.5, True, None], "b": {"a": "😀 ä"}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' is given twice"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' is given twice"),
        ('{"a": 1, "\\u0061": 2}', "the key 'a' is given twice"),
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("1e999", "1e999 is not a JSON number"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("1 2", "Extra data"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "not UTF-8 .invalid start byte at byte 0."),
    ],
)
def test_what_is_ambiguous_or_no_json_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        read_json(text)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("plain", None),
        ("😀", None),
        ("a\ud83d", "a\ud83d"),
        ({"a": [1, {"b": "\udc00"}]}, "\udc00"),
        ({"\ud800": 1}, "\ud800"),
        ([None, 1.5, True], None),
    ],
)
def test_half_of_a_surrogate_pair_is_found_wherever_it_stands(value, found):
    assert find_lone_surrogate(value) == found
