"""Finding runs again, and never writing over one."""

import pytest

from palaestra.errors import ConfigError
from palaestra.train import RunDirectory, runs_root
from palaestra.train.config import config_from
from palaestra.train.trainer import build_trainer


def _run(root, name):
    return RunDirectory.create(root, name, "given: here\n", {"env": {"id": "CartPole-v1"}})


def test_a_run_is_found_by_path_by_id_and_by_the_beginning_of_its_id(tmp_path):
    run = _run(tmp_path, "pole-20260101")
    assert RunDirectory.find(str(run.path), tmp_path).path == run.path.resolve()
    assert RunDirectory.find("pole-20260101", tmp_path) == run
    assert RunDirectory.find("pole", tmp_path) == run


def test_an_ambiguous_beginning_is_refused_with_the_candidates(tmp_path):
    _run(tmp_path, "pole-a"), _run(tmp_path, "pole-b")
    with pytest.raises(ConfigError, match="pole-a, pole-b"):
        RunDirectory.find("pole", tmp_path)


def test_a_run_is_never_created_over_another(tmp_path):
    _run(tmp_path, "pole")
    with pytest.raises(FileExistsError):
        _run(tmp_path, "pole")


def test_attempts_are_counted_and_secrets_are_not_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SOMETHING_PRIVATE", "hush")
    run = _run(tmp_path, "pole")
    words = ["palaestra", "a.password=hush"]
    assert [run.new_attempt(words, {}).path.name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]
    text = (run.path / "attempt_1" / "command.json").read_text()
    assert "hush" not in text
    assert '"OMP_NUM_THREADS": "1"' in text


def test_a_folder_that_is_no_attempt_is_left_alone(tmp_path):
    run = _run(tmp_path, "pole")
    run.new_attempt([], {})
    (run.path / "attempt_old").mkdir()
    assert [attempt.path.name for attempt in run.attempts()] == ["attempt_1"]
    assert run.new_attempt([], {}).path.name == "attempt_2"


def test_runs_live_under_the_current_directory_or_palaestra_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PALAESTRA_HOME", raising=False)
    assert runs_root() == tmp_path / "var" / "training" / "runs"
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "home"))
    assert runs_root() == tmp_path / "home" / "var" / "training" / "runs"


def test_a_resolved_configuration_resolves_to_itself():
    config = config_from({"env": {"id": "CartPole-v1"}, "trainer": {"iterations": 3, "rollout_length": 128}})
    assert config_from(config.resolved()) == config
    assert config.total_timesteps == 3 * 128 * 8


def test_every_configuration_we_ship_is_valid_and_builds(request):
    from palaestra.train.config import load_config

    folder = request.config.rootpath / "configs" / "ppo"
    files = sorted(folder.glob("*.yaml"))
    assert len(files) >= 1
    for path in files:
        trainer = build_trainer(load_config(path))
        trainer.env.close()
