"""Modules that a configuration names."""

import sys

import pytest

from palaestra.config import import_own_module


def test_a_module_is_found_in_the_current_directory_after_all_installed_packages(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("NAME = 'theirs'")
    (tmp_path / "my_own_module.py").write_text("NAME = 'mine'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_own_module", raising=False)
    assert import_own_module("my_own_module").NAME == "mine"
    assert not hasattr(import_own_module("json"), "NAME")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_own_module("no_such_module")
    del sys.modules["my_own_module"]


@pytest.mark.parametrize("name", ["", ".", ".relative", "..relative.part"])
def test_a_name_that_is_no_full_module_name_is_an_import_error(name):
    with pytest.raises(ModuleNotFoundError, match="is not the full name of a module"):
        import_own_module(name)
