"""Bad input is refused with a remedy before anything is launched or written."""

import asyncio
import sys
import venv
from pathlib import Path

import pytest
from tests.runs.supervisors import run_supervisor, wait_for_end

from palaestra.errors import ConfigError, ConsentRequired, LaunchRefused
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.runner import RunnerCapabilities
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.runners.template import MyTrainerRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator

CHECKOUT = str(Path(__file__).parent / "checkout")
CARTPOLE = {"env": {"id": "CartPole-v1"}}


class _Hungry(EchoRunner):
    name = "hungry"
    capabilities = RunnerCapabilities(title="Needs a GPU", needs_gpu=True)


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Launches and returns the reason of the refusal; the state directory must stay empty."""
    home = tmp_path_factory.mktemp("home")
    empty = tmp_path_factory.mktemp("empty")
    venv.create(empty, with_pip=False, symlinks=True)
    with TrainerOrchestrator(home) as orchestrator:
        orchestrator.register_runner("hungry", _Hungry)

        def launch(runner, config, **spec):
            spec = {key: str(empty) if value == "EMPTY" else value for key, value in spec.items()}
            with pytest.raises((LaunchRefused, ConfigError)) as caught:
                orchestrator.launch(runner, config, consent=True, **spec)
            assert list((home / "var" / "training" / "runs").iterdir()) == []
            return str(caught.value)

        yield launch


@pytest.mark.parametrize(
    ("runner", "config", "spec", "reason", "remedy"),
    [
        ("palestra", CARTPOLE, {}, "palestra", "palaestra"),
        ("cleanrl", {"checkout": CHECKOUT}, {"script": "shapde"}, "is not in", "shaped"),
        ("cleanrl", {"checkout": CHECKOUT, "gama": 1}, {"script": "shaped"}, "no such argument", "shaped.py has"),
        ("cleanrl", {"checkout": CHECKOUT}, {"script": "shaped", "python": "EMPTY"}, "not installed", "pip install"),
        ("cleanrl", {"checkout": CHECKOUT}, {"script": "shaped", "python": "/bin/false"}, "exit code 1", "--python"),
        (
            "cleanrl",
            {"checkout": CHECKOUT},
            {"script": "shaped", "env_id": "CartPole-v9"},
            "CartPole-v9",
            "CartPole-v1",
        ),
        ("hungry", {}, {}, "GPU", "GPU"),
        ("echo", {}, {"python": "/nowhere/python"}, "/nowhere/python is not a program", "virtualenv"),
        ("echo", {}, {"python": "/bin/false"}, "exit code 1", "--python"),
        ("cleanrl", {"checkout": CHECKOUT}, {"script": "shaped", "python": ""}, "names no interpreter", "Leave it out"),
        ("cleanrl", {"checkout": CHECKOUT}, {"script": "shaped", "python": "~nobody9/x"}, "no such user", "whole path"),
        ("echo", {"step": 3}, {}, "unknown key", "Did you mean 'steps'?"),
        ("cleanrl", {"checkout": CHECKOUT}, {"script": "shaped", "warm_start": "x"}, "cannot begin with", "Leave"),
        ("echo", {}, {"video": True}, "cannot record video", "Leave --video out"),
    ],
)
def test_it_is_refused_and_nothing_is_written(refused, runner, config, spec, reason, remedy):
    text = refused(runner, config, **{"python": None, **spec})

    assert reason in text
    assert remedy in text


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    config = SupervisorConfig(min_free_disk_mb=1 << 40)
    with TrainerOrchestrator(tmp_path, config) as orchestrator, pytest.raises(LaunchRefused, match="MB are free"):
        orchestrator.launch("echo", {})
    assert list((tmp_path / "var" / "training" / "runs").iterdir()) == []


def test_a_script_that_changed_since_its_last_run_is_told_where_one_decides(home, tmp_path):
    script = tmp_path / "own.py"
    script.write_text("pass")
    spec = RunSpec(runner="my-trainer", script=str(script), python=sys.executable)

    async def body():
        async with run_supervisor(home, runners={"my-trainer": MyTrainerRunner()}) as supervisor:
            first = await supervisor.preview(spec)
            run_id = (await supervisor.submit(spec, first.plan.digest())).run_id
            await wait_for_end(supervisor, run_id)
            same = await supervisor.preview(spec)
            script.write_text("print()")
            return run_id, first, same, await supervisor.preview(spec)

    run_id, first, same, changed = asyncio.run(body())

    assert "drift" not in {finding.check for finding in first.findings + same.findings}
    drift = [finding for finding in changed.findings if finding.check == "drift"]
    assert [(finding.level, finding.text) for finding in drift] == [
        ("warning", f"its script is not the one that {run_id} ran")
    ]
    assert changed.refusal is None


class _Filmed(EchoRunner):
    name = "filmed"
    capabilities = RunnerCapabilities(title="Films itself", video=True)


def test_who_asks_for_film_is_told_what_it_costs(home):
    async def body():
        async with run_supervisor(home, runners={"filmed": _Filmed()}) as supervisor:
            return [await supervisor.preview(RunSpec(runner="filmed", video=video)) for video in (False, True)]

    plain, filmed = asyncio.run(body())

    assert "video" not in {finding.check for finding in plain.findings}
    assert [finding.level for finding in filmed.findings if finding.check == "video"] == ["warning"]


def test_foreign_code_needs_a_consent_to_exactly_its_command(tmp_path):
    script = tmp_path / "own.py"
    script.write_text("")
    with TrainerOrchestrator(tmp_path) as orchestrator:
        orchestrator.register_runner("my-trainer", MyTrainerRunner)
        with pytest.raises(ConsentRequired, match=r"own\.py"):
            orchestrator.launch("my-trainer", {}, script=str(script), python=sys.executable)
    assert list((tmp_path / "var" / "training" / "runs").iterdir()) == []
