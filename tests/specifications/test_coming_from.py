"""Every name of ours in the tables of docs/coming-from.md exists, and so does every test that snippets.md names."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import palaestra
from palaestra.cli.app import build_app
from palaestra.learner.registry import ALGORITHMS, config_of
from palaestra.train.config import SECTIONS
from palaestra.train.screen_config import SCREEN_SECTIONS

ROOT = Path(__file__).parents[2]


def _rows(page):
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


NAMES = sorted(
    {
        name
        for row in _rows(ROOT / "docs" / "coming-from.md")
        if len(row) == 3
        for name in re.findall(r"`([^`]+)`", row[1])
    }
)
SNIPPETS = [row for row in _rows(Path(__file__).parent / "snippets.md") if row[0] != "document"]
KEYS = {f"{section}.{key}" for section, cls in {**SECTIONS, **SCREEN_SECTIONS}.items() for key in cls.model_fields}
KEYS |= {f"algorithm.{key}" for key in SECTIONS["ppo"].model_fields}
KEYS |= {f"trainer.{key}" for key in SCREEN_SECTIONS["ui_trainer"].model_fields} | {"tasks.task"}
KEYS |= {
    f"algorithm.{key}" for name in ALGORITHMS["trajectories"] for key in config_of(name, "trajectories").model_fields
}


def _python(path):
    """What a dotted path names, counted from `palaestra`."""
    parts = path.removeprefix("palaestra.").split(".")
    found, module = palaestra, "palaestra"
    for part in parts:
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(f"{module}.{part}")
        module = f"{module}.{part}"
    return found


def _command(words):
    found, context = get_command(build_app([])), None
    for word in words:
        if word.startswith("--"):
            assert any(word in parameter.opts for parameter in found.params), f"no option {word}"
        else:
            found = found.get_command(context, word)
            assert found is not None, f"no command {word}"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_table_calls_ours_exists(name):
    if name.startswith("palaestra "):
        _command(name.split()[1:])
    elif "/" in name:
        assert (ROOT / name).exists()
    elif re.fullmatch(r"[a-z_]+\.[a-z_]+", name) and not name.startswith("palaestra."):
        assert name in KEYS
    else:
        called = re.fullmatch(r"([\w.]+?)(?:\((\w+)=…\))?", name)
        found = _python(called[1])
        if called[2] is not None:
            parameters = inspect.signature(found).parameters
            assert called[2] in parameters, f"{called[1]} takes no {called[2]}"


@pytest.mark.parametrize("row", SNIPPETS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_snippet_runs_in_the_test_it_names_or_says_why_it_does_not(row):
    _, _, _, status, where = row
    assert status.startswith(("as written", "different"))
    tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", where)
    assert tests or status == "different"
    for file, test in tests:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()


def test_every_specification_has_its_snippets_listed():
    assert {row[0] for row in SNIPPETS} == {"000", "001", "002", "003", "004"}
