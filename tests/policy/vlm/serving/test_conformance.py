"""Every sampler keeps the same promises: in this process, in a child process, and with inference engines."""

import pytest
import torch
from tests.policy.vlm.serving.conftest import MODEL, request, tokens

from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.conformance import check_sampler
from palaestra.policy.vlm.sampler import ConcurrentSampler, LocalSampler, ProcessSampler
from palaestra.train.screens import SamplerPublisher
from palaestra.transport.conformance import check_publisher

REQUESTS = [request(number, turns=number % 3) for number in range(4)]


def test_a_sampler_in_this_process_conforms(policy):
    def publish(version, weights):
        policy.publish(version)

    check_sampler(LocalSampler(policy, threads=1), publish, policy, REQUESTS, temperature=0.8)


@pytest.mark.slow
def test_a_sampler_in_a_child_process_conforms(policy):
    sampler = ProcessSampler(MODEL, seed=1, threads=1)
    try:
        check_sampler(sampler, sampler.publish, policy, REQUESTS, temperature=0.8)
    finally:
        sampler.close()


def test_a_sampler_of_an_inference_engine_conforms(policy, connect):
    sampler = connect(temperature=0.8)
    sampler.check(policy.trainable_state())
    assert isinstance(sampler, ConcurrentSampler)
    check_sampler(sampler, sampler.publish, policy, REQUESTS, temperature=0.8)


def test_an_engine_of_ours_draws_the_same_tokens_as_a_sampler_in_this_process(policy, connect):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    policy.publish(1)
    here, there = (one.sample(REQUESTS, temperature=1.0) for one in (LocalSampler(policy, threads=1), sampler))
    assert tokens(there) == tokens(here)
    assert [one.completion.fingerprint for one in there] == [policy.fingerprint] * 4


def test_a_sampler_that_reports_the_log_probabilities_of_another_temperature_does_not_conform(policy):
    class Raw(LocalSampler):
        def sample(self, requests, *, temperature):
            return super().sample(requests, temperature=1.0)

    with pytest.raises(AssertionError, match="it must be that of the distribution the token was drawn from"):
        check_sampler(
            Raw(policy, threads=1), lambda version, _: policy.publish(version), policy, REQUESTS, temperature=0.5
        )


def test_publishing_to_an_engine_conforms(policy, connect):
    sampler = connect()
    actors = VLMPolicy.from_config(MODEL, seed=1)

    def change():
        with torch.no_grad():
            for weight in policy.trainable_parameters():
                weight.add_(0.02)

    def read():
        (reply,) = sampler.sample([request(1)], temperature=1.0)
        return sampler.version, reply.completion.fingerprint

    check_publisher(SamplerPublisher(actors, sampler), policy.trainable_state, change, read)
