"""Unmodified scripts of CleanRL, from the checkout and interpreter of the environment.

PALAESTRA_CLEANRL is a checkout; PALAESTRA_CLEANRL_PYTHON an interpreter with its packages (default: this one).
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.runs.runners.acting import MACHINE, ask_policy, plan_policy

from palaestra.errors import LaunchRefused
from palaestra.files.home import Home
from palaestra.runs.checkpoints.catalogue import list_checkpoints
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.runners.catalogues import scripts_of
from palaestra.runs.runners.cleanrl import SHIM, CleanrlRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator
from palaestra.telemetry import EpisodeSummary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("PALAESTRA_CLEANRL" not in os.environ, reason="PALAESTRA_CLEANRL names no checkout"),
]
PYTHON = os.environ.get("PALAESTRA_CLEANRL_PYTHON", sys.executable)


def _has(*modules):
    return (
        subprocess.run([PYTHON, "-c", f"import {', '.join(modules)}"], capture_output=True, check=False).returncode == 0
    )


def _trained(home, script, env_id, *, options=None, **config) -> tuple[RunRecord, list[EpisodeSummary], str]:
    with TrainerOrchestrator(home) as orchestrator:
        run_id = orchestrator.launch(
            "cleanrl", config, script=script, env_id=env_id, seed=1, python=PYTHON, consent=True, **(options or {})
        )  # fmt: skip
        episodes = [r.event for r in orchestrator.stream(run_id) if isinstance(r.event, EpisodeSummary)]
        output = (home / "var" / "training" / "runs" / run_id / "attempt_1" / "stdout.log").read_text()
        return orchestrator.run(run_id), episodes, output


@pytest.mark.parametrize(
    ("script", "env_id"),
    [
        ("ppo", "CartPole-v1"),
        ("dqn", "CartPole-v1"),
        ("c51", "CartPole-v1"),
        ("pqn", "CartPole-v1"),
        ("ppo_continuous_action", "Pendulum-v1"),
        ("rpo_continuous_action", "Pendulum-v1"),
        ("sac_continuous_action", "Pendulum-v1"),
        ("td3_continuous_action", "Pendulum-v1"),
        ("ddpg_continuous_action", "Pendulum-v1"),
    ],
)
def test_every_episode_on_stdout_is_an_event(tmp_path, script, env_id):
    run, episodes, output = _trained(tmp_path, script, env_id, total_timesteps=3000)

    assert run.phase is Phase.SUCCEEDED, output[-2000:]
    assert (run.agent_id, run.env_id) == (f"cleanrl/{script}", env_id)
    assert len(episodes) == run.episodes == output.count("episodic_return=") >= 10
    assert all(episode.length > 0 for episode in episodes)


def test_dqn_learns(tmp_path):
    _, episodes, _ = _trained(tmp_path, "dqn", "CartPole-v1", total_timesteps=60_000)

    returns = [episode.episode_return for episode in episodes]
    assert sum(returns[:100]) / 100 < 40
    assert sum(returns[-100:]) / 100 > 100


def test_a_model_is_not_trained_that_could_not_be_evaluated(tmp_path):
    if _has("moviepy"):
        pytest.skip("moviepy is installed")
    with pytest.raises(LaunchRefused, match="dependency:moviepy"):
        _trained(tmp_path, "dqn", "CartPole-v1", total_timesteps=2000, save_model=True)


def test_a_filmed_and_tracked_run_ends_well(tmp_path):
    if not _has("moviepy", "wandb"):
        pytest.skip("moviepy or wandb is not installed")
    options = {"video": True, "track": "offline"}
    run, _, output = _trained(tmp_path, "dqn", "CartPole-v1", total_timesteps=2000, save_model=True, options=options)

    assert run.phase is Phase.SUCCEEDED, output[-2000:]
    assert list(tmp_path.rglob("videos/**/*.mp4"))


def test_an_atari_script_trains_or_names_the_emulator(tmp_path):
    options = {"total_timesteps": 256, "num_envs": 2, "num_steps": 64}
    if not _has("ale_py", "cv2"):
        with pytest.raises(LaunchRefused, match=r"dependency:(ale-py|opencv-python)"):
            _trained(tmp_path, "ppo_atari", "BreakoutNoFrameskip-v4", **options)
        return
    run, _, output = _trained(tmp_path, "ppo_atari", "BreakoutNoFrameskip-v4", **options)
    assert run.phase is Phase.SUCCEEDED, output[-2000:]
    assert run.env_step >= 100


def test_a_model_is_saved_and_its_evaluation_ends(tmp_path):
    if not _has("moviepy"):
        pytest.skip("moviepy is not installed")
    run, _, output = _trained(tmp_path, "dqn", "CartPole-v1", total_timesteps=2000, save_model=True)

    assert run.phase is Phase.SUCCEEDED
    assert "model saved to runs/" in output
    assert len(list(tmp_path.rglob("*.cleanrl_model"))) == 1


REFERENCE = """
import json, sys
import gymnasium as gym, numpy as np, torch
script, model, env_id, observations = sys.argv[1:]
module = __import__(f"cleanrl.{script}", fromlist=["x"])
envs = gym.vector.SyncVectorEnv([lambda: gym.make(env_id)])
x = torch.Tensor(np.array(json.loads(observations), np.float32))
saved = torch.load(model, weights_only=True)
with torch.no_grad():
    if script == "dqn":
        network = module.QNetwork(envs); network.load_state_dict(saved); actions = network(x).argmax(1)
    elif script == "c51":
        args = saved["args"]
        network = module.QNetwork(envs, args["n_atoms"], args["v_min"], args["v_max"])
        network.load_state_dict(saved["model_weights"]); actions = network.get_action(x)[0]
    else:
        network = module.Actor(envs); network.load_state_dict(saved[0]); actions = network(x)
print("@" + json.dumps(actions.tolist()))
"""


@pytest.mark.parametrize(
    ("script", "env_id"),
    [
        ("dqn", "CartPole-v1"),
        ("c51", "CartPole-v1"),
        ("ddpg_continuous_action", "Pendulum-v1"),
        ("td3_continuous_action", "Pendulum-v1"),
        ("ppo_continuous_action", "Pendulum-v1"),
    ],
)
def test_a_saved_model_acts_as_the_script_itself_would(tmp_path, script, env_id):
    if not _has("moviepy"):
        pytest.skip("moviepy is not installed")
    run, _, output = _trained(tmp_path, script, env_id, total_timesteps=3000, save_model=True)
    assert run.phase is Phase.SUCCEEDED, output[-2000:]
    (checkpoint,) = list_checkpoints(Home(tmp_path / "var" / "training"), run_id=run.run_id)
    plan = plan_policy(CleanrlRunner(), Home(tmp_path / "var" / "training"), checkpoint)
    assert plan.foreign_code == ""
    observations = np.random.default_rng(0).normal(0, 1, (50, 4 if env_id == "CartPole-v1" else 3)).astype(np.float32)

    ready, answers = ask_policy(plan, observations)

    assert len(answers) == 50
    if script == "ppo_continuous_action":
        assert "estimated anew" in ready["notes"][0]
        return
    words = (script, checkpoint.path, env_id, json.dumps(observations.tolist()))
    environment = {**os.environ, **plan.environment}
    done = subprocess.run(
        [PYTHON, "-c", REFERENCE, *words], env=environment, capture_output=True, text=True, check=True
    )
    expected = np.array(json.loads(done.stdout.rpartition("@")[2]))
    assert np.allclose(expected.reshape(50, -1), np.array([a["action"] for a in answers]).reshape(50, -1), atol=1e-6)
    assert ready["notes"] == []


SAVE_NETWORK = """
import sys
import gymnasium as gym, torch
script, name, env_id, path, observation = sys.argv[1:]
module = __import__(f"cleanrl.{script}", fromlist=["x"])
torch.manual_seed(0)
network = getattr(module, name)(gym.vector.SyncVectorEnv([lambda: gym.make(env_id)]))
torch.save(network.state_dict(), path)
x = torch.Tensor([[float(number) for number in observation.split(",")]])
with torch.no_grad():
    action = network.actor(x).argmax(1) if name == "Agent" else network.get_action(x)[2]
print("@" + str(action[0].tolist()))
"""


@pytest.mark.parametrize(
    ("script", "name", "env_id", "observation"),
    [
        ("ppo", "Agent", "CartPole-v1", [0.1, -0.2, 0.3, -0.4]),
        ("sac_continuous_action", "Actor", "Pendulum-v1", [1.0, 0.0, 0.5]),
    ],
)
def test_weights_of_scripts_that_save_none_act_as_well(tmp_path, script, name, env_id, observation):
    checkout, path = os.environ["PALAESTRA_CLEANRL"], tmp_path / "a.cleanrl_model"
    words = (script, name, env_id, str(path), ",".join(map(str, observation)))
    environment = {**os.environ, "PYTHONPATH": f"{SHIM.parent}:{checkout}"}
    done = subprocess.run(
        [PYTHON, "-c", SAVE_NETWORK, *words], env=environment, capture_output=True, text=True, check=True
    )
    home = Home(tmp_path / "var" / "training")
    record = import_checkpoint(home, path, Provenance(agent_id=f"cleanrl/{script}", env_id=env_id))

    plan = plan_policy(CleanrlRunner(), home, record)
    _, (answer,) = ask_policy(plan, [np.float32(observation)])

    assert "is not known to be the one that saved it" in plan.foreign_code
    assert answer["action"] == pytest.approx(json.loads(done.stdout.rpartition("@")[2]))


def test_the_catalogue_says_of_each_script_what_it_saves():
    infos = {info.name: info for info in scripts_of(CleanrlRunner(), RunSpec(runner="cleanrl"), MACHINE)}

    playing = {name for name, info in infos.items() if info.plays}
    assert playing == {
        "c51", "ddpg_continuous_action", "dqn", "ppo_continuous_action", "td3_continuous_action",
    }  # fmt: skip
    assert not infos["ppo"].saves_checkpoints
    assert not infos["sac_continuous_action"].saves_checkpoints
    assert infos["dqn_atari"].saves_checkpoints
    assert (infos["dqn"].actions, infos["td3_continuous_action"].actions) == (("discrete",), ("continuous",))
