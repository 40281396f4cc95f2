"""Offline learning from a dataset, and fine-tuning of what it learned, end to end."""

import asyncio
import json
import math
import shutil
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from palaestra.cli import main
from palaestra.errors import CheckpointError, ConfigError, DatasetError
from palaestra.experience.datasets import find_dataset
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.runs.checkpoints.catalogue import list_checkpoints
from palaestra.runs.checkpoints.import_checkpoint import import_checkpoint
from palaestra.runs.play.policy_planner import PolicyPlanner
from palaestra.runs.play.protocol import LoadPolicy, Message
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.runners.palaestra import PalaestraRunner
from palaestra.train import config_from, load_config, train
from palaestra.train.collection.collect import Amount
from palaestra.train.collection.create import CollectionPlan, collect_dataset
from palaestra.train.play.own_policy import load_policy
from palaestra.train.transitions import build_transition_training
from palaestra.transport.conformance import check_source

ROOT = Path(__file__).parents[2]
SMALL = {"policy": {"hidden": [8]}, "telemetry": {"progress": False}}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    return Home.default()


@pytest.fixture
def palaestra(monkeypatch, capsys):
    """The command, called in this process; returns the exit code and what it printed."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["palaestra", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr().out

    return call


def _create(name, env, steps=300, **kwargs):
    plan = CollectionPlan(
        dataset_id=name,
        amount=Amount(steps=steps),
        env_id=env,
        env_kwargs=kwargs,
        policy="random",
        score_episodes=2,
        expert_score=100.0,
    )
    collect_dataset(Home.default(), plan)


def _config(name, dataset="pendulum/random-v0", algorithm=None, trainer=None, **sections):
    dataset = {"id": dataset, "steps_per_update": 5} if isinstance(dataset, str) else dataset
    return config_from(
        {
            **SMALL,
            "dataset": dataset,
            "algorithm": {"name": name, "batch_size": 8, **(algorithm or {})},
            "trainer": {"device": "cpu", "updates": 40, "eval_every": 4, "eval_episodes": 1, **(trainer or {})},
            **sections,
        }
    )


def _train(config, run_id, **more):
    return train(config, root=Home.default().runs, run_id=run_id, **more)


def _metrics(run_id, attempt=1):
    lines = (Home.default().runs / run_id / f"attempt_{attempt}" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["metrics"] | {"at": event["env_step"]} for event in events if event.get("metrics")]


def _tensors(path):
    from safetensors.torch import load_file

    return {
        (name, key): tensor
        for name in ("policy.safetensors", "learner.safetensors", "source.safetensors")
        for key, tensor in load_file(path / name).items()
    }


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("bc", "Pendulum-v1"),
        ("iql", "Pendulum-v1"),
        ("td3_bc", "Pendulum-v1"),
        ("bc", "CartPole-v1"),
        ("iql", "CartPole-v1"),
        ("dqn", "CartPole-v1"),
        ("sac", "Pendulum-v1"),
    ],
)
def test_an_offline_run_names_its_environment_and_scores_itself(name, env):
    _create("some/data-v0", env)
    config = _config(name, "some/data-v0", env={"normalize_observation": True})
    result = _train(config, "run")

    assert (config.env.id, result.steps) == (env, 40)
    dataset = find_dataset("some/data-v0", Home.default().datasets)
    reports = [metrics for metrics in _metrics("run") if "eval_return" in metrics]
    assert [metrics["at"] for metrics in reports] == [20, 40]
    score = dataset.normalized_score(reports[-1]["eval_return"])
    assert reports[-1]["eval_normalized_score"] == pytest.approx(score)
    about = load_checkpoint(result.checkpoint).about["dataset"]
    assert (about["dataset_id"], about["sha256"]) == ("some/data-v0", dataset.sha256)


def test_eval_prints_the_normalised_score_of_a_checkpoint_that_knows_its_dataset(palaestra):
    _create("pendulum/random-v0", "Pendulum-v1")
    _train(_config("bc"), "run")
    _, printed = palaestra("eval", "run", "--episodes", 2, "--json")
    report = json.loads(printed)
    about = load_checkpoint(next(iter((Home.default().runs / "run").rglob("update_*")))).about["dataset"]
    share = (report["mean_return"] - about["random_score"]) / (100.0 - about["random_score"])
    assert report["normalized_score"] == pytest.approx(100.0 * share)
    assert f"normalised score {report['normalized_score']:.1f}" in palaestra("eval", "run", "--episodes", 2)[1]


@pytest.mark.parametrize("algorithm", ["bc", "iql", "td3_bc"])
def test_an_offline_run_that_was_interrupted_ends_with_the_same_weights(algorithm):
    _create("pendulum/random-v0", "Pendulum-v1")
    config = _config(algorithm, env={"normalize_observation": True}, trainer={"keep_checkpoints": 9})
    whole = _train(config, "run")
    middle = sorted((Home.default().runs / "run").rglob("update_00000004"))[0]
    run = RunDirectory.find("run", Home.default().runs)
    resumed = _train(config, "run", resume=run, checkpoint=middle)

    expected, actual = _tensors(whole.checkpoint), _tensors(resumed.checkpoint)
    assert not [key for key, tensor in expected.items() if not torch.equal(tensor, actual[key])]


def test_the_schedule_of_an_update_begins_where_the_update_before_it_ended():
    _create("pendulum/random-v0", "Pendulum-v1")
    algorithm = {"learning_rate": 0.5, "learning_rate_schedule": "linear"}
    _train(_config("bc", algorithm=algorithm, trainer={"updates": 10, "log_interval": 1}), "run")
    assert [metrics["learning_rate"] for metrics in _metrics("run")] == [0.5, 0.25]


def test_the_normaliser_has_the_statistics_of_the_dataset():
    _create("pendulum/random-v0", "Pendulum-v1")
    training = build_transition_training(_config("td3_bc", env={"normalize_observation": True}))
    observation = find_dataset("pendulum/random-v0", Home.default().datasets).load_transitions().observation
    normalizer = training.policy.encoder.normalizers["observation"]
    assert normalizer.mean.numpy() == pytest.approx(observation.mean(0, np.float64), abs=1e-6)
    assert normalizer.scale().numpy() == pytest.approx(1.0 / (observation.std(0) + 1e-3), rel=1e-4)
    target = training.learner.target.encoder.normalizers["observation"]
    assert torch.equal(target.mean, normalizer.mean)
    training.env.close()


def test_the_sources_keep_their_promises():
    _create("pendulum/random-v0", "Pendulum-v1")
    check_source(lambda: build_transition_training(_config("bc", trainer={"updates": None})).source)
    mixed = {"id": "pendulum/random-v0", "mix": 0.5, "offline_updates": 5, "steps_per_update": 5}
    online = {"updates": None, "total_timesteps": 100}
    check_source(lambda: build_transition_training(_config("sac", mixed, trainer=online)).source)


@pytest.mark.parametrize(
    ("task", "dataset", "env"),
    [
        ("pendulum", "pendulum/medium-v0", "Pendulum-v1"),
        ("lunarlander", "lander/medium-v0", "LunarLanderContinuous-v3"),
        ("halfcheetah", "halfcheetah/medium-v0", "HalfCheetah-v5"),
    ],
)
def test_the_example_configs_can_be_trained(task, dataset, env):
    _create(dataset, env, 50)
    for path in sorted((ROOT / "configs" / "offline").glob(f"*_{task}.yaml")):
        training = build_transition_training(load_config(path, ["dataset.steps_per_update=2"]))
        try:
            metrics = training.learner.update(training.source.next_batch().experience)
            assert all(math.isfinite(number) for number in metrics.values())
            assert "policy_loss" in metrics
        finally:
            training.env.close()


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_a_checkpoint_plays(actions):
    env = "CartPole-v1" if actions == "discrete" else "Pendulum-v1"
    _create("some/data-v0", env, 60)
    checkpoint = _train(_config("iql", "some/data-v0"), "run").checkpoint
    policy = load_policy(checkpoint, deterministic=False)
    policy.begin("", 3)
    size = 4 if actions == "discrete" else 3
    observation = np.zeros(size, np.float32)
    arrays = [{"name": "", "dtype": "float32", "shape": [size]}]
    reply = policy.act(Message({"type": "act", "arrays": arrays}, observation.tobytes()))
    assert ("probabilities" in reply["outputs"]) == (actions == "discrete")
    assert np.shape(reply["action"]) == (() if actions == "discrete" else (1,))


# ---------------------------------------------------------------------- from offline to online

ONLINE = {"updates": None, "total_timesteps": 60, "eval_every": None, "keep_checkpoints": 99, "checkpoint_every": 1}
FEW = {"learning_starts": 8, "train_freq": 4, "gradient_steps": 2}


def test_one_run_learns_offline_first_and_records_its_baseline_before_the_first_step():
    _create("pendulum/random-v0", "Pendulum-v1")
    dataset = {"id": "pendulum/random-v0", "offline_updates": 12, "steps_per_update": 5, "mix": 0.5}
    result = _train(_config("td3_bc", dataset, algorithm=FEW, trainer=ONLINE), "run")

    reports = [m for m in _metrics("run") if "eval_return" in m]
    assert [(m["at"], m["gradient_steps"]) for m in reports] == [(0, 12), (60, 12 + 2 * 14)]
    assert all("eval_normalized_score" in m for m in reports)
    assert result.steps == 60


def test_half_of_a_mixed_minibatch_is_of_the_dataset():
    _create("pendulum/random-v0", "Pendulum-v1")
    training = build_transition_training(
        _config("sac", {"id": "pendulum/random-v0", "mix": 0.5}, algorithm=FEW, trainer=ONLINE)
    )
    training.source.dataset.columns["reward"] = np.full(300, 7.0, np.float32)
    batch = training.source.next_batch().experience
    assert batch.shape == (2, 8)
    assert (batch.columns["reward"] == 7.0).sum(1).tolist() == [4, 4]
    training.env.close()


def test_a_prefilled_buffer_starts_with_the_newest_transitions_of_the_dataset():
    _create("pendulum/random-v0", "Pendulum-v1")
    dataset = {"id": "pendulum/random-v0", "prefill": True}
    training = build_transition_training(_config("sac", dataset, algorithm={**FEW, "buffer_size": 100}, trainer=ONLINE))
    rewards = find_dataset("pendulum/random-v0", Home.default().datasets).load_transitions().reward
    assert training.source.buffer.size == 100
    assert training.source.buffer.read(np.arange(100))["reward"].tolist() == rewards[-100:].tolist()
    text = (
        "dataset.prefill: the dataset has 300 steps, and algorithm.buffer_size is 100: "
        "only the newest 100 steps are in the replay buffer."
    )
    assert ("warning", text) in training.notices()
    training.env.close()


def test_a_buffer_that_holds_the_whole_dataset_is_prefilled_without_a_notice():
    _create("pendulum/random-v0", "Pendulum-v1")
    dataset = {"id": "pendulum/random-v0", "prefill": True}
    training = build_transition_training(_config("sac", dataset, algorithm={**FEW, "buffer_size": 300}, trainer=ONLINE))
    assert training.source.buffer.size == 300
    assert not any("prefill" in text for _, text in training.notices())
    training.env.close()


def test_an_evaluation_that_is_due_anyway_is_not_repeated_after_the_first_online_update():
    _create("pendulum/random-v0", "Pendulum-v1")
    dataset = {"id": "pendulum/random-v0", "offline_updates": 10, "steps_per_update": 5}
    _train(_config("td3_bc", dataset, algorithm=FEW, trainer={**ONLINE, "eval_every": 2, "total_timesteps": 16}), "run")
    # Two offline updates, then steps 8, 12 and 16: every second update, and the end.
    assert [m["at"] for m in _metrics("run") if "eval_return" in m] == [0, 12, 16]


def test_a_pretrained_policy_takes_the_first_steps_itself():
    _create("pendulum/random-v0", "Pendulum-v1")
    dataset = {"id": "pendulum/random-v0", "offline_updates": 5, "steps_per_update": 5}
    algorithm = {**FEW, "exploration_noise": 0.0}
    training = build_transition_training(_config("td3_bc", dataset, algorithm=algorithm, trainer=ONLINE))
    training.learner.update(training.source.next_batch().experience)
    training.source.next_batch()
    columns = training.source.buffer.read(np.arange(8))
    expected = training.policy.parameters_of(torch.from_numpy(columns["observation"])).detach()
    assert columns["action"] == pytest.approx(expected.numpy(), abs=1e-5)
    training.env.close()


def test_a_shipped_policy_is_fine_tuned_with_the_configuration_for_it():
    _create("pendulum/medium-v0", "Pendulum-v1")
    short = ["telemetry.progress=false", "trainer.eval_episodes=1", "algorithm.batch_size=8"]
    folder = ROOT / "configs" / "offline"
    offline = _train(load_config(folder / "iql_pendulum.yaml", [*short, "trainer.updates=100"]), "offline")
    online = ["trainer.total_timesteps=30", "algorithm.learning_starts=10", "trainer.eval_every=null"]
    fine = load_config(folder / "iql_pendulum_finetune.yaml", [*short, *online])
    _train(fine, "fine", warm_start=offline.checkpoint)
    assert [m["at"] for m in _metrics("fine") if "eval_normalized_score" in m] == [0, 30]


def test_fine_tuning_starts_from_policy_critics_targets_and_statistics_and_evaluates_them_first():
    _create("pendulum/random-v0", "Pendulum-v1")
    offline = _train(_config("td3_bc", env={"normalize_observation": True}), "offline")
    fine = _config(
        "td3_bc",
        {"id": "pendulum/random-v0", "mix": 0.5},
        algorithm=FEW,
        trainer=ONLINE,
        env={"normalize_observation": True},
    )
    _train(fine, "fine", warm_start=offline.checkpoint)

    start = sorted((Home.default().runs / "fine").rglob("update_00000000"))[0]
    expected, actual = _tensors(offline.checkpoint), _tensors(start)
    same = [key for key in expected if key[0] == "policy.safetensors" or key == ("learner.safetensors", "target")]
    assert ("policy.safetensors", "encoder.normalizers.observation.mean") in same
    assert not [key for key in same if not torch.equal(expected[key], actual[key])]
    baseline, final = [m for m in _metrics("fine") if "eval_return" in m]
    assert (baseline["at"], final["at"]) == (0, 60)
    assert baseline["eval_return"] == pytest.approx(
        [m for m in _metrics("offline") if "eval_return" in m][-1]["eval_return"]
    )


def test_a_comparison_puts_the_offline_baseline_beside_the_result_of_fine_tuning(palaestra):
    _create("pendulum/random-v0", "Pendulum-v1")
    offline = _train(_config("td3_bc"), "offline")
    fine = _config("td3_bc", {"id": "pendulum/random-v0", "mix": 0.5}, algorithm=FEW, trainer=ONLINE)
    _train(fine, "fine", warm_start=offline.checkpoint)

    report = json.loads(palaestra("runs", "compare", "offline", "fine", "--json")[1])["evaluations"]
    before, after = [m["eval_return"] for m in _metrics("fine") if "eval_return" in m]
    assert report["eval_return/final"] == pytest.approx([before, after])
    assert report["eval_return/baseline"][1] == pytest.approx(before)
    assert report["eval_return/gain"][1] == pytest.approx(after - before)
    assert report["eval_normalized_score/gain"][1] != 0.0
    printed = palaestra("runs", "compare", "offline", "fine")[1]
    assert "eval_normalized_score/gain" in printed.split("EVALUATIONS")[1].split("LATEST METRICS")[0]


def test_the_baseline_of_one_run_is_the_evaluation_at_the_end_of_its_offline_phase(palaestra):
    _create("pendulum/random-v0", "Pendulum-v1")
    dataset = {"id": "pendulum/random-v0", "offline_updates": 20, "steps_per_update": 5, "mix": 0.5}
    _train(_config("td3_bc", dataset, algorithm=FEW, trainer={**ONLINE, "eval_every": 2}), "run")

    reports = [m for m in _metrics("run") if "eval_return" in m]
    early, baseline = (m["eval_return"] for m in reports if m["at"] == 0)
    document = json.loads(palaestra("runs", "compare", "run", "run", "--json")[1])["evaluations"]
    assert early != baseline
    assert document["eval_return/baseline"][0] == pytest.approx(baseline)
    assert document["eval_return/gain"][0] == pytest.approx(reports[-1]["eval_return"] - baseline)


def test_a_checkpoint_of_train_alone_names_its_dataset_in_its_run_as_an_import_and_by_path(home, tmp_path):
    _create("pendulum/random-v0", "Pendulum-v1")
    saved = _train(_config("bc"), "offline").checkpoint
    copy = shutil.copytree(saved, tmp_path / "copy")

    (listed,) = [row for row in list_checkpoints(home, run_id="offline") if row.path == str(saved.resolve())]
    imported = import_checkpoint(home, copy)
    with pytest.raises(CheckpointError, match=r"learned from pendulum/random-v0, which was recorded in Pendulum-v1"):
        asyncio.run(_plan_policy(home, str(copy), PlaySpec(env_id="CartPole-v1")))

    dataset = find_dataset("pendulum/random-v0", home.datasets)
    assert listed.offline_dataset == imported.offline_dataset
    assert listed.offline_dataset["dataset_id"] == "pendulum/random-v0"
    assert (listed.offline_dataset["sha256"], listed.offline_dataset["env_id"]) == (dataset.sha256, "Pendulum-v1")


def test_a_play_has_the_arguments_with_which_the_dataset_of_its_policy_was_recorded(home):
    _create("pendulum/moon-v0", "Pendulum-v1", g=1.6)
    saved = str(_train(_config("bc", "pendulum/moon-v0"), "offline").checkpoint)

    with pytest.raises(CheckpointError, match=r'with g = 1.6, this is .* g = 10.0.*the parameters {"g": 1.6}'):
        asyncio.run(_plan_policy(home, saved, PlaySpec(env_id="Pendulum-v1")))
    launch = asyncio.run(_plan_policy(home, saved, PlaySpec(env_id="Pendulum-v1", parameters={"g": 1.6})))

    assert launch.command


async def _plan_policy(home, checkpoint, play):
    async def get_runner(name):
        return PalaestraRunner()

    return await PolicyPlanner(home, get_runner).plan(LoadPolicy(checkpoint, True, ""), play)


# ---------------------------------------------------------------------- what is refused


def test_a_dataset_of_another_environment_is_refused_with_both_names():
    _create("pendulum/random-v0", "Pendulum-v1")
    with pytest.raises(DatasetError, match=r"collected in Pendulum-v1, and env\.id is CartPole-v1"):
        build_transition_training(_config("bc", env={"id": "CartPole-v1"}))


def test_a_dataset_with_other_spaces_is_refused_with_both_spaces():
    _create("bandit/random-v0", "palaestra.env.toy:Bandit", arms=3)
    with pytest.raises(DatasetError, match=r"its action_space is Discrete\(3\), that of .* is Discrete\(4\)"):
        build_transition_training(
            _config("bc", "bandit/random-v0", env={"id": "palaestra.env.toy:Bandit", "kwargs": {"arms": 4}})
        )


def test_a_missing_dataset_is_refused_before_a_run_directory_exists(home):
    with pytest.raises(DatasetError, match="nothing/here-v0"):
        _config("bc", "nothing/here-v0")
    assert not home.runs.exists()


def test_a_run_does_not_resume_on_other_data_of_the_same_name():
    _create("pendulum/random-v0", "Pendulum-v1")
    _train(_config("bc"), "run")
    shutil.rmtree(find_dataset("pendulum/random-v0", Home.default().datasets).path)
    _create("pendulum/random-v0", "Pendulum-v1", 200)
    run = RunDirectory.find("run", Home.default().runs)
    with pytest.raises(DatasetError, match="and the checkpoint learned from"):
        _train(_config("bc", trainer={"updates": 80}), "run", resume=run)


@pytest.mark.parametrize(("settings", "trainer"), [({}, {}), ({"mix": 0.5}, {"updates": None, "total_timesteps": 60})])
def test_priorities_are_refused_where_the_dataset_is_sampled(settings, trainer):
    _create("cartpole/random-v0", "CartPole-v1")
    with pytest.raises(ConfigError, match=r"algorithm\.prioritized .* sampled uniformly"):
        _config("dqn", {"id": "cartpole/random-v0", **settings}, {"prioritized": True}, trainer)


class Nested(gymnasium.Env):
    """One step per episode; the observation is a Dict within a Dict."""

    observation_space = gymnasium.spaces.Dict(
        {"arm": gymnasium.spaces.Dict({"angle": gymnasium.spaces.Box(-1, 1, (2,), np.float32)})}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"arm": {"angle": np.zeros(2, np.float32)}}, {}

    def step(self, action):
        return {"arm": {"angle": np.ones(2, np.float32)}}, float(action), True, False, {}


def test_data_with_nested_observations_can_be_learned_from():
    _create("arm/random-v0", "tests.train.test_offline:Nested", 40)
    result = _train(_config("bc", "arm/random-v0"), "run")
    assert result.steps == 40


def test_td3_bc_needs_continuous_actions():
    _create("cartpole/random-v0", "CartPole-v1")
    with pytest.raises(ConfigError, match="needs a Box"):
        build_transition_training(_config("td3_bc", "cartpole/random-v0"))


def test_a_checkpoint_of_another_algorithm_does_not_warm_start():
    _create("pendulum/random-v0", "Pendulum-v1")
    cloned = _train(_config("bc"), "cloned")
    with pytest.raises(CheckpointError, match="was trained by BC, this run trains by IQL"):
        _train(_config("iql"), "run", warm_start=cloned.checkpoint)


@pytest.mark.parametrize(
    ("trainer", "place"),
    [
        ({"total_timesteps": 10, "updates": None}, "trainer.total_timesteps"),
        ({"rollout_length": 5}, "trainer.rollout_length"),
    ],
)
def test_cloning_takes_no_steps_in_the_environment(trainer, place):
    _create("pendulum/random-v0", "Pendulum-v1")
    with pytest.raises(ConfigError) as caught:
        _config("bc", trainer=trainer)
    assert caught.value.place == place


def test_a_run_has_either_a_length_offline_or_one_online():
    with pytest.raises(ConfigError, match=r"dataset\.offline_updates"):
        _config("iql", env={"id": "Pendulum-v1"}, trainer={"total_timesteps": 10})


@pytest.mark.parametrize("settings", [{"offline_updates": 5}, {"mix": 0.5}, {"prefill": True}])
def test_settings_of_fine_tuning_are_refused_in_an_offline_run(settings):
    data = {"env": {"id": "Pendulum-v1"}, "algorithm": {"name": "iql"}, "trainer": {"updates": 10}}
    with pytest.raises(ConfigError, match=f"dataset\\.{next(iter(settings))} = .* has no effect without steps"):
        config_from({**data, "dataset": {"id": "pendulum/random-v0", **settings}})


def test_a_dataset_without_a_name_is_reported_before_the_environment():
    with pytest.raises(ConfigError, match=r"dataset\.id = 5"):
        config_from({"dataset": {"id": 5}, "algorithm": {"name": "iql"}})


def test_check_reports_the_dataset_of_a_configuration(tmp_path, palaestra):
    _create("pendulum/random-v0", "Pendulum-v1")
    path = tmp_path / "bc.yaml"
    path.write_text("dataset: {id: pendulum/random-v0}\nalgorithm: {name: bc}\n")
    report = json.loads(palaestra("train", path, "--check")[1])
    assert (report["env_id"], report["algorithm"], report["total_steps"]) == ("Pendulum-v1", "bc", 100_000)
    assert report["offline_dataset"]["dataset_id"] == "pendulum/random-v0"
    path.write_text("dataset: {id: pendulum/other-v0}\nalgorithm: {name: bc}\n")
    code, printed = palaestra("train", path, "--check")
    assert code == 2
    assert "pendulum/other-v0" in json.loads(printed)["refused"]["value"]
