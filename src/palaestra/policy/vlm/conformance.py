"""Conformance checks for a `ReplySampler`.

Run them on your own sampler before training with it. They raise `AssertionError` naming the violated rule. The samplers
of this package pass them: in this process, in a child process, and with inference engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.sampler import ReplyRequest, ReplySampler, SampledReply
from palaestra.policy.vlm.scoring import turn_input

Publish = Callable[[int, Mapping[str, Tensor]], None]


def check_sampler(
    sampler: ReplySampler,
    publish: Publish,
    policy: VLMPolicy,
    requests: Sequence[ReplyRequest],
    *,
    temperature: float = 1.0,
    tolerance: float = 1e-3,
    repeatable: bool = True,
) -> None:
    """`publish` makes the sampler use weights under a version above 0; `policy` is the learner's.

    `requests` are at least two, of different conversations and seeds. `tolerance` is the largest difference (nats)
    between the sampler's log-probability of a token and that of the policy. `repeatable`: the reply to a request does
    not depend on which others are sampled with it; rounding in other batch sizes may change it.
    """
    assert len(requests) >= 2, "give at least two requests"
    publish(1, policy.trainable_state())
    first = sampler.sample(requests, temperature=temperature)
    _check_replies(first, requests, policy, version=1)
    _check_log_probs(first, policy, temperature, tolerance)
    assert sampler.sample([], temperature=temperature) == [], "no requests have no replies"
    if repeatable:
        alone = [sampler.sample([request], temperature=temperature)[0] for request in reversed(requests)]
        same = _tokens(alone[::-1]) == _tokens(first)
        assert same, "the reply to a request must not depend on the other requests of its batch"
    _check_threads(sampler, requests, policy, temperature)
    _check_greedy(sampler, requests, policy)
    _check_publishing(sampler, publish, requests, policy, temperature, tolerance)


def _check_replies(
    replies: Sequence[SampledReply], requests: Sequence[ReplyRequest], policy: VLMPolicy, *, version: int
) -> None:
    assert len(replies) == len(requests), f"{len(requests)} requests got {len(replies)} replies"
    for number, (reply, request) in enumerate(zip(replies, requests, strict=True)):
        prompt, sampled = policy.prompt(request.conversation), reply.completion
        own = reply.prompt.ids.tolist() == prompt.ids.tolist() and reply.prompt.pictures == prompt.pictures
        assert own, f"reply {number} is to another prompt than the policy writes for its request"
        count, tokens = len(sampled.token_ids), sampled.token_ids.tolist()
        assert 1 <= count <= policy.config.max_new_tokens, f"reply {number} has {count} tokens"
        forbidden = set(policy.rules.forbidden) & set(tokens)
        assert not forbidden, f"reply {number} has tokens that must not be drawn: {sorted(forbidden)}"
        ends = [place for place, token in enumerate(tokens) if token in policy.rules.ends]
        assert ends in ([], [count - 1]), f"reply {number} goes on after an end token"
        assert sampled.ended == bool(ends), f"reply {number}: `ended` is whether the last token is an end token"
        assert len(sampled.log_probs) == len(sampled.versions) == count, f"reply {number}: one number for each token"
        assert bool(np.isfinite(sampled.log_probs).all()), f"reply {number}: a log-probability is not finite"
        assert float(sampled.log_probs.max()) <= 1e-4, f"reply {number}: a log-probability is above 0"
        assert set(sampled.versions.tolist()) == {version}, f"reply {number} is not of version {version} alone"
        assert sampled.text == policy.text_of(tokens), f"reply {number}: the text is not that of its tokens"
        assert sampled.fingerprint == policy.fingerprint, f"reply {number} names other weights than were published"


def _check_log_probs(replies: Sequence[SampledReply], policy: VLMPolicy, temperature: float, tolerance: float) -> None:
    turns = [turn_input(reply.prompt, reply.completion, temperature=temperature) for reply in replies]
    scored = policy.log_probs(turns, grad=False)
    theirs = np.concatenate([reply.completion.log_probs for reply in replies])
    largest = float(np.abs(scored.log_probs[scored.mask].cpu().numpy() - theirs).max())
    assert largest <= tolerance, (
        f"a log-probability differs by {largest:.3g} nats from that of the policy: it must be that of the distribution "
        "the token was drawn from, temperature and forbidden tokens included"
    )


def _check_threads(
    sampler: ReplySampler, requests: Sequence[ReplyRequest], policy: VLMPolicy, temperature: float
) -> None:
    """Calls from several threads at once must each get their own replies."""

    def sample(request: ReplyRequest) -> SampledReply:
        return sampler.sample([request], temperature=temperature)[0]

    with ThreadPoolExecutor(len(requests)) as threads:
        _check_replies(list(threads.map(sample, requests)), requests, policy, version=1)


def _check_greedy(sampler: ReplySampler, requests: Sequence[ReplyRequest], policy: VLMPolicy) -> None:
    same = [ReplyRequest(requests[0].conversation, request.seed) for request in requests]
    greedy = sampler.sample(same, temperature=0.0)
    _check_replies(greedy, same, policy, version=1)
    assert len(set(_tokens(greedy))) == 1, "at temperature 0 the seed must not matter"
    zero = all((reply.completion.log_probs == 0).all() for reply in greedy)
    assert zero, "at temperature 0 the only possible token has log-probability 0"


def _check_publishing(
    sampler: ReplySampler,
    publish: Publish,
    requests: Sequence[ReplyRequest],
    policy: VLMPolicy,
    temperature: float,
    tolerance: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator).to(weight))
    publish(2, policy.trainable_state())
    replies = sampler.sample(requests, temperature=temperature)
    _check_replies(replies, requests, policy, version=2)
    _check_log_probs(replies, policy, temperature, tolerance)


def _tokens(replies: Sequence[SampledReply]) -> list[Any]:
    return [tuple(reply.completion.token_ids.tolist()) for reply in replies]
