"""A sampler in a process of its own: a child that dies is replaced, and shares with the learner what it reads."""

import io
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image

from palaestra.errors import CollectorFailed
from palaestra.policy.vlm import ModelConfig, VLMPolicy
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Conversation
from palaestra.policy.vlm.sampler import ProcessSampler, ReplyRequest

CONFIG = ModelConfig(name="tiny", max_new_tokens=6, history=0, lora_rank=4)


def question(seed=5):
    written = io.BytesIO()
    Image.new("RGB", (32, 32), "white").save(written, "PNG")
    return ReplyRequest(Conversation("", "Click the square.", (), Picture(written.getvalue(), (32, 32))), seed)


def said(answers):
    return [
        (one.completion.token_ids.tolist(), one.completion.versions.tolist(), one.completion.fingerprint)
        for one in answers
    ]


def test_a_sampler_that_is_killed_is_replaced_and_answers_the_same_with_the_newest_weights():
    policy = VLMPolicy.from_config(CONFIG, seed=1)
    sampler = ProcessSampler(CONFIG, seed=1, threads=1)
    try:
        policy.publish(3)
        sampler.publish(3, policy.trainable_state())
        before = said(sampler.sample([question()], temperature=1.0))
        first = sampler.pid
        os.kill(first, signal.SIGKILL)
        after = said(sampler.sample([question()], temperature=1.0))
        assert after == before
        assert after[0][1][0] == 3
        assert after[0][2] == policy.fingerprint
        assert sampler.pid != first
        assert sampler.failures == [sampler.failures[0]]
        assert "ended with status -9" in sampler.failures[0]
    finally:
        sampler.close()


READER = ModelConfig(name="tiny-reader", max_new_tokens=6, history=0, lora_rank=4)
FORM = Path(__file__).parents[1] / "screen_reader" / "form.png"


def test_the_learner_reads_no_picture_that_the_child_has_read():
    picture = Picture(FORM.read_bytes(), (160, 210))
    request = ReplyRequest(Conversation("", "Press Submit.", (), picture), 5)
    policy = VLMPolicy.from_config(READER, seed=1)
    own = policy.preprocessor.image_processor(images=[policy.preprocessor.resize(picture)])["pixel_values"]
    policy.preprocessor.image_processor = None  # reading again would fail
    sampler = ProcessSampler(READER, seed=1, threads=1, preprocessor=policy.preprocessor)
    try:
        for _ in range(2):
            (reply,) = sampler.sample([request], temperature=1.0)
    finally:
        sampler.close()
    assert torch.equal(policy.preprocessor.patches(picture), own)
    assert policy.prompt(request.conversation).ids.tolist() == reply.prompt.ids.tolist()


def test_pictures_that_are_cached_are_not_read_again():
    policy = VLMPolicy.from_config(READER, seed=1)
    picture = Picture(FORM.read_bytes(), (160, 210))
    assert list(policy.preprocessor.read_new([picture, picture])) == [picture.key]
    assert policy.preprocessor.read_new([picture]) == {}


def test_patches_of_models_that_do_not_read_are_not_shared():
    policy = VLMPolicy.from_config(CONFIG, seed=1)
    assert policy.preprocessor.read_new([question().conversation.now]) == {}


def die(pipe, config, seed, threads):
    os._exit(7)


class DyingSampler(ProcessSampler):
    _main = staticmethod(die)


def test_a_sampler_that_dies_every_time_ends_with_its_status_after_the_allowed_restarts():
    sampler = DyingSampler(CONFIG, seed=1, threads=1, restarts=1)
    try:
        with pytest.raises(CollectorFailed, match=r"ended with status 7 .*after 1 of at most 1 restarts in a row"):
            sampler.sample([question()], temperature=1.0)
        assert len(sampler.failures) == 1
    finally:
        sampler.close()
