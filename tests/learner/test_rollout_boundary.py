"""What `learn` refuses before a kernel reads it: every column's presence, shape, type, range and finiteness."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.actor.collector import Collector
from palaestra.env import EnvConfig, make_env
from palaestra.env.make import as_vector_env
from palaestra.env.spaces import allocate_row
from palaestra.errors import ConfigError, EnvironmentContractError, ExperienceError, NonFiniteError, PalaestraError
from palaestra.evaluation import evaluate
from palaestra.experience import RolloutBuffer
from palaestra.learner import PPO
from palaestra.learner.compiled import compiled_gae, compiled_vtrace
from palaestra.policy import ActorCritic
from palaestra.policy.compiled import CompiledActorCritic, why_not_compiled
from palaestra.train import Trainer

PATHS = ["auto", "off"]
NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


class Signs(gymnasium.Env[Any, Any]):
    """A discrete or nested observation, a `MultiDiscrete` action, and a mask that forbids the last choice."""

    def __init__(self, masked: bool = False, nested: bool = False) -> None:
        self.masked, self.nested = masked, nested
        number = spaces.Discrete(5, start=2)
        self.observation_space = spaces.Dict({"sign": number, "at": spaces.Box(-1, 1, (2,))}) if nested else number
        self.action_space = spaces.MultiDiscrete([2, 3])

    def _given(self) -> Any:
        sign = np.int64(2 + self.np_random.integers(5))
        return {"sign": sign, "at": np.zeros(2, np.float32)} if self.nested else sign

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([1, 1, 1, 1, 0], np.int8)} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._given(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._given(), 1.0, bool(self.np_random.integers(4) == 0), False, self._info()


def trainer_for(env: Any = "compiled/CartPole-v1", compiled: Any = "auto", **settings: Any) -> Trainer:
    vector = make_env(EnvConfig(id=env, num_envs=2)) if isinstance(env, str) else as_vector_env(env)
    policy = ActorCritic(vector.observation_space, vector.action_space)
    return Trainer(policy, vector, PPO(**{"batch_size": 16, "n_epochs": 1, **settings}), compiled=compiled)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.policy.parameters()]).clone()


@pytest.mark.parametrize("compiled", PATHS)
def test_a_rollout_of_another_environment_is_refused(compiled: Any) -> None:
    rollout = trainer_for("Acrobot-v1").collect_rollouts(8)
    trainer = trainer_for(compiled=compiled)
    before = weights(trainer)
    with pytest.raises(ExperienceError, match=r"observation has shape \[8, 2, 6\], expected \[8, 2, 4\].*another env"):
        trainer.learn(rollout)
    assert torch.equal(weights(trainer), before)
    assert trainer.n_updates == 0


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("observation", torch.zeros(8, 2, 200_000), ExperienceError, r"observation has shape \[8, 2, 200000\]"),
        ("observation", torch.zeros(8, 2, 4, dtype=torch.float64), ExperienceError, r"observation is float64.*float32"),
        ("observation", torch.full((8, 2, 4), torch.nan), NonFiniteError, "observation is not finite .nan. at step 0"),
        ("action", torch.full((8, 2), 900_000_000), ExperienceError, "action is 900000000 at step 0 of environment 0"),
        ("action", torch.full((8, 2), 7), ExperienceError, "must lie between 0 and 1"),
        ("action", torch.full((8, 2), -1), ExperienceError, "action is -1"),
        ("action", torch.zeros(8, 2), ExperienceError, "action is float32.*int64"),
        ("action", torch.zeros(8, 2, 1, dtype=torch.int64), ExperienceError, r"action has shape \[8, 2, 1\]"),
        ("log_prob", torch.full((8, 2), torch.nan), NonFiniteError, "log_prob is not finite"),
        ("log_prob", torch.zeros(7, 2), ExperienceError, r"log_prob has shape \[7, 2\], expected \[8, 2\]"),
        ("value", torch.full((8, 2), torch.inf), NonFiniteError, "value is not finite"),
        ("next_value", torch.full((8, 2), -torch.inf), NonFiniteError, "next_value is not finite"),
        ("reward", torch.zeros(8, 2, dtype=torch.float64), ExperienceError, r"reward is float64.*\.to\(torch\.float32"),
        ("terminated", torch.zeros(8, 2, dtype=torch.uint8), ExperienceError, "terminated is uint8.*bool"),
        ("truncated", torch.zeros(8, dtype=torch.bool), ExperienceError, "truncated has shape"),
        ("policy_version", torch.zeros(8, 2), ExperienceError, "policy_version is float32.*int64"),
        ("reward_scale", torch.full((8, 2), torch.nan), NonFiniteError, "reward_scale is not finite"),
        ("weight", torch.ones(8, 3), ExperienceError, "weight has shape"),
        ("valid", torch.ones(8, 2), ExperienceError, "valid is float32.*bool"),
        ("action_mask", torch.ones(8, 2, 3, dtype=torch.bool), ExperienceError, "action_mask has shape"),
        ("duration", torch.ones(8, 2, dtype=torch.int32), ExperienceError, "1 action at a time.*has duration"),
        ("reward", np.zeros((8, 2), np.float32), ExperienceError, "reward is a ndarray"),
        ("value", None, ExperienceError, "value is a NoneType"),
        ("observation", {"a": torch.zeros(8, 2, 4)}, ExperienceError, "observation has parts .a."),
        ("reward", torch.zeros(8, 2).to_sparse(), ExperienceError, "reward is float32 sparse"),
        ("reward", torch.zeros(8, 2, device="meta"), ExperienceError, "reward is float32 strided meta"),
        ("observation", torch.zeros(8, 2, 4, device="meta"), ExperienceError, "observation is float32 strided meta"),
        ("reward", NESTED, ExperienceError, "reward is a nested tensor"),
        ("value", NESTED, ExperienceError, "value is a nested tensor"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_before_anything_runs(
    compiled: Any, key: str, value: Any, error: type[Exception], message: str
) -> None:
    trainer = trainer_for(compiled=compiled)
    before = weights(trainer)
    columns = trainer.collect_rollouts(8).columns() | {key: value}
    with pytest.raises(error, match=message):
        trainer.learn(columns)
    assert torch.equal(weights(trainer), before)
    assert trainer.n_updates == 0


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("part", [(slice(0, 0),), (slice(None), slice(0, 0))])
def test_a_rollout_without_a_step_is_refused(compiled: Any, part: Any) -> None:
    trainer = trainer_for(compiled=compiled)
    columns = trainer.collect_rollouts(8).columns()
    with pytest.raises(ExperienceError, match="the rollout holds no step"):
        trainer.learn({key: column[part] for key, column in columns.items()})


def test_a_negated_view_is_learned_from_as_the_numbers_it_shows() -> None:
    plain, viewed = trainer_for(), trainer_for()
    columns = plain.collect_rollouts(8).columns()
    view = torch._neg_view(-columns["reward"])
    assert plain.learn(columns) == viewed.learn(columns | {"reward": view})


@pytest.mark.parametrize("compiled", PATHS)
def test_a_flattened_rollout_is_refused_with_the_remedy(compiled: Any) -> None:
    trainer = trainer_for(compiled=compiled)
    flat = trainer.collect_rollouts(8).reshape(-1)
    with pytest.raises(ExperienceError, match=r"the rollout is flat \(\[16\] instead of.*without flatten=True"):
        trainer.learn(flat)


@pytest.mark.parametrize("compiled", PATHS)
def test_a_continuous_action_that_is_no_number_is_refused(compiled: Any) -> None:
    trainer = trainer_for("Pendulum-v1", compiled)
    rollout = trainer.collect_rollouts(8).clone()
    rollout["action"][3, 1, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"action is not finite \(nan\) at step 3 of environment 1"):
        trainer.learn(rollout)


def test_a_column_still_attached_to_a_graph_is_learned_from_as_a_number() -> None:
    trainer, other = trainer_for(), trainer_for()
    rollout = trainer.collect_rollouts(8)
    attached = rollout.columns()
    attached["value"] = attached["value"].clone().requires_grad_()
    assert other.learn(attached)["loss"] == trainer.learn(rollout)["loss"]


def test_numbers_so_large_that_their_sum_overflows_are_still_finite() -> None:
    trainer = trainer_for(compiled="off")
    rollout = trainer.collect_rollouts(8).clone()
    rollout["observation"][:] = 3e38
    trainer.learn(rollout)  # tanh and the clipped errors keep the gradient finite


def test_discrete_observations_and_choices_are_held_to_their_ranges() -> None:
    trainer = trainer_for([Signs(), Signs()])
    rollout = trainer.collect_rollouts(8)
    trainer.learn(rollout)
    for value, at in (
        (1, "observation is 1"),
        (7, "observation is 7 at step 2 of environment 1, and must lie between 2"),
    ):
        wrong = rollout.clone()
        wrong["observation"][2, 1] = value
        with pytest.raises(ExperienceError, match=at):
            trainer.learn(wrong)
    wrong = rollout.clone()
    wrong["action"][2, 1] = torch.tensor([1, 3])
    with pytest.raises(ExperienceError, match="action is 3 at step 2 of environment 1, and must lie between 0 and 2"):
        trainer.learn(wrong)


def test_nested_observations_must_have_the_parts_the_policy_sees() -> None:
    trainer = trainer_for([Signs(nested=True), Signs(nested=True)])
    columns = trainer.collect_rollouts(8).columns()
    trainer.learn(columns)
    seen = columns["observation"]
    for observation, message in (
        ({"sign": seen["sign"]}, "observation holds sign, and this policy sees at, sign"),
        (seen["at"], "observation holds one array"),
        (seen | {"at": torch.full((8, 2, 2), torch.nan)}, "observation/at is not finite"),
        (seen | {"sign": torch.full((8, 2), 9)}, "observation/sign is 9"),
    ):
        with pytest.raises(PalaestraError, match=message):
            trainer.learn(columns | {"observation": observation})


def test_masks_must_be_there_allow_something_and_allow_what_was_done() -> None:
    trainer = trainer_for([Signs(masked=True), Signs(masked=True)])
    columns = trainer.collect_rollouts(8).columns()
    trainer.learn(columns)
    mask = columns["action_mask"]
    impossible, forbidden = mask.clone(), mask.clone()
    impossible[4, 1, 2:] = False
    forbidden[4, 1, int(columns["action"][4, 1, 0])] = False
    for wrong, message in (
        (impossible, "action_mask allows no action at step 4 of environment 1"),
        (forbidden, "action_mask forbids the action that was taken at step 4 of environment 1"),
        (mask[..., :4], r"action_mask has shape \[8, 2, 4\], expected \[8, 2, 5\]"),
    ):
        with pytest.raises(ExperienceError, match=message):
            trainer.learn(columns | {"action_mask": wrong})
    with pytest.raises(ExperienceError, match="masks actions, and the rollout has no action_mask"):
        trainer.learn({key: value for key, value in columns.items() if key != "action_mask"})
    pendulum = trainer_for("Pendulum-v1")
    unmasked = pendulum.collect_rollouts(4).columns()
    with pytest.raises(ExperienceError, match="cannot be masked"):
        pendulum.learn(unmasked | {"action_mask": torch.ones(4, 2, 1, dtype=torch.bool)})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("compiled", PATHS)
def test_fresh_and_stale_rollouts_in_one_list_keep_their_weights_in_any_order(order: Any, compiled: Any) -> None:
    trainer = trainer_for(compiled=compiled)
    stale = trainer.collect_rollouts(8)
    trainer.learn(stale)
    pair = [stale, trainer.collect_rollouts(8)]
    metrics = trainer.learn([pair[i] for i in order])
    assert metrics["behaviour_weight"] != 1.0
    assert metrics["staleness"] == 0.5


def test_another_algorithm_on_the_same_trainer_is_the_one_that_learns() -> None:
    trainer = trainer_for()
    rollout = trainer.collect_rollouts(8)
    assert trainer.learn(rollout)["minibatches"] == 1
    trainer.algorithm = PPO(batch_size=4, n_epochs=3)
    assert trainer.learn(rollout)["minibatches"] == 12


# ---------------------------------------------------------------------- the boundary under fuzzing

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
COLUMNS = [
    "observation", "action", "log_prob", "value", "next_value", "reward", "terminated", "truncated", "policy_version",
    "reward_scale", "stream", "env_step", "weight", "valid", "action_mask", "duration", "policy_fingerprint",
]  # fmt: skip

_TRAINERS: dict[tuple[str, str], Trainer] = {}


def _trainer(env: str, path: str) -> Trainer:
    if (env, path) not in _TRAINERS:
        _TRAINERS[env, path] = trainer_for(env, path)
    return _TRAINERS[env, path]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 16, 5000]), max_size=4).filter(lambda s: np.prod(s) < 1e6))
    fill = draw(st.sampled_from([0.0, 1.0, -1.0, 2.0, 1e9, 3e38, float("nan"), float("inf"), -float("inf")]))
    dtype = draw(st.sampled_from(DTYPES))
    whole = torch.full(shape, fill, dtype=torch.float64)
    return (whole if dtype.is_floating_point else whole.nan_to_num(5, 7, -7)).to(dtype)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["compiled/CartPole-v1", "Pendulum-v1"]),
    st.sampled_from(PATHS),
    st.dictionaries(
        st.sampled_from(COLUMNS),
        st.one_of(tensors(), st.none(), st.sampled_from([0, 1, -1, 2, 900_000_000, 3e38, float("nan"), float("inf")])),
        min_size=1,
        max_size=3,
    ),
)
def test_whatever_a_rollout_holds_it_is_refused_by_name_or_learned_from(
    env: str, path: str, changes: dict[str, Any]
) -> None:
    trainer = _trainer(env, path)
    before = trainer.n_updates
    rollout: dict[str, Any] = trainer.collect_rollouts(8).columns()
    for key, value in changes.items():
        if isinstance(value, torch.Tensor):
            rollout[key] = value
        elif value is None or key not in rollout:
            rollout.pop(key, None)
        else:  # the right shape and type with another number in it
            number = float(value) if rollout[key].is_floating_point() or abs(value) < 1e9 else 5
            rollout[key] = torch.full(rollout[key].shape, number).to(rollout[key].dtype)
    refused: PalaestraError | None = None
    try:
        trainer.learn(rollout)
    except (ExperienceError, NonFiniteError) as error:
        refused = error
    assert trainer.n_updates == before + (refused is None)
    assert refused is None or "learn: " in str(refused) or "gradient is not finite" in str(refused)
    assert torch.isfinite(weights(trainer)).all()


# ---------------------------------------------------------------------- the kernels' other doors


def test_a_buffer_of_another_environment_is_not_collected_into() -> None:
    trainer, other = trainer_for(), trainer_for("Acrobot-v1")
    foreign = other.collector.collect(8)
    with pytest.raises(ExperienceError, match="the buffer was made for"):
        trainer.collector.collect(8, foreign)
    with pytest.raises(ExperienceError, match="the buffer was made for"):
        trainer.collector.collect(8, RolloutBuffer(8, **{**trainer.collector.shape(), "num_envs": 1}))


def test_a_collector_and_an_evaluation_refuse_a_policy_for_other_spaces() -> None:
    policy, env = trainer_for("Acrobot-v1").policy, make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    with pytest.raises(ConfigError, match="does not fit the environment's"):
        Collector(env, policy, seed=0)
    with pytest.raises(ConfigError, match="does not fit the environment's"):
        evaluate(policy, env, episodes=1, seed=0)


def test_a_network_that_was_rebuilt_with_other_widths_does_not_run_compiled() -> None:
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    policy = ActorCritic(env.observation_space, env.action_space)
    policy.critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    assert why_not_compiled(policy) == "actor or critic is not the network that its configuration describes"
    trainer = Trainer(policy, env, PPO(batch_size=16, n_epochs=1))
    before = policy.critic[0].weight.detach().clone()
    trainer.train(16, rollout_length=8)
    assert not torch.equal(policy.critic[0].weight, before)


def test_compiled_acting_refuses_arrays_of_other_sizes() -> None:
    net = CompiledActorCritic(trainer_for().policy)  # type: ignore[arg-type]
    seen, noise, numbers = np.zeros((3, 4), np.float32), np.zeros((3, 1), np.float32), np.zeros(3, np.float32)
    action = np.zeros(3, np.int64)
    net.act_into(seen, noise, None, action, numbers, numbers.copy())
    for arguments in (
        (np.zeros((3, 5), np.float32), noise, action, numbers, numbers),
        (seen, np.zeros((2, 1), np.float32), action, numbers, numbers),
        (seen, noise, np.zeros(2, np.int64), numbers, numbers),
        (seen, noise, action, np.zeros(2, np.float32), numbers),
        (seen, noise, action, numbers, np.zeros(2, np.float32)),
    ):
        with pytest.raises(ExperienceError, match="act: "):
            net.act_into(*arguments[:2], None, *arguments[2:])
    with pytest.raises(ExperienceError, match="sees rows of 4 numbers"):
        net.value(np.zeros((3, 5), np.float32))
    with pytest.raises(ExperienceError, match="sees rows of 4 numbers"):
        net.normalize(np.zeros((3, 5), np.float32))


def test_compiled_returns_refuse_columns_of_different_rollouts() -> None:
    columns = trainer_for().collect_rollouts(8).columns()
    with pytest.raises(ExperienceError, match=r"columns have shapes .*, expected one shape"):
        compiled_gae(columns | {"value": torch.zeros(4, 2)}, columns["reward"], discount=0.9, lam=0.9)
    ratio, limits = torch.zeros(2, 2), {"rho_bar": 1.0, "c_bar": 1.0}
    with pytest.raises(ExperienceError, match=r"columns have shapes .*, expected one shape"):
        compiled_vtrace(columns, columns["reward"], ratio, discount=0.9, lam=0.9, **limits)


def test_the_compiled_environment_refuses_a_row_for_fewer_environments() -> None:
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=4))
    small, row = allocate_row(env.observation_space, 1), allocate_row(env.observation_space, 4)
    with pytest.raises(EnvironmentContractError, match="the row does not have 4 environments"):
        env.reset(0, small)
    env.reset(0, row)
    with pytest.raises(EnvironmentContractError, match="the row does not have 4 environments"):
        env.step(np.zeros(4, np.int64), small)
