"""The Python of the README and of docs/ runs, page by page, in a directory with small configurations and one run."""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import PAGES, ROOT, TUTORIALS, read_blocks

from palaestra.errors import ConfigError
from palaestra.sessions.browser.chromium import find_chromium

ELSEWHERE = {
    "docs/async.md": "tests/train/test_asynchronous_run.py",
    "docs/evaluation.md": "tests/evaluation/test_evaluation_docs.py",
    "docs/play.md": "tests/runs/play/test_docs.py",
    "docs/python.md": "tests/api/test_python_page.py",
    "docs/sessions.md": "tests/sessions/test_suites.py",
    "docs/vla.md": "tests/policy/test_vla_docs.py",
}
"""Pages whose Python another test executes, and that test."""

SMALLER = {
    "README.md": {"50_000": "4_096"},
    "docs/runs.md": {"1_000_000": "8_192"},
    "docs/runners.md": {"train.py": "own_script.py"},
    "docs/sweeps.md": {
        'RunSpec(config={"env": {"id": "CartPole-v1"}})': 'RunSpec(runner="echo", config={"steps": 10})',
        '"algorithm.learning_rate": [1e-3, 3e-4]': '"steps": [10, 20]',
    },
    "docs/vlm.md": {"Qwen/Qwen2.5-VL-3B-Instruct": "tiny", "(1288, 728)": "(160, 208)"},
}
"""What is written differently here than on a page: less work, and the names of runs that exist."""

_TRAJECTORIES = """
import numpy as np
from tests.learner.trajectories.toy import TablePolicy, play
policy, rng = TablePolicy(), np.random.default_rng(1)
policy.publish = lambda version: None
group = [play(policy, rng, seed=7, name=f"e{i}", group="g") for i in range(8)]
"""
_DATASET = """
import subprocess, sys
words = "datasets create pendulum/random-v0 --env Pendulum-v1 --steps 400".split()
subprocess.run([sys.executable, "-m", "palaestra", *words], check=True, capture_output=True, timeout=120)
"""
_SCREEN = """
import io
from PIL import Image
data = io.BytesIO()
Image.new("RGB", (160, 208), "white").save(data, "PNG")
png_bytes = data.getvalue()
"""
BEFORE = {
    "docs/algorithms.md": _TRAJECTORIES,
    "docs/offline.md": _DATASET,
    "docs/vlm.md": _SCREEN,
}
"""Names that the Python of a page takes for granted."""

PYTHON = [
    (page, [block for block in read_blocks(page) if block.language == "python"])
    for page in PAGES
    if page not in TUTORIALS
]
PYTHON = [(page, blocks) for page, blocks in PYTHON if blocks]
_NEEDS_CHROMIUM = ("train_screens(",)
_NEEDS_NO_SERVICE = ("TrainerOrchestrator()",)


def _name(page):
    return str(page.relative_to(ROOT))


def _stop_service():
    subprocess.run([sys.executable, "-m", "palaestra", "serve", "--stop"], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with small configurations, and the finished runs that pages name."""
    directory = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "configs", directory / "configs", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(ROOT / "tests/runs/runners/own_script.py", directory)
    _shorten(directory / "configs/ppo/cartpole.yaml", "total_timesteps", "4_096")
    for key, value in (("batch_size", "8"), ("num_training_steps", "1"), ("collection", "synchronous")):
        _shorten(directory / "configs/ui/click_target.yaml", key, value)
    earlier, home = Path.cwd(), os.environ.pop("PALAESTRA_HOME", None)
    os.chdir(directory)
    words = ["runs", "start", "configs/ppo/cartpole.yaml", "--name", "baseline", "--follow"]
    subprocess.run([sys.executable, "-m", "palaestra", *words], check=True, capture_output=True, timeout=120)
    (run,) = (directory / "var/training/runs").iterdir()
    # Pages name a run by an id of another day.
    (run.parent / "cartpole-20261116-100312-9f2c").symlink_to(run)
    (checkpoint,) = list(run.glob("attempt_1/checkpoints/update_*"))[:1]
    if not (named := checkpoint.with_name("update_00000120")).exists():
        named.symlink_to(checkpoint)
    yield directory
    with contextlib.suppress(subprocess.CalledProcessError):
        _stop_service()
    os.chdir(earlier)
    if home is not None:
        os.environ["PALAESTRA_HOME"] = home


def _shorten(path, key, value):
    text, count = re.subn(rf"^(\s+{key}: )[\w.]+", rf"\g<1>{value}", path.read_text(), flags=re.M)
    assert count == 1, f"{path}: {key}"
    path.write_text(text)


def _compile(block, code):
    return compile(code, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _run_imports(block):
    """Execute only the imports of a block, for one that cannot run."""
    imports = [node for node in ast.parse(block.code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), block.name, "exec"), {})


@pytest.mark.parametrize(("page", "blocks"), PYTHON, ids=[_name(page) for page, _ in PYTHON])
def test_the_python_of_a_page_runs(page, blocks, work, monkeypatch):
    name = _name(page)
    if name in ELSEWHERE:
        assert page.name in (ROOT / ELSEWHERE[name]).read_text()
        return
    monkeypatch.setattr("sys.argv", ["train.py"])
    scope = {"__name__": "page"}
    exec(compile(BEFORE.get(name, ""), name, "exec"), scope)
    smaller, used = SMALLER.get(name, {}), set()
    for block in blocks:
        code = block.code
        used |= {text for text in smaller if text in code}
        for text, replacement in smaller.items():
            code = code.replace(text, replacement)
        compiled = _compile(block, code)
        if block.not_run:
            _run_imports(block)
            continue
        if any(text in code for text in _NEEDS_CHROMIUM):
            try:
                find_chromium()
            except ConfigError:
                continue
        if any(text in code for text in _NEEDS_NO_SERVICE):
            _stop_service()
        exec(compiled, scope)
    assert used == set(smaller), "a replacement is of no use any more"
