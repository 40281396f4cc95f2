import sys
from pathlib import Path

import pytest

from palaestra.errors import ConfigError
from palaestra.telemetry.conformance import check_sink
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.wandb import WandbSink, require_wandb


class FakeRun:
    def __init__(self, directory):
        self.dir = str(Path(directory) / "wandb" / "offline-run-1" / "files")
        self.logged = []
        self.finished = 0

    def log(self, metrics, step):
        if self.finished:
            raise FakeWandb.Error("run is finished")
        if self.logged and step < self.logged[-1][0]:
            raise FakeWandb.Error("steps only grow")
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1


class FakeWandb:
    """What we use of the wandb module: init, one run, one error."""

    class Error(Exception):
        pass

    def __init__(self, refuse=None):
        self.refuse = refuse
        self.runs = []
        self.asked = []

    def init(self, **asked):
        self.asked.append(asked)
        if self.refuse:
            raise self.Error(self.refuse)
        self.runs.append(FakeRun(asked["dir"]))
        return self.runs[-1]


def offline(directory, module):
    return WandbSink("palaestra", "run-1", "offline", directory, {"seed": 3}, module=module, environ={})


def test_a_run_is_opened_quietly_under_its_name_with_its_configuration(tmp_path):
    wandb = FakeWandb()
    offline(tmp_path / "run", wandb).close()

    assert wandb.asked == [
        {
            "project": "palaestra",
            "name": "run-1",
            "mode": "offline",
            "dir": str(tmp_path / "run"),
            "config": {"seed": 3},
            "settings": {"silent": True, "console": "off"},
        }
    ]
    assert (tmp_path / "run").is_dir()


def test_metrics_are_logged_over_environment_steps_with_the_mean_of_the_episodes(tmp_path):
    wandb = FakeWandb()
    sink = offline(tmp_path, wandb)
    sink.emit(EpisodeSummary(10, 1, 0, 1.0, 10))
    sink.emit(EpisodeSummary(20, 2, 0, 3.0, 20))
    sink.emit(TrainingStep(1, 32, {"entropy": 0.5}))
    sink.emit(TrainingStep(2, 64, {"entropy": 0.25}))
    sink.emit(EpisodeSummary(70, 3, 0, 9.0, 30))
    sink.close()
    sink.emit(TrainingStep(3, 96, {"entropy": 0.0}))

    (run,) = wandb.runs
    assert run.logged == [
        (32, {"episode_return": 2.0, "episode_length": 15.0, "entropy": 0.5}),
        (64, {"entropy": 0.25}),
        (70, {"episode_return": 9.0, "episode_length": 30.0}),
    ]


def test_an_offline_run_names_the_command_that_uploads_it(tmp_path, monkeypatch):
    # W&B warns on the terminal when the URL of an offline run is read.
    monkeypatch.setattr(FakeRun, "url", property(lambda run: pytest.fail("the URL was read")), raising=False)
    wandb = FakeWandb()
    sink = offline(tmp_path / "my runs", wandb)

    assert sink.notice.endswith(f": wandb sync '{tmp_path / 'my runs' / 'wandb' / 'offline-run-1'}'")
    sink.close()
    sink.close()
    assert wandb.runs[0].finished == 1


def test_an_online_run_needs_no_such_command(tmp_path):
    sink = WandbSink("p", "r", "online", tmp_path, {}, module=FakeWandb(), environ={"WANDB_API_KEY": "k"})

    assert sink.notice == ""
    sink.close()


@pytest.mark.parametrize("content", [None, "machine example.org login a password b\n", "not a netrc file {"])
def test_going_online_without_credentials_is_refused_before_anything_starts(tmp_path, content):
    wandb = FakeWandb()
    if content is not None:
        (tmp_path / ".netrc").write_text(content)

    with pytest.raises(ConfigError, match=r"no credentials for api\.wandb\.ai.*wandb login.*offline"):
        WandbSink("p", "r", "online", tmp_path / "run", {}, module=wandb, environ={"HOME": str(tmp_path)})

    assert wandb.asked == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variable", ["HOME", "NETRC"])
def test_an_entry_in_netrc_is_enough_to_go_online(tmp_path, variable):
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine wandb.lab.example login user password secret\n")
    netrc.chmod(0o600)
    environ = {
        "HOME": str(tmp_path / "elsewhere"),
        "WANDB_BASE_URL": "https://wandb.lab.example:8080",
        variable: str(tmp_path if variable == "HOME" else netrc),
    }
    wandb = FakeWandb()

    WandbSink("p", "r", "online", tmp_path, {}, module=wandb, environ=environ).close()

    assert wandb.asked[0]["mode"] == "online"


def test_a_run_that_wandb_refuses_to_start_is_a_refused_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"wandb did not start: api key rejected.*offline"):
        offline(tmp_path, FakeWandb(refuse="api key rejected"))


def test_without_the_package_the_remedy_is_a_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)

    for start in (
        lambda: require_wandb("offline"),
        lambda: WandbSink("p", "r", "offline", tmp_path / "run", {}),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'palaestra\[wandb\]'"):
            start()
    assert not (tmp_path / "run").exists()


def test_the_directory_that_wandb_writes_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb" / "latest-run").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"needs the wandb package .*pip install 'palaestra\[wandb\]'"):
        require_wandb("offline")
    del sys.modules["wandb"]


def test_the_installed_package_is_the_one_used(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    WandbSink("p", "r", "offline", tmp_path, {}).close()

    assert len(wandb.runs) == 1


def test_it_keeps_the_rules_of_a_sink(tmp_path):
    check_sink(lambda: offline(tmp_path, FakeWandb()))
