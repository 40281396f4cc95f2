"""`DividedBatch`: the training samples of an update, divided among the processes that collected them.

All processes draw the same minibatches, those of one process with all samples; each computes the loss of its own
samples in a minibatch, which may be none. Losses are means, so each is weighted by its share of the minibatch, and the
sum of the gradients is the gradient of the whole minibatch. Observations never leave the process that collected them;
columns with one number per sample (advantages, values) are known to all, for statistics of whole minibatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaestra.errors import CollectorFailed
from palaestra.experience.columns import Columns
from palaestra.learner.batch import TrainBatch, minibatch, num_samples
from palaestra.transport.ranks import Ranks


class DividedBatch:
    """The samples of this process, and their places among those of all processes."""

    def __init__(self, ranks: Ranks, rollouts: Sequence[Columns], batch: TrainBatch) -> None:
        self.ranks, self._batch = ranks, batch
        device = batch["action"].device
        own = {key: part.cpu().numpy() for key, part in batch.items() if isinstance(part, Tensor) and part.ndim == 1}
        every = ranks.gather((_sort_keys(ranks, rollouts, num_samples(batch)), own))
        owner = np.concatenate([np.full(len(keys), rank) for rank, (keys, _) in enumerate(every)])
        order = np.argsort(np.concatenate([keys for keys, _ in every]), kind="stable")
        self.size = len(order)
        """Number of samples of all processes."""
        # Keys are ascending in each process, so its n-th sample in the common order is its own n-th sample.
        mine = owner[order] == ranks.rank
        self._row = torch.from_numpy(np.where(mine, np.cumsum(mine) - 1, -1)).to(device)
        names = [name for name in own if all(name in columns for _, columns in every)]
        self.whole: TrainBatch = {
            name: torch.from_numpy(np.concatenate([columns[name] for _, columns in every])[order]).to(device)
            for name in names
        }
        """The columns with one number per sample, of all samples."""
        self._names: list[str] | None = None

    def own_part(self, rows: Tensor, scaled: Mapping[str, Tensor]) -> tuple[TrainBatch, float]:
        """This process's samples of a minibatch of all samples, and their share of it.

        `scaled`: columns of the whole minibatch that replace or extend those of the samples.
        """
        places = self._row[rows]
        mine = places >= 0
        part = minibatch(self._batch, places[mine])
        return part | {name: column[mine] for name, column in scaled.items()}, len(places[mine]) / len(rows)

    def whole_part(self, rows: Tensor) -> TrainBatch:
        """The columns with one number per sample of a whole minibatch."""
        return minibatch(self.whole, rows)

    def mean_metrics(
        self, own: Mapping[str, Tensor], share: float, failure: CollectorFailed | None
    ) -> dict[str, Tensor]:
        """The metrics of a whole minibatch; if one process has a failure, all raise it."""
        if self._names is None:
            self._names = max(self.ranks.gather(list(own)), key=len)
        device = self._row.device
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        numbers = [own[name].detach().double() * share if own else nothing for name in self._names]
        sums = self.ranks.sum(torch.stack([nothing + float(failure is not None), *numbers]))
        if bool(sums[0] > 0):
            self.ranks.agree(failure)
        return {name: number.float() for name, number in zip(self._names, sums[1:], strict=True)}


def _sort_keys(ranks: Ranks, rollouts: Sequence[Columns], size: int) -> NDArray[np.int64]:
    """Ascending numbers that put the samples of all processes into the order of one process with all environments."""
    keys: list[NDArray[Any]] = []
    start = 0
    for rollout in rollouts:
        length, count = rollout["reward"].shape
        places = np.arange(count) + ranks.share(count * ranks.size).first
        steps = start + np.arange(length)[:, None] * count * ranks.size + places
        keys.append(steps[rollout["valid"].cpu().numpy()] if "valid" in rollout else steps.reshape(-1))
        start += length * count * ranks.size
    known = np.concatenate(keys)
    if len(known) == size:
        return known
    # The algorithm selected other samples: process after process.
    return np.arange(size) + ranks.rank * (start + size)
