"""Collect, learn, and both in turn: what each promises when used alone and together."""

import copy

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from palaestra.env import as_vector_env
from palaestra.env.toy import Bandit, Countdown, MaskedChoice, MixedSenses, Pixels, TargetReach
from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.experience import combine_rollouts
from palaestra.learner import PPO
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.train import Trainer

PATHS = ["auto", "off"]


def _trainer(env="CartPole-v1", *, cls=Trainer, seed=0, normalize=False, hidden=(16, 16), policy=None,
             distribution="auto", compiled="auto", normalize_reward=False, **settings):  # fmt: skip
    env = as_vector_env(env, num_envs=2)
    if policy is None:
        config = PolicyConfig(hidden=hidden, image_features=16, distribution=distribution)
        policy = ActorCritic(
            env.observation_space, env.action_space, config, normalize_observation=normalize, seed=seed
        )  # fmt: skip
    algorithm = PPO(**({"n_epochs": 2, "batch_size": 32} | settings))
    return cls(policy, env, algorithm, seed=seed, compiled=compiled, normalize_reward=normalize_reward)


def _weights(trainer):
    return torch.cat([value.double().flatten() for value in trainer.policy.state_dict().values()])


def _snapshot(rollout):
    return {key: rollout[key].clone() for key in rollout.keys(True, True)}


ENVIRONMENTS = {
    "CartPole": "CartPole-v1",
    "Pendulum": "Pendulum-v1",
    "mixed": [MixedSenses(), MixedSenses()],
    "masked": [MaskedChoice(), MaskedChoice()],
    "paused": SyncVectorEnv([lambda: Countdown(3)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP),
}


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_learn_leaves_its_input_bit_for_bit_as_it_was(kind, compiled):
    trainer = _trainer(copy.deepcopy(ENVIRONMENTS[kind]), compiled=compiled, normalize_reward=True)
    rollout = trainer.collect_rollouts(32)
    before, keys = _snapshot(rollout), set(rollout.keys(True, True))
    trainer.learn(rollout)
    assert set(rollout.keys(True, True)) == keys
    assert all(torch.equal(rollout[key], value) for key, value in before.items())


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_ratio_is_1_before_the_first_step_of_the_optimiser(kind, normalize, compiled):
    trainer = _trainer(
        copy.deepcopy(ENVIRONMENTS[kind]), compiled=compiled, normalize=normalize, n_epochs=1, batch_size=4096
    )  # fmt: skip
    for _ in range(3):  # from the second on, the normaliser has statistics
        metrics = trainer.learn(trainer.collect_rollouts(64))
        assert metrics["minibatches"] == 1
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-8)  # float32 rounding squared
        assert metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("normalize_reward", [False, True])
def test_train_is_collect_and_learn_in_turn_bit_for_bit(compiled, normalize_reward):
    options = {"compiled": compiled, "normalize": True, "normalize_reward": normalize_reward}
    by_train, by_hand = _trainer(**options), _trainer(**options)
    history = by_train.train(total_timesteps=3 * 64, rollout_length=32)
    metrics = [by_hand.learn(by_hand.collect_rollouts(32)) for _ in range(3)]
    assert torch.equal(_weights(by_train), _weights(by_hand))
    assert [m["loss"] for m in history] == [m["loss"] for m in metrics]
    assert by_train.total_timesteps == by_hand.total_timesteps == 192


def test_the_same_seed_trains_the_same_weights_and_another_seed_does_not():
    def trained(seed):
        trainer = _trainer(seed=seed)
        trainer.train(128, rollout_length=32)
        return _weights(trainer)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_the_compiled_and_the_plain_path_train_alike():
    fast, plain = _trainer(compiled="on"), _trainer(compiled="off")
    for trainer in (fast, plain):
        trainer.train(128, rollout_length=64)
    assert torch.allclose(_weights(fast), _weights(plain), atol=1e-4)


def test_every_update_reports_what_happened():
    (metrics,) = _trainer().train(64, rollout_length=32)
    assert metrics["env_step"] == 64
    assert metrics["update"] == 1
    assert metrics["minibatches"] == 4  # 64 samples in halves, twice
    expected = {
        "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance",
        "learning_rate", "clip_range", "actor_grad_norm", "critic_grad_norm", "value_mean", "return_mean",
        "advantage_std", "staleness", "staleness_max", "episodes", "episode_return", "episode_return_min",
        "episode_return_max", "episode_length", "steps_per_second", "collect_seconds", "learn_seconds",
    }  # fmt: skip
    assert expected <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["loss"] == pytest.approx(
        metrics["policy_loss"] - 0.01 * metrics["entropy"] + 0.5 * metrics["value_loss"]
    )
    assert metrics["explained_variance"] <= 1.0
    assert metrics["staleness"] == 0.0


def test_the_episode_return_is_the_mean_of_the_latest_episodes_as_they_were_paid():
    trainer = _trainer([Countdown(3), Countdown(3)], normalize_reward=True)
    (metrics,) = trainer.train(12, rollout_length=6)
    assert metrics["episodes"] == 4
    assert metrics["episode_return"] == 6.0  # 1 + 2 + 3
    assert metrics["episode_length"] == 3.0
    assert list(trainer.episode_rewards) == [6.0] * 4


def test_total_timesteps_counts_from_the_beginning_and_not_from_the_call():
    trainer = _trainer()
    assert len(trainer.train(128, rollout_length=32)) == 2
    assert len(trainer.train(128, rollout_length=32)) == 0
    assert len(trainer.train(192, rollout_length=32)) == 1
    assert trainer.total_timesteps == 192


def test_the_last_rollout_is_whole_even_if_it_goes_past_the_end():
    trainer = _trainer()
    trainer.train(100, rollout_length=32)
    assert trainer.total_timesteps == 128


def test_history_holds_every_nth_update_and_always_the_last():
    history = _trainer().train(7 * 64, rollout_length=32, log_interval=3)
    assert [m["update"] for m in history] == [3, 6, 7]


def test_a_callback_sees_every_update_and_false_stops():
    seen = []

    def stop_at_two(trainer, metrics):
        seen.append((trainer.n_updates, metrics["update"]))
        return trainer.n_updates < 2

    history = _trainer().train(10_000, rollout_length=32, callback=stop_at_two)
    assert seen == [(1, 1.0), (2, 2.0)]
    assert len(history) == 2


def test_a_callback_that_says_nothing_does_not_stop():
    assert len(_trainer().train(128, rollout_length=32, callback=lambda *_: None)) == 2


class Counting(Trainer):
    """Overrides both halves, as a user would."""

    def collect_rollouts(self, n_steps):
        self.collected = getattr(self, "collected", 0) + 1
        return super().collect_rollouts(n_steps)

    def learn(self, rollout):
        self.learned = getattr(self, "learned", 0) + 1
        return super().learn(rollout)


def test_train_goes_through_what_a_subclass_overrides_and_learns_the_same():
    mine, plain = _trainer(cls=Counting), _trainer()
    mine.train(192, rollout_length=32)
    plain.train(192, rollout_length=32)
    assert (mine.collected, mine.learned) == (3, 3)
    assert torch.equal(_weights(mine), _weights(plain))


def test_an_override_set_on_the_object_is_honoured_too():
    trainer = _trainer()
    seen = []
    learn = trainer.learn
    trainer.learn = lambda rollout: seen.append(rollout.batch_size) or learn(rollout)
    trainer.train(64, rollout_length=32)
    assert seen == [(32, 2)]


def test_a_linear_schedule_starts_at_its_full_rate_and_falls_with_the_steps_taken():
    trainer = _trainer(learning_rate=1e-3, learning_rate_schedule="linear", clip_range_schedule="linear")
    history = trainer.train(4 * 64, rollout_length=32)
    assert [m["learning_rate"] for m in history] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [m["clip_range"] for m in history] == pytest.approx([0.2, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("compiled", PATHS)
def test_the_kl_limit_stops_the_policy_but_not_the_value(compiled):
    trainer = _trainer(compiled=compiled, target_kl=1e-4, learning_rate=0.05, n_epochs=5)
    rollout = trainer.collect_rollouts(64)
    actor = [p.clone() for p in trainer.policy.actor.parameters()]
    metrics = trainer.learn(rollout)
    stopped_at = metrics["policy_stopped_at"]
    assert metrics["minibatches"] == 20  # the critic saw all five epochs of four
    assert 2 <= stopped_at < 20
    assert trainer.training.learner.optimizer().steps == {"actor": stopped_at - 1, "critic": 20}
    assert any(not torch.equal(a, b) for a, b in zip(actor, trainer.policy.actor.parameters(), strict=True))


def test_without_a_kl_limit_nothing_stops():
    metrics = _trainer(learning_rate=0.05).learn(_trainer().collect_rollouts(64))
    assert "policy_stopped_at" not in metrics


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("env", [[MixedSenses()], [Pixels()], [MaskedChoice()], [TargetReach()], [Bandit(3, 1, 5)]])
def test_one_update_works_on_every_kind_of_observation_and_action(env, compiled):
    trainer = _trainer(copy.deepcopy(env), compiled=compiled, normalize=True)
    before = _weights(trainer)
    metrics = trainer.learn(trainer.collect_rollouts(32))
    assert all(np.isfinite(value) for value in metrics.values())
    assert not torch.equal(_weights(trainer), before)


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("distribution", ["gaussian", "squashed_gaussian"])
def test_one_update_works_on_pendulum_with_either_gaussian(distribution, compiled):
    trainer = _trainer("Pendulum-v1", compiled=compiled, distribution=distribution, normalize_reward=True)
    (metrics,) = trainer.train(64, rollout_length=32)
    assert metrics["reward_scale"] != 1.0
    assert np.isfinite(metrics["loss"])


# ---------------------------------------------------------------------- pauses and statistics


def test_pauses_are_neither_learned_from_nor_in_the_statistics():
    # Countdown(3) with a pause after each episode shows 3, 2, 1, pause (0), ...
    env = SyncVectorEnv([lambda: Countdown(3)], autoreset_mode=AutoresetMode.NEXT_STEP)
    trainer = _trainer(env, normalize=True, n_epochs=1, batch_size=1)
    metrics = trainer.learn(trainer.collect_rollouts(8))
    assert metrics["minibatches"] == 6
    normalizer = trainer.policy.encoder.normalizers["observation"]
    assert normalizer.count.item() == 6
    assert normalizer.mean.item() == pytest.approx(2.0)  # of 3, 2, 1, 3, 2, 1


def test_the_statistics_move_only_after_the_rollout_was_learned_from():
    trainer = _trainer(normalize=True)
    normalizer = trainer.policy.encoder.normalizers["observation"]
    rollout = trainer.collect_rollouts(32)
    assert normalizer.count.item() == 0
    trainer.learn(rollout)
    assert normalizer.count.item() == 64
    expected = rollout["observation"].double().flatten(0, 1)
    assert torch.allclose(normalizer.mean, expected.mean(0))
    trainer.learn(rollout)  # an old rollout again: the statistics have seen it already
    assert normalizer.count.item() == 64


# ---------------------------------------------------------------------- several rollouts


def _same_rollout(one, other):
    return [key for key in one.keys(True, True) if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize(
    "env",
    ["CartPole-v1", "Pendulum-v1", [Countdown(3, "truncated"), Countdown(3, "truncated")]],
    ids=["CartPole-v1", "Pendulum-v1", "two countdowns"],
)
def test_two_consecutive_rollouts_are_one_long_rollout_bit_for_bit(env, compiled):
    in_two, in_one = (_trainer(copy.deepcopy(env), compiled=compiled, hidden=(64, 64)) for _ in range(2))
    joined = combine_rollouts([in_two.collect_rollouts(150), in_two.collect_rollouts(106)])
    whole = in_one.collect_rollouts(256)
    assert joined.batch_size == whole.batch_size
    assert set(_same_rollout(joined, whole)) <= {"stream"}  # each trainer's environments are its own
    one, other = (in_one.algorithm.prepare(rollout.columns()) for rollout in (joined, whole))
    assert torch.equal(one["advantage"], other["advantage"])
    assert torch.equal(one["target"], other["target"])


def _advantages_seen(trainer, experience):
    """What `learn` computes as advantages for what it is given."""
    seen = []
    extra_metrics = trainer.algorithm.extra_metrics
    trainer.algorithm.extra_metrics = lambda batch, *rest: (
        seen.append(batch["advantage"].clone()) or extra_metrics(batch, *rest)
    )
    trainer.learn(experience)
    return seen[0]


@pytest.mark.parametrize("compiled", PATHS)
def test_a_list_of_rollouts_learns_from_the_advantages_of_the_combined_one(compiled):
    policy = _trainer().policy
    collecting = [_trainer(policy=policy, seed=seed) for seed in range(3)]
    rollouts = [trainer.collect_rollouts(32) for trainer in collecting]
    combined = combine_rollouts(rollouts)
    as_list = _advantages_seen(_trainer(compiled=compiled), rollouts).view(3, 32, 2)
    as_one = _advantages_seen(_trainer(compiled=compiled), combined).view(32, 6)
    assert torch.equal(torch.cat(list(as_list), 1), as_one)


def test_rollouts_of_unequal_length_can_be_learned_from_as_a_list():
    trainer = _trainer()
    rollouts = [trainer.collect_rollouts(n) for n in (16, 48)]
    assert trainer.learn(rollouts)["minibatches"] == 8  # 128 samples by 32, twice


def test_several_trainers_may_share_a_policy_and_one_of_them_learns_for_all():
    policy = _trainer().policy
    trainers = [_trainer(policy=policy, seed=seed) for seed in range(4)]
    rollouts = [trainer.collect_rollouts(16) for trainer in trainers]
    combined = combine_rollouts(rollouts)
    assert combined.batch_size == (16, 8)
    before = _weights(trainers[3])
    trainers[0].learn(combined)
    assert not torch.equal(_weights(trainers[3]), before)
    assert torch.isfinite(trainers[3].collect_rollouts(4)["log_prob"]).all()  # and acts on with the new weights


def test_learning_again_from_an_old_rollout_says_how_old_it_is():
    trainer = _trainer()
    rollout = trainer.collect_rollouts(32)
    assert [trainer.learn(rollout)["staleness"] for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_plain_dictionary_of_tensors_is_a_rollout_too():
    trainer, other = _trainer(), _trainer()
    rollout = trainer.collect_rollouts(32)
    as_dictionary = {str(key): rollout[key] for key in rollout.keys()}
    assert other.learn(as_dictionary)["loss"] == trainer.learn(rollout)["loss"]


@pytest.mark.parametrize(
    ("experience", "message"),
    [([], "empty list"), (3, "expected a Rollout, got int"), ({"reward": torch.zeros(2, 2)}, "has no observation")],
)
def test_what_is_not_experience_is_refused(experience, message):
    with pytest.raises(ExperienceError, match=message):
        _trainer().learn(experience)


# ---------------------------------------------------------------------- refusals and restored settings


def test_a_policy_for_other_spaces_is_refused_at_once():
    policy = _trainer("Pendulum-v1").policy
    with pytest.raises(ConfigError, match=r"policy\.observation_space.*does not fit"):
        _trainer(policy=policy)


def test_a_policy_for_actions_that_start_elsewhere_is_refused_at_once():
    policy = _trainer([Bandit(3, 1, 0)]).policy
    with pytest.raises(ConfigError, match=r"policy\.action_space.*does not fit"):
        _trainer([Bandit(3, 1, 5)], policy=policy)


def test_compiled_on_refuses_an_image_policy_with_the_reason():
    with pytest.raises(ConfigError, match=r"observations are not a vector of numbers.*Use 'auto'"):
        _trainer([Pixels()], compiled="on")


@pytest.mark.parametrize("arguments", [(0,), (10, 0), (10, 5, 0)])
def test_training_for_no_time_is_refused(arguments):
    with pytest.raises(ConfigError, match="at least 1"):
        _trainer().train(*arguments)
    with pytest.raises(ConfigError, match="at least 1"):
        _trainer().collect_rollouts(0)


def test_the_thread_count_of_torch_is_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        during = []
        _trainer(compiled="off").train(64, 32, callback=lambda *_: during.append(torch.get_num_threads()))
        assert during == [1]
        assert torch.get_num_threads() == 2

        def broken(*_):
            raise RuntimeError("observer")

        with pytest.raises(RuntimeError, match="observer"):
            _trainer(compiled="off").train(64, 32, callback=broken)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- numbers that are none


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("key", ["observation", "reward", "log_prob"])
def test_a_broken_rollout_is_refused_by_column_and_step_and_changes_nothing(key, compiled):
    trainer = _trainer(compiled=compiled)
    rollout = trainer.collect_rollouts(32).clone()
    rollout[key][5, 1] = float("nan")
    before = _weights(trainer)
    with pytest.raises(NonFiniteError, match=rf"{key} is not finite \(nan\) at step 5 of environment 1"):
        trainer.learn(rollout)
    assert torch.equal(_weights(trainer), before)


@pytest.mark.parametrize("compiled", PATHS)
def test_the_minibatch_that_broke_is_counted_alike_on_both_paths(compiled):
    trainer = _trainer(compiled=compiled, batch_size=4096)
    rollout = trainer.collect_rollouts(32).clone()
    rollout["next_value"][:] = 3e38  # finite, and no float32 any more when it is squared
    with pytest.raises(NonFiniteError, match="at minibatch 1 of this update"):
        trainer.learn(rollout)


@pytest.mark.parametrize("compiled", PATHS)
def test_a_weight_that_is_no_number_is_blamed_on_the_optimiser(compiled):
    trainer = _trainer(compiled=compiled)
    rollout = trainer.collect_rollouts(32)
    with torch.no_grad():
        trainer.policy.critic[2].weight[0, 0] = float("inf")  # as a step that was too long leaves it
    with pytest.raises(NonFiniteError, match=r"it came from the optimiser: parameter critic\.2\.weight stopped being"):
        trainer.learn(rollout)


@pytest.mark.parametrize("compiled", PATHS)
def test_a_learning_rate_without_measure_stops_with_the_remedy_and_the_last_good_weights(compiled):
    trainer = _trainer(compiled=compiled, learning_rate=3e37, max_grad_norm=None, n_epochs=5)
    before = _weights(trainer)
    with pytest.raises(NonFiniteError, match=r"at minibatch 2 .* Lower algorithm\.learning_rate"):
        trainer.train(10_000, rollout_length=32)
    assert torch.equal(_weights(trainer), before)


@pytest.mark.parametrize("compiled", PATHS)
def test_a_loss_that_overflows_with_finite_weights_is_blamed_on_the_network(compiled):
    trainer = _trainer(compiled=compiled, hidden=())
    rollout = trainer.collect_rollouts(32)
    with torch.no_grad():
        trainer.policy.critic[0].weight.fill_(1e30)  # squared, the value error is no float32 any more
    with pytest.raises(NonFiniteError, match="it came from the network: finite weights and samples"):
        trainer.learn(rollout)


@pytest.mark.parametrize("buffer_type", ["standard", "vla"])
def test_whoever_overrides_learn_may_keep_what_it_is_given(buffer_type):
    kept = []

    class Keeping(Trainer):
        def learn(self, rollout):
            kept.append((rollout, rollout["reward"].clone(), rollout["observation"].clone()))
            return super().learn(rollout)

    env = as_vector_env("CartPole-v1", num_envs=2)
    trainer = Keeping(
        ActorCritic(env.observation_space, env.action_space), env, PPO(batch_size=16), buffer_type=buffer_type
    )
    trainer.train(4 * 16, 8)
    assert len(kept) == 4
    assert all(torch.equal(r["reward"], reward) and torch.equal(r["observation"], o) for r, reward, o in kept)
    assert not torch.equal(kept[0][2], kept[1][2])  # so that overwriting would show
