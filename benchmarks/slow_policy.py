"""A policy that answers late, as one on a remote accelerator does: calls wait, and no core is busy meanwhile.

Each call lasts as long as it is told to, its own small computation included. Acting and valuing cost one inference.
A minibatch of learning costs `learn_seconds`; looking at old experience again (a pass without gradients, which
corrections for staleness need) a third of that per minibatch's worth of rows, since the backward pass takes two thirds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.policy.actor_critic import ActorCritic, ActResult

__all__ = ["SlowPolicy", "SlowScreenPolicy"]


class SlowPolicy(ActorCritic):
    """An actor-critic behind a slow line."""

    infer_seconds = 0.0
    learn_seconds = 0.0
    learn_rows = 1
    """Rows in the minibatch that takes `learn_seconds`."""

    def act(self, *args: Any, **kwargs: Any) -> ActResult:
        """One inference."""
        began = time.perf_counter()
        acted = super().act(*args, **kwargs)
        _last_until(began + self.infer_seconds)
        return acted

    def value(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One inference as well: the critic sits where the actor does."""
        began = time.perf_counter()
        found = super().value(*args, **kwargs)
        _last_until(began + self.infer_seconds)
        return found

    def evaluate_actions(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward and backward pass of a minibatch; only the forward pass where no gradient is wanted."""
        began = time.perf_counter()
        found = super().evaluate_actions(*args, **kwargs)
        share = 1.0 if torch.is_grad_enabled() else len(found[0]) / self.learn_rows / 3
        _last_until(began + share * self.learn_seconds)
        return found


def _last_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class SlowScreenPolicy(nn.Module):
    """A policy on screens behind a slow line: it types a letter or, at the given rate, clicks.

    A batch of replies takes `batch_seconds` and `reply_seconds` each; learning from a turn `turn_seconds`, and looking
    at it without gradients a third of that.
    """

    TEXTS = ({"action": "left_click", "coordinate": [20, 20]}, {"action": "type", "text": "a"})

    def __init__(self, *, click_rate: float, batch_seconds: float, reply_seconds: float, turn_seconds: float) -> None:
        super().__init__()
        self.seconds = (batch_seconds, reply_seconds, turn_seconds)
        self.scores = nn.Parameter(torch.tensor([click_rate, 1 - click_rate]).log())

    def text_of(self, token_ids: Sequence[int]) -> str:
        call = {"name": "computer_use", "arguments": self.TEXTS[int(token_ids[0])]}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def sample(self, requests: Sequence[Any], *, temperature: float) -> list[tuple[list[int], list[float]]]:
        began = time.perf_counter()
        log_probs = torch.log_softmax(self.scores / temperature, -1).tolist()
        click = math.exp(log_probs[0])
        tokens = [int(np.random.default_rng(one.seed).random() >= click) for one in requests]
        _last_until(began + self.seconds[0] + self.seconds[1] * len(requests))
        return [([token], [log_probs[token]]) for token in tokens]

    def log_probs(
        self, turns: Sequence[Any], *, with_values: bool = False, with_entropy: bool = False, grad: bool = True
    ) -> TokenLogProbs:
        began = time.perf_counter()
        rows = [
            torch.log_softmax(self.scores / one.temperature, -1)[torch.tensor(one.turn.token_ids.astype(np.int64))]
            for one in turns
        ]
        _last_until(began + (1.0 if grad else 1 / 3) * self.seconds[2] * len(turns))
        padded = pad_sequence(rows, batch_first=True)
        return TokenLogProbs(padded, torch.ones_like(padded, dtype=torch.bool))
