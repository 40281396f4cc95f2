"""`palaestra runners`."""

import json

import pytest
import typer
from typer.testing import CliRunner

from palaestra.cli.catalog import runners as runners_command
from palaestra.errors import ConfigError


@pytest.fixture
def runners():
    app = typer.Typer()
    app.command()(runners_command)

    def call(*words):
        done = CliRunner().invoke(app, list(words), catch_exceptions=True)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout

    return call


def test_one_line_per_runner_with_what_it_can_do(runners):
    lines = runners().splitlines()

    assert lines[0].split()[:2] == ["RUNNER", "RESUME"]
    assert {line.split()[0]: line.split()[1] for line in lines[1:]} == {
        "palaestra": "yes", "cleanrl": "–", "sb3": "yes", "echo": "yes",
    }  # fmt: skip
    assert {"BELIEFS", "GPU"} <= set(lines[0].split())
    assert "wandb, huggingface" in next(line for line in lines if line.startswith("cleanrl"))


def test_programs_get_a_document(runners):
    result = json.loads(runners("--json"))

    assert result["broken"] == {}
    assert result["runners"]["cleanrl"]["runs_foreign_code"] is True


def test_a_schema_is_printed_by_name_and_a_wrong_name_refused_with_the_nearest(runners):
    assert "steps" in json.loads(runners("--schema", "echo"))["properties"]
    with pytest.raises(ConfigError, match="Did you mean 'echo'"):
        runners("--schema", "ecko")
