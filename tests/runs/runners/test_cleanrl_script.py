"""Arguments read from the source of a script, and the flags for them."""

from pathlib import Path

import pytest

from palaestra.errors import ConfigError
from palaestra.runs.runners.cleanrl_script import build_flags, read_script
from palaestra.runs.runners.script_arguments import ScriptArgument, argument_schema, check_values, leaves_directory

SHAPED = Path(__file__).parent / "checkout" / "cleanrl" / "shaped.py"
SOURCE = '''
import tyro
from dataclasses import dataclass
from typing import List, Literal, Optional, Tuple
import typing

class Other:
    never: int = 1

@dataclass
class Settings:
    a_flag: bool = True
    """does
    this"""
    count: int = int(1e6)
    rate: float = float(3)
    entity: str = None
    kl: Optional[float] = 0.1
    limit: "int | None" = 3
    backend: Literal["gloo", "nccl"] = "gloo"
    sizes: Tuple[int, ...] = (64, 64)
    words: typing.List[str] = ()
    table: dict = None
    required: int
    place: str = __file__
    either: int | str = 1
    plain = 3

    # to be filled in runtime
    batch_size: int = 0

if __name__ == "__main__":
    settings = tyro.cli(Settings)
'''


def _read(tmp_path, source=SOURCE):
    path = tmp_path / "script.py"
    path.write_text(source)
    return read_script(path)


def test_every_kind_of_field_is_understood(tmp_path):
    script = _read(tmp_path)

    found = {a.name: (a.kind, a.default, a.optional) for a in script.arguments}
    assert found == {
        "a_flag": ("bool", True, False),
        "count": ("int", 1_000_000, False),
        "rate": ("float", 3.0, False),
        "entity": ("str", None, True),
        "kl": ("float", 0.1, True),
        "limit": ("int", 3, True),
        "backend": ("str", "gloo", False),
        "sizes": ("list", (64, 64), False),
        "words": ("list", (), False),
        "table": ("other", None, True),
        "required": ("int", None, False),
        "place": ("str", None, False),
        "either": ("other", 1, True),
        "batch_size": ("int", 0, False),
    }
    assert script.argument("a_flag").help == "does this"
    assert script.argument("backend").choices == ("gloo", "nccl")
    assert (script.argument("sizes").item, script.argument("words").item) == ("int", "str")
    assert [a.name for a in script.arguments if a.hidden] == ["batch_size"]
    assert [a.name for a in script.arguments if a.computed] == ["required", "place"]


def test_imports_tell_what_it_needs():
    script = read_script(SHAPED)

    assert script.imports == {"gymnasium", "tyro", "torch", "cleanrl_utils"}
    assert script.local_imports == ("cleanrl_utils.seeding",)
    assert script.argument("never") is None


@pytest.mark.parametrize("source", ["import argparse\n", "def broken(:\n", "import tyro\ntyro.cli(main)\n", "\0"])
def test_a_script_that_declares_no_arguments_is_refused(tmp_path, source):
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, source)
    assert refused.value.place == "script"


def test_words_come_in_the_scripts_order_one_element_each(tmp_path):
    values = {
        "entity": "; $(touch x) --seed 3", "a_flag": False, "count": -5, "rate": 1e-3, "kl": None, "words": ["a b"],
        "sizes": [3, -4], "place": "", "backend": "nccl",
    }  # fmt: skip

    assert build_flags(_read(tmp_path).arguments, values) == [
        "--no-a-flag", "--count=-5", "--rate", "0.001", "--entity", "; $(touch x) --seed 3", "--kl", "None",
        "--backend", "nccl", "--sizes", "3", "-4", "--words", "a b", "--place=",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "check", "words", "remedy"),
    [
        ({"cuont": 3}, "flag", "no such argument", "Did you mean 'count'?"),
        ({"zzzzzzz": 3}, "flag", "no such argument", "x.py has a_flag"),
        ({"count": "3"}, "flag", "not a whole number", "1000000"),
        ({"count": 3.5}, "flag", "not a whole number", "1000000"),
        ({"count": True}, "flag", "not a whole number", "1000000"),
        ({"a_flag": 1}, "flag", "not true or false", "True"),
        ({"rate": float("nan")}, "flag", "not a number", "3.0"),
        ({"count": None}, "flag", "must have a value", ""),
        ({"backend": "mpi"}, "flag", "not one of gloo, nccl", "gloo"),
        ({"sizes": 3}, "flag", "not a list", ""),
        ({"sizes": ["a"]}, "flag", "holds 'a'", ""),
        ({"words": ["--seed"]}, "flag", "dash", ""),
        ({"table": {}}, "flag", "command line", ""),
        ({"entity": "a\0b"}, "flag", "not text", ""),
        ({"entity": "../../x"}, "path", "outside the directory of the run", "relative"),
        ({"entity": "/etc/passwd"}, "path", "outside", ""),
        ({"entity": "~root"}, "path", "outside", ""),
        ({"words": ["/etc"]}, "path", "outside", ""),
    ],
)
def test_a_value_the_script_would_not_take_is_refused_with_a_remedy(tmp_path, value, check, words, remedy):
    (finding,) = check_values(_read(tmp_path).arguments, value, "x.py")

    assert (finding.level, finding.check) == ("refused", check)
    assert words in finding.text
    assert remedy in finding.remedy


def test_values_it_takes_have_no_findings(tmp_path):
    good = {"count": 3, "rate": 1, "entity": "ALE/Pong-v5", "kl": None, "sizes": (1, 2), "words": ["a..b"]}
    assert check_values(_read(tmp_path).arguments, good, "x.py") == []
    assert [leaves_directory(value) for value in ("a/b", "a/../b", "..", 3, ["~"])] == [False, True, True, False, True]


def test_the_schema_has_types_defaults_and_what_to_hide(tmp_path):
    schema = argument_schema(_read(tmp_path).arguments)

    assert schema["count"] == {"type": "integer", "description": "", "default": 1_000_000}
    assert schema["kl"]["type"] == ["number", "null"]
    assert schema["sizes"]["items"] == {"type": "integer"}
    assert schema["backend"]["enum"] == ["gloo", "nccl"]
    assert schema["batch_size"]["x-hidden"] is True
    assert "default" not in schema["place"]


def test_an_argument_without_a_kind_is_text_in_a_form():
    assert argument_schema([ScriptArgument("x", "other")])["x"]["type"] == "string"
