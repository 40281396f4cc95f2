"""A published update reaches the very next token, an unpublished one reaches none, and a lost one is found out."""

import threading

import numpy as np
import pytest
import torch
from tests.policy.vlm.conftest import by_turn, move, requests, turns_of

from palaestra.errors import CheckpointError


@pytest.fixture(params=[True, False], ids=["lora", "full"])
def policy(build, request):
    return build(use_lora=request.param, moved=False)


def test_a_published_update_changes_the_next_tokens_probability_and_version(policy):
    asked = requests(policy, 3)
    before = policy.sample(asked, max_new_tokens=1)
    move(policy, by=0.02)
    unpublished = policy.sample(asked, max_new_tokens=1)
    for one, other in zip(before, unpublished, strict=True):
        assert one.log_probs.tolist() == other.log_probs.tolist()
        assert one.fingerprint == other.fingerprint != policy.fingerprint
    policy.publish(1)
    after = policy.sample(asked, max_new_tokens=1)
    assert all(answer.versions.tolist() == [1] for answer in after)
    again = by_turn(policy.log_probs(turns_of(asked, after), grad=False))
    np.testing.assert_allclose(torch.cat(again), np.concatenate([a.log_probs for a in after]), atol=1e-4)
    at_before = by_turn(policy.log_probs(turns_of(asked, before), grad=False))
    assert np.abs(torch.cat(at_before).numpy() - np.concatenate([a.log_probs for a in before])).max() > 1e-2


def test_an_update_that_did_not_arrive_shows_in_the_fingerprint(policy, build):
    """The actor says version 2 but still has the weights of version 1."""
    actor = build(use_lora=policy.config.use_lora, moved=False)
    move(policy, by=0.02)
    policy.publish(1)
    actor.load_trainable_state(policy.trainable_state())
    actor.publish(1)
    (answer,) = actor.sample(requests(actor, 1), max_new_tokens=1)
    assert answer.fingerprint == policy.fingerprint
    move(policy, seed=1, by=1e-4)
    policy.publish(2)
    actor.publish(2)
    (answer,) = actor.sample(requests(actor, 1), max_new_tokens=1)
    assert answer.versions.tolist() == [2]
    assert answer.fingerprint != policy.fingerprint
    actor.load_trainable_state(policy.trainable_state())
    actor.publish(2)
    (answer,) = actor.sample(requests(actor, 1), max_new_tokens=1)
    assert answer.fingerprint == policy.fingerprint


def test_the_fingerprint_is_of_the_weights_that_speak(policy):
    before = policy.fingerprint
    with torch.no_grad():
        policy.learner.value_head.bias.add_(1)
    assert policy.fingerprint == before
    with torch.no_grad():
        policy.trainable_parameters()[0].view(-1)[0].add_(1e-6)
    assert policy.fingerprint != before


def test_what_does_not_learn_is_held_once(policy):
    learning = dict(policy.learner.named_parameters())
    acting = dict(policy._acting.named_parameters())
    assert learning.keys() == acting.keys()
    for name, weight in learning.items():
        assert (weight.data_ptr() == acting[name].data_ptr()) == (not weight.requires_grad), name
    assert not any(weight.requires_grad for weight in acting.values())


def test_a_batch_keeps_the_weights_it_began_with_while_others_are_published(build):
    """One thread samples without pause, another learns and publishes."""
    policy = build()
    asked = requests(policy, 2)
    published = {0: policy.fingerprint}
    answers, stop, began = [], threading.Event(), threading.Event()

    def speak():
        while not stop.is_set() or answers[-1].versions[0] != 5:
            began.set()
            answers.extend(policy.sample(asked, max_new_tokens=6))

    thread = threading.Thread(target=speak)
    thread.start()
    began.wait()
    for version in range(1, 6):
        move(policy, seed=version, by=0.01)
        policy.publish(version)
        published[version] = policy.fingerprint
    stop.set()
    thread.join()
    assert answers[-1].versions.tolist()[0] == policy.version == 5
    for answer in answers:
        (version,) = set(answer.versions.tolist())
        assert answer.fingerprint == published[version]
    last = by_turn(policy.log_probs(turns_of(asked, answers[-2:]), grad=False))
    np.testing.assert_allclose(torch.cat(last), np.concatenate([a.log_probs for a in answers[-2:]]), atol=1e-4)


def test_versions_only_grow(policy):
    policy.publish(3)
    with pytest.raises(ValueError, match="version 2 after 3"):
        policy.publish(2)


def test_weights_of_other_adapters_are_refused_before_anything_changes(qwen3, build):
    policy, other = build(), build(lora_target_option="attention")
    before = policy.fingerprint
    with pytest.raises(CheckpointError, match="other adapters"):
        policy.load_trainable_state(other.trainable_state())
    with pytest.raises(CheckpointError, match=r"has shape \(8, 32\)"):
        policy.load_trainable_state(build(lora_rank=8).trainable_state())
    assert policy.fingerprint == before


def test_an_optimiser_makes_what_was_said_likelier(policy):
    asked = requests(policy, 3)
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=4))
    optimiser = torch.optim.Adam(policy.trainable_parameters(), lr=1e-2)
    totals = []
    for _ in range(8):
        total = policy.log_probs(turns, with_values=True).log_probs.sum()
        optimiser.zero_grad()
        (-total).backward()
        optimiser.step()
        totals.append(total.item())
    assert totals[-1] > totals[0] + 5
