"""Toy models on disk, made once a session, and policies around them."""

import io
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tests.policy.vlm import toy

from palaestra.policy.vlm import Conversation, ModelConfig, PastTurn, Picture, SampleRequest, VLMPolicy, turn_input

SIZES = [(40, 32), (16, 16), (48, 24)]


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    return {family: toy.make(tmp_path_factory.mktemp("models") / family, family) for family in toy.FAMILIES}


@pytest.fixture(scope="session", params=toy.FAMILIES)
def directory(request, directories):
    return directories[request.param]


@pytest.fixture
def qwen3(directories):
    return directories["qwen3_vl"]


@pytest.fixture
def build(directory):
    """Builds policies of either family."""
    return lambda **keys: built(directory, **keys)


@pytest.fixture(scope="session")
def still(directory):
    """One policy of each family, for tests that leave it as it is."""
    return built(directory)


def built(directory, **keys):
    """A small policy, its adapters away from zero so that they matter."""
    moved = keys.pop("moved", True)
    policy = VLMPolicy.from_config(ModelConfig(**{"name": str(directory), "lora_rank": 4, "history": 2} | keys))
    if moved:
        move(policy)
        policy.publish(policy.version)
    return policy


def move(policy, seed=0, by=0.05):
    """What an optimiser does: other weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * by)


def conversation(number, turns, *, past=None):
    """The `number`th conversation after so many turns; pictures of three sizes."""
    behind = [
        PastTurn(Picture(toy.screenshot(100 * number + i), SIZES[(i + number) % 3]), [30 + i, 50 + number, 2], f"{i}")
        for i in range(turns)
    ]
    now = Picture(toy.screenshot(100 * number + turns), SIZES[(turns + number) % 3])
    return Conversation("You are a helpful assistant.", f"press button {number}", past or behind, now)


def requests(policy, count=6):
    """Prompts of different lengths with one to three pictures, some with turns that have left the window."""
    return [SampleRequest(policy.prompt(conversation(n, n % 5)), seed=n) for n in range(count)]


def turns_of(asked, answers, temperature=1.0):
    return [
        turn_input(request.prompt, answer, temperature=temperature)
        for request, answer in zip(asked, answers, strict=True)
    ]


def changed(one, *, temperature=None, **facts):
    """The same turn with other facts; of other tokens, log-probabilities and versions mean nothing."""
    if "token_ids" in facts:
        count = len(facts["token_ids"])
        facts |= {"log_probs": [-1.0] * count, "versions": [0] * count}
    heat = one.temperature if temperature is None else temperature
    return replace(one, turn=replace(one.turn, **facts), temperature=heat)


def pixels_and_grid(policy, pictures):
    """The pictures as the library's own image processor gives them to a model."""
    images = [Image.open(io.BytesIO(picture.data)).convert("RGB") for picture in pictures]
    resized = [
        image.resize(picture.size, Image.Resampling.BICUBIC) for image, picture in zip(images, pictures, strict=True)
    ]
    return dict(policy.prompts.preprocessor.image_processor(images=resized, do_resize=False, return_tensors="pt"))


def by_turn(scored):
    """The log-probabilities of each turn, without padding."""
    return [row[mask] for row, mask in zip(scored.log_probs, scored.mask, strict=True)]
