"""A missing optional dependency is answered with the command that installs it."""

import importlib.util
import subprocess
import sys

import pytest

from palaestra.errors import ConfigError
from palaestra.extras import EXTRAS, GATEWAY, find_extra, is_installed, missing_modules, require_extras

# Hides the modules of all extras from a new interpreter, as in a bare install, and runs the command.
BARE = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted({module for extra in EXTRAS.values() for module in extra.modules})}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
sys.argv = ["palaestra", *sys.argv[1:]]
from palaestra.cli import main

main()
"""


@pytest.fixture
def bare(tmp_path):
    def call(*words):
        command = [sys.executable, "-c", BARE, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)

    return call


@pytest.fixture
def without(monkeypatch):
    """Hides modules from `find_spec`."""
    find = importlib.util.find_spec

    def hide(*modules):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))

    return hide


def test_the_error_names_the_modules_and_ends_with_the_command(without):
    without("aiohttp", "peft")
    with pytest.raises(ConfigError) as error:
        require_extras("demo", "ui", "vlm", "serve")
    assert str(error.value) == "demo = 'aiohttp, peft': are not installed. Run: pip install 'palaestra[ui,vlm]'"


def test_a_long_list_of_modules_is_cut(without):
    without(*EXTRAS["ui"].modules)
    with pytest.raises(ConfigError, match="'aiohttp, miniwob, fastapi and 3 more': are not installed"):
        require_extras("gateway", "ui")
    assert missing_modules("ui") == list(EXTRAS["ui"].modules)


def test_a_part_of_an_extra_is_enough_where_only_that_is_used(without):
    without("miniwob", "PIL")
    require_extras("the gateway", "ui", only=GATEWAY)
    with pytest.raises(ConfigError, match=r"'miniwob, PIL': are not installed. Run: pip install 'palaestra\[ui\]'$"):
        require_extras("demo", "ui")


def test_a_submodule_belongs_to_the_extra_of_its_package():
    assert (find_extra("aiohttp.web"), find_extra("uvicorn"), find_extra("torch")) == ("ui", "serve", None)
    assert not is_installed("no_such_package.part")


def test_a_directory_without_code_is_no_installed_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_package" / "latest-run").mkdir(parents=True)  # as W&B writes `wandb` beside a script
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("no_such_package") is not None
    assert not is_installed("no_such_package")


@pytest.mark.parametrize(("words", "extras"), [
    (["demo"], "ui,vlm"),
    (["runs", "start", "cartpole"], "serve"),
    (["train", "click_target"], "vlm,ui"),
    (["sessions", "try", "miniwob/click-button"], "ui"),
    (["gateway"], "ui"),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_a_bare_install_answers_in_one_line_without_a_traceback(bare, words, extras):
    done = bare(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"pip install 'palaestra[{extras}]'\n")


def test_a_bare_install_trains_a_packaged_configuration(bare):
    done = bare("train", "cartpole", "--num-steps", "512", "--quiet", "trainer.compiled=off")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Done after")
