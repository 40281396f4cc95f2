"""`palaestra eval` of UI agents: the report of a comparison and the picture beside it."""

import json
from pathlib import Path

from PIL import Image
from tests.learner.trajectories.toy import episode
from tests.train.test_session_servers import config as screen_config
from tests.train.test_session_servers import server_process

from palaestra.api.screen_evaluation import _load_pair, _short_names
from palaestra.evaluation import ScreenComparison, ScreenEvaluation
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.train.screens import train_screens


def test_a_comparison_of_two_checkpoints_leaves_a_picture_beside_its_report(palaestra, home):
    with server_process("--fake") as url:
        config = screen_config({"session_servers": url})
        run = train_screens(config, root=home.runs, run_id="one").run
        before, after = sorted(run.attempts()[-1].checkpoints.glob("update_*"))
        compared = palaestra("eval", after, "--against", before, "--episodes", 3, "--json")
        alone = palaestra("eval", after, "--episodes", 2, "--json")
    assert compared.code == 0, compared.err
    document = json.loads(compared.out)
    picture, page = Path(document["picture"]), Path(document["page"])
    assert picture == page.with_name("before-after.png")
    assert 'href="before-after.png"' in page.read_text()
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
    assert document["comparison"]["pairs"] == 3
    assert "picture" not in json.loads(alone.out)


def test_a_comparison_whose_recorded_episode_was_lost_has_no_picture(tmp_path):
    scores = ScreenEvaluation.from_episodes([episode()])
    for name in ("a", "b"):
        TrajectoryArchive(tmp_path / name).append(episode())
    comparison, directories = ScreenComparison(scores, scores), (tmp_path / "a", tmp_path / "b")
    assert _load_pair(comparison, *directories, ("A", "B")).names == ("B", "A")
    next(directories[1].glob("*.safetensors")).write_bytes(b"")
    assert _load_pair(comparison, *directories, ("A", "B")) is None


def test_checkpoints_are_named_by_run_and_update_from_any_working_directory(tmp_path, monkeypatch):
    (tmp_path / "run-1" / "attempt_1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run-1" / "attempt_1")
    names = _short_names(Path("checkpoints/update_2"), Path("elsewhere"))
    assert names == ("A, run-1 update_2", "B, elsewhere")
