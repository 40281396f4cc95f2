"""Stage one: the vision tower learns what is where, cell by cell, before any language.

Every cell of a screen is asked which widget it belongs to, what colour and which letters that has, the how manieth of
its kind it is, and where its centre is. Answers are linear in the tower's output, so that whatever attends to a cell
later finds them there. A language model that only hears whether its coordinate was right takes far longer to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from palaestra.policy.tiny_vlm.architecture import CODE, WAVES, waves
from palaestra.policy.tiny_vlm.screen_dataset import ACROSS, DOWN, LETTERS, RANKS, Pool, patches
from palaestra.policy.tiny_vlm.screens import COLOURS, HEIGHT, KINDS, WIDTH

__all__ = ["Quiz", "Schedule", "batches", "learn_to_see", "look", "what_is_seen"]

_PARTS = {"kind": len(KINDS), "colour": len(COLOURS), "rank": RANKS, "centre": 2, "letters": len(LETTERS)} | {
    "first": len(LETTERS)
}


class Schedule:
    """A learning rate that rises for a twentieth of the steps and then falls in half a cosine."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float, steps: int) -> None:
        self._optimizer, self._peak, self._steps = optimizer, peak, steps
        self._warm = max(1, steps // 20)

    def at(self, step: int) -> None:
        """Set the rate of this step."""
        rise = min(1.0, (step + 1) / self._warm)
        fall = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / self._steps)).item())
        for group in self._optimizer.param_groups:
            group["lr"] = self._peak * rise * max(fall, 0.02) * group.get("pace", 1.0)


def batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices for so many steps, every index equally often."""
    left = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(left) < size:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:size]
        left = left[size:]


def look(model: Any, pool: Pool, chosen: Tensor) -> Tensor:
    """What the vision tower makes of screens: [screens, cells, hidden]."""
    pixels, grid = patches(pool.pixels[chosen.numpy()])
    seen: Tensor = model.model.visual(pixels, grid_thw=grid).pooler_output
    return seen.view(len(chosen), ACROSS * DOWN, -1)


class Quiz(nn.Module):
    """What every cell is asked; thrown away once the tower can answer."""

    def __init__(self, hidden: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(hidden, sum(_PARTS.values()))

    def forward(self, seen: Tensor) -> dict[str, Tensor]:
        """The answers, by part."""
        told = dict(zip(_PARTS, self.head(seen).split(list(_PARTS.values()), -1), strict=True))
        # The centre once more, in the code of numbers and not through the head: there the language model finds it.
        return told | {"place": seen[..., : 2 * CODE]}

    def loss(self, told: dict[str, Tensor], pool: Pool, chosen: Tensor) -> Tensor:
        """How wrong the answers are."""
        return torch.stack(list(_losses(told, pool, chosen).values())).sum()


def learn_to_see(
    model: Any, quiz: Quiz, pool: Pool, *, steps: int, batch: int, rate: float, seed: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Train the tower; returns how good it is on its last screens."""
    generator = torch.Generator().manual_seed(seed)
    tower = model.model.visual
    optimizer = torch.optim.AdamW([*tower.parameters(), *quiz.parameters()], rate, weight_decay=0.01)
    schedule = Schedule(optimizer, rate, steps)
    figures: dict[str, float] = {}
    for step, chosen in enumerate(batches(len(pool), batch, steps, generator)):
        schedule.at(step)
        told = quiz(look(model, pool, chosen))
        optimizer.zero_grad()
        torch.autograd.backward(quiz.loss(told, pool, chosen))
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24 or step == steps - 1:
            figures = what_is_seen(told, pool, chosen)
            say(f"seeing {step + 1}/{steps}: " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    return figures


def _losses(told: dict[str, Tensor], pool: Pool, chosen: Tensor) -> dict[str, Tensor]:
    widget = pool.kind[chosen] > 0
    labelled = pool.first[chosen] >= 0
    weight = torch.ones(len(KINDS))
    weight[0] = 0.3  # most cells show nothing
    coded = waves(pool.centre[chosen].flatten(), WAVES).view(*widget.shape, -1)
    off = (told["place"] - coded).square().mean(-1)
    apart = (told["centre"] - pool.centre[chosen]).abs()
    spelled = functional.binary_cross_entropy_with_logits(told["letters"], pool.letters[chosen], reduction="none").mean(
        -1
    )
    return {
        "kind": 3 * functional.cross_entropy(told["kind"].flatten(0, 1), pool.kind[chosen].flatten(), weight),
        "colour": 0.5 * _wrong(told["colour"], pool.colour[chosen]),
        "rank": 0.3 * _wrong(told["rank"], pool.rank[chosen]),
        "centre": 5 * _mean(apart.mean(-1), widget) + _mean(apart.mean(-1), ~widget),
        "place": 6 * _mean(off, widget) + 3 * _mean(off, ~widget),
        "letters": 2 * _mean(spelled, labelled),
        "first": 0.3 * _wrong(told["first"], pool.first[chosen]),
    }


def _wrong(told: Tensor, wanted: Tensor) -> Tensor:
    losses = functional.cross_entropy(told.flatten(0, 1), wanted.flatten(), reduction="none")
    return _mean(losses, wanted.flatten() >= 0)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Over the cells it concerns; a batch may have none."""
    return (values * where).sum() / where.sum().clamp_min(1)


@torch.no_grad()
def what_is_seen(told: dict[str, Tensor], pool: Pool, chosen: Tensor) -> dict[str, float]:
    """How many answers are right."""
    widget, labelled = pool.kind[chosen] > 0, pool.first[chosen] >= 0

    def share(name: str, where: Tensor) -> float:
        right: Tensor = told[name].argmax(-1) == getattr(pool, name)[chosen]
        return float(_mean(right.float(), where))

    error = ((told["centre"] - pool.centre[chosen]).abs() * torch.tensor([WIDTH, HEIGHT])).mean(-1)
    said, true = told["letters"][labelled] > 0, pool.letters[chosen][labelled] > 0
    both = (said & true).sum()
    return {
        "kind": share("kind", widget), "colour": share("colour", pool.colour[chosen] >= 0),
        "rank": share("rank", widget), "centre_px": float(_mean(error, widget)), "first": share("first", labelled),
        "letters_f1": float(2 * both / (said.sum() + true.sum()).clamp_min(1)),
    }  # fmt: skip
