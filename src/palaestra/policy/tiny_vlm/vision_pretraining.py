"""Stage one: pretrain the vision tower to describe each cell of a screen, before any language.

An auxiliary head predicts for each cell the widget it belongs to, the widget's colour, letters, rank among its kind and
centre. The head is linear, so that attention to a cell finds these features directly. From the coordinate loss alone
the language model would take far longer to discover them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from palaestra.policy.tiny_vlm.architecture import CODE, FREQUENCIES, fourier_features
from palaestra.policy.tiny_vlm.screen_dataset import COLUMNS, LETTERS, RANKS, ROWS, ScreenDataset, cut_patches
from palaestra.policy.tiny_vlm.screens import COLOURS, HEIGHT, KINDS, WIDTH

_OUTPUTS = {
    "kind": len(KINDS),
    "colour": len(COLOURS),
    "rank": RANKS,
    "centre": 2,
    "letters": len(LETTERS),
    "first": len(LETTERS),
}


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Linear warm-up to the peak over a twentieth of the steps, then half a cosine."""
    warmup = min(1.0, (step + 1) / max(1, steps // 20))
    decay = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item())
    for group in optimizer.param_groups:
        group["lr"] = peak * warmup * max(decay, 0.02) * group.get("scale", 1.0)


def batch_indices(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of the batches; every index occurs equally often."""
    remaining = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(remaining) < size:
            remaining = torch.cat([remaining, torch.randperm(count, generator=generator)])
        yield remaining[:size]
        remaining = remaining[size:]


def encode_screens(model: Any, dataset: ScreenDataset, batch: Tensor) -> Tensor:
    """The vision tower's features of screens: [screens, cells, hidden]."""
    pixels, grid = cut_patches(dataset.pixels[batch.numpy()])
    features: Tensor = model.model.visual(pixels, grid_thw=grid).pooler_output
    return features.view(len(batch), COLUMNS * ROWS, -1)


class AuxiliaryHead(nn.Module):
    """Predicts the labels of each cell. Used in training only."""

    def __init__(self, hidden: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(hidden, sum(_OUTPUTS.values()))

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Predictions by label."""
        predictions = dict(zip(_OUTPUTS, self.head(features).split(list(_OUTPUTS.values()), -1), strict=True))
        # The centre once more, as Fourier features and without the head: the language model copies it from there.
        return predictions | {"place": features[..., : 2 * CODE]}

    def compute_loss(self, predictions: dict[str, Tensor], dataset: ScreenDataset, batch: Tensor) -> Tensor:
        """Weighted sum of the losses of all labels."""
        is_widget = dataset.kind[batch] > 0
        weight = torch.ones(len(KINDS))
        weight[0] = 0.3  # most cells are empty
        code = fourier_features(dataset.centre[batch].flatten(), FREQUENCIES).view(*is_widget.shape, -1)
        place_error = (predictions["place"] - code).square().mean(-1)
        centre_error = (predictions["centre"] - dataset.centre[batch]).abs().mean(-1)
        letters = functional.binary_cross_entropy_with_logits(
            predictions["letters"], dataset.letters[batch], reduction="none"
        )
        kind = functional.cross_entropy(predictions["kind"].flatten(0, 1), dataset.kind[batch].flatten(), weight)
        losses = (
            3 * kind,
            0.5 * _cross_entropy(predictions["colour"], dataset.colour[batch]),
            0.3 * _cross_entropy(predictions["rank"], dataset.rank[batch]),
            5 * _masked_mean(centre_error, is_widget) + _masked_mean(centre_error, ~is_widget),
            6 * _masked_mean(place_error, is_widget) + 3 * _masked_mean(place_error, ~is_widget),
            2 * _masked_mean(letters.mean(-1), dataset.first[batch] >= 0),
            0.3 * _cross_entropy(predictions["first"], dataset.first[batch]),
        )
        return torch.stack(losses).sum()

    @torch.no_grad()
    def compute_metrics(
        self, predictions: dict[str, Tensor], dataset: ScreenDataset, batch: Tensor
    ) -> dict[str, float]:
        """Accuracy by label, error of the centre in pixels, F1 score of the letters."""
        is_widget, has_label = dataset.kind[batch] > 0, dataset.first[batch] >= 0

        def accuracy(name: str, mask: Tensor) -> float:
            correct: Tensor = predictions[name].argmax(-1) == getattr(dataset, name)[batch]
            return float(_masked_mean(correct.float(), mask))

        error = ((predictions["centre"] - dataset.centre[batch]).abs() * torch.tensor([WIDTH, HEIGHT])).mean(-1)
        predicted, true = predictions["letters"][has_label] > 0, dataset.letters[batch][has_label] > 0
        return {
            "kind": accuracy("kind", is_widget),
            "colour": accuracy("colour", dataset.colour[batch] >= 0),
            "rank": accuracy("rank", is_widget),
            "centre_px": float(_masked_mean(error, is_widget)),
            "first": accuracy("first", has_label),
            "letters_f1": float(2 * (predicted & true).sum() / (predicted.sum() + true.sum()).clamp_min(1)),
        }


def pretrain_vision(
    model: Any,
    head: AuxiliaryHead,
    dataset: ScreenDataset,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Train the vision tower; returns the metrics of the last batch."""
    generator = torch.Generator().manual_seed(seed)
    tower = model.model.visual
    optimizer = torch.optim.AdamW([*tower.parameters(), *head.parameters()], learning_rate, weight_decay=0.01)
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batch_indices(len(dataset), batch_size, steps, generator)):
        set_learning_rate(optimizer, learning_rate, step, steps)
        predictions = head(encode_screens(model, dataset, batch))
        optimizer.zero_grad()
        torch.autograd.backward(head.compute_loss(predictions, dataset, batch))
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24 or step == steps - 1:
            metrics = head.compute_metrics(predictions, dataset, batch)
            log(f"seeing {step + 1}/{steps}: " + ", ".join(f"{name} {value:.2f}" for name, value in metrics.items()))
    return metrics


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return _masked_mean(losses, labels.flatten() >= 0)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp_min(1)
