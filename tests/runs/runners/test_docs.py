"""The page about runners shows the tested code and output."""

from pathlib import Path

from palaestra.cli.catalog import format_runners
from palaestra.runs.runners.registry import registered_runners

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "runners.md").read_text()


def test_the_template_and_the_script_stand_on_the_page_as_they_are():
    template = (ROOT / "src" / "palaestra" / "runs" / "runners" / "template.py").read_text()

    assert template.strip() in PAGE
    assert Path(__file__).with_name("own_script.py").read_text().strip() in PAGE


def test_the_matrix_on_the_page_is_the_one_that_is_printed():
    found = {name: runner.capabilities for name, runner in registered_runners().items()}

    assert "\n".join(format_runners(found)) in PAGE
