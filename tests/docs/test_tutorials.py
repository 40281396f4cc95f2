"""Every command, file and snippet of a tutorial, executed in order in an empty directory."""

import os
import signal
import stat
import subprocess
import sys

import pytest
from tests.docs.blocks import ROOT, TUTORIALS, read_blocks

from palaestra.errors import ConfigError
from palaestra.sessions.browser.chromium import find_chromium

COMMAND_TIMEOUT_S = 240
SMALLER = {
    "gymnasium": {
        "total_timesteps: 40_000": "total_timesteps: 2_048",
        "steps=40_000": "steps=2_048",
        "--episodes 100": "--episodes 4",
        "1e-3,1e-5 --seeds 1..3": "1e-3,1e-5 --seeds 1..1",
    },
    "script": {"seeds: 1..3": "seeds: 1..1"},
    "web-page": {
        "num_training_steps: 12": "num_training_steps: 1",
        "batch_size: 32": "batch_size: 8",
        "trainer.num_training_steps=4": "trainer.num_training_steps=1",
        "--episodes 24": "--episodes 8",
        "--episodes 60": "--episodes 2",
    },
    "qwen": {"trainer.batch_size=8": "trainer.batch_size=8 actor.max_steps_per_episode=2"},
}
"""What is written differently here than in a tutorial, so that it takes seconds: the text and its replacement."""

_PIP = """#!/bin/sh
# Installs into a directory of the test instead of the environment, without a network.
shift
[ "$1" = --editable ] && shift
exec {python} -m pip install --quiet --disable-pip-version-check --no-index --no-deps \\
    --no-build-isolation --target {site} "$@"
"""


@pytest.fixture
def shell(tmp_path):
    """Runs a script in an empty directory, with `palaestra`, `python` and `pip` of this environment."""
    work, bin_, site = (tmp_path / name for name in ("work", "bin", "site"))
    for directory in (work, bin_, site):
        directory.mkdir()
    scripts = {
        "palaestra": f'#!/bin/sh\nexec {sys.executable} -P -m palaestra "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "pip": _PIP.format(python=sys.executable, site=site),
    }
    for name, script in scripts.items():
        (bin_ / name).write_text(script)
        (bin_ / name).chmod((bin_ / name).stat().st_mode | stat.S_IXUSR)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PALAESTRA_")}
    environment |= {"PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}:{site}"}

    def run(words):
        process = subprocess.Popen(
            words, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nnot finished after {COMMAND_TIMEOUT_S} s"
        return process.returncode, output

    run.work = work
    yield run
    run(["palaestra", "serve", "--stop"])


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_works_from_an_empty_directory(page, shell):
    if page.stem in ("web-page", "qwen"):
        try:
            find_chromium()
        except ConfigError as error:
            pytest.skip(str(error))
    smaller, used = SMALLER[page.stem], set()
    for block in read_blocks(page):
        code = block.code
        for text, replacement in smaller.items():
            if text in code:
                used.add(text)
                code = code.replace(text, replacement)
        if block.not_run or block.language == "text":
            continue
        if block.title:
            (shell.work / block.title).write_text(code)
            continue
        words = {"bash": ["bash", "-euo", "pipefail", "-c", code], "python": ["python", "-c", code]}[block.language]
        exit_code, output = shell(words)
        assert exit_code == block.exit_code, f"{block.name}\n{code}\n{output}"
    assert used == set(smaller), "a replacement is of no use any more"
