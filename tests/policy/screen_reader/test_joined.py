"""A pretrained language model, here a tiny random one, joined to the vision tower: words, places, training, policy."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from palaestra.errors import ConfigError
from palaestra.policy.codecs import CODECS, IMAGE_RULES, DecodedAction
from palaestra.policy.screen_reader.image_processor import PictureReader
from palaestra.policy.screen_reader.joined.language_model import (
    NAME,
    NAMED_CLICK,
    extend_tokenizer,
    join_language_model,
    load_language_model,
)
from palaestra.policy.screen_reader.joined.page_examples import PageExampleBuilder, collate_pages
from palaestra.policy.screen_reader.joined.training import (
    JoinRecipe,
    JointTrainer,
    draw_page_batches,
    train_on_batches,
    write_joined_reader,
)
from palaestra.policy.screen_reader.language_pretraining import LanguagePage
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.recipe import TrainedReader
from palaestra.policy.screen_reader.segments import SegmentTokenizer
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Detections, read_in_order
from palaestra.policy.screen_reader.tokenizer import END_CLICK, TYPE
from palaestra.policy.screen_reader.tower import CHAR_CLASSES, WIDGET_KINDS, Tower
from palaestra.policy.vlm import Conversation, ModelConfig, Picture, SampleRequest, VLMPolicy, turn_input
from palaestra.sessions.action import Click
from palaestra.sessions.screen import Size

SIZE = (160, 210)
FORM = (Path(__file__).parent / "form.png").read_bytes()
BLACK, BLUE = (0.7, 0.7, 0.7), (0.6, 0.6, 0.95)


def write_language_model(path, *, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), tied=True):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    words = ["click on the Submit button and press enter name into form Cancel Login", "user assistant"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(words, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[-1], pad_token=special[0])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def base(language):
    return load_language_model(language)[1]


@pytest.fixture(scope="module")
def tokenizer(base):
    return extend_tokenizer(base)


def join(language, tokenizer):
    model, base = load_language_model(language)
    return join_language_model(model, base, tokenizer, seed=0)


def text(left, top, written, colour=BLACK):
    """Characters of 6 x 10 pixels."""
    return [
        (CHAR_CLASSES[char], (left + 6 * place, top, 6, 10), colour)
        for place, char in enumerate(written)
        if char != " "
    ]


def widget(kind, *box, on=False):
    return [(FIRST_WIDGET + 2 * WIDGET_KINDS[kind] + on, box, BLACK)]


def detections(*groups):
    items = [item for group in groups for item in group]
    return Detections(
        np.array([symbol for symbol, _, _ in items], np.int64),
        np.array([box for _, box, _ in items], np.float32).reshape(-1, 4),
        np.array([colour for _, _, colour in items], np.float32).reshape(-1, 3),
    )


def split(tokenizer, *groups):
    return SegmentTokenizer(tokenizer).split(read_in_order(detections(*groups)), SIZE)


PAGE = (
    text(10, 20, "Name:"),
    widget("field", 60, 18, 80, 14),
    widget("button", 10, 60, 60, 20),
    text(20, 65, "Submit"),
    widget("button", 80, 60, 60, 20),
    text(90, 65, "Cancel"),
)


def test_a_screen_is_written_in_words_with_the_place_of_each_segment_behind_it(tokenizer):
    """The button from (10, 60) of 60 x 20 pixels has its middle at (40, 70): 250 and 333 thousandths of 160 x 210."""
    screen = split(tokenizer, *PAGE)
    assert tokenizer.decode(screen.tokens.ids) == (
        " Name:[155, 115]<|field|>[625, 115]<|button|> Submit[255, 335]<|button|> Cancel[685, 335]"
    )
    assert [segment.text for segment in screen.segments] == ["Name:", "", "Submit", "Cancel"]


def test_a_link_in_a_sentence_is_a_segment_by_its_colour_and_a_caption_stands_beside_its_check_box(tokenizer):
    line = (*text(0, 10, "see"), *text(24, 10, "more", BLUE), *text(54, 10, "now"))
    box = (*widget("checkbox", 0, 40, 12, 12, on=True), *text(16, 41, "ab cd"))
    assert [segment.text for segment in split(tokenizer, line, box).segments] == ["see", "more", "now", "ab cd"]
    assert tokenizer.decode(split(tokenizer, box).tokens.ids) == "<|checkbox*|> ab cd[35, 215]"


def test_what_stands_on_a_screen_is_no_control_token_and_an_empty_screen_is_one_token(tokenizer):
    screen = split(tokenizer, text(0, 0, "<|im_end|>"))
    assert screen.segments[0].text == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in screen.tokens.ids
    assert tokenizer.decode(split(tokenizer).tokens.ids) == "<|blank|>"


def test_own_tokens_keep_their_ids_and_a_click_is_five_tokens_beside_its_name(base, tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert all(vocabulary[token] == place for token, place in base.get_vocab().items())
    reply = f"{NAME} Submit{NAMED_CLICK}[255, 335]{END_CLICK}"
    assert len(tokenizer(reply)["input_ids"]) - len(base(" Submit")["input_ids"]) == 5
    decoded = CODECS["qwen3-vl"].decode(reply, IMAGE_RULES["unscaled"].frame(Size(*SIZE)))
    assert isinstance(decoded, DecodedAction)
    assert isinstance(decoded.action, Click)
    assert (decoded.action.at.x, decoded.action.at.y) == (40, 70)


@pytest.mark.parametrize("tied", [True, False])
def test_text_has_the_logits_of_the_language_model_before_training(tmp_path, tied):
    path = write_language_model(tmp_path / "language", tied=tied)
    model, base = load_language_model(path)
    joined = join_language_model(model, base, extend_tokenizer(base), seed=0)
    ids = torch.tensor([base("click on the Submit button")["input_ids"]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path)(ids).logits
        torch.testing.assert_close(joined(ids).logits[..., : len(base)], expected)
    assert (joined.lm_head.weight is joined.get_input_embeddings().weight) is tied


def test_a_model_without_the_chat_format_and_a_directory_without_a_model_are_refused(tmp_path):
    path = write_language_model(tmp_path / "plain", special=("<pad>", "<end>"))
    with pytest.raises(ConfigError, match=r"has no token <\|im_start\|>.*ChatML"):
        load_language_model(path)
    with pytest.raises(ConfigError, match=r"cannot be loaded.*GGUF"):
        load_language_model(tmp_path)


def page(*goals):
    places = {"submit": (10.0, 60.0, 60.0, 20.0), "field": (60.0, 18.0, 80.0, 14.0)}
    return LanguagePage(SIZE, goals, detections(*PAGE), places, is_exact=False)


def build(tokenizer, *goals):
    one = page(*goals)
    builder = PageExampleBuilder(tokenizer)
    return builder.build(one.goals, read_in_order(one.detections), one.places, SIZE, random.Random(0))


def test_a_click_names_its_target_and_an_empty_field_by_the_text_before_it(tokenizer):
    example = build(tokenizer, Goal("Click Submit.", "submit"), Goal("Enter a name.", "field"), Goal("x", text="zzz"))
    first, second, *plain = (tokenizer.decode(branch.reply) for branch in example.branches)
    assert first.startswith(f"{NAME}<|button|> Submit\n<tool_call>")
    assert "[255, 335]" in first
    assert second.startswith(f"{NAME} Name:<|field|>\n<tool_call>")
    assert len(plain) == 3, "the text that is nowhere is left out, and three plain goals are added"


def test_instructions_about_one_screen_do_not_see_each_other(language, tokenizer):
    model = join(language, tokenizer)
    trainer = JointTrainer(model, len(load_language_model(language)[1]), rank=2, learning_rate=1e-3, steps=1)
    example = build(tokenizer, Goal("Click Submit.", "submit"), Goal('Type "Name".', text="Name"))
    whole, _ = trainer.loss(collate_pages([example], tokenizer.pad_token_id))
    parts = []
    for branch in example.branches:
        alone = type(example)(example.prefix, example.screen_start, example.rows, [branch])
        loss, _ = trainer.loss(collate_pages([alone], tokenizer.pad_token_id))
        parts += [loss.detach()] * len(branch.reply)
    torch.testing.assert_close(whole.detach(), torch.stack(parts).mean(), rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def trained(language, tokenizer, tmp_path_factory):
    """A model directory after 50 steps on one page, the losses, and the embeddings before."""
    model = join(language, tokenizer)
    before = model.get_input_embeddings().weight.clone()
    recipe = JoinRecipe(steps=50, rank=4, tokens=400, learning_rate=1e-2)
    pages = page(Goal("Click Submit.", "submit"), Goal('Type "Name".', text="Name"))
    builder = PageExampleBuilder(tokenizer)
    batches = draw_page_batches(builder, iter([[pages]] * recipe.steps), tokens=recipe.tokens, seed=0)
    first, lines = len(load_language_model(language)[1]), []
    model, figures = train_on_batches(model, tokenizer, batches, recipe, first=first, log=lines.append)
    tower = Tower()
    path = tmp_path_factory.mktemp("joined") / "model"
    reader = TrainedReader(model, tokenizer, tower, {"acting": figures})
    manifest = write_joined_reader(reader, language, recipe, path)
    return path, manifest, lines, before[:first]


def test_50_steps_on_one_page_learn_its_replies_and_leave_the_words_as_they_were(trained):
    path, manifest, lines, before = trained
    assert len(lines) == 3
    assert manifest["figures"]["acting"]["loss"] < 4, "a uniform guess over 570 tokens is 6.3"
    assert manifest["figures"]["acting"]["action"] > 0.5
    weights = VLMPolicy.from_config(ModelConfig(name=str(path))).loaded.model.get_input_embeddings().weight
    torch.testing.assert_close(weights[: len(before)], before, rtol=1e-3, atol=1e-3)


def test_it_is_a_policy_whose_sampled_and_scored_probabilities_agree_and_whose_prompt_is_that_of_training(
    trained, tokenizer, monkeypatch
):
    sequence = read_in_order(detections(*PAGE))
    monkeypatch.setattr(PictureReader, "read", lambda self, image: sequence)
    config = ModelConfig(name=str(trained[0]), lora_rank=2, history=0, max_new_tokens=12)
    policy = VLMPolicy.from_config(config)
    assert policy.grammar.codec.name == "qwen3-vl"
    prompt = policy.prompt(Conversation("left out", "Click Submit.", (), Picture(FORM, SIZE)))
    example = build(tokenizer, Goal("Click Submit.", "submit"))
    screen = len(example.rows)
    expected = [*example.prefix, *example.branches[0].prompt]
    start, image = example.screen_start, policy.learner.image_token
    assert prompt.ids.tolist() == [*expected[:start], *[image] * screen, *expected[start + screen :]]
    completions = policy.sample([SampleRequest(prompt, seed) for seed in range(3)], temperature=1.0)
    turns = [turn_input(prompt, completion) for completion in completions]
    scored = policy.log_probs(turns, grad=False)
    sampled = np.concatenate([completion.log_probs for completion in completions])
    np.testing.assert_allclose(scored.log_probs[scored.mask].numpy(), sampled, atol=1e-4)
    assert sum(policy.trainable_parts().values()) > 0


def test_pages_are_batched_up_to_so_many_tokens(tokenizer):
    one = page(Goal("Click Submit.", "submit"))
    builder = PageExampleBuilder(tokenizer)
    length = len(build(tokenizer, Goal("Click Submit.", "submit")))
    batches = list(draw_page_batches(builder, iter([[one] * 7]), tokens=3 * length + 40, seed=0))
    assert sorted(len(batch) for batch in batches) == [1, 3, 3]
    assert tokenizer.convert_ids_to_tokens(batches[0][0].branches[0].reply[0]) in (NAME, TYPE)


def test_a_recipe_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"recipe\.steps.*at least 1"):
        JoinRecipe(steps=0)
