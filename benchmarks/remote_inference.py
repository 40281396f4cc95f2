"""Figures of an inference engine on this machine: agreement with the learner, speed, and the cost of a publication.

    python -m benchmarks.remote_inference URL MODEL_DIRECTORY

The model is a language model without pictures, such as SmolLM2-135M-Instruct, that the engine at URL serves.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from tests.vllm.text_policy import TextPolicy

from palaestra.policy.vlm import Conversation, Picture
from palaestra.policy.vlm.sampler import InferenceConfig, ReplyRequest
from palaestra.policy.vlm.serving.server_sampler import ServerSampler

TOKENS = 48
TEXTS = ["Tell a story about a harbour.", "Explain how bread is made.", "Describe a city at night.", "Write a letter."]


def requests(count, first):
    return [
        ReplyRequest(Conversation("", f"{TEXTS[n % 4]} ({n})", (), Picture(b"", (0, 0))), seed=n, episode=str(n))
        for n in range(first, first + count)
    ]


def report_difference(name, policy, replies):
    theirs = np.concatenate([reply.completion.log_probs for reply in replies])
    apart = np.abs(np.array(policy.log_probs(replies, 1.0)) - theirs)
    print(f"{name}: mean {apart.mean():.4f}, largest {apart.max():.4f} nats over {len(apart)} tokens", flush=True)


def report_speed(sampler, count, first):
    began = time.perf_counter()
    replies = sampler.sample(requests(count, first), temperature=1.0)
    seconds = time.perf_counter() - began
    tokens = sum(len(reply.completion.token_ids) for reply in replies)
    print(f"{count} at once: {tokens / seconds:.1f} tokens/s ({tokens} tokens)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", help="of the learner")
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = TextPolicy(given.model, dtype=getattr(torch, given.dtype))
    settings = InferenceConfig(backend="server", urls=given.url)
    with ServerSampler(policy, settings, temperature=1.0, max_new_tokens=TOKENS) as sampler:
        began = time.perf_counter()
        sampler.check(policy.weights())
        print(f"check, with a trial adapter: {time.perf_counter() - began:.1f} s", flush=True)
        sampler.publish(0, policy.weights())
        replies = sampler.sample(requests(4, 0), temperature=1.0)
        report_difference("no adapter yet", policy, replies)
        policy.learn(replies[:1], steps=4, learning_rate=2e-3)
        sampler.publish(1, policy.weights())
        print(f"publication: {sampler.counts.publish_s:.2f} s; probe: {sampler.counts.probe}", flush=True)
        report_difference("trained adapter", policy, sampler.sample(requests(4, 10), temperature=1.0))
        for count, first in ((1, 100), (8, 200), (1, 300), (8, 400)):
            report_speed(sampler, count, first)


if __name__ == "__main__":
    main()
