"""Examples of the language stage: prompts as the policy writes them, and labels that point to the right tokens."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from palaestra.errors import ConfigError
from palaestra.policy.screen_reader.architecture import COPY_HEAD, FOCUS_HEAD, START_HEAD, X_HEAD, Y_HEAD
from palaestra.policy.screen_reader.examples import AttentionLabel, ExampleBuilder, collate, jitter
from palaestra.policy.screen_reader.language_pretraining import LanguagePage, draw_batches
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.screen_tokens import ROW_FEATURES, ScreenTokenizer
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Detections, SymbolSequence, read_in_order
from palaestra.policy.screen_reader.tokenizer import build_tokenizer, coordinate_ids, press_key
from palaestra.policy.screen_reader.tower import CHAR_CLASSES
from palaestra.policy.vlm import Conversation, Picture
from palaestra.policy.vlm.config import INSTRUCTION_ONLY
from palaestra.policy.vlm.picture import PicturePreprocessor
from palaestra.policy.vlm.prompt import PromptWriter

SIZE = (160, 210)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def builder(tokenizer):
    return ExampleBuilder(tokenizer, blur_px=3.0)


def screen(*lines):
    """Lines of text, 20 pixels apart, with characters 6 pixels wide."""
    items = [
        (CHAR_CLASSES[char], (10 + 6 * column, 20 * row, 6, 12))
        for row, line in enumerate(lines)
        for column, char in enumerate(line)
        if char != " "
    ]
    boxes = np.array([box for _, box in items], np.float32)
    return Detections(np.array([symbol for symbol, _ in items]), boxes, np.zeros((len(items), 3), np.float32))


def build(builder, goal, detections, places=None):
    return builder.build(goal, read_in_order(detections), places or {}, SIZE, random.Random(0))


class _Reader:
    """An image processor that reads the same number of tokens on every picture."""

    patch_size = merge_size = 1
    reads_pictures = True

    def __init__(self, count):
        self.count = count

    def __call__(self, **_):
        return {"pixel_values": torch.zeros(self.count, ROW_FEATURES)}


@pytest.mark.parametrize("instruction", ['Enter "kolu" and press OK.', "Copy name, city and 12/04/1999 into the form."])
def test_the_prompt_is_the_policys_id_by_id(tokenizer, builder, instruction):
    sequence = read_in_order(screen("kolu 12", "OK"))
    example = builder.build(Goal(instruction, keys=("Enter",)), sequence, {}, SIZE, random.Random(0))
    count = len(ScreenTokenizer(tokenizer).tokenize(sequence))
    preprocessor = PicturePreprocessor(_Reader(count), memory_bytes=2**20)
    preprocessor.resize = lambda picture: SimpleNamespace(size=picture.size)
    writer = PromptWriter(
        tokenizer,
        tokenizer.chat_template,
        preprocessor,
        image_token=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        history=0,
        request=INSTRUCTION_ONLY,
        name="tiny-reader",
    )
    prompt = writer.write(Conversation("left out", instruction, (), Picture(b"png", SIZE)))
    assert prompt.ids.tolist() == example.ids[: example.start]


def test_a_click_has_soft_labels_around_the_middle_and_attends_to_the_tokens_of_its_target(tokenizer, builder):
    """The box from (16, 20) of 12 x 12 pixels has its middle at (22, 26), and `ok` of the second line in it."""
    example = build(builder, Goal("Click ok.", "e1"), screen("abc", " ok"), {"e1": (16, 20, 12, 12)})
    (x, width), (y, height) = example.soft
    assert (x, y) == pytest.approx((22 * 999 / 160, 26 * 999 / 210))
    assert (width, height) == pytest.approx((12 / 5 * 999 / 160, 12 / 5 * 999 / 210))
    reply = example.ids[example.start :]
    columns, rows = coordinate_ids(tokenizer)
    assert abs(columns.index(reply[1]) - x) < 4 * width
    assert abs(rows.index(reply[2]) - y) < 4 * height
    assert len(reply) == 5
    # `ok` is the last token of the screen.
    assert tokenizer.convert_ids_to_tokens(int(example.rows[-1, 0])) == "ok"
    first = example.ids.index(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    wanted = (first + len(example.rows) - 1,)
    assert example.sources == (
        AttentionLabel(example.start + 1, X_HEAD, wanted),
        AttentionLabel(example.start + 2, Y_HEAD, wanted),
    )


def test_a_label_is_at_most_as_wide_as_the_blur_and_at_least_a_pixel(builder):
    wide = build(builder, Goal("Click.", "e1"), screen("abc"), {"e1": (0, 4, 100, 4)})
    assert [width for _, width in wide.soft] == pytest.approx([3 * 999 / 160, 1 * 999 / 210])


def test_a_target_without_tokens_gives_no_example(builder):
    assert build(builder, Goal("Click.", "e1"), screen("abc"), {"e1": (100, 150, 20, 20)}) is None


def test_typed_tokens_come_from_the_instruction_if_they_are_in_it(tokenizer, builder):
    example = build(builder, Goal('Enter "me 7" here.', text="me 7"), screen("me 7"))
    copied = [tokenizer.decode([example.ids[source.indices[0]]]) for source in example.sources]
    assert copied == ["me", " ", "7", '"']
    assert [source.column - example.start for source in example.sources] == [1, 2, 3, 4]
    assert [source.head for source in example.sources] == [START_HEAD, COPY_HEAD, COPY_HEAD, COPY_HEAD]


def test_else_they_come_from_the_last_place_on_the_screen_that_has_them_and_spaces_have_no_source(tokenizer, builder):
    example = build(builder, Goal("Copy the code.", text="me 7"), screen("me 7", "to", "me 7."))
    first = example.ids.index(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    places = [source.indices[0] - first for source in example.sources]
    names = tokenizer.convert_ids_to_tokens(example.rows[:, 0].astype(int).tolist())
    assert names == ["me", "7", "to", "me", "7", "."]
    assert places == [3, 4, 5]
    # The reply is the phrase, `me`, a space, `7` and the end of the text.
    assert [source.column - example.start for source in example.sources] == [1, 3, 4]


def test_a_head_is_pointed_to_the_focused_field_when_a_text_begins(tokenizer, builder):
    detections = screen("me 7")
    field = Detections(
        np.append(detections.symbols, FIRST_WIDGET + 1),
        np.append(detections.boxes, np.array([[10, 40, 80, 20]], np.float32), 0),
        np.zeros((4, 3), np.float32),
    )
    example = build(builder, Goal("Copy the code.", text="me"), field)
    first = example.ids.index(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    assert example.sources[-1] == AttentionLabel(example.start + 1, FOCUS_HEAD, (first + 2,))


def test_scrolling_down_is_a_negative_number_of_pixels(builder, tokenizer):
    example = build(builder, Goal("Scroll down.", scroll=100), screen("ko 7"))
    reply = tokenizer.decode(example.ids[example.start :])
    assert reply.endswith('{"action": "scroll", "pixels": -100}}\n</tool_call><|im_end|>')


def test_a_text_that_is_nowhere_gives_no_example(builder):
    assert build(builder, Goal("Copy the code.", text="zz"), screen("ko 7")) is None


def test_a_key_is_two_tokens(tokenizer, builder):
    example = build(builder, Goal("Press the Tab key.", keys=("Tab",)), screen("a"))
    assert tokenizer.decode(example.ids[example.start :]) == press_key("tab") + "<|im_end|>"
    assert len(example.ids) - example.start == 2


def test_a_batch_points_each_head_to_its_sources(tokenizer, builder):
    click = build(builder, Goal("Click ok.", "e1"), screen("ok"), {"e1": (10, 0, 12, 12)})
    text = build(builder, Goal('Type "me" now.', text="me"), screen("x"))
    batch = collate([click, text], tokenizer.pad_token_id)
    assert batch.mask.sum(1).tolist() == [len(click.ids), len(text.ids)]
    assert batch.counts == [1, 1]
    assert batch.labels.tolist() == click.ids[click.start :] + text.ids[text.start :]
    assert batch.attend_head == [X_HEAD, Y_HEAD, START_HEAD, COPY_HEAD]
    # Of the click's reply tokens 0 to 4 the coordinates are 1 and 2; of the text's, from 5 on, the first is the phrase.
    assert batch.soft_at.tolist() == [1, 2]
    assert batch.attend_at.tolist() == [1, 2, 6, 7]
    assert batch.soft.sum(1).tolist() == pytest.approx([1, 1])
    assert batch.soft[0].argmax().item() == round(16 * 999 / 160)
    for row, source in zip(batch.attend, [*click.sources, *text.sources], strict=True):
        assert row.nonzero().flatten().tolist() == list(source.indices)
    # Position p predicts token p + 1.
    assert batch.at[0].tolist() == [0, click.start - 1]


def test_noise_moves_boxes_by_less_than_two_pixels_and_drops_one_in_three_hundred():
    count = 3000
    detections = Detections(
        np.zeros(count, np.int64), np.full((count, 4), 10, np.float32), np.ones((count, 3), np.float32)
    )
    moved = jitter(detections, np.random.default_rng(0))
    assert 0 < count - len(moved.symbols) < 30
    assert (moved.boxes - 10).std() == pytest.approx(0.35, abs=0.01)
    assert np.abs(moved.boxes - 10).max() < 2
    assert moved.colours.max() <= 1
    assert isinstance(read_in_order(moved), SymbolSequence)


def page_of(*goals):
    return LanguagePage(SIZE, goals, screen("ko 7"), {}, is_exact=False)


def test_batches_have_examples_of_similar_length_and_at_most_so_many_tokens(builder):
    # " now" is three tokens, and lengths that differ by up to 8 are in random order.
    pages = [page_of(Goal("Press." + " now" * count, keys=("Tab",))) for count in range(30)]
    batches = list(draw_batches(builder, iter([pages]), tokens=120, seed=0))
    assert sum(map(len, batches)) == 30
    for batch in batches:
        lengths = [len(example.ids) for example in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= 120
        assert max(lengths) - min(lengths) <= 3 * (len(batch) - 1) + 8


def test_pages_without_a_single_example_are_refused(builder):
    page = page_of(Goal("Copy the code.", text="zz"))
    with pytest.raises(ConfigError, match=r"recipe\.act_pages = 2: none of the goals of 2 pages can be learned from"):
        next(draw_batches(builder, iter([[page, page]]), tokens=100, seed=0))
