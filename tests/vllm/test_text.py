"""A real vLLM server of a real pretrained language model in bfloat16, with adapters that our scoring trained."""

import numpy as np
import pytest
import torch
from tests.vllm.text_policy import TextPolicy

from palaestra.errors import CollectorFailed
from palaestra.policy.vlm import Conversation, Picture
from palaestra.policy.vlm.sampler import InferenceConfig, ReplyRequest
from palaestra.policy.vlm.serving.server_sampler import ServerSampler

pytestmark = pytest.mark.vllm

QUESTIONS = ["What is the capital of France?", "Name a colour.", "What is 3 plus 4?", "Write one word."]


@pytest.fixture(scope="module")
def policy(text_model):
    torch.set_num_threads(1)
    return TextPolicy(text_model)


def question(number, seed=0):
    return ReplyRequest(Conversation("", QUESTIONS[number % 4], (), Picture(b"", (0, 0))), seed, episode=str(number))


def difference(policy, replies, temperature):
    theirs = np.concatenate([reply.completion.log_probs for reply in replies])
    return np.abs(np.array(policy.log_probs(replies, temperature)) - theirs)


def test_a_trained_adapter_answers_with_the_learners_log_probabilities(text_engine, policy):
    settings = InferenceConfig(backend="server", urls=text_engine)
    with ServerSampler(policy, settings, temperature=0.7, max_new_tokens=16) as sampler:
        sampler.check(policy.weights())
        sampler.publish(1, policy.weights())
        requests = [question(number, seed=number) for number in range(8)]
        before = sampler.sample(requests, temperature=0.7)
        assert difference(policy, before, 0.7).mean() < 0.1
        means = policy.learn(before[:2], steps=6, learning_rate=2e-3)
        assert means[-1] > means[0] + 0.2
        sampler.publish(2, policy.weights())
        assert sampler.counts.probe.difference < 0.1
        after = sampler.sample(requests, temperature=0.7)
        assert {version for one in after for version in one.completion.versions.tolist()} == {2}
        assert difference(policy, after, 0.7).mean() < 0.1
        # The old replies are more likely now: the learner's weights have moved by more than the tolerance.
        assert difference(policy, before, 0.7).mean() > 0.1


def test_a_version_whose_file_is_not_the_learners_is_refused(text_engine, policy, monkeypatch):
    settings = InferenceConfig(backend="server", urls=text_engine)
    with ServerSampler(policy, settings, temperature=1.0, max_new_tokens=16) as sampler:
        sampler.publish(1, policy.weights())
        policy.learn(sampler.sample([question(0), question(1)], temperature=1.0), steps=6, learning_rate=2e-3)
        engine = sampler._pool._engines[0]
        real, first = engine.load_adapter, sampler._pool.current.exported.path

        async def load_adapter(name, path):
            await real(name, first)

        monkeypatch.setattr(engine, "load_adapter", load_adapter)
        with pytest.raises(CollectorFailed, match=r"answers with the adapter of version 1\. Version 2 is refused"):
            sampler.publish(2, policy.weights())
        assert sampler.version == 1
        assert len(sampler.sample([question(2)], temperature=1.0)) == 1
