"""`palaestra runners`."""

import json
import sys
from pathlib import Path

import pytest
import typer
from tests.runs.runners.bdi import bdi_python
from typer.testing import CliRunner

from palaestra.cli.catalog import envs as envs_command
from palaestra.cli.catalog import runners as runners_command
from palaestra.errors import ConfigError
from palaestra.runs.process.virtual_environment import LOCATION_VARIABLE


def _command(function):
    app = typer.Typer()
    app.command()(function)

    def call(*words):
        done = CliRunner().invoke(app, list(words), catch_exceptions=True)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout

    return call


@pytest.fixture
def runners():
    return _command(runners_command)


@pytest.fixture
def envs():
    return _command(envs_command)


def test_one_line_per_runner_with_what_it_can_do(runners):
    lines = runners().splitlines()

    assert lines[0].split()[:2] == ["RUNNER", "RESUME"]
    assert {line.split()[0]: line.split()[1] for line in lines[1:]} == {
        "palaestra": "yes", "cleanrl": "–", "corl": "–", "sb3": "yes", "spade-bdi": "–", "echo": "yes",
        "script": "again",
    }  # fmt: skip
    assert {"BELIEFS", "GPU"} <= set(lines[0].split())
    assert "wandb, huggingface" in next(line for line in lines if line.startswith("cleanrl"))


def test_the_environment_of_a_runner_is_prepared_once(runners, monkeypatch):
    bdi_python()
    monkeypatch.setenv(LOCATION_VARIABLE, str(Path(sys.prefix) / "environments"))

    assert runners("--prepare", "spade-bdi") == "spade-bdi is ready.\n"
    assert json.loads(runners("--prepare", "spade-bdi", "--json")) == {"runner": "spade-bdi", "ready": True}
    with pytest.raises(ConfigError, match="has no environment of its own"):
        runners("--prepare", "echo")


def test_programs_get_a_document(runners):
    result = json.loads(runners("--json"))

    assert result["broken"] == {}
    assert result["runners"]["cleanrl"]["runs_foreign_code"] is True


def test_a_schema_is_printed_by_name_and_a_wrong_name_refused_with_the_nearest(runners):
    assert "steps" in json.loads(runners("--schema", "echo"))["properties"]
    with pytest.raises(ConfigError, match="Did you mean 'echo'"):
        runners("--schema", "ecko")


def test_the_scripts_of_a_runner_are_a_table_or_a_document(runners):
    lines = runners("--scripts", "sb3").splitlines()

    assert lines[0].split() == ["SCRIPT", "ACTIONS", "SAVES", "PLAYS", "WARM", "START", "DESCRIPTION"]
    assert lines[1].startswith("ppo     discrete, continuous  yes    yes    yes         On-policy")
    assert [info["name"] for info in json.loads(runners("--scripts", "sb3", "--json"))][:2] == ["ppo", "a2c"]
    assert runners("--scripts", "echo") == "echo has no scripts.\n"
    with pytest.raises(ConfigError, match="Did you mean 'sb3'"):
        runners("--scripts", "sb33")


def test_scripts_of_a_missing_checkout_are_refused_with_the_remedy(runners, monkeypatch, tmp_path):
    monkeypatch.setenv("PALAESTRA_CLEANRL", str(tmp_path))

    with pytest.raises(ConfigError, match="is not a CleanRL checkout"):
        runners("--scripts", "cleanrl")


def test_the_environments_of_a_runner_are_grouped(envs):
    lines = envs("lunarlander-v", "--runner", "sb3").splitlines()

    assert [line.split() for line in lines] == [
        ["ENVIRONMENT", "GROUP", "STEPS", "NEEDS"],
        ["LunarLander-v3", "Box2D", "1000"],
    ]
    (info,) = json.loads(envs("lunarlander-v", "--runner", "sb3", "--json"))
    assert (info["env_id"], info["installed"], info["newest"]) == ("LunarLander-v3", True, True)
    assert envs("no such", "--runner", "sb3") == "sb3 has no such environment.\n"
    with pytest.raises(ConfigError, match="no such runner"):
        envs("--runner", "zzz")
