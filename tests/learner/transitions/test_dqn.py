"""DQN computes the errors of its paper, by numbers done by hand, and keeps what the training loop relies on."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from palaestra.errors import CheckpointError, ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.replay import TransitionBatch
from palaestra.learner.conformance import check_learner
from palaestra.learner.transitions import DQN, TransitionLearner
from palaestra.learner.transitions.conformance import check_transition_algorithm
from palaestra.policy.config import PolicyConfig
from palaestra.policy.off_policy import QNetwork

LINEAR = PolicyConfig(name="q_network", hidden=(), activation="relu")
NUMBER = spaces.Box(-100.0, 100.0, (1,), np.float32)


def _policy(weights, dueling=False):
    """Values of actions are `weights` times the observation."""
    config = LINEAR.model_copy(update={"kwargs": {"dueling": dueling}})
    policy = QNetwork(NUMBER, spaces.Discrete(2), config)
    with torch.no_grad():
        policy.critic[0].weight.copy_(torch.tensor(weights)[:, None])
        policy.critic[0].bias.zero_()
    return policy


def _batch(observation=3.0, action=1, reward=1.0, following=2.0, terminated=False, **more):
    columns = {
        "observation": np.array([[[observation]]], np.float32),
        "action": np.array([[action]]),
        "reward": np.array([[reward]], np.float32),
        "next_observation": np.array([[[following]]], np.float32),
        "terminated": np.array([[terminated]]),
        **more,
    }
    return TransitionBatch(columns)


def _rows(batch):
    return {name: torch.from_numpy(column[0]) for name, column in batch.columns.items()}


def _target_of(algorithm, policy, target, **transition):
    return float(algorithm.targets(policy, target, _rows(_batch(**transition)))[0])


def test_the_target_is_the_reward_plus_the_discounted_largest_value_of_the_next_observation():
    # The target network values the two actions at observation 2 with 2 * 2 = 4 and 2 * 5 = 10.
    target = _policy([2.0, 5.0])
    assert _target_of(DQN(gamma=0.5), _policy([1.0, 1.0]), target) == 1.0 + 0.5 * 10.0


def test_double_q_learning_values_the_action_that_the_trained_network_prefers():
    # The trained network prefers the first action, which the target network values with 4.
    target = _policy([2.0, 5.0])
    assert _target_of(DQN(gamma=0.5, double=True), _policy([3.0, 1.0]), target) == 1.0 + 0.5 * 4.0


def test_nothing_follows_a_terminated_step():
    assert _target_of(DQN(gamma=0.5), _policy([1.0, 1.0]), _policy([2.0, 5.0]), terminated=True) == 1.0


@pytest.mark.parametrize(("value", "loss"), [(6.2, 0.5 * 0.2**2), (9.0, 3.0 - 0.5)])
def test_the_loss_is_quadratic_up_to_an_error_of_one_and_linear_above(value, loss):
    # The value of the action taken at observation 3 is `value`, the target 6.
    policy = _policy([0.0, value / 3.0])
    (step,) = DQN(gamma=0.5).losses(policy, _policy([2.0, 5.0]), _rows(_batch()), 0)
    assert float(step.loss.detach()) == pytest.approx(loss, abs=1e-5)
    assert float(step.td_error[0]) == pytest.approx(value - 6.0, abs=1e-5)


def test_importance_weights_scale_the_loss():
    weighted = _rows(_batch(weight=np.array([[0.25]], np.float32)))
    (step,) = DQN(gamma=0.5).losses(_policy([0.0, 3.0]), _policy([2.0, 5.0]), weighted, 0)
    assert float(step.loss.detach()) == pytest.approx(0.25 * 2.5)


def test_dueling_heads_add_the_value_to_centred_advantages():
    # At observation 1: advantages 4 and 2, value 10, so 10 + 4 - 3 and 10 + 2 - 3.
    policy = _policy([4.0, 2.0, 10.0], dueling=True)
    assert policy.q_values(torch.ones(1, 1)).detach().tolist() == [[11.0, 9.0]]


def test_epsilon_falls_linearly_to_its_final_value():
    algorithm = DQN(exploration_fraction=0.2, exploration_initial=1.0, exploration_final=0.1)
    assert [algorithm.exploration(share) for share in (0.0, 0.1, 0.2, 0.9)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_exploration_draws_every_action_and_greed_the_best():
    policy = _policy([1.0, 2.0])
    policy.distribution.exploration.fill_(0.5)
    noise = torch.tensor([[0.4, 0.1], [0.4, 0.9], [0.6, 0.1]])
    observation = torch.ones(3, 1)
    assert policy.act(observation, noise).action.tolist() == [0, 1, 1]
    assert policy.act(observation, None).action.tolist() == [1, 1, 1]
    # Half of the time one of two actions at random, and otherwise the second.
    assert policy.act(observation, noise).log_prob.exp().tolist() == pytest.approx([0.25, 0.75, 0.75])


# ---------------------------------------------------------------------- the learner


def _experience(steps=4, size=8, seed=0, **columns):
    rng = np.random.default_rng(seed)
    return TransitionBatch(
        {
            "observation": rng.standard_normal((steps, size, 3), dtype=np.float32),
            "action": rng.integers(0, 2, (steps, size)),
            "reward": rng.standard_normal((steps, size), dtype=np.float32),
            "next_observation": rng.standard_normal((steps, size, 3), dtype=np.float32),
            "terminated": rng.random((steps, size)) < 0.2,
            **columns,
        }
    )


def _learner(compiled=True, **settings):
    policy = QNetwork(
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Discrete(2),
        PolicyConfig(name="q_network", hidden=(8, 8), activation="relu"),
        seed=1,
    )
    return TransitionLearner(policy, DQN(learning_rate=1e-2, **settings), seed=3, compiled=compiled)


def _weights(learner):
    return [parameter.detach().tolist() for parameter in learner.policy.parameters()]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_learner_keeps_its_promises(compiled):
    check_learner(lambda: _learner(compiled, target_interval=3), _experience(), _weights)


def test_the_algorithm_keeps_its_promises():
    check_transition_algorithm(DQN(), _learner().policy, _experience())


def test_the_target_network_is_copied_every_third_gradient_step():
    learner = _learner(target_interval=3)
    first = learner.state().tensors["target"]
    learner.update(_experience(steps=2))
    assert torch.equal(learner.state().tensors["target"], first)
    learner.update(_experience(steps=1))
    assert torch.equal(learner.state().tensors["target"], learner.flat.vector)


def test_the_target_network_moves_by_a_tenth_of_the_way():
    learner = _learner(target_tau=0.1, target_interval=1)
    before = learner.state().tensors["target"].clone()
    learner.update(_experience(steps=1))
    expected = 0.9 * before + 0.1 * learner.flat.vector
    assert torch.allclose(learner.state().tensors["target"], expected, atol=1e-7)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_number_that_is_not_finite_changes_nothing(compiled):
    learner = _learner(compiled)
    learner.update(_experience())
    before, state = _weights(learner), learner.state()
    broken = _experience()
    broken.columns["reward"][2, 1] = np.nan
    with pytest.raises(NonFiniteError, match="critic is not finite at gradient step 3"):
        learner.update(broken)
    after = learner.state()
    assert _weights(learner) == before
    assert after.facts == state.facts
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in state.tensors.items())


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ExperienceError, match=r"reward has shape|action has shape"):
        _learner().update(_experience(action=np.zeros((4, 7), np.int64)))


def test_a_state_of_another_network_is_refused():
    other = TransitionLearner(_policy([1.0, 2.0]), DQN())
    with pytest.raises(CheckpointError, match="has 4 trained numbers, this policy has 122"):
        _learner().check_state(other.state(), place="here")


def test_continuous_actions_have_no_table_of_values():
    with pytest.raises(ConfigError, match="q_network values discrete actions"):
        QNetwork(NUMBER, spaces.Box(-1, 1, (1,)))
