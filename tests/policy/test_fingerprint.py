"""The fingerprint of weights follows from names, shapes, dtypes and numbers alone."""

import copy

import torch
from gymnasium import spaces
from torch import nn

from palaestra.policy import ActorCritic
from palaestra.policy.fingerprint import MAX_HASHED, policy_fingerprint, weights_fingerprint

OBSERVATION = spaces.Box(-1, 1, (3,))
ACTION = spaces.Discrete(2)


def test_equal_weights_in_other_memory_and_order_have_the_same_fingerprint():
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    found = weights_fingerprint({"a": a, "b": b})
    assert len(found) == 64
    assert weights_fingerprint({"b": b.clone(), "a": a.t().contiguous().t()}) == found


def test_another_number_shape_name_or_dtype_gives_another_fingerprint():
    a = torch.arange(6.0)
    changed = a.clone()
    changed[5] += 1e-6
    others = [{"a": changed}, {"a": a.reshape(2, 3)}, {"b": a}, {"a": a.double()}, {"a": a.bfloat16()}, {}]
    assert len({weights_fingerprint(one) for one in [{"a": a}, *others]}) == 7


def test_a_large_tensor_is_told_from_one_that_a_step_moved():
    a = torch.zeros(3 * MAX_HASHED + 5)
    assert weights_fingerprint({"a": a}) != weights_fingerprint({"a": a + 1e-3})
    assert weights_fingerprint({"a": a}) != weights_fingerprint({"a": a[:-1]})


def test_an_empty_set_an_empty_tensor_and_a_scalar_have_fingerprints():
    found = {weights_fingerprint(one) for one in ({}, {"a": torch.zeros(0)}, {"a": torch.tensor(1.0)})}
    assert len(found) == 3


class Frozen(nn.Module):
    """A frozen layer below a trained head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.body(observation))
        return out[:, :2], out[:, 2]


def test_equal_weights_have_one_fingerprint_and_another_seed_has_another():
    one, same = (ActorCritic(OBSERVATION, ACTION, seed=1) for _ in range(2))
    other = ActorCritic(OBSERVATION, ACTION, seed=2)
    assert policy_fingerprint(one) == policy_fingerprint(same) > 0
    assert policy_fingerprint(one) != policy_fingerprint(other)
    assert policy_fingerprint(copy.deepcopy(one)) == policy_fingerprint(one)


def test_the_smallest_change_of_one_weight_changes_the_fingerprint_and_undoing_it_restores_it():
    policy = ActorCritic(OBSERVATION, ACTION)
    before = policy_fingerprint(policy)
    weight = policy.actor[0].weight.data
    old = weight[0, 0].clone()
    weight[0, 0] = torch.nextafter(old, torch.tensor(1.0))
    assert policy_fingerprint(policy) != before
    weight[0, 0] = old
    assert policy_fingerprint(policy) == before


def test_buffers_are_not_part_of_it():
    policy = ActorCritic(OBSERVATION, ACTION, normalize_observation=True)
    before = policy_fingerprint(policy)
    policy.update_statistics(torch.ones(4, 3))
    assert policy_fingerprint(policy) == before


def test_untrained_weights_are_part_of_it_also_when_they_change_later():
    policy = ActorCritic(OBSERVATION, ACTION, network=Frozen())
    before = policy_fingerprint(policy)
    assert policy_fingerprint(policy) == before
    with torch.no_grad():
        policy.network.body.weight[0, 0] += 1.0
    assert policy_fingerprint(policy) != before


def test_half_precision_weights_have_a_fingerprint():
    policy = ActorCritic(OBSERVATION, ACTION).to(torch.bfloat16)
    assert policy_fingerprint(policy) == policy_fingerprint(copy.deepcopy(policy))
