"""What a rollout says about toy environments whose every step is known beforehand."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.env.faulty import Faulty

from palaestra.actor import Collector
from palaestra.actor.collector import RewardScale
from palaestra.env import as_vector_env
from palaestra.env.toy import Bandit, Countdown, MaskedChoice, MixedSenses, Pixels, TargetReach
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.policy import ActorCritic, PolicyConfig

PATHS = ["auto", "off"]


class Fast(Countdown):
    """Ends a step before its observation space says it could."""

    def reset(self, **options):
        super().reset(**options)
        self._t = 1
        return self._observe(), {}


def _policy(env, *, normalize=False, **config):
    config = PolicyConfig(**({"hidden": (8,), "image_features": 8} | config))
    return ActorCritic(env.observation_space, env.action_space, config, normalize_observation=normalize, seed=4)


def _collector(envs, *, seed=0, compiled="auto", normalize=False, discount=None, **config):
    env = as_vector_env(envs)
    policy = _policy(env, normalize=normalize, **config)
    return Collector(env, policy, seed=seed, compiled=compiled, discount=discount)


def _value(collector, observation):
    with torch.no_grad():
        return collector.policy.value(torch.as_tensor(observation, dtype=torch.float32)).tolist()


@pytest.mark.parametrize("compiled", PATHS)
def test_rewards_and_observations_are_written_down_as_the_environment_gave_them(compiled):
    rollout = _collector([Fast(4), Countdown(4)], compiled=compiled).collect(6).get()
    assert rollout["observation"][:, 0, 0].tolist() == [3, 2, 1, 3, 2, 1]
    assert rollout["observation"][:, 1, 0].tolist() == [4, 3, 2, 1, 4, 3]
    assert rollout["reward"][:, 0].tolist() == [2, 3, 4, 2, 3, 4]
    assert rollout["reward"][:, 1].tolist() == [1, 2, 3, 4, 1, 2]
    assert rollout["terminated"][:, 0].tolist() == [False, False, True] * 2
    assert not rollout["truncated"].any()


@pytest.mark.parametrize("compiled", PATHS)
def test_after_termination_the_future_is_worth_nothing(compiled):
    rollout = _collector(Countdown(3), compiled=compiled).collect(6).get()
    assert rollout["next_value"][[2, 5], 0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("compiled", PATHS)
def test_after_truncation_the_future_is_worth_the_value_of_the_final_observation(compiled):
    collector = _collector(Countdown(3, "truncated"), compiled=compiled)
    rollout = collector.collect(4).get()
    (final, first) = _value(collector, [[0.0], [3.0]])  # 0 steps left; the next episode starts with 3
    assert rollout["truncated"][:, 0].tolist() == [False, False, True, False]
    assert rollout["next_value"][2, 0].item() == pytest.approx(final, abs=1e-6)
    assert abs(final - first) > 1e-3  # so that the assertion above says something


@pytest.mark.parametrize("compiled", PATHS)
def test_at_the_edge_of_a_rollout_the_future_is_worth_the_value_of_what_comes_next(compiled):
    collector = _collector(Countdown(5), compiled=compiled)
    rollout = collector.collect(2).get()
    assert rollout["next_value"][1, 0].item() == pytest.approx(_value(collector, [[3.0]])[0], abs=1e-6)
    following = collector.collect(2).get()
    assert following["observation"][0, 0, 0] == 3.0
    assert following["value"][0, 0] == rollout["next_value"][1, 0]


@pytest.mark.parametrize("compiled", PATHS)
def test_within_an_episode_the_next_value_is_the_value_of_the_next_step(compiled):
    rollout = _collector([Countdown(9)] * 2, compiled=compiled).collect(5).get()
    assert torch.equal(rollout["next_value"][:-1], rollout["value"][1:])


def test_termination_wins_where_an_episode_is_also_out_of_time():
    env = gymnasium.wrappers.TimeLimit(Countdown(3), 3)
    rollout = _collector(env).collect(3).get()
    assert rollout["terminated"][2, 0]
    assert rollout["next_value"][2, 0] == 0.0


def test_the_first_value_and_log_probability_are_the_policys():
    collector = _collector(TargetReach())
    rollout = collector.collect(8).get()
    with torch.no_grad():
        log_prob, _, value = collector.policy.evaluate_actions(
            rollout["observation"].flatten(0, 1), rollout["action"].flatten(0, 1)
        )
    assert torch.allclose(rollout["log_prob"].flatten(), log_prob, atol=1e-6)
    assert torch.allclose(rollout["value"].flatten(), value, atol=1e-6)


def test_episodes_are_reported_with_their_return_length_and_place_in_time():
    collector = _collector([Fast(4), Countdown(4)])
    collector.collect(4)
    # Both environments have taken a step each time: step 3 of the first is the 6th of all.
    assert [tuple(e)[:4] for e in collector.episodes] == [(6, 0, 9.0, 3), (8, 1, 10.0, 4)]
    collector.collect(2)
    assert [tuple(e)[:4] for e in collector.episodes] == [(12, 0, 9.0, 3)]


def test_a_pause_of_the_environment_is_marked_and_bootstraps_nothing():
    # A NEXT_STEP environment ignores the action after an end: 3, 2, 1, (0: pause), 3, 2, ...
    env = SyncVectorEnv([lambda: Countdown(3)], autoreset_mode=AutoresetMode.NEXT_STEP)
    rollout = _collector(env).collect(7).get()
    assert rollout["observation"][:, 0, 0].tolist() == [3, 2, 1, 0, 3, 2, 1]
    assert rollout["valid"][:, 0].tolist() == [True, True, True, False, True, True, True]
    assert rollout["next_value"][2, 0] == 0.0
    assert rollout["reward"][:, 0].tolist() == [1, 2, 3, 0, 1, 2, 3]


def test_a_paused_truncation_is_worth_its_final_observation():
    env = SyncVectorEnv([lambda: Countdown(3, "truncated")], autoreset_mode=AutoresetMode.NEXT_STEP)
    collector = _collector(env)
    rollout = collector.collect(6).get()
    assert rollout["next_value"][2, 0].item() == pytest.approx(_value(collector, [[0.0]])[0], abs=1e-6)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_autoreset_mode_gives_the_same_valid_steps(mode):
    make = [lambda: Countdown(3, "truncated")]
    options = {"autoreset_mode": mode}
    rollout = _collector(SyncVectorEnv(make, **options)).collect(8).get()
    keep = rollout["valid"][:, 0] if "valid" in rollout.keys() else torch.ones(8, dtype=torch.bool)
    assert rollout["observation"][keep, 0, 0].tolist()[:6] == [3, 2, 1, 3, 2, 1]
    assert rollout["reward"][keep, 0].tolist()[:6] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan_observation", r"environment 1 returned a observation that is not finite .* at step 3 of"),
        ("nan_reward", r"environment 1 returned a reward that is not finite \(nan\) at step 3 of"),
        ("shape", r"environment 1 \(Faulty\), 3 steps into its episode: the observation has shape \(3,\)"),
        ("raise", r"environment 1 \(Faulty\), 3 steps into its episode: RuntimeError: the simulator fell over"),
    ],
)
def test_a_broken_environment_is_named_with_the_step_at_which_it_broke(fault, message):
    collector = _collector([Faulty("none"), Faulty(fault)])
    with pytest.raises(EnvironmentContractError, match=message):
        collector.collect(5)


def test_huge_rewards_are_not_mistaken_for_broken_ones():
    class Rich(Bandit):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 3e38, *rest

    rollout = _collector(Rich()).collect(4).get()  # their sum overflows; each of them is a number
    assert torch.isfinite(rollout["reward"]).all()


def test_a_masked_action_is_never_taken_and_its_probability_is_as_masked():
    collector = _collector([MaskedChoice(4), MaskedChoice(4)])
    rollout = collector.collect(100).get()  # the environment raises on a forbidden action
    mask = rollout["action_mask"].flatten(0, 1)
    action = rollout["action"].flatten()
    assert mask.gather(1, action.unsqueeze(1)).all()
    assert torch.equal(mask.sum(-1), rollout["observation"].flatten() + 1)  # observation k allows k + 1 actions
    with torch.no_grad():
        log_prob, _, _ = collector.policy.evaluate_actions(rollout["observation"].flatten(), action, mask=mask)
    assert torch.allclose(log_prob, rollout["log_prob"].flatten(), atol=1e-6)
    only_choice = rollout["observation"].flatten() == 0
    assert (rollout["log_prob"].flatten()[only_choice] == 0).all()


def test_a_policy_whose_weights_are_all_frozen_can_collect():
    env = as_vector_env([Countdown()])
    policy = ActorCritic(env.observation_space, env.action_space).requires_grad_(False)
    first, again = (Collector(env, policy, seed=0).collect(2) for _ in range(2))
    assert first.policy_fingerprint[0] == again.policy_fingerprint[0] > 0
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    assert Collector(env, policy, seed=0).collect(2).policy_fingerprint[0] != first.policy_fingerprint[0]


def test_masks_do_not_run_compiled_and_say_so_when_that_was_demanded():
    with pytest.raises(ConfigError, match=r"cannot run compiled|vector of numbers|masked"):
        _collector(MaskedChoice(), compiled="on")


class Repeats(gymnasium.Env):
    """Any pair of spaces; remembers the actions it received; episodes of three steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space
        self.received = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.received.append(action)
        assert self.action_space.contains(np.asarray(action)), (action, self.action_space)
        self._t += 1
        return self.observation_space.sample(), 1.0, False, self._t >= 3, {}


VECTOR = spaces.Box(-1, 1, (3,), np.float32)
ACTIONS = {
    "from 5": (spaces.Discrete(3, start=5), "auto"),
    "several": (spaces.MultiDiscrete([2, 3]), "auto"),
    "several from elsewhere": (spaces.MultiDiscrete([2, 3], start=[4, 9]), "auto"),
    "table": (spaces.MultiDiscrete([[2, 3], [4, 5]]), "auto"),
    "switches": (spaces.MultiBinary(3), "auto"),
    "box": (spaces.Box(-0.5, 0.5, (2,), np.float32), "auto"),
    "double box": (spaces.Box(-0.5, 0.5, (2,), np.float64), "auto"),
    "box table": (spaces.Box(-0.5, 0.5, (2, 2), np.float32), "auto"),
    "box cube": (spaces.Box(-0.5, 0.5, (1, 2, 2), np.float32), "auto"),
    "single number": (spaces.Box(-0.5, 0.5, (), np.float32), "auto"),
    "squashed": (spaces.Box(np.array([-0.5, 0], np.float32), np.array([0.5, 9], np.float32)), "squashed_gaussian"),
}


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("kind", ACTIONS)
def test_every_kind_of_action_reaches_the_environment_as_it_wants_it(kind, compiled):
    space, distribution = ACTIONS[kind]
    envs = [Repeats(VECTOR, space), Repeats(VECTOR, space)]
    collector = _collector(envs, compiled=compiled, distribution=distribution)
    rollout = collector.collect(10).get()
    sent = collector.policy.distribution.to_env(rollout["action"].numpy().reshape(20, *rollout["action"].shape[2:]))
    received = np.stack([action for pair in zip(*(env.received for env in envs), strict=True) for action in pair])
    assert np.allclose(sent, received, atol=1e-6)
    with torch.no_grad():
        log_prob, _, _ = collector.policy.evaluate_actions(
            rollout["observation"].flatten(0, 1), rollout["action"].flatten(0, 1)
        )
    assert torch.allclose(log_prob, rollout["log_prob"].flatten(), atol=1e-5)


OBSERVATIONS = {
    "vector": VECTOR,
    "doubles": spaces.Box(-1, 1, (3,), np.float64),
    "matrix": spaces.Box(-1, 1, (2, 3), np.float32),
    "bytes": spaces.Box(0, 255, (40,), np.uint8),
    "whole numbers": spaces.Box(-5, 5, (2,), np.int64),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "image, channels first": spaces.Box(0, 255, (3, 40, 40), np.uint8),
    "choice": spaces.Discrete(4, start=2),
    "choices": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "switches": spaces.MultiBinary(3),
    "nested": spaces.Dict({"body": spaces.Dict({"joints": VECTOR}), "room": spaces.Discrete(3)}),
}


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_every_kind_of_observation_is_acted_on_as_it_is_learned_from(kind, compiled):
    collector = _collector(Repeats(OBSERVATIONS[kind], spaces.Discrete(2)), compiled=compiled, hidden=(32, 32))
    rollout = collector.collect(7).get()
    columns = rollout.columns()["observation"]
    flat = {k: v.flatten(0, 1) for k, v in columns.items()} if isinstance(columns, dict) else columns.flatten(0, 1)
    with torch.no_grad():
        log_prob, _, value = collector.policy.evaluate_actions(flat, rollout["action"].flatten())
    assert torch.allclose(log_prob, rollout["log_prob"].flatten(), atol=1e-5)
    assert torch.allclose(value, rollout["value"].flatten(), atol=1e-5)
    assert torch.isfinite(rollout["next_value"]).all()


@pytest.mark.parametrize("make", [MixedSenses, Pixels, MaskedChoice])
def test_truncated_episodes_of_any_observation_get_a_value_for_their_end(make):
    rollout = _collector([make(length=3), make(length=3)]).collect(5).get()
    ends = rollout["truncated"]
    assert torch.isfinite(rollout["next_value"]).all()
    assert (rollout["next_value"][ends] != 0).all()


@pytest.mark.parametrize("compiled", PATHS)
def test_the_same_seed_collects_the_same_and_another_seed_does_not(compiled):
    def actions(seed):
        return _collector("CartPole-v1", seed=seed, compiled=compiled).collect(20).get()

    one, again, other = actions(3), actions(3), actions(4)
    assert torch.equal(one["observation"], again["observation"])
    assert torch.equal(one["action"], again["action"])
    assert not torch.equal(one["observation"], other["observation"])


def test_the_compiled_and_the_plain_path_take_the_same_actions():
    fast, plain = (_collector("CartPole-v1", compiled=compiled).collect(50).get() for compiled in ("on", "off"))
    assert torch.equal(fast["action"], plain["action"])
    assert torch.allclose(fast["log_prob"], plain["log_prob"], atol=1e-6)
    assert torch.equal(fast["terminated"], plain["terminated"])


def test_a_collector_never_moves_the_normalisers_statistics():
    collector = _collector("CartPole-v1", normalize=True)
    collector.collect(20)
    assert collector.policy.encoder.normalizers["observation"].count.item() == 0


@pytest.mark.parametrize("compiled", PATHS)
def test_the_final_observation_is_normalised_like_every_other(compiled):
    collector = _collector(Countdown(3, "truncated"), compiled=compiled, normalize=True)
    collector.policy.update_statistics(torch.tensor([[5.0], [9.0]]))
    rollout = collector.collect(4).get()
    (final, edge) = _value(collector, [[0.0], [2.0]])
    assert rollout["next_value"][2, 0].item() == pytest.approx(final, abs=1e-6)
    assert rollout["next_value"][3, 0].item() == pytest.approx(edge, abs=1e-6)


def test_a_buffer_used_again_holds_only_the_new_rollout():
    collector = _collector([Countdown(3)])
    buffer = collector.collect(4)
    again = collector.collect(4, buffer)
    assert again is buffer
    assert again.get()["observation"][:, 0, 0].tolist() == [2, 1, 3, 2]


def test_every_collector_has_streams_of_its_own():
    one, other = (_collector([Countdown(3)] * 2).collect(1).get()["stream"] for _ in range(2))
    assert not set(one[0].tolist()) & set(other[0].tolist())


def test_the_reward_scale_is_one_over_the_deviation_of_the_discounted_return():
    scale = RewardScale(1, 0.5)
    reward = np.array([[1.0], [2.0], [4.0]], np.float32)
    ended, valid = np.array([[False], [True], [False]]), np.ones((3, 1), bool)
    found = scale.update(reward, ended, valid)
    assert found == pytest.approx(1 / np.std([1.0, 2.5, 4.0]))  # 1; 1/2 + 2; a fresh start with 4


def test_the_reward_scale_does_not_depend_on_how_the_rewards_were_cut_into_rollouts():
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(30, 2)).astype(np.float32)
    ended, valid = rng.random((30, 2)) < 0.2, rng.random((30, 2)) < 0.9
    whole, pieces = RewardScale(2, 0.9), RewardScale(2, 0.9)
    whole.update(reward, ended, valid)
    for part in (slice(0, 7), slice(7, 8), slice(8, 30)):
        pieces.update(reward[part], ended[part], valid[part])
    assert pieces.scale == pytest.approx(whole.scale, rel=1e-12)
    assert pieces.moments[2] == valid.sum()


def test_scaled_rewards_are_still_recorded_as_they_were_paid():
    rollout = _collector(Countdown(3), discount=0.99).collect(6).get()
    assert rollout["reward"][:, 0].tolist() == [1, 2, 3, 1, 2, 3]
    assert rollout["reward_scale"].unique().item() != 1.0


def test_streams_of_other_seeds_and_other_collectors_never_share_a_number():
    from palaestra.actor.collector import stream_base

    bases = [stream_base(seed) for seed in (0, 0, 1, 2) for _ in range(50)]
    assert len(set(bases)) == 200
    assert all(0 <= base < 2**63 - 2**20 and base % 2**20 == 0 for base in bases)
