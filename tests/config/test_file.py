"""Configuration files as people write them."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from palaestra.config.file import apply_overrides, read_config_file, read_settings, strip_comments
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
    value = apply_overrides({}, [f"a.b={written}"])["a"]["b"]
    assert value == meant
    assert type(value) is type(meant)


def test_overrides_leave_the_original_alone_and_come_last_wins():
    data = {"a": {"b": 1}}
    assert apply_overrides(data, ["a.b=2", "a.c=3", "a.b=4"]) == {"a": {"b": 4, "c": 3}}
    assert data == {"a": {"b": 1}}


@pytest.mark.parametrize("bad", ["a", "=1", "a..b=1", ".a=1", "a={"])
def test_what_is_no_assignment_is_refused(bad):
    with pytest.raises(ConfigError):
        apply_overrides({}, [bad])


def test_comments_in_json_go_and_strings_stay(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"a": "http://x", // why\n "b": 2 /* or\n 3 */ }')
    assert read_config_file(path) == {"a": "http://x", "b": 2}


@given(st.text())
def test_a_json_string_survives_the_removal_of_comments(text):
    import json

    written = json.dumps({"key": text})
    assert strip_comments(written) == written


def _written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
LADDER = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 500))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("deep.json", "[" * 100_000, "is nested more than 64 levels deep"),
        ("deep.json", '{"a":' * 100 + "1" + "}" * 100, "is nested more than 64 levels deep"),
        ("deep.yaml", "a: " + "[" * 100_000, "is nested more than 64 levels deep"),
        ("deep.yaml", "a: " + "[" * 100 + "]" * 100, "is nested more than 64 levels deep"),
        ("ladder.yaml", LADDER, "is nested more than 64 levels deep"),
        ("bomb.yaml", BOMB, "holds more than 100,000 values"),
        ("bomb.yaml", MERGED, "holds more than 100,000 values"),
        ("long.yaml", "a: " + "x" * (1 << 20), "is longer than 1 MB"),
        ("itself.yaml", "a: &a [*a]", "an anchor contains itself"),
        ("huge.yaml", "a: 1e999", "1e999 is too large for a number at line 1, column 4"),
    ],
)
def test_a_document_that_is_not_a_configuration_is_refused_at_once(tmp_path, name, text, reason):
    with pytest.raises(ConfigError, match=reason):
        read_config_file(_written(tmp_path, name, text))


def test_an_override_is_held_to_the_same():
    for word, reason in (("1e999", "1e999 is too large"), ("[" * 100 + "]" * 100, "nested more than"), ("-.inf", "")):
        if not reason:
            assert apply_overrides({}, [f"a={word}"]) == {"a": float("-inf")}
            continue
        with pytest.raises(ConfigError, match=reason):
            apply_overrides({}, [f"a={word}"])


def test_aliases_that_people_write_are_followed(tmp_path):
    path = _written(tmp_path, "c.yaml", "base: &b {x: 1, y: [1, 2]}\none: {<<: *b, x: 2}\ntwo: *b\n")
    assert read_config_file(path) == {
        "base": {"x": 1, "y": [1, 2]},
        "one": {"x": 2, "y": [1, 2]},
        "two": {"x": 1, "y": [1, 2]},
    }


def test_hints_name_what_is_there_and_examples_only_where_they_would_do(tmp_path):
    empty = _written(tmp_path, "empty.yaml", "# nothing\n")
    with pytest.raises(ConfigError, match=r"is empty, not a mapping of sections. Write KEY: VALUE lines."):
        read_config_file(empty)
    with pytest.raises(ConfigError, match=r"See the examples\."):
        read_config_file(empty, "See the examples")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"Is a directory.*Check the path"):
        read_config_file(tmp_path / "folder.yaml")
    with pytest.raises(ConfigError) as refused:
        read_config_file(tmp_path / "none.yaml")
    assert refused.value.remedy == f"There are {empty}"


# ---------------------------------------------------------------------- files that a configuration names


def _model_path(data):
    return data["policy"]["vla_config"]["model_path"]


@pytest.mark.parametrize(("name", "text"), [
    ("c.yaml", "policy: {vla_config: {model_path: weights.pt}}"),
    ("c.json", '{"policy": {"vla_config": {"model_path": "weights.pt"}}}'),
])  # fmt: skip
def test_a_path_in_a_configuration_means_the_file_beside_it(tmp_path, monkeypatch, name, text):
    (tmp_path / "configs").mkdir()
    beside, here = tmp_path / "configs" / "weights.pt", tmp_path / "weights.pt"
    config = _written(tmp_path / "configs", name, text)
    monkeypatch.chdir(tmp_path)
    assert _model_path(read_config_file(config)) == str(beside)  # there is neither: the message names this one
    here.touch()
    assert _model_path(read_config_file(config)) == str(here)  # as a repository's configurations are written
    beside.touch()
    assert _model_path(read_config_file(Path("configs") / name)) == str(beside)


def test_a_path_given_in_the_shell_means_a_file_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = apply_overrides({}, ["policy.vla_config.model_path=weights.pt", "name=weights.pt"])
    assert (_model_path(given), given["name"]) == (str(tmp_path / "weights.pt"), "weights.pt")
    assert _model_path(apply_overrides({}, ["policy.vla_config.model_path=null"])) is None
    assert _model_path(apply_overrides({}, ["policy.vla_config.model_path=/a/b.pt"])) == "/a/b.pt"


def test_a_configuration_without_such_sections_is_left_alone(tmp_path):
    for text in ("policy: fast", "policy: {vla_config: 3}", "policy: {vla_config: {model_path: 3}}", "a: 1"):
        assert read_config_file(_written(tmp_path, "c.yaml", text)) == yaml.safe_load(text)


def test_settings_come_from_a_file_and_from_assignments_which_take_precedence(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text("port: 8701\nkubernetes: {name: a}\n")
    assert read_settings(file, ["kubernetes.name=b", "warm=0"]) == {
        "port": 8701,
        "kubernetes": {"name": "b"},
        "warm": 0,
    }
    assert read_settings(None, []) == {}
