"""A real vLLM server of the built-in vision-language model: prompts with pictures, trained adapters, whole runs."""

import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import wait

import pytest
from tests.policy.vlm.serving.conftest import move, picture, request
from tests.train.test_screen_loop import config, gateway, steps_of
from tests.vllm.conftest import MODEL

from palaestra.errors import ConfigError
from palaestra.policy.vlm import Conversation, ModelConfig, PastTurn, VLMPolicy
from palaestra.policy.vlm.conformance import check_sampler
from palaestra.policy.vlm.sampler import InferenceConfig, ReplyRequest
from palaestra.policy.vlm.serving.server_sampler import ServerSampler
from palaestra.train.screens import train_screens

__all__ = ["gateway"]

pytestmark = pytest.mark.vllm


def models(url):
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return [one["id"] for one in json.load(answer)["data"]]


@pytest.fixture
def policy():
    made = VLMPolicy.from_config(MODEL, seed=1)
    move(made)
    return made


@pytest.fixture
def sampler(engine, policy):
    settings = InferenceConfig(backend="server", urls=engine, probe_tolerance=1e-3, unreachable_s=600)
    with ServerSampler(policy, settings, temperature=0.8, max_new_tokens=12) as made:
        yield made


def test_vllm_conforms_with_pictures_and_adapters_to_a_hundred_thousandth(sampler, policy):
    sampler.check(policy.trainable_state())
    requests = [request(number, turns=number % 3) for number in range(8)]
    # Batches of other sizes round differently, which may draw another token.
    check_sampler(sampler, sampler.publish, policy, requests, temperature=0.8, tolerance=1e-4, repeatable=False)
    assert sampler.counts.probe.largest < 1e-4


def test_an_old_adapter_is_gone_when_the_new_one_answers_and_all_when_the_sampler_closes(engine, sampler, policy):
    sampler.publish(1, policy.trainable_state())
    (first,) = [name for name in models(engine) if name.startswith("palaestra")]
    move(policy, seed=3)
    sampler.publish(2, policy.trainable_state())
    assert [name for name in models(engine) if name.startswith("palaestra")] == [first.replace("-v1", "-v2")]
    body = json.dumps({"model": first, "prompt": [5], "max_tokens": 1}).encode()
    asked = urllib.request.Request(f"{engine}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(asked)
    sampler.close()
    assert [name for name in models(engine) if name.startswith("palaestra")] == []


def test_the_prefix_of_an_episode_comes_from_the_engines_cache(sampler, policy):
    sampler.publish(1, policy.trainable_state())
    past = []
    for turn in range(3):
        now = picture(turn, (256, 192))
        conversation = Conversation("", "Click the square.", tuple(past), now)
        (reply,) = sampler.sample([ReplyRequest(conversation, turn, episode="one")], temperature=0.8)
        past.append(PastTurn(now, reply.completion.token_ids, reply.completion.text))
    # Each turn repeats the one before it and adds about 200 tokens. The cache holds whole blocks, of 128 tokens on a
    # CPU: one block of the first turn and three of the second come from it.
    assert sampler.counts.cached_tokens >= 512
    assert sampler.counts.metrics()["prefix_cache_share"] > 0.3


def test_an_adapter_of_too_high_a_rank_is_refused_with_the_words_of_vllm(engine):
    policy = VLMPolicy.from_config(ModelConfig(name="tiny", lora_rank=64, max_new_tokens=12))
    settings = InferenceConfig(backend="server", urls=engine)
    words = r"did not load adapter .*64.*--max-lora-rank of at least"
    with (
        ServerSampler(policy, settings, temperature=1.0, max_new_tokens=12) as sampler,
        pytest.raises(ConfigError, match=words) as caught,
    ):
        sampler.check(policy.trainable_state())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("collection", ["synchronous", "asynchronous"])
def test_a_run_learns_from_the_replies_of_vllm(gateway, engine, tmp_path, collection):
    settings = config(gateway, 3, inference={"backend": "server", "urls": [engine]}, trainer={"collection": collection})
    outcome = train_screens(settings, root=tmp_path, run_id=collection)
    assert [step.update for step in steps_of(outcome.run)] == [1, 2, 3]
    assert outcome.final["disagreement_max"] < 1e-4
    assert outcome.final["probe_difference"] < 1e-4
    assert [name for name in models(engine) if name.startswith("palaestra")] == []


@pytest.mark.skipif("PALAESTRA_VLLM_URL" in os.environ, reason="kills the server, which is not ours")
def test_a_vllm_that_is_killed_in_a_batch_and_started_again_answers_the_rest(own_engine, sampler, policy):
    sampler.publish(1, policy.trainable_state())
    futures = [sampler.submit(request(number), temperature=0.8) for number in range(32)]
    wait(futures[:1])
    own_engine.kill()
    began = time.monotonic()
    own_engine.start()
    replies = [future.result() for future in futures]
    assert len(replies) == 32
    assert {version for one in replies for version in one.completion.versions.tolist()} == {1}
    assert sampler.counts.engines_lost == 1
    assert any("answers again" in text for text in sampler.notices)
    assert time.monotonic() > began
