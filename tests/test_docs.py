"""Pages that come from code are as the code says, and the README's code runs."""

import re
from pathlib import Path

from benchmarks.reference import configuration_page, documented_metrics, schemas_file

from palaestra.runs.runners.palaestra import SCHEMAS_FILE

ROOT = Path(__file__).parents[1]


def test_the_generated_pages_are_up_to_date():
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), "run: make docs"
    assert SCHEMAS_FILE.read_text() == schemas_file(), "run: make docs"


def test_the_readme_fits_one_screen_and_its_python_runs():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 70
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(code.replace("100_000", "4_096"), scope)
    assert scope["rollout"].batch_size == (128, 8)
    assert scope["history"][-1]["env_step"] >= 4_096


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


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_walk_from_the_command_to_the_update_is_short_and_its_files_exist():
    section = (ROOT / "docs" / "architecture.md").read_text().split("## From `palaestra train`")[1].split("\n## ")[0]
    vector, screens = section.split("On screens:")
    for walk, most in ((vector, 8), (screens, 20)):
        files = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
        assert 2 < len(files) <= most
        assert [name for name in files if not (ROOT / "src" / "palaestra" / name).is_file()] == []
