"""Acting: in eval mode, never under a mask that allows nothing, and with outputs of the right shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.env.make import as_vector_env
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.evaluation import evaluate
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


class Board(gymnasium.Env[Any, Any]):
    """Episodes of four steps; what may be done at step t is the t-th mask."""

    observation_space = spaces.Box(-1, 1, (3,))

    def __init__(self, masks: Any = None, action_space: Any = None) -> None:
        self.masks = masks
        self.action_space = action_space or spaces.Discrete(2)

    def _given(self) -> tuple[Any, dict[str, Any]]:
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return seen, {} if self.masks is None else {"action_mask": np.array(self.masks[self.t], np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._given()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        seen, info = self._given()
        return seen, 1.0, self.t == 4, False, info


class Dropping(nn.Module):
    """A network with dropout, a part that the user keeps in eval mode, and outputs that can be made wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.body = nn.Linear(3, 64)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(64, 3)
        self.kept = nn.Dropout(0.5).eval()

    def forward(self, observation: Tensor) -> Any:
        out = self.head(self.dropout(self.body(observation)))
        wrong: dict[str, Any] = {
            "": (out[:, :2], out[:, 2]),
            "one tensor": out,
            "three": (out, out, out),
            "wide": (out, out[:, 2]),
            "one value": (out[:, :2], out[0, 2]),
            "flat": (out[0, :2], out[:, 2]),
        }
        return wrong[self.wrong]


def trainer_for(*envs: Board, network: nn.Module | None = None, policy: Any = None) -> Trainer:
    env = as_vector_env(list(envs or (Board(), Board())))
    made = policy or ActorCritic(env.observation_space, env.action_space, network=network)
    return Trainer(made, env, PPO(batch_size=8, n_epochs=1))


# ---------------------------------------------------------------------- modes


def test_dropout_left_in_train_mode_does_not_touch_actions_or_their_probabilities() -> None:
    network = Dropping()
    trainer = trainer_for(network=network)
    assert network.dropout.training
    rollout = trainer.collect_rollouts(8)
    with torch.no_grad():
        trainer.policy.eval()
        again, _, value = trainer.policy.evaluate_actions(
            rollout["observation"].flatten(0, 1), rollout["action"].flatten()
        )
    torch.testing.assert_close(again, rollout["log_prob"].flatten())
    torch.testing.assert_close(value, rollout["value"].flatten())


def test_after_acting_and_evaluating_every_part_is_in_the_mode_it_was_in() -> None:
    network = Dropping()
    trainer = trainer_for(network=network)
    trainer.train(32, rollout_length=8)
    evaluate(trainer.policy, trainer.env, episodes=2, seed=0)
    assert (trainer.policy.training, network.dropout.training, network.kept.training) == (True, True, False)


def test_stale_steps_are_looked_at_again_without_dropout() -> None:
    trainer = trainer_for(network=Dropping())
    rollout = trainer.collect_rollouts(8)
    trainer.algorithm = PPO(batch_size=8, n_epochs=1, learning_rate=1e-30)
    trainer.learn(rollout)
    trainer.policy.network.head.bias.data[2] += 1.0  # another fingerprint, and the same distribution of actions
    assert trainer.learn(rollout)["behaviour_weight"] == pytest.approx(1.0, abs=1e-6)


# ---------------------------------------------------------------------- masks

FREE, NOTHING = [1, 1], [0, 0]


@pytest.mark.parametrize("at", [0, 2])
def test_a_mask_that_allows_nothing_is_the_environments_fault_and_names_it(at: int) -> None:
    masks = [FREE] * 5
    masks[at] = NOTHING
    trainer = trainer_for(Board([FREE] * 5), Board(masks))
    with pytest.raises(EnvironmentContractError, match=r"environment 1 allows no action: its info\['action_mask'\]"):
        trainer.collect_rollouts(8)
    with pytest.raises(EnvironmentContractError, match="environment 1 allows no action"):
        evaluate(trainer.policy, trainer.env, episodes=2, seed=0)


def test_at_the_end_of_an_episode_nothing_needs_to_be_allowed() -> None:
    trainer = trainer_for(Board([FREE] * 4 + [NOTHING]))
    trainer.learn(trainer.collect_rollouts(8))


def test_every_choice_of_several_needs_something_it_may_take() -> None:
    action = spaces.MultiDiscrete([2, 2])
    masks = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    with pytest.raises(EnvironmentContractError, match="environment 0 allows no action"):
        trainer_for(Board(masks, action)).collect_rollouts(8)


# ---------------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("one tensor", "its forward gave a Tensor for 2 observations"),
        ("three", "its forward gave a tuple of 3 for 2 observations"),
        ("wide", r"gave parameters \(2, 3\) and value \(2,\)"),
        ("one value", r"gave parameters \(2, 2\) and value \(\)"),
        ("flat", r"gave parameters \(2,\) and value \(2,\)"),
    ],
)
def test_an_own_network_with_other_outputs_is_refused_with_what_it_must_return(wrong: str, message: str) -> None:
    trainer = trainer_for(network=Dropping(wrong))
    with pytest.raises(ConfigError, match=f"{message}.*it must return .parameters .B, 2., value .B.."):
        trainer.collect_rollouts(4)


class Answer(NamedTuple):
    action: Tensor
    log_prob: Tensor
    value: Tensor


class WholePolicy(nn.Module):
    """A policy of the user's own, some of whose outputs have an axis too many or stand for all environments."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.inner = ActorCritic(Board.observation_space, spaces.Discrete(2))
        self.distribution, self.wrong = self.inner.distribution, wrong

    def act(self, observation: Any, noise: Any, *, mask: Any = None) -> Answer:
        acted = Answer(*self.inner.act(observation, noise, mask=mask))
        if self.wrong == "act":
            return acted._replace(log_prob=acted.log_prob[:1])
        return acted

    def value(self, observation: Any) -> Tensor:
        value = self.inner.value(observation)
        return value.unsqueeze(-1) if self.wrong == "value" else value

    def evaluate_actions(self, observation: Any, action: Any, *, mask: Any = None) -> Any:
        log_prob, entropy, value = self.inner.evaluate_actions(observation, action, mask=mask)
        return log_prob.unsqueeze(-1) if self.wrong == "evaluate" else log_prob, entropy, value


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "act",
            r"its act returned action, log_prob and value of shape \[\[2\], \[1\], \[2\]\].*Return \[\[2\], \[2\], \[2",
        ),
        ("value", r"its value returned values of shape \[2, 1\].*Return \[2\]"),
        ("evaluate", r"its evaluate_actions returned log_prob, entropy, value of shapes \[\[8, 1\], \[8\], \[8\]\]"),
    ],
)
def test_a_whole_policy_with_outputs_of_other_shapes_is_refused(wrong: str, message: str) -> None:
    trainer = trainer_for(policy=WholePolicy(wrong))
    with pytest.raises(ConfigError, match=message):
        trainer.train(8, rollout_length=4)
