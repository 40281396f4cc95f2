"""The code of docs/python.md and of the notebook runs, with shorter trainings."""

import json
import re
from pathlib import Path

import pytest

from palaestra.sessions.browser.chromium import find_chromium

DOCS = Path(__file__).parents[2] / "docs"
SHORTER = (
    ("200_000", "4_096"),
    ("100_000", "4_096"),
    ("50_000", "2_048"),
    ("20_000", "2_048"),
    ("episodes=100", "episodes=4"),
    ("episodes=50", "episodes=4"),
    ('"num_training_steps": 40', '"num_training_steps": 1'),
    ('"batch_size": 64', '"batch_size": 8'),
    ('"target_concurrent_actors": 16', '"target_concurrent_actors": 4'),
    ("episodes=200", "episodes=2"),
    ("< 150", "< 20"),
    ("< 100", "< 20"),
)


def shorten(code):
    for long, short in SHORTER:
        code = code.replace(long, short)
    return code


def blocks(kind=""):
    return re.findall(rf"```python{kind}\n(.*?)```", (DOCS / "python.md").read_text(), re.DOTALL)


@pytest.fixture
def scope(monkeypatch):
    """A module of its own, so that classes of the page have an address."""
    import sys
    import types

    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return vars(module)


def test_every_block_of_the_page_about_python_runs(scope):
    for code in blocks():
        exec(shorten(code), scope)
    assert scope["action"] in (0, 1)
    assert scope["corridor"].config["env"]["id"] == "page:Corridor"
    assert Path("kept/cartpole-dqn/manifest.json").is_file()
    assert scope["run"].directory.attempts()[0].tensorboard.is_dir()


def test_the_corridor_of_the_page_is_solved(scope):
    exec("import palaestra as pal\n" + blocks()[2], scope)
    assert scope["pal"].evaluate(scope["corridor"], episodes=20).mean_return == 1.0


def test_the_block_about_weights_and_biases_runs_where_it_is_installed(scope, monkeypatch):
    pytest.importorskip("wandb")
    (code,) = blocks(" wandb")
    exec("import palaestra as pal\n" + shorten(code), scope)
    assert list(scope["run"].directory.path.rglob("*.wandb"))


def test_the_block_about_screens_runs_in_a_real_browser(scope):
    try:
        find_chromium()
    except Exception as error:  # noqa: BLE001 - the reason is what the skip shows
        pytest.skip(str(error))
    (code,) = blocks(" screens")
    exec("import palaestra as pal\n" + shorten(code), scope)
    assert scope["report"].document["comparison"]["pairs"] == 2
    assert scope["reply"].text


def test_the_cells_of_the_notebook_run_in_order_and_it_holds_no_outputs(scope):
    notebook = json.loads((DOCS / "notebooks" / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    for cell in cells:
        exec(shorten(cell["source"]), scope)
    assert scope["total"] > 0
    assert scope["longer"].run_id == scope["short"].run_id
