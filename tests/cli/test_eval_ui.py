"""`palaestra eval` of UI agents: the report of a comparison and the picture beside it."""

import json
from pathlib import Path

from PIL import Image
from tests.learner.trajectories.toy import episode
from tests.train.test_session_servers import config as screen_config
from tests.train.test_session_servers import server_process

from palaestra.api.screen_evaluation import _load_pair, checkpoint_names
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
    assert "<h1>t after 1 update, compared with t before training</h1>" in page.read_text()
    assert Path(document["viewer"]) == page.with_name("episodes.html")
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


def write_checkpoint_state(path, name, run_id, updates):
    path.mkdir(parents=True)
    state = {
        "learner": {},
        "source": {},
        "progress": {"updates": updates},
        "about": {"config": {"experiment_name": name}, "run_id": run_id},
    }
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").write_text(json.dumps({"schema": 2, "kind": "screens", "files": {}}))
    return path


def test_checkpoints_are_named_by_what_was_trained_and_how_long_and_by_the_run_if_that_is_ambiguous(tmp_path):
    before, after = (write_checkpoint_state(tmp_path / str(n), "forms", "forms-1", n) for n in (0, 12))
    other = write_checkpoint_state(tmp_path / "other", "forms", "forms-2", 12)
    assert checkpoint_names(after, before) == ("forms after 12 updates", "forms before training")
    assert checkpoint_names(after, other) == ("forms-1 after 12 updates", "forms-2 after 12 updates")
    assert checkpoint_names(after, None)[0] == "forms after 12 updates"
