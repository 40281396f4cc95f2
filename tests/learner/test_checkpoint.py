"""Checkpoints: an interrupted run ends with the same bits, and what cannot be trusted changes nothing."""

import io
import json
import os
import pickletools

import pytest
import torch

from palaestra.env import EnvConfig, as_vector_env
from palaestra.env.toy import Bandit, MaskedChoice, MixedSenses, Pixels, TargetReach
from palaestra.errors import CheckpointError
from palaestra.files.checkpoint import list_checkpoints
from palaestra.learner import PPO
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.policy import ActorCritic, PolicyConfig, load_policy
from palaestra.train import Trainer

UPDATES, STEPS = 4, 40


def _trainer(
    env="CartPole-v1", *, seed=0, compiled="auto", normalize=True, normalize_reward=True, hidden=(16, 16), **ppo
):
    env = as_vector_env(env() if callable(env) else env, num_envs=2)
    config = PolicyConfig(hidden=hidden, image_features=8)
    policy = ActorCritic(env.observation_space, env.action_space, config, normalize_observation=normalize, seed=seed)
    algorithm = PPO(**({"n_epochs": 2, "batch_size": 16, "learning_rate_schedule": "linear"} | ppo))
    return Trainer(policy, env, algorithm, seed=seed, compiled=compiled, normalize_reward=normalize_reward)


def _everything(trainer):
    """Every number the next number depends on."""
    adam = trainer.training.learner.optimizer()
    return {
        **{name: value.clone() for name, value in trainer.policy.state_dict().items()},
        "adam.first": adam.first.clone(),
        "adam.second": adam.second.clone(),
        "adam.steps": dict(adam.steps),
        "counters": (trainer.total_timesteps, trainer.n_updates, trainer.num_episodes),
        "episodes": (list(trainer.episode_rewards), list(trainer.episode_lengths)),
        "shuffle": json.dumps(trainer.training.learner._shuffle.bit_generator.state),
        "noise": json.dumps(trainer.collector.rng.bit_generator.state),
    }


def _differences(one, other):
    return [
        key
        for key in one
        if not (torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key])
    ]


def _resumed_at_every_update(make, tmp_path, steps=STEPS):
    """Train with a checkpoint after every update; then, from each of them, a fresh trainer to the same end."""
    whole = make()
    total = UPDATES * steps * whole.env.num_envs
    whole.train(total, steps, callback=lambda t, _: t.save_checkpoint(tmp_path / f"update_{t.n_updates}") and None)
    expected = _everything(whole)
    following = whole.collect_rollouts(steps)
    for k in range(1, UPDATES + 1):
        resumed = make()
        assert resumed.load_checkpoint(tmp_path / f"update_{k}"), f"the environments did not come back at update {k}"
        resumed.train(total, steps)
        assert _differences(expected, _everything(resumed)) == [], f"resumed at update {k}"
        onwards = resumed.collect_rollouts(steps)
        assert torch.equal(onwards["reward"], following["reward"])
        assert torch.equal(onwards["log_prob"], following["log_prob"])


@pytest.mark.parametrize("compiled", ["auto", "off"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def test_a_run_resumed_at_any_update_ends_with_the_same_bits(env, compiled, tmp_path):
    _resumed_at_every_update(lambda: _trainer(env, compiled=compiled), tmp_path)


@pytest.mark.parametrize(
    "settings", [{"normalize": False, "normalize_reward": False}, {"grad_clip": "global"}], ids=str
)
def test_so_does_one_without_normalisation_or_with_one_gradient_norm(settings, tmp_path):
    _resumed_at_every_update(lambda: _trainer(**settings), tmp_path)


@pytest.mark.parametrize("make", [MixedSenses, MaskedChoice, Pixels, TargetReach, Bandit])
def test_so_does_one_with_any_kind_of_observation_and_action(make, tmp_path):
    _resumed_at_every_update(lambda: _trainer([make(), make()]), tmp_path, steps=8)


def test_so_does_one_in_compiled_environments(tmp_path):
    _resumed_at_every_update(lambda: _trainer(EnvConfig(id="compiled/CartPole-v1", num_envs=2)), tmp_path)


def test_a_trainer_that_was_busy_with_something_else_continues_from_the_checkpoint_alike(tmp_path):
    whole = _trainer()
    whole.train(80, STEPS)
    whole.save_checkpoint(tmp_path / "here")
    whole.train(160, STEPS)
    busy = _trainer(seed=9)
    busy.train(240, STEPS)
    assert busy.load_checkpoint(tmp_path / "here")
    busy.train(160, STEPS)
    assert _differences(_everything(whole), _everything(busy)) == []


def test_a_checkpoint_from_before_the_first_step_starts_a_busy_trainer_over(tmp_path):
    whole = _trainer()
    whole.save_checkpoint(tmp_path / "start")
    whole.train(160, STEPS)
    busy = _trainer()
    busy.train(80, STEPS)
    assert busy.load_checkpoint(tmp_path / "start")
    busy.train(160, STEPS)
    assert _differences(_everything(whole), _everything(busy)) == []


def test_saving_disturbs_nothing(tmp_path):
    quiet, saving = _trainer(), _trainer()
    quiet.train(240, STEPS)
    saving.save_checkpoint(tmp_path / "before anything")
    saving.train(240, STEPS, callback=lambda t, _: t.save_checkpoint(tmp_path / str(t.n_updates)) and None)
    assert _differences(_everything(quiet), _everything(saving)) == []


def test_the_same_seed_gives_the_same_checkpoint_and_another_seed_another(tmp_path):
    def fingerprint(name, seed):
        trainer = _trainer(seed=seed)
        trainer.train(160, STEPS)
        return trainer.save_checkpoint(tmp_path / name)

    one, again, other = fingerprint("one", 1), fingerprint("again", 1), fingerprint("other", 2)
    assert one == again
    assert one != other
    assert load_checkpoint(tmp_path / "one").sha256 == one


def test_the_policy_of_a_checkpoint_can_be_loaded_alone(tmp_path):
    trainer = _trainer()
    trainer.train(160, STEPS)
    trainer.save_checkpoint(tmp_path / "here")
    policy = load_policy(load_checkpoint(tmp_path / "here").policy)
    observation = trainer.collect_rollouts(4)["observation"].flatten(0, 1)
    with torch.no_grad():
        assert torch.equal(policy.value(observation), trainer.policy.value(observation))


# ---------------------------------------------------------------------- what cannot be trusted


@pytest.fixture
def saved(tmp_path):
    trainer = _trainer()
    trainer.train(80, STEPS)
    trainer.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def _refuses(path, message, **settings):
    """Loading raises, and the trainer goes on exactly as one that never tried."""
    tried, untouched = _trainer(seed=5, **settings), _trainer(seed=5, **settings)
    for trainer in (tried, untouched):
        trainer.train(80, STEPS)
    with pytest.raises(CheckpointError, match=message):
        tried.load_checkpoint(path)
    for trainer in (tried, untouched):
        trainer.train(160, STEPS)
    assert _differences(_everything(tried), _everything(untouched)) == []


FILES = ["policy.safetensors", "learner.safetensors", "source.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_corrupt_file_is_refused_and_nothing_changes(name, saved):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 0x40
    (saved / name).write_bytes(content)
    _refuses(saved, rf"{name} is corrupt \(its SHA-256 differs\).*Use an earlier checkpoint")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_and_nothing_changes(name, saved):
    size = os.path.getsize(saved / name)
    os.truncate(saved / name, size - 5)
    _refuses(saved, rf"{name} is truncated \({size - 5} of {size} bytes\)")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_and_nothing_changes(name, saved):
    (saved / name).unlink()
    _refuses(saved, f"{name} is missing")


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": "x", "files": {}}', b'{"schema": 1, "files": 3}']
)
def test_a_broken_manifest_is_refused_and_nothing_changes(content, saved):
    if content is None:
        (saved / "manifest.json").unlink()
    else:
        (saved / "manifest.json").write_bytes(content)
    _refuses(saved, "manifest cannot be read")


@pytest.mark.parametrize("files", [{}, {name: 3 for name in FILES}, {name: {} for name in FILES}], ids=str)
def test_a_manifest_that_vouches_for_nothing_is_refused_and_nothing_changes(files, saved):
    (saved / "manifest.json").write_text(json.dumps({"schema": 1, "files": files}))
    _refuses(saved, r"manifest cannot be read|policy.safetensors is ")


def test_a_newer_schema_is_refused_and_nothing_changes(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(manifest | {"schema": 3}))
    _refuses(saved, "schema 3 is newer than 2.*Upgrade palaestra")


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    _refuses(tmp_path / "nowhere", "no such checkpoint directory")


def test_another_width_is_refused_and_nothing_changes(saved):
    _refuses(saved, "trained numbers, this policy has", hidden=(24, 16))


def test_another_environment_is_refused_and_nothing_changes(saved):
    _refuses(saved, r"trained numbers|has shape|another architecture", env="Acrobot-v1")


def test_statistics_for_which_there_is_no_normaliser_are_refused_and_nothing_changes(tmp_path):
    trainer = _trainer(normalize=True)
    trainer.save_checkpoint(tmp_path / "normalised")
    _refuses(tmp_path / "normalised", "another architecture", normalize=False)


def test_more_environments_start_afresh_and_say_so(saved):
    other = as_vector_env("CartPole-v1", num_envs=3)
    config = PolicyConfig(hidden=(16, 16))
    policy = ActorCritic(other.observation_space, other.action_space, config, normalize_observation=True)
    trainer = Trainer(policy, other, PPO(n_epochs=2, batch_size=16), normalize_reward=True)
    assert trainer.load_checkpoint(saved) is False
    assert trainer.total_timesteps == 80
    trainer.train(300, STEPS)
    assert trainer.total_timesteps >= 300


# ---------------------------------------------------------------------- how it is written


def test_a_crash_while_writing_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    trainer = _trainer()
    trainer.train(80, STEPS)

    def power_cut(*_):
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", power_cut)
        with pytest.raises(OSError, match="power cut"):
            trainer.save_checkpoint(tmp_path / "update_1")
    assert not (tmp_path / "update_1").exists()
    assert list_checkpoints(tmp_path) == []
    trainer.save_checkpoint(tmp_path / "update_1")  # and the next attempt is not in the way of the first
    assert list_checkpoints(tmp_path) == [tmp_path / "update_1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update_1"]


def test_a_full_disk_keeps_no_half_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _trainer().save_checkpoint(tmp_path / "update_1")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_is_never_overwritten(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(CheckpointError, match="never overwritten"):
        _trainer().save_checkpoint(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_there_is_no_pickle_in_a_checkpoint(saved):
    assert sorted(path.name for path in saved.iterdir()) == sorted([*FILES, "manifest.json"])
    for path in saved.iterdir():
        raw = path.read_bytes()
        if path.suffix == ".json":
            json.loads(raw)
            continue
        length = int.from_bytes(raw[:8], "little")
        json.loads(raw[8 : 8 + length])  # a safetensors header, and behind it numbers only
        with pytest.raises(ValueError):  # noqa: PT011  whatever pickletools thinks of it
            pickletools.dis(raw, out=io.StringIO())


def test_checkpoints_are_listed_oldest_first_and_half_ones_not_at_all(tmp_path):
    trainer = _trainer()
    for k in (10, 2):
        trainer.save_checkpoint(tmp_path / f"update_{k:08d}")
    (tmp_path / ".update_00000011.123.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["update_00000002", "update_00000010"]


def test_what_the_caller_adds_about_a_checkpoint_comes_back(tmp_path):
    _trainer().save_checkpoint(tmp_path / "here", about={"curriculum": {"level": 3}})
    assert load_checkpoint(tmp_path / "here").about == {"curriculum": {"level": 3}}
