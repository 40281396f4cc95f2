"""Training while a collector works in the background: the same numbers, nothing lost, no failure unheard."""

import multiprocessing
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from tests.actor import rooms
from torch import nn

from palaestra.actor import collector_thread
from palaestra.actor.asynchronous import AsyncConfig
from palaestra.actor.collector import Collector
from palaestra.env import EnvConfig, make_env
from palaestra.errors import CollectorFailed, ConfigError, EnvironmentContractError
from palaestra.learner import PPO
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.policy.weight_sync import clone_policy
from palaestra.train import Trainer

ROOMS = "tests.actor.rooms"
BOTH = pytest.mark.parametrize("kind", ["thread", "process"])


def _trainer(env="CartPole-v1", kind="thread", num_envs=2, kwargs=None, ppo=None, policy=None, **settings):
    config = EnvConfig(id=env, num_envs=num_envs, kwargs=kwargs or {})
    rooms.Room.made = 0
    made = make_env(config)
    asynchronous = None if kind == "sync" else AsyncConfig(collector=kind, **settings)
    algorithm = ppo or PPO(n_epochs=2, batch_size=16)
    size = PolicyConfig(hidden=(16,), image_features=8)
    policy = policy or ActorCritic(made.observation_space, made.action_space, size, seed=3)
    return Trainer(policy, made, algorithm, seed=3, asynchronous=asynchronous, env_config=config)


def _weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


@pytest.fixture(autouse=True)
def _nobody_is_left():
    yield
    rooms.LET_GO.set()
    for thread in threading.enumerate():
        if thread.name.startswith("palaestra-collector"):
            thread.join(10)
    rooms.LET_GO.clear()
    rooms.GO.clear()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("palaestra-collector")]
    assert not multiprocessing.active_children()


@BOTH
def test_staleness_0_is_synchronous_training_bit_for_bit(kind):
    in_turn, behind = _trainer(kind="sync"), _trainer(kind=kind, max_staleness=0)
    in_turn.train(6 * 64, 32)
    history = behind.train(6 * 64, 32)
    assert torch.equal(_weights(in_turn), _weights(behind))
    assert [metrics["staleness_max"] for metrics in history] == [0.0] * 6
    assert list(in_turn.episode_rewards) == list(behind.episode_rewards)
    assert behind.total_timesteps == in_turn.total_timesteps == 384


def _lagged(staleness, updates, rollout_length):
    """What `reproducible` promises, in one thread: segment u acts on the weights of update u - staleness."""
    trainer = _trainer(kind="sync")
    collector = Collector(trainer.env, clone_policy(trainer.policy), seed=3)
    past = [_weights(trainer)]
    for update in range(updates):
        version = max(0, update - staleness)
        nn.utils.vector_to_parameters(past[version], collector.policy.parameters())
        buffer = collector.collect(rollout_length, policy_version=version)
        trainer.learn(buffer.get())
        past.append(_weights(trainer))
    return past[-1]


@BOTH
def test_a_reproducible_run_is_the_same_in_thread_process_and_by_hand(kind):
    trainer = _trainer(kind=kind, max_staleness=2, reproducible=True)
    history = trainer.train(6 * 64, 32)
    assert [metrics["staleness"] for metrics in history] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert torch.equal(_weights(trainer), _lagged(2, 6, 32))


@BOTH
def test_staleness_stays_within_its_bound_and_no_step_is_lost_or_doubled(kind):
    ids: Counter[tuple[int, int]] = Counter()

    class Noting(Trainer):
        def learn(self, rollout):
            pairs = zip(rollout["stream"].flatten().tolist(), rollout["env_step"].flatten().tolist(), strict=True)
            ids.update(pairs)
            return super().learn(rollout)

    config = EnvConfig(id="CartPole-v1", num_envs=2)
    env = make_env(config)
    policy = ActorCritic(env.observation_space, env.action_space, seed=0)
    settings = AsyncConfig(collector=kind, max_staleness=3)
    trainer = Noting(policy, env, PPO(n_epochs=1, batch_size=8), asynchronous=settings, env_config=config)
    history = trainer.train(20 * 16, 8)
    assert max(metrics["staleness_max"] for metrics in history) <= 3.0
    assert len(ids) == 320
    assert set(ids.values()) == {1}
    assert sorted({step for _, step in ids}) == list(range(160))
    assert history[-1]["dropped_steps"] == 0.0


def test_the_metrics_say_who_waited_for_whom():
    metrics = _trainer().train(4 * 64, 32)[-1]
    assert {"staleness", "queue_depth", "wait_seconds", "dropped_steps", "collector_restarts"} <= metrics.keys()
    assert 0.0 <= metrics["collector_utilisation"] <= 1.0
    assert 0.0 <= metrics["learner_utilisation"] <= 1.0
    assert metrics["env_step"] == 256.0


@BOTH
def test_an_exception_of_the_environment_surfaces_with_its_cause(kind):
    trainer = _trainer(f"{ROOMS}:Raising", kind, kwargs={"at": 40})
    with pytest.raises(
        CollectorFailed, match=r"EnvironmentContractError: environment 0 .*: RuntimeError: the floor gave"
    ) as it:
        trainer.train(10_000, 16)
    assert isinstance(it.value.__cause__, EnvironmentContractError)
    # 40 steps are two segments and a half; what was learned before the news came is kept.
    assert trainer.total_timesteps in (0, 32, 64)


def test_a_killed_process_surfaces_by_its_signal():
    trainer = _trainer(f"{ROOMS}:Killed", "process", kwargs={"at": 40})
    with pytest.raises(CollectorFailed, match="died: killed by signal 9, SIGKILL"):
        trainer.train(10_000, 16)


@BOTH
def test_a_step_that_never_ends_surfaces_as_a_hang(kind, monkeypatch):
    monkeypatch.setattr(collector_thread, "STOP_GRACE_S", 0.1)
    monkeypatch.setattr("palaestra.actor.collector_process.STOP_GRACE_S", 0.1)
    trainer = _trainer(f"{ROOMS}:Stuck", kind, kwargs={"at": 40}, step_timeout=0.3)
    with pytest.raises(CollectorFailed, match=r"hangs: its step has not ended for .* trainer.step_timeout is 0.3"):
        trainer.train(10_000, 16)


def test_an_environment_that_cannot_be_made_in_the_process_says_so(tmp_path):
    trainer = _trainer(f"{ROOMS}:Room", "process")
    trainer.training.source._env_config = EnvConfig(id=f"{ROOMS}:Nowhere")
    with pytest.raises(CollectorFailed, match="Nowhere"):
        trainer.train(64, 16)


def test_a_dead_collector_is_replaced_and_every_step_accounted_for(tmp_path):
    kwargs = {"at": 40, "mark": str(tmp_path / "mark")}
    trainer = _trainer(f"{ROOMS}:KilledOnce", "process", num_envs=1, kwargs=kwargs, collector_restarts=1)
    history = trainer.train(128, 16)
    assert trainer.total_timesteps == 128
    assert history[-1]["collector_restarts"] == 1.0
    assert ["SIGKILL" in failure for failure in trainer.collector_failures] == [True]
    # The first collector finished steps 0 to 38 and died in the 40th: two whole segments, and 7 steps that are lost.
    assert history[-1]["dropped_steps"] == 7.0


def test_a_thread_that_raised_is_replaced_too_and_plays_other_episodes():
    trainer = _trainer(f"{ROOMS}:Raising", num_envs=1, kwargs={"at": 40}, collector_restarts=1)
    assert trainer.train(128, 16)[-1]["collector_restarts"] == 1.0
    assert trainer.total_timesteps == 128


def test_one_failure_too_many_is_an_error():
    trainer = _trainer(f"{ROOMS}:Killed", "process", kwargs={"at": 20}, collector_restarts=1)
    with pytest.raises(CollectorFailed, match="SIGKILL"):
        trainer.train(10_000, 16)
    assert len(trainer.collector_failures) == 1


def test_bad_news_ends_a_long_update_which_is_undone_and_its_segment_kept():
    raised = threading.Event()

    class Waiting(PPO):
        """In its second update, at the second minibatch, lets the environment break and waits for the news."""

        def losses(self, policy, batch, *, clip_range):
            nonlocal minibatches
            minibatches += 1
            if minibatches == 6:
                rooms.GO.set()
                raised.wait(30)
            return super().losses(policy, batch, clip_range=clip_range)

    minibatches = 0
    trainer = _trainer(f"{ROOMS}:RaisingWhenTold", kwargs={"at": 40}, ppo=Waiting(n_epochs=2, batch_size=16))
    source = trainer.training.source
    start = source.start

    def starting(*args, **kwargs):
        start(*args, **kwargs)
        fail = source._queue.fail

        def failing(failure):
            fail(failure)
            raised.set()

        source._queue.fail = failing

    source.start = starting
    after_first: list[torch.Tensor] = []
    with pytest.raises(CollectorFailed, match="the floor gave way"):
        trainer.train(10_000, 16, callback=lambda t, _: after_first.append(_weights(t)))
    assert minibatches == 6  # four of the first update, two of the second
    assert torch.equal(_weights(trainer), after_first[0])
    assert (trainer.n_updates, trainer.total_timesteps) == (1, 32)
    source.start = start
    assert trainer.train(64, 16)[-1]["env_step"] == 64.0  # the segment was still there


def test_overwriting_counts_what_it_loses_and_never_exceeds_the_bound():
    class Slow(PPO):
        def losses(self, policy, batch, *, clip_range):
            ahead.wait(0.05)
            return super().losses(policy, batch, clip_range=clip_range)

    ahead = threading.Event()
    trainer = _trainer(f"{ROOMS}:Room", ppo=Slow(n_epochs=1, batch_size=32), overflow="overwrite_oldest")
    history = trainer.train(10 * 32, 16)
    assert history[-1]["dropped_steps"] > 0
    assert max(metrics["staleness_max"] for metrics in history) <= 1.0
    assert trainer.total_timesteps == 320


def test_stopping_early_keeps_what_is_unread_for_later():
    trainer = _trainer(max_staleness=2)
    trainer.train(10_000, 16, callback=lambda *_: False)
    assert trainer.total_timesteps == 32
    history = trainer.train(5 * 32, 16)
    assert [metrics["env_step"] for metrics in history] == [64.0, 96.0, 128.0, 160.0]


@BOTH
@pytest.mark.parametrize("env", ["palaestra.env.toy:MixedSenses", "palaestra.env.toy:MaskedChoice"])
def test_nested_observations_and_masks_travel_too(kind, env):
    in_turn, behind = _trainer(env, "sync"), _trainer(env, kind, max_staleness=0)
    in_turn.train(3 * 32, 16)
    behind.train(3 * 32, 16)
    assert torch.equal(_weights(in_turn), _weights(behind))


class HalfFrozen(nn.Module):
    """A network whose first layer stays as it is."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.eye = nn.Linear(observation_space.shape[0], 8)
        self.eye.requires_grad_(False)
        self.register_buffer("shift", torch.full((8,), 0.5), persistent=False)
        self.head = nn.Linear(8, int(action_space.n) + 1)

    def forward(self, observation):
        out = self.head(torch.tanh(self.eye(observation) + self.shift))
        return out[:, :-1], out[:, -1]


@BOTH
def test_a_frozen_part_is_shared_and_stays_as_it_was(kind):
    def build(kind, **settings):
        env = make_env(EnvConfig(id="CartPole-v1", num_envs=1))
        torch.manual_seed(0)
        network = HalfFrozen(env.observation_space, env.action_space)
        policy = ActorCritic(env.observation_space, env.action_space, network=network)
        return _trainer(kind=kind, policy=policy, **settings)

    in_turn, behind = build("sync"), build(kind, max_staleness=0)
    before = behind.policy.network.eye.weight.clone()
    in_turn.train(3 * 32, 16)
    behind.train(3 * 32, 16)
    assert torch.equal(behind.policy.network.eye.weight, before)
    assert torch.equal(_weights(in_turn), _weights(behind))


def test_normalisers_learn_in_the_background_as_in_turn():
    def build(kind, **settings):
        config = EnvConfig(id="Pendulum-v1", num_envs=2)
        env = make_env(config)
        policy = ActorCritic(env.observation_space, env.action_space, normalize_observation=True, seed=1)
        asynchronous = None if kind == "sync" else AsyncConfig(collector=kind, **settings)
        return Trainer(
            policy, env, PPO(n_epochs=1, batch_size=32), normalize_reward=True, asynchronous=asynchronous,
            env_config=config,
        )  # fmt: skip

    runs = [build("sync"), build("thread", max_staleness=0), build("process", max_staleness=0)]
    scales = [run.train(4 * 64, 32)[-1]["reward_scale"] for run in runs]
    assert scales[0] == scales[1] == scales[2] != 1.0
    counts = [float(next(iter(run.policy.encoder.normalizers.values())).count) for run in runs]
    assert counts == [256.0, 256.0, 256.0]
    assert torch.equal(_weights(runs[0]), _weights(runs[1]))
    assert torch.equal(_weights(runs[0]), _weights(runs[2]))


@BOTH
def test_a_checkpoint_in_the_middle_goes_on_counting_with_fresh_episodes(kind, tmp_path):
    first = _trainer(kind=kind)
    first.train(3 * 64, 32, callback=lambda t, _: t.save_checkpoint(tmp_path / f"at_{t.n_updates}") and None)
    second = _trainer(kind=kind)
    assert second.load_checkpoint(tmp_path / "at_2") is False  # the environments were under way
    assert (second.n_updates, second.total_timesteps) == (2, 128)
    history = second.train(4 * 64, 32)
    assert [metrics["update"] for metrics in history] == [3.0, 4.0]
    assert np.isfinite(history[-1]["loss"])


def test_environment_objects_cannot_go_to_a_process():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=1))
    policy = ActorCritic(env.observation_space, env.action_space)
    with pytest.raises(ConfigError, match=r"environment objects cannot be sent to another process. Name the env"):
        Trainer(policy, env, asynchronous=AsyncConfig(collector="process"))


def test_a_policy_that_cannot_be_pickled_is_refused_before_anything_starts():
    trainer = _trainer(kind="process")
    trainer.policy.extra = lambda: None
    with pytest.raises(ConfigError, match=r"cannot be sent to a collector process.*trainer.collector=thread"):
        trainer.train(64, 32)


def test_the_specification_s_own_words_collect_in_the_background():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=2))
    trainer = Trainer(
        ActorCritic(env.observation_space, env.action_space), env, PPO(batch_size=64), buffer_size=64, buffer_type="vla"
    )
    assert trainer.train(total_timesteps=256)[-1]["update"] == 2.0  # 64 steps of 2 environments each
    assert trainer.collect_rollouts(8).batch_size == (8, 2)


def test_a_ring_smaller_than_a_segment_is_refused():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=2))
    trainer = Trainer(ActorCritic(env.observation_space, env.action_space), env, buffer_type="vla", buffer_size=16)
    with pytest.raises(ConfigError, match="smaller than one segment of 32"):
        trainer.train(64, 32)


@pytest.mark.parametrize(
    ("kind", "cores", "is_ahead", "expected"),
    [
        ("process", 2, False, False),  # the learner waits for the collector, which needs its core
        ("process", 2, True, True),  # the collector waits for the learner
        ("process", 3, False, True),
        ("thread", 2, False, True),
    ],
)
def test_the_learner_leaves_the_second_core_to_a_collector_process_it_waits_for(
    kind, cores, is_ahead, expected, monkeypatch
):
    monkeypatch.setattr("palaestra.actor.asynchronous.usable_cores", lambda: cores)
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=1))
    policy = ActorCritic(env.observation_space, env.action_space)
    settings = AsyncConfig(collector=kind)
    trainer = Trainer(policy, env, asynchronous=settings, env_config=EnvConfig(id="CartPole-v1", num_envs=1))
    trainer.training.source._is_ahead = is_ahead
    assert trainer.training.source.has_spare_core() is expected
