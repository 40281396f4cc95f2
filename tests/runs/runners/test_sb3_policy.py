"""Checkpoints of Stable-Baselines3 act as the library's own `predict`, and no pickle in them runs without consent."""

import base64
import json
import pickle
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tests.runs.runners.acting import MACHINE, Acting, ask_in_vain, ask_policy, plan_policy

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.files import digest_path
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.checkpoints.sb3_zip import Sb3Zip
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import PolicyRequest
from palaestra.runs.runners.programs.policy_program import CannotAct, Sb3Policy, parse_args
from palaestra.runs.runners.sb3 import Sb3Runner

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
SMALL = {"buffer_size": 10}


def _save(path, algorithm, env_id, policy="MlpPolicy", **options):
    model = algorithm(policy, env_id, device="cpu", seed=1, **options)
    model.save(path)
    return model


def _record(path, env_id=CARTPOLE, agent_id="sb3/ppo"):
    digest = digest_path(path)
    return CheckpointRecord(
        checkpoint_id=digest.sha256[:16], run_id="", agent_id=agent_id, env_id=env_id, attempt=0, env_step=None,
        path=str(path), sha256=digest.sha256, size_bytes=digest.size_bytes, format="sb3_zip", created=0.0,
    )  # fmt: skip


def _plan(path, env_id=CARTPOLE, **options):
    return plan_policy(Sb3Runner(), None, _record(path, env_id), **options)


def _load(path, env_id, *words):
    """The policy of the program, in this process."""
    return Sb3Policy(parse_args(["sb3", str(path), "--sha256", "", f"--env={env_id}", *words]))


def _observations(env_id, count):
    env = gymnasium.make(env_id)
    space = env.observation_space
    env.close()
    space.seed(0)
    if space.dtype != np.float32:
        return [np.asarray(space.sample()) for _ in range(count)]
    # Bounds of observations are often infinite, and then samples are too small to tell networks apart.
    return list(np.random.default_rng(0).normal(0, 2, (count, *space.shape)).astype(np.float32))


def _rewrite(path, change):
    """Change the JSON of a zip."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(members["data"])
    change(data)
    members["data"] = json.dumps(data).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


RELU = {"activation_fn": torch.nn.ReLU, "net_arch": {"pi": [32, 16], "vf": [8]}}
CASES = {
    "ppo": (sb3.PPO, CARTPOLE, {"policy_kwargs": RELU}, 1000),
    "a2c": (sb3.A2C, CARTPOLE, {}, 1000),
    "dqn": (sb3.DQN, CARTPOLE, {**SMALL, "policy_kwargs": {"activation_fn": torch.nn.ELU, "net_arch": [16]}}, 1000),
    "sac": (sb3.SAC, PENDULUM, SMALL, 1000),
    "td3": (sb3.TD3, PENDULUM, {**SMALL, "policy_kwargs": {"activation_fn": torch.nn.Tanh, "net_arch": [9, 8]}}, 1000),
    "ddpg": (sb3.DDPG, PENDULUM, SMALL, 100),
    "trpo": (sb3_contrib.TRPO, CARTPOLE, {}, 100),
    "qrdqn": (sb3_contrib.QRDQN, CARTPOLE, SMALL, 100),
    "tqc": (sb3_contrib.TQC, PENDULUM, SMALL, 100),
    "continuous actions with state-dependent noise": (sb3.PPO, PENDULUM, {"use_sde": True}, 100),
    "squashed state-dependent noise": (sb3.SAC, PENDULUM, {**SMALL, "use_sde": True}, 100),
    "a number as the observation": (sb3.PPO, "FrozenLake-v1", {}, 16),
    "images": (sb3.PPO, "Camera-v0", {"n_steps": 2, "batch_size": 2}, 5),
    "several observations": (sb3.PPO, "Senses-v0", {"n_steps": 2, "batch_size": 2}, 5),
}  # fmt: skip
POLICIES = {"images": "CnnPolicy", "several observations": "MultiInputPolicy"}


class Camera(gymnasium.Env):
    """Pictures with the colours last, as environments have them; SB3 trains on pictures with the colours first."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as Gymnasium declares it
    observation_space = gymnasium.spaces.Box(0, 255, (36, 40, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode


class Senses(Camera):
    observation_space = gymnasium.spaces.Dict(
        {"near": gymnasium.spaces.Box(-1, 1, (3,)), "picture": Camera.observation_space}
    )


gymnasium.register("Camera-v0", Camera)
gymnasium.register("Senses-v0", Senses)


@pytest.mark.parametrize("name", CASES)
def test_every_action_is_the_one_that_the_library_predicts(tmp_path, name):
    algorithm, env_id, options, count = CASES[name]
    model = _save(tmp_path / "a.zip", algorithm, env_id, POLICIES.get(name, "MlpPolicy"), **options)
    if name == "several observations":
        space = Senses.observation_space
        space.seed(0)
        observations = [dict(space.sample()) for _ in range(count)]
    else:
        observations = _observations(env_id, count)
    policy = _load(tmp_path / "a.zip", env_id)

    answers = [policy.act(o if isinstance(o, dict) else {"": o}) for o in observations]

    expected = [model.predict(o, deterministic=True)[0].tolist() for o in observations]
    assert [answer["action"] for answer in answers] == expected
    assert len({str(action) for action in expected}) > 1 or count < 10
    assert policy.describe()["notes"] == []


def test_the_outputs_are_what_the_networks_say(tmp_path):
    discrete = _save(tmp_path / "ppo.zip", sb3.PPO, CARTPOLE)
    q_learning = _save(tmp_path / "dqn.zip", sb3.DQN, CARTPOLE, **SMALL)
    continuous = _save(tmp_path / "sac.zip", sb3.SAC, PENDULUM, **SMALL)
    four, three = np.float32([0.1, -0.2, 0.3, -0.4]), np.float32([1.0, 0.0, 0.5])
    ppo, dqn, sac = (
        _load(tmp_path / f"{n}.zip", e) for n, e in (("ppo", CARTPOLE), ("dqn", CARTPOLE), ("sac", PENDULUM))
    )

    outputs = ppo.act({"": four})["outputs"]
    with torch.no_grad():
        x = torch.tensor(four)[None]
        assert outputs["value"] == pytest.approx(float(discrete.policy.predict_values(x)))
        assert sum(outputs["probabilities"]) == pytest.approx(1.0)
        assert outputs["probabilities"] == pytest.approx(
            discrete.policy.get_distribution(x).distribution.probs[0].tolist()
        )
        assert dqn.act({"": four})["outputs"] == {"q_values": pytest.approx(q_learning.q_net(x)[0].tolist())}
        answer, x = sac.act({"": three}), torch.tensor(three)[None]
        # The critics know actions between -1 and 1; Pendulum's lie between -2 and 2.
        values = continuous.critic(x, torch.tensor([answer["action"]]) / 2)
        assert answer["outputs"]["value"] == pytest.approx(min(float(value) for value in values))


def test_a_sampled_action_varies_and_repeats_with_the_seed(tmp_path):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    policy = _load(tmp_path / "a.zip", CARTPOLE, "--sample")
    observation = {"": np.zeros(4, np.float32)}

    def play(seed):
        policy.begin(seed)
        return [policy.act(observation)["action"] for _ in range(30)]

    assert set(play(1)) == {0, 1}
    assert play(1) == play(1)
    assert play(1) != play(2)


def test_an_epsilon_greedy_policy_that_samples_explores_at_the_rate_in_its_file(tmp_path):
    _save(tmp_path / "a.zip", sb3.DQN, CARTPOLE, **SMALL)
    _rewrite(tmp_path / "a.zip", lambda data: data.update(exploration_rate=1.0))
    observation = {"": np.zeros(4, np.float32)}
    policy = _load(tmp_path / "a.zip", CARTPOLE, "--sample")
    policy.begin(0)

    assert {policy.act(observation)["action"] for _ in range(40)} == {0, 1}
    greedy = _load(tmp_path / "a.zip", CARTPOLE)
    assert len({greedy.act(observation)["action"] for _ in range(40)}) == 1


class Hostile:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return Path.touch, (Path(self.canary),)


def test_a_planted_pickle_does_not_run_although_the_library_would_run_it(tmp_path):
    model = _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE, policy_kwargs=RELU)
    planted = base64.b64encode(pickle.dumps(Hostile(tmp_path / "canary"))).decode()

    def plant(data):
        for entry in data.values():
            if isinstance(entry, dict) and ":serialized:" in entry:
                entry[":serialized:"] = planted

    _rewrite(tmp_path / "a.zip", plant)
    plan = _plan(tmp_path / "a.zip")

    _, (answer,) = ask_policy(plan, [np.ones(4, np.float32)])

    assert plan.foreign_code == ""
    assert answer["action"] == model.predict(np.ones(4, np.float32), deterministic=True)[0]
    assert not (tmp_path / "canary").exists()
    with pytest.raises((TypeError, AttributeError, ValueError)):
        sb3.PPO.load(tmp_path / "a.zip", device="cpu")
    assert (tmp_path / "canary").exists()


class Doubling(FlattenExtractor):
    def forward(self, observations):
        return 2 * super().forward(observations)


def test_a_network_of_the_users_own_needs_consent_and_then_acts_as_trained(tmp_path):
    path = tmp_path / "a.zip"
    model = _save(path, sb3.PPO, CARTPOLE, policy_kwargs={"features_extractor_class": Doubling})

    plan = _plan(path)

    assert re.match(r"a\.zip holds policy_kwargs\.features_extractor_class = <class '.*Doubling'>", plan.foreign_code)
    assert plan.argv[-2:] == ("--unpickle", "stable_baselines3:PPO")
    with pytest.raises(CannotAct, match=r"it needs what only unpickling gives: policy_kwargs.features_extractor_class"):
        _load(path, CARTPOLE)
    policy = _load(path, CARTPOLE, "--unpickle", "stable_baselines3:PPO")
    observations = _observations(CARTPOLE, 50)
    assert [policy.act({"": o})["action"] for o in observations] == [
        model.predict(o, deterministic=True)[0].tolist() for o in observations
    ]


@pytest.mark.parametrize(
    ("entry", "value", "missing"),
    [
        ("policy_kwargs", {"activation_fn": "<class 'my.Swish'>"}, "policy_kwargs.activation_fn = <class 'my.Swish'>"),
        ("policy_kwargs", {"activation_fn": "<class 'torch.nn.modules.x.Sequential'>"}, "policy_kwargs.activation_fn"),
        ("policy_kwargs", {"net_arch": "[<object>]"}, "policy_kwargs.net_arch"),
        ("policy_kwargs", {"net_arch": [True]}, "policy_kwargs.net_arch"),
        ("policy_kwargs", {"use_sde": "yes"}, "policy_kwargs.use_sde = yes"),
        ("policy_kwargs", {"log_std_init": float("nan")}, "policy_kwargs.log_std_init = nan"),
        ("policy_kwargs", {"lstm_hidden_size": 3}, "policy_kwargs.lstm_hidden_size = 3"),
        ("policy_kwargs", {"features_extractor_kwargs": {"module": "os"}}, "policy_kwargs.features_extractor_kwargs"),
        ("policy_class", {"__module__": "os", "__init__": "<function ActorCriticPolicy.__init__ at 0>"}, "class of os"),
        ("policy_class", None, "a policy class of an unknown module"),
    ],
)
def test_whatever_is_not_on_the_list_is_named_and_not_guessed(tmp_path, entry, value, missing):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    _rewrite(tmp_path / "a.zip", lambda data: data.update({entry: value}))

    assert missing in Sb3Zip(str(tmp_path / "a.zip")).serialized[0]


def test_statistics_of_vecnormalize_are_loaded_only_with_consent(tmp_path):
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make(PENDULUM)]))
    model = sb3.PPO("MlpPolicy", env, device="cpu", seed=1, n_steps=64, batch_size=64)
    model.learn(64)
    model.save(tmp_path / "a.zip")
    env.save(tmp_path / "vecnormalize.pkl")
    observations = _observations(PENDULUM, 20)

    plan = _plan(tmp_path / "a.zip", PENDULUM)
    raw, without = ask_policy(plan, observations)
    normalized, with_consent = ask_policy(plan.alternative, observations)

    assert plan.foreign_code == ""
    assert plan.alternative.foreign_code == "the pickle vecnormalize.pkl of VecNormalize"
    assert raw["notes"] == [
        "It was trained on observations that VecNormalize normalised. Here they are not normalised."
    ]
    assert normalized["notes"] == []
    assert [a["action"] for a in without] == [model.predict(o, deterministic=True)[0].tolist() for o in observations]
    assert [a["action"] for a in with_consent] == [
        model.predict(env.normalize_obs(o), deterministic=True)[0].tolist() for o in observations
    ]
    env.close()


def test_a_process_keeps_its_output_for_messages_and_ends_with_its_input(tmp_path):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    acting = Acting(_plan(tmp_path / "a.zip"))

    assert acting.first["action_space"] == {"type": "Discrete", "n": 2, "start": 0}
    assert acting.first["observation_space"] == {"type": "Box", "shape": [4], "dtype": "float32"}
    assert acting.act(np.zeros(4, np.float32))["type"] == "action"
    acting.process._input.close()
    assert acting.process._process.wait(30) == 0
    acting.process.close()


def test_an_observation_of_another_shape_is_an_answer_and_not_a_silence(tmp_path):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    acting = Acting(_plan(tmp_path / "a.zip"))

    failed = acting.act(np.zeros(3, np.float32))
    acting.process.close()

    assert failed["type"] == "failed"
    assert "cannot act on this observation" in failed["text"]


def test_weights_of_another_environment_are_refused(tmp_path):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)

    failed = ask_in_vain(_plan(tmp_path / "a.zip", "Acrobot-v1"))

    assert "its weights do not fit the network" in failed["text"]
    assert failed["remedy"] == "Use it in the environment it was trained in"


def test_a_file_that_changed_after_the_plan_is_not_loaded(tmp_path):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    plan = _plan(tmp_path / "a.zip")
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE, policy_kwargs=RELU)

    assert "was changed meanwhile" in ask_in_vain(plan)["text"]


@pytest.mark.parametrize(("content", "reason"), [(b"PK\x03\x04", "not a zip"), (b"", "not a zip"), (None, "not a zip")])
def test_a_file_that_is_no_zip_of_the_library_is_refused_before_anything_starts(tmp_path, content, reason):
    path = tmp_path / "a.zip"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data", "[")
    else:
        path.write_bytes(content)
    request = PolicyRequest(checkpoint=_record(path), spec=None, command={}, deterministic=True)

    with pytest.raises(CheckpointError, match=reason):
        Sb3Runner().plan_policy(request, MACHINE)


def test_weights_that_hold_code_are_refused_before_anything_starts(tmp_path):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    request = PolicyRequest(
        checkpoint=_record(tmp_path / "a.zip"), spec=None, command={}, deterministic=True, unsafe="would import posix"
    )

    with pytest.raises(CheckpointError, match="would import posix"):
        Sb3Runner().plan_policy(request, MACHINE)


def test_an_interpreter_without_the_library_is_named_with_the_command_that_installs_it(tmp_path, bare_python):
    _save(tmp_path / "a.zip", sb3.PPO, CARTPOLE)
    request = PolicyRequest(
        checkpoint=_record(tmp_path / "a.zip"), spec=None, command={"argv": [bare_python]}, deterministic=True
    )

    with pytest.raises(ConfigError, match=f"{bare_python} -m pip install 'stable-baselines3'"):
        Sb3Runner().plan_policy(request, MACHINE)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home" / "var" / "training")


def test_an_imported_zip_loses_its_objects_and_still_acts(home, tmp_path):
    model = _save(tmp_path / "best.zip", sb3.A2C, CARTPOLE, policy_kwargs=RELU)

    record = import_checkpoint(home, tmp_path / "best.zip", Provenance(env_id=CARTPOLE))

    assert (record.format, record.agent_id, Path(record.path).name) == ("sb3_zip", "sb3/a2c", "best.zip")
    assert ":serialized:" not in zipfile.ZipFile(record.path).read("data").decode()
    plan = plan_policy(Sb3Runner(), home, record)
    observations = _observations(CARTPOLE, 20)
    _, answers = ask_policy(plan, observations)
    assert [a["action"] for a in answers] == [model.predict(o, deterministic=True)[0] for o in observations]
    assert import_checkpoint(home, tmp_path / "best.zip").sha256 == record.sha256


def test_an_imported_zip_with_a_network_of_its_own_keeps_it_only_if_trusted(home, tmp_path):
    _save(tmp_path / "best.zip", sb3.PPO, CARTPOLE, policy_kwargs={"features_extractor_class": Doubling})
    stripped = import_checkpoint(home, tmp_path / "best.zip", Provenance(env_id=CARTPOLE))

    with pytest.raises(CheckpointError, match=r"which its import left out. Import it again with --trust"):
        plan_policy(Sb3Runner(), home, stripped)
    trusted = import_checkpoint(home, tmp_path / "best.zip", Provenance(env_id=CARTPOLE), trusted=True)
    assert "Doubling" in plan_policy(Sb3Runner(), home, trusted).foreign_code
    with pytest.raises(CheckpointError, match="its algorithm is none of ppo, a2c"):
        Sb3Runner().plan_policy(
            PolicyRequest(
                checkpoint=replace(trusted, agent_id="mine", path=_other_algorithm(tmp_path)),
                spec=None,
                command={},
                deterministic=True,
            ),
            MACHINE,
        )


def _other_algorithm(tmp_path):
    path = tmp_path / "other.zip"
    _save(path, sb3.PPO, CARTPOLE)
    _rewrite(path, lambda data: data.update(policy_class={"__module__": "my.policies", ":serialized:": ""}))
    return str(path)


def test_statistics_beside_an_imported_zip_come_along(home, tmp_path):
    _save(tmp_path / "rl_model_500_steps.zip", sb3.PPO, CARTPOLE)
    (tmp_path / "rl_model_vecnormalize_500_steps.pkl").write_bytes(b"statistics")

    record = import_checkpoint(home, tmp_path / "rl_model_500_steps.zip", Provenance(env_id=CARTPOLE))

    plan = plan_policy(Sb3Runner(), home, record)
    kept = Path(record.path).with_name("rl_model_vecnormalize_500_steps.pkl")
    assert kept.read_bytes() == b"statistics"
    assert plan.alternative.argv[-4:-1] == ("--statistics", str(kept), "--statistics-sha256")
