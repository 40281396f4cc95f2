"""Finding runs again, and never writing over one."""

import os

import pytest

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory, find_checkpoint


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
    assert Home.default().runs == tmp_path / "var" / "training" / "runs"
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "home"))
    assert Home.default().runs == tmp_path / "home" / "var" / "training" / "runs"


def test_train_and_the_run_service_name_the_same_files(tmp_path):
    home = Home(tmp_path / "var" / "training")
    run = RunDirectory.create(home.runs, "pole", None, {"a": 1}, {"runner": "echo"})
    assert run == home.run("pole")
    assert sorted(path.name for path in run.path.iterdir()) == ["resolved.json", "spec.json"]
    assert run.is_supervised
    assert run.resume_command == "palaestra runs resume pole"
    attempt = run.new_attempt(["palaestra"], {"a": 2})
    assert attempt == run.attempt(1) == run.attempts()[0]
    assert attempt.command.is_file()
    assert run.read_config() == {"a": 2}
    assert home.base == tmp_path


def test_a_run_that_cannot_be_written_is_not_there_at_all(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"runs directory = .*cannot be written"):
        _run(tmp_path / "file", "pole")


def test_a_run_that_is_being_made_is_not_found(tmp_path):
    (tmp_path / ".pole.123.tmp").mkdir()
    (tmp_path / ".pole.123.tmp" / "resolved.json").write_text("{}")
    with pytest.raises(ConfigError, match="There are 0 runs under"):
        RunDirectory.find(".pole", tmp_path)


def test_a_run_of_another_trainer_is_refused_by_its_name_where_a_checkpoint_of_ours_is_needed(tmp_path):
    run = _run(tmp_path, "pole")
    run.spec.write_text('{"runner": "corl"}')
    with pytest.raises(ConfigError, match=r"is a run of corl, not of palaestra.*palaestra studio"):
        find_checkpoint("pole", tmp_path)


def test_an_unknown_run_is_refused_with_the_number_of_runs_and_the_newest(tmp_path):
    _run(tmp_path, "pole")
    with pytest.raises(ConfigError, match=r"There is 1 run under .*, the newest: pole\.$"):
        RunDirectory.find("xyz", tmp_path)
    for age, name in enumerate(("cart", "acrobot", "mountain", "pole")):
        path = _run(tmp_path, name).resolved if name != "pole" else RunDirectory(tmp_path / name).resolved
        os.utime(path, (1e9 - age, 1e9 - age))
    with pytest.raises(ConfigError, match=r"There are 4 runs under .*, the newest: cart, acrobot, mountain\.$"):
        RunDirectory.find("xyz", tmp_path)
