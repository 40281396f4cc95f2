"""Lazy imports of a package's public names, so that importing the package itself is fast, and callable packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; `modules` maps each name to its module, relative to the package.

    A name without a module (an empty string) is a module itself.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        if not modules[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get_attribute, list_names


def make_callable(package: str, address: str) -> None:
    """Make a package callable: a call imports the function at `address` (`module:function`) and calls it.

    For a package whose parent exports a function of the same name; an attribute has only one value. The function may be
    in a higher layer, because nothing in the package calls it.
    """
    module, _, name = address.partition(":")

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return getattr(import_module(module), name)(*args, **options)

    sys.modules[package].__class__ = CallablePackage
