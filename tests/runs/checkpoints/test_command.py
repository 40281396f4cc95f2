"""`palaestra checkpoints`."""

import json

import pytest
import typer
from tests.runs.checkpoints import evil
from tests.runs.checkpoints.own import own_checkpoint
from typer.testing import CliRunner

from palaestra.cli.app import build_app
from palaestra.cli.eval import eval_command
from palaestra.errors import CheckpointError, ConfigError, UnknownRun
from palaestra.runs.store.rebuild import open_registry


def typed(*words):
    return CliRunner().invoke(build_app([]), ["checkpoints", *(str(word) for word in words)], catch_exceptions=False)


def evaluated(*words):
    app = typer.Typer()
    app.command()(eval_command)
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def answer(*words):
    return json.loads(typed(*words, "--json").stdout)


@pytest.fixture
def own_run(home):
    """A run that somebody trained without any service."""
    run = home.runs / "cartpole-1"
    own_checkpoint(run / "attempt_1" / "checkpoints" / "update_00000003", env_step=4096)
    (run / "resolved.json").write_text(json.dumps({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}))
    (run / "attempt_1" / "metrics.jsonl").write_text("")
    return run


def test_checkpoints_are_listed_without_a_service_or_a_registry(home, own_run):
    (row,) = answer("list")
    words = typed("list").stdout.splitlines()

    assert (row["run_id"], row["env_step"], row["format"]) == ("cartpole-1", 4096, "palaestra")
    assert row["uri"] == f"file://{row['path']}"
    assert words[0].split()[:4] == ["CHECKPOINT", "AGENT", "ENV", "STEP"]
    assert "4,096" in words[1]
    assert not home.registry.exists()


def test_a_prefix_of_a_run_id_lists_its_checkpoints_and_any_other_is_refused(home, own_run):
    open_registry(home).close()
    # No service has looked at this one yet; it counts all the same.
    own_checkpoint(home.runs / "cartpole-20" / "attempt_1" / "checkpoints" / "update_00000001", env_step=512, seed=1)
    (home.runs / "cartpole-20" / "resolved.json").write_text('{"env": {"id": "CartPole-v1"}}')

    assert [row["env_step"] for row in answer("list", "--run", "cartpole-2")] == [512]
    with pytest.raises(UnknownRun, match=r"is a prefix of several runs\. Which of cartpole-1, cartpole-20\?"):
        typed("list", "--run", "cart")
    with pytest.raises(UnknownRun, match="run = 'another': no such run"):
        typed("list", "--run", "another")
    assert typed("list", "--env", "Pendulum-v1").stdout == "No matching checkpoint.\n"


def test_one_is_imported_listed_and_verified(home, tmp_path):
    source = evil.torch_zip(tmp_path / "a.pt")

    record = answer("import", source, "--agent", "cleanrl/dqn", "--env", "CartPole-v1", "--step", 500)

    assert record["env_signature"]["action_space"]["n"] == 2
    assert [row["checkpoint_id"] for row in answer("list", "--agent", "cleanrl/dqn")] == [record["checkpoint_id"]]
    assert typed("verify", record["checkpoint_id"][:6]).stdout.split()[1] == "verified"
    with open(record["path"], "r+b") as file:
        file.write(b"X")
    done = typed("verify", "--all")
    assert done.exit_code == 1
    assert "does not match: its SHA-256 differs" in done.stdout
    assert "damaged" in typed("list").stdout


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--step", "99999999999999999999999", "is not a number of steps"),
        ("--step", "-5", "is not a number of steps"),
        ("--agent", "a\nb", "control character"),
        ("--env", "\udcff", "is not valid UTF-8"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(home, tmp_path, option, value, reason):
    source = evil.torch_zip(tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match=f"^{option} = .*{reason}"):
        typed("import", source, option, value)
    assert not (home.path / "checkpoints").exists()


def test_one_that_is_known_is_called_so_and_takes_what_is_said_of_it_now(home, tmp_path):
    source = evil.torch_zip(tmp_path / "a.pt")
    first = answer("import", source, "--agent", "cleanrl/dqn", "--step", 500)

    assert typed("import", source).stdout.endswith(
        " was imported already, with agent 'cleanrl/dqn', env '' and step 500; nothing changed\n"
    )
    said = typed("import", source, "--step", 700, "--env", "nowhere-v1").stdout
    assert said.endswith(" was imported already: env was '' and is now 'nowhere-v1', step was 500 and is now 700\n")
    (row,) = answer("list")
    assert row == {**first, "env_step": 700, "env_id": "nowhere-v1", "env_signature": row["env_signature"]}
    assert row["env_signature"]["env_id"] == "nowhere-v1"


def test_an_evil_one_is_refused_with_the_reason_and_a_remedy(home, tmp_path):
    canary = tmp_path / "canary"
    source = tmp_path / "evil.pt"
    source.write_bytes(evil.pickles(canary)["reduce_protocol_4"])

    with pytest.raises(CheckpointError, match=r"it would import posix\.system\. Save the weights as safetensors"):
        typed("import", source)
    assert answer("list") == []
    assert not canary.exists()


def test_one_is_deployed_by_the_beginning_of_its_id(home, own_run):
    (row,) = answer("list")

    now = answer("deploy", row["checkpoint_id"][:5])

    assert (now["env_id"], now["checkpoint_id"]) == ("CartPole-v1", row["checkpoint_id"])
    with pytest.raises(CheckpointError, match="Switch to CartPole-v1"):
        typed("deploy", row["checkpoint_id"], "--env", "Pendulum-v1")
    (listed,) = answer("deployed")
    assert listed == now
    assert typed("deployed").stdout.splitlines()[1].split()[:3] == [
        "CartPole-v1",
        row["checkpoint_id"],
        row["agent_id"],
    ]
    said = evaluated("--deployed", "CartPole-v1", "--episodes", "1", "--json")
    assert json.loads(said.stdout)["checkpoint"] == now["path"]
    assert typed("deploy", "--back", "--env", "CartPole-v1").stdout == "Nothing is deployed in CartPole-v1 now.\n"
    assert answer("deployed") == []


def test_unknown_and_missing_names_are_refused(home):
    for words in (
        ("verify",),
        ("verify", "feed"),
        ("deploy", "feed"),
        ("deploy", ""),
        ("deploy",),
        ("deploy", "--back"),
    ):
        with pytest.raises(ConfigError, match=r"no such checkpoint|nothing to verify|no checkpoint given"):
            typed(*words)
    for words in ((), ("a", "--deployed", "b"), ("--deployed", "CartPole-v1")):
        with pytest.raises(ConfigError, match=r"give either this|nothing is deployed there"):
            evaluated(*words)
