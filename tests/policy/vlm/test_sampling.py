"""Answers are drawn from the model's own distribution, and their probabilities are exact."""

import numpy as np
import pytest
import torch
from tests.policy.vlm import toy
from tests.policy.vlm.conftest import built, by_turn, conversation, pixels_and_grid, requests, turns_of

from palaestra.errors import ConfigError
from palaestra.policy.vlm import SampleRequest


def _by_transformers(policy, prompt, answer):
    """Log-probabilities of an answer from the library's own forward pass: one row, raw pixels, its own positions."""
    model = policy.learner.model
    whole = np.concatenate([prompt.ids, answer]).astype(np.int64)
    ids = torch.from_numpy(whole)[None]
    with torch.no_grad():
        out = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **pixels_and_grid(policy, prompt.pictures),
            mm_token_type_ids=(ids == policy.learner.image_token).int(),
        )  # fmt: skip
    scores = policy.rules.mask_forbidden(out.logits[0, len(prompt.ids) - 1 : -1])
    return torch.log_softmax(scores, -1).gather(-1, ids[0, len(prompt.ids) :, None])[:, 0].numpy()


def test_sampler_trainer_and_the_library_itself_agree_on_every_token(still):
    _agree(still)


def test_they_agree_on_the_older_qwen2_vl_as_well(tmp_path):
    _agree(built(toy.make(tmp_path / "model", "qwen2_vl")))


def _agree(policy):
    asked = requests(policy, 8)
    assert {len(request.prompt.pictures) for request in asked} == {1, 2, 3}
    assert len({len(request.prompt.ids) for request in asked}) > 4
    answers = policy.sample(asked, max_new_tokens=12)
    scored = by_turn(policy.log_probs(turns_of(asked, answers)))
    for request, answer, again in zip(asked, answers, scored, strict=True):
        np.testing.assert_allclose(again.detach().numpy(), answer.log_probs, atol=1e-4)
        np.testing.assert_allclose(
            _by_transformers(policy, request.prompt, answer.token_ids), answer.log_probs, atol=1e-4
        )
    spread = np.concatenate([answer.log_probs for answer in answers])
    assert spread.std() > 0.5, "a test on near-uniform distributions would show nothing"


def test_a_hotter_distribution_is_the_one_that_is_recorded(still):
    policy = still
    asked = requests(policy, 4)
    answers = policy.sample(asked, temperature=0.6, max_new_tokens=8)
    for again, answer in zip(
        by_turn(policy.log_probs(turns_of(asked, answers, 0.6), grad=False)), answers, strict=True
    ):
        np.testing.assert_allclose(again.numpy(), answer.log_probs, atol=1e-4)


def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(still):
    policy = still
    asked = requests(policy, 6)
    together = policy.sample(asked, max_new_tokens=10)
    for request, answer in zip(asked, together, strict=True):
        (alone,) = policy.sample([request], max_new_tokens=10)
        np.testing.assert_array_equal(alone.token_ids, answer.token_ids)
        np.testing.assert_allclose(alone.log_probs, answer.log_probs, atol=1e-5)


def test_the_greedy_answer_is_what_the_librarys_own_generation_gives(still):
    policy = still
    prompt = policy.prompt(conversation(3, 2))
    (answer,) = policy.sample([SampleRequest(prompt, 0)], temperature=0, max_new_tokens=12)
    ids = torch.from_numpy(prompt.ids.astype(np.int64))[None]
    out = policy.learner.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == policy.learner.image_token).int(),
        **pixels_and_grid(policy, prompt.pictures),
        do_sample=False, max_new_tokens=12, suppress_tokens=list(policy.rules.forbidden),
    )  # fmt: skip
    np.testing.assert_array_equal(out[0, ids.shape[1] :].numpy()[: len(answer.token_ids)], answer.token_ids)
    assert not answer.log_probs.any(), "a choice without chance has probability 1"


def test_tokens_come_as_often_as_their_probability_says(still):
    policy = still
    prompt = policy.prompt(conversation(1, 0))
    drawn = policy.sample([SampleRequest(prompt, seed) for seed in range(500)], max_new_tokens=1)
    counts = np.bincount([int(one.token_ids[0]) for one in drawn], minlength=400)
    chances = {int(one.token_ids[0]): float(np.exp(one.log_probs[0])) for one in drawn}
    # Every draw reports the same number for the same token, and its share is within five standard deviations of it.
    for token, chance in chances.items():
        deviation = (chance * (1 - chance) / 500) ** 0.5
        assert abs(counts[token] / 500 - chance) < 5 * deviation + 2e-3
    assert not counts[list(policy.rules.forbidden)].any()


def test_an_answer_ends_with_its_end_token_or_is_cut(still):
    policy = still
    answers = policy.sample(requests(policy, 40), max_new_tokens=12)
    ended = [answer for answer in answers if answer.ended]
    assert ended
    for answer in answers:
        ends = [int(token) in policy.rules.ends for token in answer.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == answer.ended
        assert answer.ended or len(answer.token_ids) == 12
        assert "<|im_end|>" not in answer.text


def test_every_token_carries_its_version(build):
    policy = build()
    policy.publish(7)
    (answer,) = policy.sample(requests(policy, 1), max_new_tokens=5)
    assert set(answer.versions.tolist()) == {7}
    assert len(answer.versions) == len(answer.log_probs) == len(answer.token_ids)


def test_nothing_asked_is_nothing_answered(still):
    assert still.sample([]) == []


def test_a_prompt_beyond_the_models_length_is_refused(still):
    policy = still
    with pytest.raises(ConfigError, match="exceed the model's 4096"):
        policy.sample(requests(policy, 1), max_new_tokens=4090)
