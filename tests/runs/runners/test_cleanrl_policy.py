"""Files that CleanRL scripts save act with the networks of their script, and only with the script of their run."""

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from tests.runs.runners.acting import MACHINE, ask_in_vain, ask_policy
from tests.runs.runners.test_cleanrl import CHECKOUT

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints import sb3_zip
from palaestra.runs.checkpoints.files import detect_format, digest_path
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.process.interpreter import PROBE_PROGRAM
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import PolicyRequest
from palaestra.runs.runners.cleanrl import POLICY_PROGRAM, CleanrlRunner
from palaestra.runs.runners.programs.policy_program import CannotAct, CleanrlPolicy, import_script, parse_args
from palaestra.runs.spec import RunSpec

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"


@pytest.fixture
def checkout(tmp_path):
    return shutil.copytree(CHECKOUT, tmp_path / "checkout", ignore=shutil.ignore_patterns("__pycache__"))


def _script(checkout, name):
    path = str(checkout / "cleanrl" / f"{name}.py")
    return path, digest_path(checkout / "cleanrl" / f"{name}.py").sha256


def _module(checkout, name):
    path, sha256 = _script(checkout, name)
    return import_script(path, [path], sha256)


def _envs(env_id, count=1):
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id)] * count)


def _load(checkout, name, env_id, model, *words, **values):
    """The policy of the program, in this process."""
    path, sha256 = _script(checkout, name)
    command = ["cleanrl", str(model), "--sha256", "", f"--env={env_id}", "--values", json.dumps(values)]
    return CleanrlPolicy(parse_args([*command, "--script", path, "--script-sha256", sha256, *words]))


def _spread(network):
    """Weights that differ enough to make different actions the best ones."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return network


def _observations(size, count=200):
    return np.random.default_rng(0).normal(0, 1, (count, size)).astype(np.float32)


def _actions(policy, observations):
    return [policy.act({"": observation})["action"] for observation in observations]


def test_a_q_network_takes_the_action_of_the_highest_value(checkout, tmp_path):
    network = _spread(_module(checkout, "q_learning").QNetwork(_envs(CARTPOLE)))
    torch.save(network.state_dict(), tmp_path / "a.cleanrl_model")
    policy = _load(checkout, "q_learning", CARTPOLE, tmp_path / "a.cleanrl_model")
    observations = _observations(4)

    with torch.no_grad():
        values = network(torch.tensor(observations))
    assert _actions(policy, observations) == values.argmax(1).tolist()
    assert set(_actions(policy, observations)) == {0, 1}
    assert policy.act({"": observations[0]})["outputs"] == {"q_values": pytest.approx(values[0].tolist())}


def test_c51_takes_its_atoms_from_the_arguments_in_its_file(checkout, tmp_path):
    network = _spread(_module(checkout, "distributional").QNetwork(_envs(CARTPOLE), 5, -1.0, 3.0))
    arguments = {"n_atoms": 5, "v_min": -1.0, "v_max": 3.0}
    torch.save({"model_weights": network.state_dict(), "args": arguments}, tmp_path / "a.cleanrl_model")
    policy = _load(checkout, "distributional", CARTPOLE, tmp_path / "a.cleanrl_model", n_atoms=101)
    observations = _observations(4)

    with torch.no_grad():
        expected = network.get_action(torch.tensor(observations))[0].tolist()
    assert _actions(policy, observations) == expected
    (first, second) = policy.act({"": observations[0]})["outputs"]["q_values"]
    assert -1 <= min(first, second) <= max(first, second) <= 3


def test_ppo_takes_the_likeliest_action_and_says_how_likely(checkout, tmp_path):
    agent = _spread(_module(checkout, "policy_gradient").Agent(_envs(CARTPOLE)))
    torch.save(agent.state_dict(), tmp_path / "a.cleanrl_model")
    policy = _load(checkout, "policy_gradient", CARTPOLE, tmp_path / "a.cleanrl_model")
    observations = _observations(4)

    with torch.no_grad():
        logits = agent.actor(torch.tensor(observations))
        value = float(agent.get_value(torch.tensor(observations[:1])))
    assert _actions(policy, observations) == logits.argmax(1).tolist()
    outputs = policy.act({"": observations[0]})["outputs"]
    assert outputs["probabilities"] == pytest.approx(torch.softmax(logits[0], -1).tolist())
    assert outputs["value"] == pytest.approx(value)


@pytest.mark.parametrize("rows", [1, 3])
def test_ddpg_acts_with_the_scale_of_however_many_environments_trained_it(checkout, tmp_path, rows):
    module = _module(checkout, "actor_critic")
    actor, critic = _spread(module.Actor(_envs(PENDULUM, rows))), module.QNetwork(_envs(PENDULUM))
    torch.save((actor.state_dict(), critic.state_dict()), tmp_path / "a.cleanrl_model")
    policy = _load(checkout, "actor_critic", PENDULUM, tmp_path / "a.cleanrl_model")
    observations = _observations(3, 50)

    expected = []
    for observation in observations:
        with torch.no_grad():
            expected.append(actor(torch.tensor(observation)[None])[0].tolist())
    assert np.allclose(_actions(policy, observations), expected, atol=1e-6)
    assert policy.describe()["action_space"] == {
        "type": "Box", "shape": [1], "dtype": "float32", "low": -2.0, "high": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("is_tuple", [True, False])
def test_sac_takes_the_mean_action(checkout, tmp_path, is_tuple):
    actor = _spread(_module(checkout, "soft_actor").Actor(_envs(PENDULUM)))
    saved = (actor.state_dict(), {}, {}) if is_tuple else actor.state_dict()
    torch.save(saved, tmp_path / "a.cleanrl_model")
    policy = _load(checkout, "soft_actor", PENDULUM, tmp_path / "a.cleanrl_model")
    observations = _observations(3, 50)

    expected = []
    for observation in observations:
        with torch.no_grad():
            expected.append(actor.get_action(torch.tensor(observation)[None])[2][0].tolist())
    assert np.allclose(_actions(policy, observations), expected, atol=1e-6)


def test_sampled_actions_vary_as_in_the_scripts_own_evaluation(checkout, tmp_path):
    torch.save(_module(checkout, "q_learning").QNetwork(_envs(CARTPOLE)).state_dict(), tmp_path / "q")
    torch.save(_module(checkout, "policy_gradient").Agent(_envs(CARTPOLE)).state_dict(), tmp_path / "p")
    torch.save((_module(checkout, "actor_critic").Actor(_envs(PENDULUM)).state_dict(), {}), tmp_path / "a")
    torch.save(_module(checkout, "soft_actor").Actor(_envs(PENDULUM)).state_dict(), tmp_path / "s")
    cases = (("q_learning", CARTPOLE, "q", 4), ("policy_gradient", CARTPOLE, "p", 4),
             ("actor_critic", PENDULUM, "a", 3), ("soft_actor", PENDULUM, "s", 3))  # fmt: skip

    for name, env_id, file, size in cases:
        policy = _load(checkout, name, env_id, tmp_path / file, "--sample", end_e=1.0, exploration_noise=0.1)

        def play(policy=policy, size=size):
            policy.begin(7)
            return _actions(policy, np.zeros((40, size), np.float32))

        first = play()
        assert len({str(action) for action in first}) > 1, name
        assert play() == first, name


def test_a_file_of_another_network_is_refused(checkout, tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "a.cleanrl_model")
    with pytest.raises(CannotAct, match=r"no network of q_learning\.py \(Agent, Actor, QNetwork\) has its weights"):
        _load(checkout, "q_learning", CARTPOLE, tmp_path / "a.cleanrl_model")
    torch.save(torch.zeros(3), tmp_path / "b.cleanrl_model")
    with pytest.raises(CannotAct, match="holds no weights that are known here"):
        _load(checkout, "q_learning", CARTPOLE, tmp_path / "b.cleanrl_model")
    network = _module(checkout, "q_learning").QNetwork(_envs("Acrobot-v1"))
    torch.save(network.state_dict(), tmp_path / "c.cleanrl_model")
    with pytest.raises(CannotAct, match="its weights do not fit the network"):
        _load(checkout, "q_learning", CARTPOLE, tmp_path / "c.cleanrl_model")


def test_a_script_that_plays_in_a_wrapper_that_a_play_lacks_is_refused(checkout, tmp_path):
    torch.save(_module(checkout, "q_learning").QNetwork(_envs(CARTPOLE)).state_dict(), tmp_path / "a.cleanrl_model")
    script = checkout / "cleanrl" / "q_learning.py"
    wrapped = "gym.wrappers.RescaleObservation(gym.make(env_id), 0, 1)"
    script.write_text(script.read_text().replace("gym.make(env_id)", wrapped))

    with pytest.raises(CannotAct, match="its script plays in the wrapper RescaleObservation"):
        _load(checkout, "q_learning", PENDULUM, tmp_path / "a.cleanrl_model")


def _record(path, script="q_learning", env_id=CARTPOLE, **changes):
    digest = digest_path(path)
    record = CheckpointRecord(
        checkpoint_id=digest.sha256[:16], run_id="", agent_id=f"cleanrl/{script}", env_id=env_id, attempt=0,
        env_step=None, path=str(path), sha256=digest.sha256, size_bytes=digest.size_bytes, format=detect_format(path),
        created=0.0,
    )  # fmt: skip
    return replace(record, **changes)


def _request(record, checkout, script_sha256="", *, script="q_learning"):
    spec = RunSpec(runner="cleanrl", script=script, checkout=str(checkout), env_id=record.env_id)
    command = {"argv": [sys.executable], "script_sha256": script_sha256}
    return PolicyRequest(checkpoint=record, spec=spec, command=command, deterministic=True)


def _save_network(checkout, path):
    torch.save(_module(checkout, "q_learning").QNetwork(_envs(CARTPOLE)).state_dict(), path)
    return _record(path)


def test_only_the_script_of_the_run_needs_no_consent(checkout, tmp_path):
    record = _save_network(checkout, tmp_path / "a.cleanrl_model")
    runner = CleanrlRunner()
    _, sha256 = _script(checkout, "q_learning")

    assert runner.plan_policy(_request(record, checkout, sha256), MACHINE).foreign_code == ""
    unknown = runner.plan_policy(_request(record, checkout), MACHINE)
    assert unknown.foreign_code == (
        f"cleanrl/q_learning.py of {checkout}, which is not known to be the one that saved it"
    )
    with open(checkout / "cleanrl" / "q_learning.py", "a") as script:
        script.write("\n# changed\n")
    changed = runner.plan_policy(_request(record, checkout, sha256), MACHINE)
    assert changed.foreign_code == f"cleanrl/q_learning.py of {checkout}, which has changed since the run"
    assert len({unknown.digest(), changed.digest()}) == 2


def test_a_script_that_changes_after_the_plan_is_not_executed(checkout, tmp_path):
    record = _save_network(checkout, tmp_path / "a.cleanrl_model")
    _, sha256 = _script(checkout, "q_learning")
    plan = CleanrlRunner().plan_policy(_request(record, checkout, sha256), MACHINE)
    canary = tmp_path / "canary"
    with open(checkout / "cleanrl" / "q_learning.py", "a") as script:
        script.write(f"\nopen({str(canary)!r}, 'w')\n")

    assert "q_learning.py was changed meanwhile" in ask_in_vain(plan)["text"]
    assert not canary.exists()


def test_a_script_that_normalises_observations_restarts_its_statistics_and_says_so(checkout, tmp_path):
    linear = {"critic.weight": torch.zeros(1, 3), "critic.bias": torch.zeros(1), "actor_logstd": torch.zeros(1, 1)}
    torch.save({**linear, "actor_mean.weight": torch.ones(1, 3), "actor_mean.bias": torch.zeros(1)}, tmp_path / "a.pt")
    record = _record(tmp_path / "a.pt", "normalizing", PENDULUM)
    _, sha256 = _script(checkout, "normalizing")
    plan = CleanrlRunner().plan_policy(_request(record, checkout, sha256, script="normalizing"), MACHINE)
    first, second = np.float32([1, 0, 2]), np.float32([0, 1, -2])

    ready, answers = ask_policy(plan, [first, second])

    reference = gymnasium.wrappers.NormalizeObservation(gymnasium.make(PENDULUM))
    expected = [float(np.clip(reference.observation(o), -10, 10).sum()) for o in (first, second)]
    assert [answer["action"][0] for answer in answers] == pytest.approx(expected, abs=1e-5)
    assert ready["notes"] == [
        "The script normalises observations and does not save the statistics. They are estimated anew while it plays, "
        "so that its first steps are worse."
    ]


def test_an_imported_file_names_its_script_by_its_agent_and_needs_consent(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_CLEANRL", str(checkout))
    home = Home(tmp_path / "home" / "var" / "training")
    _save_network(checkout, tmp_path / "best.cleanrl_model")
    named = Provenance(agent_id="cleanrl/q_learning", env_id=CARTPOLE)
    record = import_checkpoint(home, tmp_path / "best.cleanrl_model", named)
    machine = replace(MACHINE, environment={**MACHINE.environment, "PALAESTRA_CLEANRL": str(checkout)})
    request = PolicyRequest(checkpoint=record, spec=None, command={}, deterministic=True)

    plan = CleanrlRunner().plan_policy(request, machine)

    assert "is not known to be the one that saved it" in plan.foreign_code
    ready, _ = ask_policy(plan, np.zeros((1, 4), np.float32))
    assert ready["action_space"]["n"] == 2
    nameless = replace(request, checkpoint=replace(record, agent_id=""))
    with pytest.raises(CheckpointError, match="Import it again with --agent cleanrl/SCRIPT and --env ENV"):
        CleanrlRunner().plan_policy(nameless, machine)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "unknown"}, "is not a file of torch"),
        ({"agent_id": "cleanrl/no_such_script"}, "is not in"),
    ],
)
def test_what_cannot_act_is_refused_before_anything_starts(checkout, tmp_path, changes, reason):
    record = replace(_save_network(checkout, tmp_path / "a.cleanrl_model"), **changes)
    request = _request(record, checkout, script=record.agent_id.partition("/")[2])

    with pytest.raises(ConfigError, match=reason):
        CleanrlRunner().plan_policy(request, MACHINE)


def test_a_script_for_atari_is_refused_because_a_play_lacks_its_wrappers(checkout, tmp_path):
    record = _save_network(checkout, tmp_path / "a.cleanrl_model")
    shutil.copy(checkout / "cleanrl" / "q_learning.py", checkout / "cleanrl" / "q_learning_atari.py")

    with pytest.raises(CheckpointError, match="a play has no wrappers for Atari"):
        CleanrlRunner().plan_policy(_request(record, checkout, script="q_learning_atari"), MACHINE)


def test_an_interpreter_without_the_packages_of_the_script_is_named(checkout, tmp_path, bare_python):
    record = _save_network(checkout, tmp_path / "a.cleanrl_model")
    request = replace(_request(record, checkout), command={"argv": [bare_python]})

    with pytest.raises(ConfigError, match=f"{bare_python} -m pip install 'gymnasium'"):
        CleanrlRunner().plan_policy(request, MACHINE)


def test_the_program_loads_in_an_interpreter_without_our_package(tmp_path, bare_python):
    words = ["sb3", str(tmp_path / "none.zip"), "--sha256", "", "--env=CartPole-v1"]
    done = subprocess.run([bare_python, str(POLICY_PROGRAM), *words], capture_output=True, check=False, timeout=60)

    assert b"failed" in done.stdout
    assert b"none.zip" in done.stdout
    assert done.returncode != 0


@pytest.mark.parametrize("program", [POLICY_PROGRAM, PROBE_PROGRAM, Path(sb3_zip.__file__)], ids=lambda path: path.name)
def test_what_runs_in_other_interpreters_is_written_for_python_3_8(program):
    tree = ast.parse(program.read_text(), feature_version=(3, 8))

    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_a_lone_policy_program_is_not_confused_by_messages_it_does_not_know(checkout, tmp_path):
    record = _save_network(checkout, tmp_path / "a.cleanrl_model")
    plan = CleanrlRunner().plan_policy(_request(record, checkout, _script(checkout, "q_learning")[1]), MACHINE)
    header = json.dumps({"type": "of a later version"}).encode()
    unknown = len(header).to_bytes(4, "little") + bytes(4) + header

    done = subprocess.run(plan.argv, input=unknown, env={**MACHINE.environment, **plan.environment},
                          capture_output=True, check=False, timeout=120)  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert SimpleNamespace(**json.loads(done.stdout[8:])).type == "ready"
