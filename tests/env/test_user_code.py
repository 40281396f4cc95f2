"""Errors of an environment name the line of the user's code that raised them."""

import re

import numpy as np
import pytest

from palaestra.env import factory
from palaestra.env.factory import EnvFactory, describe_exception
from palaestra.env.toy import Countdown
from palaestra.errors import ConfigError


def _exception(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()
    return caught.value


def _helper(values):
    return values["speed"]


def _concatenate():
    return np.stack([np.zeros(2), np.zeros(3)])


def test_the_innermost_line_is_named():
    line = _helper.__code__.co_firstlineno + 1
    text = describe_exception(_exception(lambda: _helper({})))
    assert re.fullmatch(rf"KeyError: 'speed' \(.*tests/env/test_user_code\.py:{line}, in _helper\)", text)


def test_a_file_below_the_current_directory_has_a_short_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = compile("def step():\n    return {}['speed']\n", str(tmp_path / "walk.py"), "exec")
    names = {}
    exec(code, names)
    assert describe_exception(_exception(names["step"])) == "KeyError: 'speed' (walk.py:2, in step)"


def test_an_error_inside_a_library_names_the_line_that_calls_it():
    assert describe_exception(_exception(_concatenate)).endswith("in _concatenate)")


def test_without_a_line_of_the_user_there_is_no_place(monkeypatch):
    monkeypatch.setattr(factory, "_INSTALLED", ("/",))
    assert describe_exception(_exception(lambda: _helper({}))) == "KeyError: 'speed'"


class _Unfinished(Countdown):
    def __init__(self):
        raise LookupError("no map")


def test_an_error_in_the_constructor_names_the_line():
    with pytest.raises(ConfigError, match=r"LookupError: no map \(.*test_user_code\.py:\d+, in __init__\)"):
        EnvFactory(f"{__name__}:_Unfinished")()
