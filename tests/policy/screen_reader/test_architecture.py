"""The model before training: heads that attend back and copy, and weights that survive saving and loading."""

import pytest
import torch

from palaestra.policy.screen_reader.architecture import COPY_HEAD, X_HEAD, Y_HEAD, _token_codes, build_model
from palaestra.policy.screen_reader.modeling import FREQUENCIES, PLACE_CODE, fourier_features, register_model
from palaestra.policy.screen_reader.screen_tokens import ROW_FEATURES
from palaestra.policy.screen_reader.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return build_model(tokenizer, seed=0).eval()


def attention(model, tokenizer, text):
    """Attention weights [layer][head, query, key] of a text."""
    model.model.language_model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.model(torch.tensor([tokenizer(text)["input_ids"]]), output_attentions=True)
    model.model.language_model.set_attn_implementation("sdpa")
    return [weights[0] for weights in out.attentions]


def prompt(model, tokenizer, rows):
    ids = tokenizer("<|im_start|>user\nClick.<|vision_start|>")["input_ids"]
    ids += [model.config.image_token_id] * len(rows)
    return torch.tensor([ids]), torch.tensor([[1, len(rows), 1]])


def rows_of(count):
    rows = torch.rand(count, ROW_FEATURES, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = 300 + torch.arange(count)
    return rows


def test_two_heads_of_the_first_layer_attend_one_and_two_tokens_back(model, tokenizer):
    weights = attention(model, tokenizer, 'Enter the name "kolumbet" and press Submit.')[0]
    count = weights.shape[-1]
    assert weights[0, 1:].argmax(-1).tolist() == list(range(count - 1))
    assert weights[1, 2:].argmax(-1).tolist() == list(range(count - 2))
    assert weights[0].diagonal(-1).min() > 0.9


def test_the_copying_head_prefers_the_token_after_the_same_two_tokens(model, tokenizer):
    """Most of the time more than any other token, and on average more than twice its share."""
    start, between = tokenizer("Type ")["input_ids"], tokenizer(" into the field: ")["input_ids"]
    most, shares = [], []
    for word in ("bafukedo", "zarqu7", "first.ruiz47", "kolumbet", "tresi.vadu12"):
        pieces = tokenizer(word)["input_ids"]
        for written in range(2, len(pieces)):
            text = tokenizer.decode([*start, *pieces, *between, *pieces[:written]])
            weights = attention(model, tokenizer, text)[-1][COPY_HEAD[1], -1]
            most.append(int(weights.argmax()) == len(start) + written)
            shares.append(float(weights[len(start) + written]) * len(weights))
    assert sum(most) > len(most) / 2
    assert sum(shares) / len(shares) > 2


def test_a_head_of_the_second_layer_attends_from_a_value_to_its_label_in_the_instruction(model, tokenizer):
    """The second head compares the token before with the tokens of the text: `12` follows `Code`."""
    ids = tokenizer("Type the code into the field. NameBaCode12")["input_ids"]
    names = tokenizer.convert_ids_to_tokens(ids)
    weights = attention(model, tokenizer, tokenizer.decode(ids))[1][1, names.index("12")]
    assert names[int(weights[: names.index("Name")].argmax())] == "code"


def test_the_coordinate_heads_copy_the_place_of_what_they_attend_to(model):
    """Their output is 1.5 times the code of x, or of y, in the features from which coordinates are predicted."""
    layer = model.model.language_model.layers[-1].self_attn
    features = torch.zeros(256)
    features[: 2 * PLACE_CODE] = torch.arange(2.0 * PLACE_CODE)
    for _, head in (X_HEAD, Y_HEAD):
        own = slice(32 * head, 32 * head + 32)
        copied = layer.o_proj.weight[:, own] @ (layer.v_proj.weight[own] @ features)
        wanted = torch.zeros(256)
        wanted[160:176] = 1.5 * features[PLACE_CODE * head : PLACE_CODE * (head + 1)]
        torch.testing.assert_close(copied, wanted)


def test_codes_of_places_have_mean_square_1_and_differ_more_the_further_apart_they_are():
    codes = fourier_features(torch.tensor([0.0, 0.01, 0.05]), FREQUENCIES)
    assert codes.shape == (3, PLACE_CODE)
    torch.testing.assert_close(codes.square().mean(1), torch.ones(3))
    near, far = (codes[0] - codes[1]).norm(), (codes[0] - codes[2]).norm()
    assert 0 < near < far


def test_it_has_4_5_million_weights_and_the_same_seed_gives_the_same(model, tokenizer):
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e6, 1) == 4.5
    again, other = build_model(tokenizer, seed=0), build_model(tokenizer, seed=1)
    weights, others = dict(again.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    assert not torch.equal(model.lm_head.weight, others["lm_head.weight"])


def test_codes_are_the_same_in_every_process(tokenizer):
    """The order of a set of strings is not, and another order gives another model from the same seed."""
    codes = []
    for _ in range(2):
        torch.manual_seed(0)
        codes.append(_token_codes(tokenizer))
    assert list(codes[0]) == sorted(codes[0])
    assert all(torch.equal(codes[0][token], codes[1][token]) for token in codes[0])


def test_cases_of_a_word_have_similar_codes_and_other_words_do_not(tokenizer):
    torch.manual_seed(0)
    codes = _token_codes(tokenizer)
    lower, upper, other = (codes[tokenizer(word)["input_ids"][0]] for word in ("code", "Code", "name"))
    assert torch.cosine_similarity(lower, upper, 0) > 0.5 > torch.cosine_similarity(lower, other, 0)


def test_saved_and_loaded_it_gives_the_same_logits(model, tokenizer, tmp_path):
    from transformers import AutoModelForImageTextToText

    register_model()
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert type(loaded) is type(model)
    rows = rows_of(40)
    ids, grid = prompt(model, tokenizer, rows)
    with torch.no_grad():
        wanted = model(ids, pixel_values=rows, image_grid_thw=grid).logits
        logits = loaded.eval()(ids, pixel_values=rows, image_grid_thw=grid).logits
    assert torch.equal(logits, wanted)


def test_it_has_no_buffers_that_are_not_saved_besides_those_of_the_language_model(model):
    """`from_pretrained` leaves such buffers undefined."""
    saved = model.state_dict()
    assert {name.split(".")[1] for name, _ in model.named_buffers() if name not in saved} <= {"language_model"}


def test_screens_may_come_embedded_and_pictures_in_one_batch_keep_their_own(model, tokenizer):
    rows = rows_of(12)
    ids, _ = prompt(model, tokenizer, rows)
    with torch.no_grad():
        whole = model(ids, pixel_values=rows, image_grid_thw=torch.tensor([[1, 12, 1]])).logits
        parts = model.model.get_image_features(rows, torch.tensor([[1, 5, 1], [1, 7, 1]]))
        assert [len(part) for part in parts.pooler_output] == [5, 7]
        embedded = model(ids, mm_encoder_outputs={"image": parts}).logits
    torch.testing.assert_close(embedded, whole)
