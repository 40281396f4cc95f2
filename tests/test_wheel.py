"""The wheel holds what the code reads at run time, and its extras are those that errors name."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from palaestra.config.packaged import CONFIGS, packaged_configs
from palaestra.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "palaestra"
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that no build directory is left in the checkout; needs no network."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in ("src", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True, timeout=120)
    (path,) = out.glob("palaestra-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _files(directory):
    paths = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {f"palaestra/{path.relative_to(PACKAGE).as_posix()}" for path in paths}


def test_the_wheel_holds_every_file_of_the_package(wheel):
    expected = _files(PACKAGE) | _files(PACKAGE / "configs")
    assert expected - set(wheel.namelist()) == set()
    for name in (
        "configs/ppo/cartpole.yaml",
        "configs/vla/small_vla_reach.safetensors",
        "runs/service/web/static/index.html",
        "sessions/suites/miniwob_oracles.js",
        "policy/tiny_vlm/checkpoint/config.json",
        "studio/qt/check-dark.svg",
    ):
        assert f"palaestra/{name}" in expected


def test_the_wheel_holds_nothing_beside_the_package(wheel):
    assert {name.partition("/")[0] for name in wheel.namelist()} == {"palaestra", "palaestra-0.1.0.dist-info"}


def test_the_wheel_starts_the_command_and_names_the_extras(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "palaestra = palaestra.cli:main" in wheel.read(entry_points).decode()
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    fields = Parser().parsestr(wheel.read(metadata).decode())
    assert set(fields.get_all("Provides-Extra")) - {"dev", "docs"} == set(EXTRAS)
    assert fields["Requires-Python"] == ">=3.11"


DISTRIBUTIONS = {"PIL": "pillow", "Box2D": "gymnasium[box2d]", "mujoco": "gymnasium[mujoco]"}


def test_every_module_of_an_extra_comes_from_a_requirement_of_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def requirements(extra):
        for text in extras[extra]:
            own = re.match(r"palaestra\[(\w+)\]", text)
            if own:
                yield from requirements(own[1])
            else:
                yield re.match(r"[\w-]+(\[[\w,]+\])?", text)[0].lower().replace("_", "-")

    for name, extra in EXTRAS.items():
        known = set(requirements(name))
        for module in extra.modules:
            distribution = DISTRIBUTIONS.get(module, module).lower().replace("_", "-")
            assert any(one.split("[")[0].startswith(distribution) or one == distribution for one in known), (
                name,
                module,
            )


def test_every_packaged_configuration_has_a_name_of_its_own():
    names = [path.stem for path in CONFIGS.rglob("*.yaml")]
    assert sorted(names) == sorted(packaged_configs())
