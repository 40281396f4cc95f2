"""The registry of runners, including those of other packages."""

import sys
from importlib.metadata import EntryPoint

import pytest
from tests.runs.serving import service_thread

from palaestra.errors import ConfigError, LaunchRefused
from palaestra.runs import TrainerService
from palaestra.runs.runners import registry
from palaestra.runs.runners.echo import EchoRunner


@pytest.fixture
def announced(monkeypatch):
    """Makes packages register runners."""

    def announce(**addresses):
        points = [EntryPoint(name, address, registry.GROUP) for name, address in addresses.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry._load.cache_clear()

    yield announce
    monkeypatch.undo()
    registry._load.cache_clear()


def test_every_runner_that_plans_policies_says_so_and_no_other():
    runners = registry.registered_runners().items()

    playable = [name for name, runner in runners if runner.capabilities.offline_inference]
    assert playable == ["cleanrl", "corl", "palaestra", "sb3", "spade-bdi"]
    assert [name for name, runner in runners if hasattr(runner, "plan_policy")] == playable


def test_ours_are_there_under_the_names_they_give_themselves():
    assert {name: runner.name for name, runner in registry.registered_runners().items()} == {
        name: name for name in ("cleanrl", "corl", "echo", "palaestra", "sb3", "script", "spade-bdi")
    }


def test_a_package_adds_one_and_cannot_replace_ours(announced):
    announced(mine="tests.runs.runners.test_registry:Mine", echo="tests.runs.runners.test_registry:Mine")

    found = registry.registered_runners()
    assert found["mine"].name == "mine"
    assert type(found["echo"]) is EchoRunner


def test_a_package_that_breaks_takes_nobody_with_it(announced, caplog):
    announced(absent="no.such.module:X", raising="tests.runs.runners.test_registry:Raising")

    assert sorted(registry.registered_runners()) == [
        "cleanrl",
        "corl",
        "echo",
        "palaestra",
        "sb3",
        "script",
        "spade-bdi",
    ]
    assert registry.broken_runners()["raising"] == "ZeroDivisionError: division by zero"
    assert len(caplog.records) == 2
    with pytest.raises(ConfigError, match="is installed and cannot be loaded"):
        registry.get_runner("absent")


def test_a_wrong_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'cleanrl'"):
        registry.get_runner("cleanrll")
    with pytest.raises(ConfigError, match="Known: cleanrl, corl, echo, palaestra, sb3"):
        registry.get_runner("zzz")


def test_naming_runners_loads_nothing_heavy():
    import subprocess

    code = "import sys; from palaestra.runs.runners.registry import registered_runners as r; r(); " \
        "sys.exit(str([m for m in ('torch', 'numpy', 'gymnasium', 'yaml') if m in sys.modules] or ''))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


class Mine(EchoRunner):
    name = "mine"


class Raising(EchoRunner):
    def __init__(self):
        1 / 0  # noqa: B018


def install(directory, name, code):
    """The files that `pip install` writes for a package with a runner of the same name."""
    (directory / f"{name}_package.py").write_text(code)
    facts = directory / f"{name}_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {name}_package:Runner\n")


def test_a_runner_that_is_installed_while_a_service_runs_can_be_started(home, tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    with service_thread(home):
        trainer = TrainerService(home)
        with pytest.raises(LaunchRefused, match=rf"no such runner in {sys.prefix}, where the service runs\. Known:"):
            trainer.start_run({"steps": 1}, runner="zzz")
        install(site, "zzz", "from palaestra.runs.runners.echo import EchoRunner as Runner\n")
        assert "zzz" in trainer.request("GET", "/runners")
        assert trainer.wait(trainer.start_run({"steps": 1}, runner="zzz"), timeout_s=30).phase == "succeeded"
        install(site, "yyy", "import a_module_that_needs_a_new_process\n")
        reason = (
            r"the running service cannot load it \(cannot be imported \(No module named 'a_module_.*'\)\)\. Restart"
        )
        with pytest.raises(LaunchRefused, match=reason):
            trainer.start_run({"steps": 1}, runner="yyy")
        assert trainer.request("GET", "/runners/zzz/schema")["properties"]["steps"]["default"] == 100
    sys.modules.pop("zzz_package")
