"""Configuration files as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.document import overridden, read_document, without_comments
from palaestra.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("3e-4", 3e-4), ("1E5", 1e5), ("2.5e-4", 2.5e-4), ("-1.5", -1.5), (".5", 0.5), ("1_000_000", 1_000_000),
        ("7", 7), ("true", True), ("null", None), ("tanh", "tanh"), ("[64, 64]", [64, 64]), ("1e", "1e"),
        ("CartPole-v1", "CartPole-v1"), ("0x10", 16), ("''", ""),
        ("on", "on"), ("off", "off"), ("yes", True), ("No", False),
    ],
)  # fmt: skip
def test_a_value_is_read_as_it_is_meant(written, meant):
    value = overridden({}, [f"a.b={written}"])["a"]["b"]
    assert value == meant
    assert type(value) is type(meant)


def test_overrides_leave_the_original_alone_and_come_last_wins():
    data = {"a": {"b": 1}}
    assert overridden(data, ["a.b=2", "a.c=3", "a.b=4"]) == {"a": {"b": 4, "c": 3}}
    assert data == {"a": {"b": 1}}


@pytest.mark.parametrize("bad", ["a", "=1", "a..b=1", ".a=1", "a={"])
def test_what_is_no_assignment_is_refused(bad):
    with pytest.raises(ConfigError):
        overridden({}, [bad])


def test_comments_in_json_go_and_strings_stay(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"a": "http://x", // why\n "b": 2 /* or\n 3 */ }')
    assert read_document(path) == {"a": "http://x", "b": 2}


@given(st.text())
def test_a_json_string_survives_the_removal_of_comments(text):
    import json

    written = json.dumps({"key": text})
    assert without_comments(written) == written
