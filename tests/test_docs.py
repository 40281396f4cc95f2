"""Pages that come from code are as the code says, and links lead somewhere. tests/docs/ runs what pages show."""

import re
from pathlib import Path

import yaml
from benchmarks.python_reference import PAGE as PYTHON_PAGE
from benchmarks.python_reference import build_page
from benchmarks.reference import benchmarks_page, configuration_page, documented_metrics, schemas_file

from palaestra.runs.runners.palaestra import SCHEMAS_FILE

ROOT = Path(__file__).parents[1]


def test_the_generated_pages_are_up_to_date():
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), "run: make docs"
    assert SCHEMAS_FILE.read_text() == schemas_file(), "run: make docs"
    assert PYTHON_PAGE.read_text() == build_page(), "run: make docs"
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    assert benchmarks.count("<!-- table:") == 2
    assert benchmarks_page(benchmarks) == benchmarks, "run: make docs"


def test_every_metric_that_training_reports_is_explained():
    from palaestra.train import build_trainer, config_from

    config = config_from(
        {
            "env": {"id": "CartPole-v1", "num_envs": 4, "normalize_reward": True},
            "algorithm": {"target_kl": 1e-6, "batch_size": 64},
            "trainer": {"rollout_length": 64},
        }
    )
    trainer = build_trainer(config)
    reported = set().union(*trainer.train(1024, 64))
    assert reported <= set(documented_metrics())


def _anchors(page):
    """The anchors of the headings of a page, as GitHub and mkdocs make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    headings = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_between_pages_lead_to_files_and_headings():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = []
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)} -> {target}#{anchor}")
    assert broken == []


def test_every_page_is_in_the_navigation_of_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [name for section in nav for name in section] == ["Start", "Guides", "Concepts", "Reference"]
    entries = [entry for section in nav for pages in section.values() for entry in pages]
    named = {entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named - {"index.md"} == {page for page in pages if not page.startswith("decisions/")}


def test_the_walk_from_the_command_to_the_update_is_short_and_its_files_exist():
    section = (ROOT / "docs" / "architecture.md").read_text().split("## From `palaestra train`")[1].split("\n## ")[0]
    vector, screens = section.split("On screens:")
    for walk, most in ((vector, 8), (screens, 20)):
        files = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
        assert 2 < len(files) <= most
        assert [name for name in files if not (ROOT / "src" / "palaestra" / name).is_file()] == []
