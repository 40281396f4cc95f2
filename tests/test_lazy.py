"""Packages whose names are imported when first asked for."""

import sys
from types import ModuleType

import pytest

from palaestra.lazy import lazy_attributes


def test_names_come_from_their_homes_and_others_do_not_exist(monkeypatch):
    package, home = ModuleType("shop"), ModuleType("shop.shelf")
    home.apple = 3
    monkeypatch.setitem(sys.modules, "shop", package)
    get, names = lazy_attributes("shop", {"apple": "shelf"})
    with pytest.raises(ModuleNotFoundError):
        get("apple")
    monkeypatch.setitem(sys.modules, "shop.shelf", home)
    assert get("apple") == 3
    assert "apple" in names()
    with pytest.raises(AttributeError, match="module 'shop' has no attribute 'pear'"):
        get("pear")
