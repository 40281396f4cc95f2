"""The running observation statistics: equal to numpy's over everything seen, and still while acting."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.policy import ActorCritic
from palaestra.policy.compiled import CompiledActorCritic
from palaestra.policy.network import ObservationNormalizer

numbers = st.floats(-1000, 1000, width=32)
batches = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(batches)
def test_the_statistics_are_those_of_all_batches_in_a_row(seen):
    normalizer = ObservationNormalizer(2)
    for batch in seen:
        normalizer.update_statistics(torch.tensor(batch))
    everything = np.concatenate([np.array(batch, np.float64) for batch in seen])
    assert normalizer.count.item() == len(everything)
    assert np.allclose(normalizer.mean.numpy(), everything.mean(0), atol=1e-6)
    assert np.allclose(normalizer.variance.numpy(), everything.var(0), rtol=1e-6, atol=1e-5)


def test_a_normalised_observation_is_shifted_scaled_and_clipped():
    normalizer = ObservationNormalizer(1, clip=2.0)
    normalizer.update_statistics(torch.tensor([[1.0], [3.0]]))  # mean 2, variance 1
    assert normalizer(torch.tensor([[2.0], [3.0], [100.0], [-100.0]])).flatten().tolist() == [0.0, 1.0, 2.0, -2.0]


def test_nothing_seen_changes_nothing_and_an_empty_batch_is_nothing():
    normalizer = ObservationNormalizer(2)
    normalizer.update_statistics(torch.zeros(0, 2))
    assert normalizer.count.item() == 0
    assert torch.allclose(normalizer(torch.tensor([[0.5, -3.0]])), torch.tensor([[0.5, -3.0]]))


def _policy():
    space = spaces.Dict({"joints": spaces.Box(-9, 9, (2,), np.float32), "room": spaces.Discrete(3)})
    return ActorCritic(space, spaces.Discrete(2), normalize_observation=True)


def test_acting_and_valuing_move_no_statistic():
    policy = _policy()
    observation = {"joints": torch.full((4, 2), 5.0), "room": torch.zeros(4, dtype=torch.long)}
    policy.act(observation, torch.rand(4, 1))
    policy.value(observation)
    policy.evaluate_actions(observation, torch.zeros(4, dtype=torch.long))
    assert policy.encoder.normalizers["joints"].count.item() == 0


def test_only_numbers_are_normalised_and_choices_stay_one_hot():
    policy = _policy()
    assert list(policy.encoder.normalizers) == ["joints"]
    policy.update_statistics({"joints": torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "room": torch.tensor([0, 2])})
    features = policy.encoder({"joints": torch.tensor([[3.0, 2.0]]), "room": torch.tensor([1])})
    assert features.flatten().tolist() == pytest.approx([1.0, -1.0, 0.0, 1.0, 0.0])  # (3-2)/1, (2-4)/2, room 1


def test_the_kernels_and_the_module_normalise_alike():
    policy = ActorCritic(spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(2), normalize_observation=True)
    seen = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) * 4 + 2
    policy.update_statistics(seen)
    fast = CompiledActorCritic(policy).normalize(seen.numpy())
    assert np.allclose(fast, policy.encoder(seen).numpy(), atol=1e-6)
