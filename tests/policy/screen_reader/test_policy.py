"""The shipped reading model as a policy: its pictures are as long as what is on them."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from palaestra.policy.codecs import CODECS, IMAGE_RULES, DecodedAction
from palaestra.policy.model_directory import read_manifest
from palaestra.policy.screen_reader import image_processor
from palaestra.policy.screen_reader.pages.words import pseudo_word
from palaestra.policy.screen_reader.recipe import SHIPPED
from palaestra.policy.screen_reader.screen_tokens import ROW_FEATURES
from palaestra.policy.screen_reader.tokenizer import BLANK
from palaestra.policy.vlm import Conversation, ModelConfig, Picture, SampleRequest, VLMPolicy, turn_input
from palaestra.sessions.action import Click, TypeText
from palaestra.sessions.screen import Size

SIZE = (160, 210)
FORM, FOCUSED_FORM, VALUES = (
    (Path(__file__).parent / name).read_bytes() for name in ("form.png", "focused_form.png", "labelled_values.png")
)
FRAME = IMAGE_RULES["unscaled"].frame(Size(*SIZE))


@pytest.fixture(scope="module")
def policy():
    return VLMPolicy.from_config(ModelConfig(name="tiny-reader", lora_rank=4, history=0, max_new_tokens=40))


def ask(policy, instruction, data=FORM, size=SIZE):
    return policy.prompt(Conversation("", instruction, (), Picture(data, size)))


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def picture_tokens(policy, prompt):
    return int((prompt.ids == policy.learner.image_token).sum())


def test_its_files_are_unchanged_and_small():
    manifest = read_manifest(SHIPPED)
    assert manifest["parameters"] == 4_970_866
    assert set(manifest["figures"]) == {"seeing", "acting"}
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 11_000_000


def test_a_picture_has_as_many_tokens_as_its_words_and_widgets(policy):
    with Image.open(io.BytesIO(FORM)) as image:
        reader = policy.loaded.image_processor
        tokens = reader.screen_tokenizer.tokenize(reader.read(image))
    prompt = ask(policy, "Click Submit.")
    assert picture_tokens(policy, prompt) == len(tokens) == 28
    # The start of the turn, its role, two words, a space and a full stop, the picture, and the frame of the reply.
    assert len(prompt.ids) == 2 + 4 + 1 + 28 + 1 + 4


def test_an_empty_screen_is_one_blank_token(policy):
    for colour in (0, 255):
        data = png(np.full((210, 160, 3), colour, np.uint8))
        assert picture_tokens(policy, ask(policy, "Click.", data)) == 1
        rows = policy.prompts.preprocessor.patches(Picture(data, SIZE))
        blank = policy.loaded.tokenizer.convert_tokens_to_ids(BLANK)
        assert rows.tolist() == [[blank, *[0] * (ROW_FEATURES - 5), 1, 1, 0, 0]]


def test_a_screen_with_too_many_tokens_is_cut(policy, monkeypatch):
    monkeypatch.setattr(image_processor, "MAX_TOKENS", 20)
    with Image.open(io.BytesIO(FORM)) as image:
        (cut,) = policy.loaded.image_processor(images=[image]).values()
        monkeypatch.undo()
        (whole,) = policy.loaded.image_processor(images=[image]).values()
    assert image_processor.MAX_TOKENS == 1500
    assert len(cut) == 20
    assert torch.equal(cut, whole[:20])


def test_a_picture_is_read_once(policy, monkeypatch):
    calls = []
    read = image_processor.PictureReader.read
    monkeypatch.setattr(
        image_processor.PictureReader, "read", lambda self, image: calls.append(image.size) or read(self, image)
    )
    with Image.open(io.BytesIO(FORM)) as image:
        data = png(np.asarray(image.convert("RGB"))[:, ::-1].copy())
    first = ask(policy, "Click.", data)
    answers = policy.sample([SampleRequest(first, 0), SampleRequest(ask(policy, "Press Tab.", data), 1)])
    policy.log_probs([turn_input(first, answers[0])], grad=False)
    assert calls == [SIZE]


def act(policy, instruction, data):
    (reply,) = policy.sample([SampleRequest(ask(policy, instruction, data), 0)], temperature=0.0)
    decoded = CODECS["qwen3-vl"].decode(reply.text, FRAME)
    assert isinstance(decoded, DecodedAction)
    return decoded.action


def test_it_clicks_a_button_by_its_caption(policy):
    click = act(policy, 'Click on the "Submit" button.', FORM)
    assert isinstance(click, Click)
    # The browser reports a button of 63 x 21 pixels at (4, 135).
    assert 4 <= click.at.x <= 67
    assert 135 <= click.at.y <= 156


def test_it_types_nearly_all_words_that_an_instruction_quotes_where_a_field_has_the_focus(policy):
    rng = random.Random(0)
    words = [pseudo_word(rng).capitalize() for _ in range(40)]
    prompts = [ask(policy, f'Enter "{word}" into the text field and press Submit.', FOCUSED_FORM) for word in words]
    replies = policy.sample([SampleRequest(prompt, 0) for prompt in prompts], temperature=0.0)
    actions = [CODECS["qwen3-vl"].decode(reply.text, FRAME) for reply in replies]
    right = [
        isinstance(one, DecodedAction) and one.action == TypeText(word)
        for one, word in zip(actions, words, strict=True)
    ]
    assert sum(right) >= 36


@pytest.mark.parametrize(
    ("label", "value"), [("name", "Bafuke"), ("code", "48213"), ("city", "Tresi"), ("room", "907")]
)
def test_of_four_labelled_values_it_types_the_one_that_is_asked_for(policy, label, value):
    assert act(policy, f"Type the {label} into the field and press Submit.", VALUES) == TypeText(value)


def test_scores_are_the_samplers(policy):
    asked = ['Enter "Kolumbet" into the text field and press Submit.', "Click zarqu7.", "Click Fro 42."]
    requests = [SampleRequest(ask(policy, text), seed) for seed, text in enumerate(asked)]
    requests.append(SampleRequest(ask(policy, "Click.", png(np.full((210, 160, 3), 255, np.uint8))), 9))
    replies = policy.sample(requests, temperature=1.0)
    turns = [turn_input(request.prompt, reply) for request, reply in zip(requests, replies, strict=True)]
    scores = policy.log_probs(turns, grad=False)
    for row, mask, reply in zip(scores.log_probs, scores.mask, replies, strict=True):
        np.testing.assert_allclose(row[mask.bool()].numpy(), reply.log_probs, atol=1e-4)


def test_adapters_are_on_language_layers_only_and_the_tower_is_no_part_of_the_model(policy):
    trainable = [name for name, weight in policy.learner.model.named_parameters() if weight.requires_grad]
    assert len(trainable) == 4 * 7 * 2, "four layers of seven projections, two matrices each"
    assert all(".language_model.layers." in name and "lora_" in name for name in trainable)
    assert not any(weight.requires_grad for weight in policy.loaded.image_processor.tower.parameters())


def test_its_request_is_the_instruction_alone_unless_configured(policy):
    assert policy.config.request is None
    assert policy.prompts.request == "{instruction}"


def test_a_model_directory_is_loaded_as_the_built_in_model_is(policy):
    other = VLMPolicy.from_config(ModelConfig(name=str(SHIPPED), lora_rank=4, history=0, max_new_tokens=40))
    requests = [SampleRequest(ask(policy, "Click Submit."), 3)]
    assert list(other.sample(requests)[0].token_ids) == list(policy.sample(requests)[0].token_ids)
