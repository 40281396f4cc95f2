"""The model that comes with the package: whole, small, loadable by transformers alone, and able to answer."""

import io
import random

import pytest
import torch

from palaestra.policy.codecs import CODECS, IMAGE_RULES, DecodedAction
from palaestra.policy.model_directory import read_manifest
from palaestra.policy.tiny_vlm import SHIPPED
from palaestra.policy.tiny_vlm.screen_dataset import write_instruction
from palaestra.policy.tiny_vlm.screens import HEIGHT, WIDTH, draw_instruction_bar, draw_screen
from palaestra.policy.vlm import Conversation, ModelConfig, PastTurn, Picture, SampleRequest, VLMPolicy
from palaestra.sessions.action import Click
from palaestra.sessions.screen import Size

FRAME = IMAGE_RULES["tiny"].frame(Size(WIDTH, HEIGHT))
SIZE = (FRAME.image.width, FRAME.image.height)
CODEC = CODECS["qwen3-vl"]


@pytest.fixture(scope="module")
def policy():
    return VLMPolicy.from_config(ModelConfig(name="tiny", lora_rank=4, history=0, max_new_tokens=32))


def screens(count, seed=987_654):
    """Screens nobody has seen, each with an instruction."""
    rng = random.Random(seed)
    for _ in range(count):
        screen = draw_screen(rng)
        asked = write_instruction(screen, rng)
        if screen.has_bar:
            draw_instruction_bar(screen, asked.text, rng)
        file = io.BytesIO()
        screen.image.save(file, "PNG")
        yield Picture(file.getvalue(), SIZE), asked


def test_its_files_are_what_they_were_made_as():
    manifest = read_manifest(SHIPPED)
    assert 1_000_000 <= manifest["parameters"] <= 5_000_000
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 6_000_000


def test_transformers_loads_it_without_palaestra():
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model, report = AutoModelForImageTextToText.from_pretrained(SHIPPED, output_loading_info=True)
    assert not report["missing_keys"]
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert AutoTokenizer.from_pretrained(SHIPPED).chat_template
    assert AutoImageProcessor.from_pretrained(SHIPPED, backend="pil").patch_size == 8


def test_it_answers_in_the_grammar_and_mostly_clicks_what_it_is_asked_to(policy):
    asked = list(screens(100))
    prompts = [policy.prompt(Conversation("", one.text, (), picture)) for picture, one in asked]
    for temperature, readable, on_target in ((1.0, 98, 20), (0.0, 100, 45)):
        answers = policy.sample([SampleRequest(prompt, n) for n, prompt in enumerate(prompts)], temperature=temperature)
        read = [CODEC.decode(answer.text, FRAME) for answer in answers]
        assert sum(isinstance(one, DecodedAction) for one in read) >= readable
        hits = 0
        for one, (_, question) in zip(read, asked, strict=True):
            if isinstance(one, DecodedAction) and isinstance(one.action, Click):
                left, top, right, bottom = question.widget.box
                hits += left <= one.action.at.x <= right and top <= one.action.at.y <= bottom
        assert hits >= on_target


def test_a_click_is_six_tokens_and_a_question_about_a_hundred_and_fifty(policy):
    picture, _ = next(iter(screens(1)))
    prompt = policy.prompt(Conversation("told what a tool is", 'Click the button "apple".', (), picture))
    assert len(prompt.ids) == 134 + 18
    answer = policy.sample([SampleRequest(prompt, 0)], temperature=0.0)[0]
    assert len(answer.token_ids) == 6
    assert answer.ended


def test_it_answers_later_in_an_episode_too(policy):
    (first, asked), *_ = screens(1)
    said = policy.sample([SampleRequest(policy.prompt(Conversation("", asked.text, (), first)), 0)])[0]
    past = tuple(PastTurn(first, said.token_ids, said.text) for _ in range(3))
    prompt = policy.prompt(Conversation("", asked.text, past, first))
    answers = policy.sample([SampleRequest(prompt, seed) for seed in range(50)])
    assert sum(isinstance(CODEC.decode(answer.text, FRAME), DecodedAction) for answer in answers) >= 48


def test_its_adapters_learn_a_click(policy):
    from dataclasses import replace

    from palaestra.policy.vlm import turn_input

    picture, asked = next(iter(screens(1)))
    prompt = policy.prompt(Conversation("", asked.text, (), picture))
    text = CODEC.encode(Click(asked.widget and _middle(asked.widget)), FRAME)
    ids = [*policy.loaded.tokenizer(text, add_special_tokens=False)["input_ids"], policy.loaded.tokenizer.eos_token_id]
    (said,) = policy.sample([SampleRequest(prompt, 0)])
    unknown = {"log_probs": [0.0] * len(ids), "versions": [0] * len(ids)}
    turn = turn_input(prompt, replace(said, token_ids=ids, **unknown))
    optimizer = torch.optim.Adam(policy.trainable_parameters(), 1e-2)
    before = float(policy.log_probs([turn], grad=False).log_probs.sum())
    for _ in range(10):
        optimizer.zero_grad()
        (-policy.log_probs([turn]).log_probs.sum()).backward()
        optimizer.step()
    assert float(policy.log_probs([turn], grad=False).log_probs.sum()) > before + 2


def _middle(widget):
    from palaestra.sessions.action import Point

    x, y = widget.centre
    return Point(int(x), int(y))
