"""A small engine for all tests of a module, a learner, and samplers between them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from palaestra.policy.vlm import Conversation, ModelConfig, PastTurn, Picture, VLMPolicy
from palaestra.policy.vlm.sampler import InferenceConfig, ReplyRequest
from palaestra.policy.vlm.serving.server_sampler import ServerSampler
from palaestra.policy.vlm.serving.small_server import SmallServer

MODEL = ModelConfig(name="tiny", max_new_tokens=8, lora_rank=4, history=2)


@pytest.fixture(scope="session")
def shared_server():
    with SmallServer(MODEL) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """The shared engine, which behaves when a test begins and has nothing of others."""
    yield shared_server
    shared_server.fault, shared_server.api_key = "", ""
    shared_server.served.clear()
    assert shared_server.adapters == [], "a sampler left adapters behind"


@pytest.fixture
def policy():
    made = VLMPolicy.from_config(MODEL, seed=1)
    move(made)
    return made


@pytest.fixture
def connect(policy, server):
    """Makes samplers of the shared engine, or of others, and closes them."""
    made = []

    def make(*urls, temperature=1.0, **settings):
        config = InferenceConfig(backend="server", urls=urls or (server.url,), **settings)
        made.append(ServerSampler(policy, config, temperature=temperature, max_new_tokens=MODEL.max_new_tokens))
        return made[-1]

    yield make
    for one in made:
        one.close()


def move(policy, seed=0, by=0.05):
    """What an optimiser does: other weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * by)


def picture(number, size=(64, 48)):
    colours = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(colours).resize((100, 80), Image.Resampling.NEAREST).save(written, "PNG")
    return Picture(written.getvalue(), size)


def request(number, *, turns=0, episode=None):
    """A request of an episode after some turns, with a screenshot that has to be resized."""
    past = [PastTurn(picture(100 * number + turn), [1804, 900 + turn, 800], f"turn {turn}") for turn in range(turns)]
    conversation = Conversation("", f"Click square {number}.", past, picture(100 * number + turns, (48, 64)))
    return ReplyRequest(conversation, seed=number, episode=str(number) if episode is None else episode)


def tokens(replies):
    return [reply.completion.token_ids.tolist() for reply in replies]
