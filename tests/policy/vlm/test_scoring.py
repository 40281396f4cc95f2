"""Teacher-forced log-probabilities: what they cost, what they reach, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.policy.vlm.conftest import by_turn, changed, move, requests, turns_of

from palaestra.errors import ConfigError, ExperienceError
from palaestra.policy.vlm import SampleRequest, network, scoring
from palaestra.policy.vlm.network import run_prompts


@pytest.fixture
def scene(build):
    policy = build()
    asked = requests(policy, 5)
    return policy, turns_of(asked, policy.sample(asked, max_new_tokens=6))


def test_batches_of_any_size_give_the_same_numbers(scene):
    policy, turns = scene
    whole = policy.log_probs(turns, with_values=True, with_entropy=True, grad=False)
    lengths = [len(one.turn.token_ids) for one in turns]
    assert whole.mask.sum(1).tolist() == lengths
    for start in range(0, len(turns), 2):
        rows = slice(start, start + 2)
        part = policy.log_probs(turns[rows], with_values=True, with_entropy=True, grad=False)
        width = part.mask.shape[1]
        assert part.mask.sum(1).tolist() == lengths[rows]
        torch.testing.assert_close(whole.log_probs[rows, :width], part.log_probs, atol=1e-4, rtol=0)
        torch.testing.assert_close(whole.entropy[rows, :width], part.entropy, atol=1e-4, rtol=0)
        torch.testing.assert_close(whole.values[rows], part.values, atol=1e-4, rtol=0)


def test_only_positions_that_predict_an_answer_go_through_the_output_layer(scene):
    policy, turns = scene
    seen = []
    hook = policy.learner.model.lm_head.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[:-1]))
    policy.log_probs(turns)
    hook.remove()
    assert seen == [(sum(len(one.turn.token_ids) for one in turns),)]


def test_scores_in_chunks_are_the_same_and_have_the_same_gradient(scene, monkeypatch):
    policy, turns = scene
    whole = policy.log_probs(turns, with_entropy=True)
    wanted = torch.autograd.grad(
        whole.log_probs.sum() + whole.entropy.sum(), policy.trainable_parameters(), allow_unused=True
    )
    monkeypatch.setattr(scoring, "CHUNK_NUMBERS", 400 * 7)
    parts = policy.log_probs(turns, with_entropy=True)
    got = torch.autograd.grad(
        parts.log_probs.sum() + parts.entropy.sum(), policy.trainable_parameters(), allow_unused=True
    )
    torch.testing.assert_close(parts.log_probs, whole.log_probs)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_turns_that_share_a_prompt_run_it_once_and_have_the_same_numbers_and_gradient(build, monkeypatch):
    policy = build()
    asked = [request for request in requests(policy, 2) for _ in range(3)]
    asked = [SampleRequest(request.prompt, seed) for seed, request in enumerate(asked)]
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=6))
    turns[0] = changed(turns[0], token_ids=turns[0].turn.token_ids[:1])
    ran = []
    monkeypatch.setattr(scoring, "run_prompts", lambda *args: ran.append(args) or run_prompts(*args))

    def scored_with_gradient(turns):
        found = policy.log_probs(turns, with_values=True, with_entropy=True)
        total = found.log_probs.sum() + found.entropy.sum() + found.values.sum()
        return found, torch.autograd.grad(total, policy.trainable_parameters(), allow_unused=True)

    shared, gradient = scored_with_gradient(turns)
    assert len(ran) == 1
    monkeypatch.setattr(scoring, "deduplicate_prompts", lambda prompts: (prompts, []))
    apart, wanted = scored_with_gradient(turns)
    assert len(ran) == 1
    assert torch.equal(shared.mask, apart.mask)
    torch.testing.assert_close(shared.log_probs, apart.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared.entropy, apart.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared.values, apart.values, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradient, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_turns_of_one_token_each_need_nothing_after_their_shared_prompt(build):
    policy = build()
    asked = [SampleRequest(requests(policy, 1)[0].prompt, seed) for seed in range(4)]
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=1))
    together = policy.log_probs(turns, grad=False)
    alone = torch.cat([policy.log_probs([turn], grad=False).log_probs for turn in turns])
    torch.testing.assert_close(together.log_probs, alone, atol=1e-5, rtol=1e-5)


def test_the_gradient_is_that_of_the_log_probability(scene):
    """Against a finite difference along the gradient."""
    policy, turns = scene
    names = [name for name in policy.learner.trainable() if "lora" in name]
    weights = [policy.learner.trainable()[name] for name in names]
    policy.log_probs(turns).log_probs.sum().backward()
    slope = sum(float((w.grad**2).sum()) for w in weights)
    step = 1e-3 / slope**0.5
    totals = []
    for sign in (1, -2):
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad * step * sign)
        totals.append(policy.log_probs(turns, grad=False).log_probs.double().sum().item())
    assert (totals[0] - totals[1]) / (2 * step) == pytest.approx(slope, rel=0.05)


def test_the_entropy_is_that_of_the_distribution(scene):
    policy, turns = scene
    scored = policy.log_probs(turns[:1], with_entropy=True, grad=False)
    allowed = sorted(set(range(400)) - set(policy.rules.forbidden))
    every = [changed(turns[0], token_ids=[token]) for token in allowed]
    log_probs = policy.log_probs(every, grad=False).log_probs
    assert log_probs.exp().sum().item() == pytest.approx(1, abs=1e-3)
    assert scored.entropy[0, 0].item() == pytest.approx(-(log_probs.exp() * log_probs).sum().item(), abs=1e-3)


def test_the_value_is_seen_from_the_end_of_the_prompt_and_learns_alone_unless_asked(build):
    policy = build()
    asked = requests(policy, 3)
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=4))
    values = policy.log_probs(turns, with_values=True).values
    assert values.shape == (3,)
    assert values.dtype == torch.float32
    other = [changed(one, token_ids=one.turn.token_ids[:1]) for one in turns]
    torch.testing.assert_close(policy.log_probs(other, with_values=True).values, values, atol=1e-4, rtol=0)
    values.sum().backward()
    moved = {name for name, weight in policy.learner.trainable().items() if weight.grad is not None}
    assert moved == {"value_head.weight", "value_head.bias"}
    policy = build(value_gradient=True)
    policy.log_probs(turns, with_values=True).values.sum().backward()
    assert any("lora" in name and weight.grad is not None for name, weight in policy.learner.trainable().items())


def test_the_reference_is_the_model_without_what_it_learned(build):
    policy = build(moved=False)
    asked = requests(policy, 3)
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=5))
    before = policy.log_probs(turns, grad=False).log_probs
    move(policy)
    reference = policy.reference_log_probs(turns)
    assert not reference.requires_grad
    torch.testing.assert_close(reference, before)
    assert (policy.log_probs(turns, grad=False).log_probs - before).abs().max() > 1e-2
    policy.keep_reference()
    kept = policy.log_probs(turns, grad=False).log_probs
    move(policy, seed=1)
    torch.testing.assert_close(policy.reference_log_probs(turns), kept)


def test_full_training_has_a_reference_when_asked_for_one(build):
    policy = build(use_lora=False, moved=False)
    asked = requests(policy, 2)
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=4))
    with pytest.raises(ConfigError, match="keep_reference"):
        policy.reference_log_probs(turns)
    before = policy.log_probs(turns, grad=False).log_probs
    policy.keep_reference()
    move(policy, by=0.01)
    torch.testing.assert_close(policy.reference_log_probs(turns), before)


def test_gradient_checkpointing_changes_memory_and_no_number(build):
    plain, thrifty = build(), build(gradient_checkpointing=True)
    asked = requests(plain, 3)
    turns = turns_of(asked, plain.sample(asked, max_new_tokens=5))
    grads = []
    for policy in (plain, thrifty):
        calls = []
        layer = policy.learner.model.base_model.language_model.layers[0]
        hook = layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        policy.log_probs(turns).log_probs.sum().backward()
        hook.remove()
        grads.append([weight.grad for weight in policy.trainable_parameters() if weight.grad is not None])
        assert len(calls) == (1 if policy is plain else 2)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_with_gradient_checkpointing_replies_and_shared_prompts_still_see_what_came_before(build):
    plain, thrifty = build(), build(gradient_checkpointing=True)
    asked = [SampleRequest(requests(plain, 1)[0].prompt, seed=seed) for seed in range(4)]
    answers = thrifty.sample(asked, max_new_tokens=5)
    assert [one.text for one in answers] == [one.text for one in plain.sample(asked, max_new_tokens=5)]
    turns = turns_of(asked, answers)
    thrifty.log_probs(turns)  # with gradients, which recomputes
    without = thrifty.log_probs(turns, grad=False)
    np.testing.assert_allclose(torch.cat(by_turn(without)), np.concatenate([a.log_probs for a in answers]), atol=1e-4)


def test_dropout_of_adapters_acts_on_what_is_learned_from_and_on_nothing_else(build):
    policy = build(lora_dropout=0.5)
    asked = requests(policy, 2)
    answers = policy.sample(asked, max_new_tokens=5)
    turns = turns_of(asked, answers)
    scored = policy.log_probs(turns, grad=False)
    still = scored.log_probs
    np.testing.assert_allclose(torch.cat(by_turn(scored)), np.concatenate([a.log_probs for a in answers]), atol=1e-4)
    assert (policy.log_probs(turns).log_probs - still).abs().max() > 1e-3


def test_a_recorded_turn_is_scored_as_it_was_sampled(build):
    policy = build()
    (request,) = requests(policy, 3)[2:]
    (answer,) = policy.sample([request], max_new_tokens=6)
    (one,) = turns_of([request], [answer])
    again = policy.log_probs([one], grad=False).log_probs[0].numpy()
    np.testing.assert_allclose(again, one.turn.log_probs, atol=1e-4)
    with pytest.raises(ExperienceError, match="does not hold"):
        policy.log_probs([replace(one, pictures={})])


def test_pictures_are_encoded_once_while_the_tower_does_not_learn(build):
    policy = build()
    asked = requests(policy, 5)
    calls = []
    hook = policy.learner.model.base_model.visual.register_forward_hook(lambda *_: calls.append("learner"))
    turns = turns_of(asked, policy.sample(asked, max_new_tokens=3))
    policy.log_probs(turns)
    policy.reference_log_probs(turns)
    hook.remove()
    assert calls == [], "the sampler saw them all, and what it saw is shared"
    seeing = build(lora_vision=True)
    scored = seeing.log_probs(turns).log_probs
    scored.sum().backward()
    assert all(w.grad is not None for n, w in seeing.learner.trainable().items() if "visual" in n and "lora_B" in n)
    assert seeing.learner.feature_cache.used_bytes == 0


def test_pictures_in_parts_have_the_same_features(build, monkeypatch):
    policy = build()
    pictures = [picture for request in requests(policy, 5) for picture in request.prompt.pictures]
    policy.learner.feature_cache.clear()
    whole = policy.learner._encode_pictures(pictures)
    monkeypatch.setattr(network, "CPU_PATCHES", 1)
    policy.learner.feature_cache.clear()
    parts = policy.learner._encode_pictures(pictures)
    assert [len(part) for part in policy.learner._split_pictures(pictures)] == [1] * len(pictures)
    for one, other in zip(whole.pooler_output, parts.pooler_output, strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_have_happened_is_refused(scene):
    policy, turns = scene
    one = turns[0]
    with pytest.raises(ExperienceError, match="picture tokens"):
        policy.log_probs([changed(one, pictures=(), image_sizes=())])
    with pytest.raises(ExperienceError, match="not the ones it was shown"):
        policy.log_probs([changed(one, image_sizes=((8, 8),) * len(one.turn.pictures))])
    with pytest.raises(ExperienceError, match="temperature 0"):
        policy.log_probs([changed(one, temperature=0.0)])
    with pytest.raises(ExperienceError, match="picture's token in its reply"):
        policy.log_probs([changed(one, token_ids=[policy.learner.image_token])])
    with pytest.raises(ExperienceError, match="0 own tokens"):
        policy.log_probs([changed(one, token_ids=[])])
