"""Stage two: pretrain the whole model to follow instructions about a screen in the action grammar.

The vision tower keeps its auxiliary loss. All prompts about a screen follow one copy of its image and cannot attend to
each other, so that the image is encoded once per screen. Coordinates have soft labels, a bell curve around the target's
centre: neighbouring numbers share what is learned, and the policy stays as uncertain as the curve is wide, which gives
reinforcement learning something to explore and to improve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from palaestra.policy.tiny_vlm.architecture import number_ids
from palaestra.policy.tiny_vlm.examples import TrainingExample, grid_coordinate
from palaestra.policy.tiny_vlm.screen_dataset import COLUMNS, ROWS, ScreenDataset, covered_cells
from palaestra.policy.tiny_vlm.screens import HEIGHT, WIDTH, Widget
from palaestra.policy.tiny_vlm.vision_pretraining import (
    AuxiliaryHead,
    batch_indices,
    encode_screens,
    set_learning_rate,
)

_GRAMMAR_WEIGHT = 0.25
"""Loss weight of tokens other than coordinates; the grammar is learned quickly, positions are not."""
_AUXILIARY_WEIGHT = 0.2
_ATTENTION_WEIGHT = 0.5
"""Loss weight of the copying heads' attention outside the target while a coordinate is predicted. From the coordinate
loss alone they would take ten times as long to find the target."""
_TOWER_RATE_SCALE = 0.4
"""The vision tower's learning rate relative to the language model's."""


@dataclass(frozen=True)
class _Batch:
    """Screens, each followed by all of its examples."""

    ids: Tensor
    mask: Tensor
    """[screens, 1, T, T], additive attention mask."""
    positions: Tensor
    rows: Tensor
    """Rows of the positions that predict a reply token."""
    columns: Tensor
    """Columns of the same."""
    targets: Tensor
    soft_labels: Tensor
    """[coordinates, 1000]."""
    coordinate_index: Tensor
    """[coordinates], indices into `targets`."""
    boxes: Tensor
    """[coordinates, 2]: the first and last number on the target."""
    cells: Tensor
    """[coordinates, cells]: 1 where the target is."""


class _BatchBuilder:
    def __init__(self, model: Any, tokenizer: Any, prefix: Sequence[int], *, blur_px: float) -> None:
        self._prefix, self._padding, self._blur = list(prefix), tokenizer.pad_token_id, blur_px
        self._numbers = torch.tensor(number_ids(tokenizer))
        ids = torch.tensor([self._prefix])
        is_image = (ids == model.config.image_token_id).int()
        step = model.config.vision_config.spatial_merge_size * model.config.vision_config.patch_size
        grid = torch.tensor([[1, HEIGHT // step * 2, WIDTH // step * 2]])
        positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=grid)
        self._prefix_positions = positions[:, 0]
        self._next_position = int(positions.max()) + 1

    def build(self, screens: Sequence[Sequence[TrainingExample]], generator: torch.Generator) -> _Batch:
        """The examples of several screens as one batch; coordinates are drawn from their soft labels."""
        start = len(self._prefix)
        length = start + max(sum(len(one.prompt) + len(one.reply) for one in examples) for examples in screens)
        ids = torch.full((len(screens), length), self._padding)
        ids[:, :start] = torch.tensor(self._prefix)
        positions = torch.zeros(3, len(screens), length, dtype=torch.long)
        positions[:, :, :start] = self._prefix_positions[:, None]
        group = torch.full((len(screens), length), -1)
        group[:, :start] = 0
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        soft_labels, coordinate_index, boxes, cells = [], [], [], []
        for row, examples in enumerate(screens):
            at = start
            for number, example in enumerate(examples, start=1):
                reply = list(example.reply)
                if example.widget is not None:
                    covered = torch.zeros(COLUMNS * ROWS)
                    covered[covered_cells(example.widget)] = 1.0
                    for place, (centre, side, box) in zip((1, 3), _axes(example.widget), strict=True):
                        label = self._soft_label(centre, side)
                        drawn = int(torch.multinomial(label, 1, generator=generator))
                        reply[place] = int(self._numbers[drawn])
                        soft_labels.append(label)
                        coordinate_index.append(len(targets) + place)
                        boxes.append(box)
                        cells.append(covered)
                tokens = [*example.prompt, *reply]
                end = at + len(tokens)
                ids[row, at:end] = torch.tensor(tokens)
                positions[:, row, at:end] = self._next_position + torch.arange(len(tokens))
                group[row, at:end] = number
                first = at + len(example.prompt) - 1
                rows += [row] * len(reply)
                columns += range(first, first + len(reply))
                targets += reply
                at = end
        return _Batch(
            ids=ids,
            mask=_attention_mask(group),
            positions=positions,
            rows=torch.tensor(rows),
            columns=torch.tensor(columns),
            targets=torch.tensor(targets),
            soft_labels=torch.stack(soft_labels),
            coordinate_index=torch.tensor(coordinate_index),
            boxes=torch.tensor(boxes),
            cells=torch.stack(cells),
        )

    def _soft_label(self, centre: float, side: int) -> Tensor:
        width = self._blur * 999 / side
        return torch.softmax(-0.5 * ((torch.arange(len(self._numbers)) - centre) / width) ** 2, 0)


def _axes(widget: Widget) -> list[tuple[float, int, tuple[float, float]]]:
    """For x and y: the widget's centre in grid coordinates, the screen's side in pixels, the widget's two edges."""
    (x, y), (left, top, right, bottom) = widget.centre, widget.box
    return [
        (grid_coordinate(x, WIDTH), WIDTH, (grid_coordinate(left, WIDTH), grid_coordinate(right + 1, WIDTH))),
        (grid_coordinate(y, HEIGHT), HEIGHT, (grid_coordinate(top, HEIGHT), grid_coordinate(bottom + 1, HEIGHT))),
    ]


def _attention_mask(group: Tensor) -> Tensor:
    """Tokens attend to the image (group 0) and to earlier tokens of their own group; padding to padding."""
    length = group.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = group[:, :, None] == group[:, None, :]
    shared = (group[:, None, :] == 0) & (group[:, :, None] >= 0)
    visible = ((same | shared) & causal)[:, None]
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


def pretrain_language(
    model: Any,
    head: AuxiliaryHead,
    tokenizer: Any,
    dataset: ScreenDataset,
    examples: Sequence[Sequence[TrainingExample]],
    prefix: Sequence[int],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    blur_px: float,
    seed: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Train the whole model; returns exponential averages of the metrics."""
    builder = _BatchBuilder(model, tokenizer, prefix, blur_px=blur_px)
    generator = torch.Generator().manual_seed(seed)
    model.set_attn_implementation({"text_config": "eager"})  # the only one that returns attention weights
    tower = [*model.model.visual.parameters(), *head.parameters()]
    others = [*model.model.language_model.parameters(), *model.get_output_embeddings().parameters()]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": tower, "scale": _TOWER_RATE_SCALE}]
    optimizer = torch.optim.AdamW(groups, learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    numbers = torch.tensor(number_ids(tokenizer))
    metrics: dict[str, float] = {}
    for step, chosen in enumerate(batch_indices(len(dataset), batch_size, steps, generator)):
        set_learning_rate(optimizer, learning_rate, step, steps)
        batch = builder.build([examples[index] for index in chosen.tolist()], generator)
        features = encode_screens(model, dataset, chosen)
        predictions = head(features)
        log_probs, attention = _forward(model, batch, features)
        loss = _reply_loss(log_probs, batch, numbers)
        attention_loss = -(attention.clamp_min(1e-6).log()).mean()
        auxiliary_loss = head.compute_loss(predictions, dataset, chosen)
        optimizer.zero_grad()
        torch.autograd.backward(loss + _ATTENTION_WEIGHT * attention_loss + _AUXILIARY_WEIGHT * auxiliary_loss)
        nn.utils.clip_grad_norm_([*others, *tower], 1.0)
        optimizer.step()
        current = head.compute_metrics(predictions, dataset, chosen) | _reply_metrics(log_probs, batch, numbers)
        current |= {"looked": float(attention[:, 0].detach().mean()), "loss": float(loss.detach())}
        metrics = {name: 0.9 * metrics.get(name, value) + 0.1 * value for name, value in current.items()}
        if step % 25 == 24 or step == steps - 1:
            log(f"speaking {step + 1}/{steps}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
    model.set_attn_implementation({"text_config": "sdpa"})
    return metrics


def _forward(model: Any, batch: _Batch, features: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the reply tokens, and the attention of the copying heads at coordinates.

    The attention is [coordinates, 2]: of the head in use on the target, and of the other head on the first token.
    """
    images = SimpleNamespace(pooler_output=tuple(features), deepstack_features=[])
    out = model.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        position_ids=batch.positions,
        use_cache=False,
        mm_encoder_outputs={"image": images},
        output_attentions=True,
    )
    hidden = out.last_hidden_state[batch.rows, batch.columns]
    log_probs = torch.log_softmax(model.get_output_embeddings()(hidden), -1)
    image = (batch.ids[0] == model.config.image_token_id).nonzero().squeeze(-1)
    rows, columns = batch.rows[batch.coordinate_index], batch.columns[batch.coordinate_index]
    weights = out.attentions[-1][rows, :2, columns]
    # The first head serves the first coordinate, the second head the second; the other one idles.
    busy, idle = (torch.stack([weights[0::2, head], weights[1::2, 1 - head]], 1).flatten(0, 1) for head in (0, 1))
    return log_probs, torch.stack([(busy[:, image] * batch.cells).sum(-1), idle[:, 0]], 1)


def _grammar_mask(batch: _Batch) -> Tensor:
    mask = torch.ones(len(batch.targets), dtype=torch.bool)
    mask[batch.coordinate_index] = False
    return mask


def _reply_loss(log_probs: Tensor, batch: _Batch, numbers: Tensor) -> Tensor:
    token_loss = -log_probs.gather(-1, batch.targets[:, None]).squeeze(-1)
    # Less the entropy of the soft labels, so that 0 is the best possible loss.
    entropy = -(batch.soft_labels * batch.soft_labels.clamp_min(1e-30).log()).sum(-1)
    coordinates = -(batch.soft_labels * log_probs[batch.coordinate_index][:, numbers]).sum(-1) - entropy
    return coordinates.mean() + _GRAMMAR_WEIGHT * token_loss[_grammar_mask(batch)].mean()


@torch.no_grad()
def _reply_metrics(log_probs: Tensor, batch: _Batch, numbers: Tensor) -> dict[str, float]:
    """How often the likeliest coordinate is on the target, the probability that a sampled click is, and grammar."""
    coordinates = log_probs[batch.coordinate_index][:, numbers]
    best = coordinates.argmax(-1)
    hit = (best >= batch.boxes[:, 0]) & (best <= batch.boxes[:, 1])
    line = torch.arange(len(numbers))
    inside = (line >= batch.boxes[:, :1]) & (line <= batch.boxes[:, 1:])
    mass = (coordinates.exp() * inside).sum(-1).view(-1, 2)
    correct = log_probs.argmax(-1) == batch.targets
    return {
        "greedy_x": float(hit[0::2].float().mean()),
        "greedy_y": float(hit[1::2].float().mean()),
        "sampled": float(mass.prod(-1).mean()),
        "grammar": float(correct[_grammar_mask(batch)].float().mean()),
    }
