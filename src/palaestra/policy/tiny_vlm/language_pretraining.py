"""Stage two: the language model learns to answer instructions in the action grammar, about what the tower sees.

The tower goes on answering its quiz, and learns from both. A screen comes with several questions behind one picture,
each blind for the others, so that the picture is read once and not once a question. Coordinates are taught as bells
around the target's centre and not as one right number: neighbouring numbers share what is learned, and the policy stays
as unsure as the bell is wide, which is what reinforcement learning explores with and has to overcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from palaestra.policy.tiny_vlm.architecture import number_ids
from palaestra.policy.tiny_vlm.examples import Lesson, line_of
from palaestra.policy.tiny_vlm.screen_dataset import ACROSS, DOWN, Pool, cells_of
from palaestra.policy.tiny_vlm.screens import HEIGHT, WIDTH
from palaestra.policy.tiny_vlm.vision_pretraining import Quiz, Schedule, batches, look, what_is_seen

__all__ = ["learn_to_speak"]

_PHRASE_WEIGHT = 0.25
"""Of a token that is no coordinate: the grammar is learned in no time, places are not."""
_QUIZ_WEIGHT = 0.2
"""Of what the cells are asked, beside the answers."""

_LOOK_WEIGHT = 0.5
"""Of how much the heads that copy places look elsewhere than at the target while a coordinate is said. By the
coordinate's error alone they would take ten times as long to find it."""
_TOWER_PACE = 0.4
"""Of the tower's learning rate, compared with the language model's: it has learned most of what it will."""


@dataclass(frozen=True)
class _Sheet:
    """A batch: screens with their questions behind one another."""

    ids: Tensor
    mask: Tensor
    """[screens, 1, T, T], what sees what."""
    positions: Tensor
    rows: Tensor
    """Of the tokens that predict an answer's."""
    columns: Tensor
    wanted: Tensor
    bells: Tensor
    """[coordinates, 1000]."""
    bell_at: Tensor
    """Which of the predictions they belong to."""
    boxes: Tensor
    """[coordinates, 2]: the first and last number on the target."""
    cells: Tensor
    """[coordinates, cells]: 1 where the target is."""


class _Packer:
    def __init__(self, model: Any, tokenizer: Any, prefix: Sequence[int], *, blur_px: float) -> None:
        self._prefix, self._padding, self._blur = list(prefix), tokenizer.pad_token_id, blur_px
        self._numbers = torch.tensor(number_ids(tokenizer))
        ids = torch.tensor([self._prefix])
        kinds = (ids == model.config.image_token_id).int()
        step = model.config.vision_config.spatial_merge_size * model.config.vision_config.patch_size
        grid = torch.tensor([[1, HEIGHT // step * 2, WIDTH // step * 2]])
        placed, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        self._placed = placed[:, 0]
        self._next = int(placed.max()) + 1

    def pack(self, lessons: Sequence[Sequence[Lesson]], generator: torch.Generator) -> _Sheet:
        """Screens' lessons as one batch; places on targets are drawn from their bells."""
        start = len(self._prefix)
        length = start + max(sum(len(one.question) + len(one.answer) for one in row) for row in lessons)
        ids = torch.full((len(lessons), length), self._padding)
        ids[:, :start] = torch.tensor(self._prefix)
        positions = torch.zeros(3, len(lessons), length, dtype=torch.long)
        positions[:, :, :start] = self._placed[:, None]
        group = torch.full((len(lessons), length), -1)
        group[:, :start] = 0
        rows: list[int] = []
        columns: list[int] = []
        wanted: list[int] = []
        bells, bell_at, boxes, cells = [], [], [], []
        for row, all_of_it in enumerate(lessons):
            at = start
            for number, lesson in enumerate(all_of_it, start=1):
                answer = list(lesson.answer)
                if lesson.widget is not None:
                    covered = torch.zeros(ACROSS * DOWN)
                    covered[cells_of(lesson.widget)] = 1.0
                    for place, (centre, side, ends) in zip((1, 3), _sides(lesson), strict=True):
                        bell, drawn = self._bell(centre, side, generator)
                        answer[place] = int(self._numbers[drawn])
                        bells.append(bell)
                        bell_at.append(len(wanted) + place)
                        boxes.append(ends)
                        cells.append(covered)
                own = [*lesson.question, *answer]
                ids[row, at : at + len(own)] = torch.tensor(own)
                positions[:, row, at : at + len(own)] = self._next + torch.arange(len(own))
                group[row, at : at + len(own)] = number
                first = at + len(lesson.question) - 1
                rows += [row] * len(answer)
                columns += range(first, first + len(answer))
                wanted += answer
                at += len(own)
        return _Sheet(
            ids, _seen(group), positions, torch.tensor(rows), torch.tensor(columns), torch.tensor(wanted),
            torch.stack(bells), torch.tensor(bell_at), torch.tensor(boxes),
            torch.stack(cells),
        )  # fmt: skip

    def _bell(self, centre: float, side: int, generator: torch.Generator) -> tuple[Tensor, int]:
        width = self._blur * 999 / side
        bell = torch.softmax(-0.5 * ((torch.arange(len(self._numbers)) - centre) / width) ** 2, 0)
        return bell, int(torch.multinomial(bell, 1, generator=generator))


def _sides(lesson: Lesson) -> list[tuple[float, int, tuple[float, float]]]:
    assert lesson.widget is not None
    (x, y), (left, top, right, bottom) = lesson.widget.centre, lesson.widget.box
    return [
        (line_of(x, WIDTH), WIDTH, (line_of(left, WIDTH), line_of(right + 1, WIDTH))),
        (line_of(y, HEIGHT), HEIGHT, (line_of(top, HEIGHT), line_of(bottom + 1, HEIGHT))),
    ]


def _seen(group: Tensor) -> Tensor:
    """Every token sees the picture (group 0) and what came before it in its own group; padding sees itself."""
    length = group.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = group[:, :, None] == group[:, None, :]
    shared = (group[:, None, :] == 0) & (group[:, :, None] >= 0)
    seen = ((same | shared) & causal)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def learn_to_speak(
    model: Any, quiz: Quiz, tokenizer: Any, pool: Pool, lessons: Sequence[Sequence[Lesson]], prefix: Sequence[int], *,
    steps: int, batch: int, rate: float, blur_px: float, seed: int, say: Callable[[str], None],
) -> dict[str, float]:  # fmt: skip
    """Train the whole model; returns how good it is on its last batches."""
    packer = _Packer(model, tokenizer, prefix, blur_px=blur_px)
    generator = torch.Generator().manual_seed(seed)
    model.set_attn_implementation({"text_config": "eager"})  # the only one that tells where it looks
    tower = [*model.model.visual.parameters(), *quiz.parameters()]
    others = [*model.model.language_model.parameters(), *model.get_output_embeddings().parameters()]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": tower, "pace": _TOWER_PACE}]
    optimizer = torch.optim.AdamW(groups, rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = Schedule(optimizer, rate, steps)
    numbers = torch.tensor(number_ids(tokenizer))
    figures: dict[str, float] = {}
    for step, chosen in enumerate(batches(len(pool), batch, steps, generator)):
        schedule.at(step)
        sheet = packer.pack([lessons[place] for place in chosen.tolist()], generator)
        seen = look(model, pool, chosen)
        told = quiz(seen)
        log_probs, looked = _answered(model, sheet, seen)
        loss = _loss(log_probs, sheet, numbers)
        missed = -(looked.clamp_min(1e-6).log()).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss + _LOOK_WEIGHT * missed + _QUIZ_WEIGHT * quiz.loss(told, pool, chosen))
        nn.utils.clip_grad_norm_([*others, *tower], 1.0)
        optimizer.step()
        now = {
            **what_is_seen(told, pool, chosen), **_figures(log_probs, sheet, numbers),
            "looked": float(looked[:, 0].detach().mean()), "loss": float(loss.detach()),
        }  # fmt: skip
        figures = {name: 0.9 * figures.get(name, value) + 0.1 * value for name, value in now.items()}
        if step % 25 == 24 or step == steps - 1:
            say(f"speaking {step + 1}/{steps}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    model.set_attn_implementation({"text_config": "sdpa"})
    return figures


def _answered(model: Any, sheet: _Sheet, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the vocabulary wherever an answer's token is predicted, and where the copying heads look
    where a coordinate is: [coordinates, 2], how much of one on the target, and of the other on nothing.
    """
    pictures = SimpleNamespace(pooler_output=tuple(seen), deepstack_features=[])
    out = model.model(
        input_ids=sheet.ids, attention_mask=sheet.mask, position_ids=sheet.positions, use_cache=False,
        mm_encoder_outputs={"image": pictures}, output_attentions=True,
    )  # fmt: skip
    log_probs = torch.log_softmax(model.get_output_embeddings()(out.last_hidden_state[sheet.rows, sheet.columns]), -1)
    picture = (sheet.ids[0] == model.config.image_token_id).nonzero().squeeze(-1)
    rows, columns = sheet.rows[sheet.bell_at], sheet.columns[sheet.bell_at]
    looks = out.attentions[-1][rows, :2, columns]
    # The first head while the first coordinate is said, the second with the second; whose turn it is not, rests.
    busy, idle = (torch.stack([looks[0::2, head], looks[1::2, 1 - head]], 1).flatten(0, 1) for head in (0, 1))
    return log_probs, torch.stack([(busy[:, picture] * sheet.cells).sum(-1), idle[:, 0]], 1)


def _loss(log_probs: Tensor, sheet: _Sheet, numbers: Tensor) -> Tensor:
    plain = -log_probs.gather(-1, sheet.wanted[:, None]).squeeze(-1)
    phrase = torch.ones(len(plain), dtype=torch.bool)
    phrase[sheet.bell_at] = False
    # Less what a perfect answer would still cost, so that the figure says how much is left to learn.
    entropy = -(sheet.bells * sheet.bells.clamp_min(1e-30).log()).sum(-1)
    bells = -(sheet.bells * log_probs[sheet.bell_at][:, numbers]).sum(-1) - entropy
    return bells.mean() + _PHRASE_WEIGHT * plain[phrase].mean()


@torch.no_grad()
def _figures(log_probs: Tensor, sheet: _Sheet, numbers: Tensor) -> dict[str, float]:
    """How often the likeliest coordinate lies on the target, and how likely a drawn one does."""
    likely = log_probs[sheet.bell_at][:, numbers]
    best = likely.argmax(-1)
    inside = (torch.arange(len(numbers)) >= sheet.boxes[:, :1]) & (torch.arange(len(numbers)) <= sheet.boxes[:, 1:])
    hit = (best >= sheet.boxes[:, 0]) & (best <= sheet.boxes[:, 1])
    mass = (likely.exp() * inside).sum(-1).view(-1, 2)
    phrase = torch.ones(len(log_probs), dtype=torch.bool)
    phrase[sheet.bell_at] = False
    right = log_probs.argmax(-1) == sheet.wanted
    return {
        "greedy_x": float(hit[0::2].float().mean()), "greedy_y": float(hit[1::2].float().mean()),
        "sampled": float(mass.prod(-1).mean()), "grammar": float(right[phrase].float().mean()),
    }  # fmt: skip
