"""The code on the page about evaluation runs as it is written, and its example numbers are right."""

import re
from pathlib import Path

from tests.experience.episodes import episode

from palaestra.evaluation.statistics import wilson_interval
from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryArchive

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def test_the_comparison_of_the_page_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, outcome in (("after", Outcome.SUCCESS), ("before", Outcome.FAILURE)):
        for seed in range(4):
            TrajectoryArchive(tmp_path / name).append(episode(task={"task": "a/b", "seed": seed}, outcome=outcome))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("1.0 (")
    assert "100.0 percentage points above" in (tmp_path / "report.html").read_text()


def test_ten_of_ten_is_72_to_100_percent_as_the_page_says():
    assert "72 % to 100 %" in " ".join(PAGE.split())
    assert [f"{bound:.0%}" for bound in wilson_interval(10, 10)] == ["72%", "100%"]


def test_every_outcome_and_every_key_of_the_report_is_explained():
    from palaestra.evaluation.screens import ScreenEvaluation

    for name in (*(outcome.value for outcome in Outcome), *ScreenEvaluation.from_episodes([episode()]).to_json()):
        assert f"`{name}`" in PAGE, name
