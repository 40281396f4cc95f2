"""Conformance checks for a `Learner` and a `RolloutAlgorithm`.

Run these on your own implementation before training with it. They raise `AssertionError` naming the violated rule.
`palaestra.learner.trajectories.conformance` has the checks for policies and algorithms on trajectories.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import torch

from palaestra.errors import CollectorFailed
from palaestra.experience.columns import Columns, column_parts, map_column
from palaestra.learner.algorithm import Learner, RolloutAlgorithm
from palaestra.learner.batch import num_samples


def check_learner(
    make: Callable[[], Learner[Any, Any]], experience: Any, read: Callable[[Learner[Any, Any]], Any]
) -> None:
    """`make` builds the same learner each time; `read` returns its policy's weights in a form that `==` compares."""
    learner, twin = make(), make()
    before, version = read(learner), learner.version
    assert read(twin) == before, "make must build the same weights each time"
    _check_interruption(make(), experience, read)
    metrics = learner.update(experience)
    assert all(math.isfinite(number) for number in metrics.values()), "a metric is not finite"
    assert learner.version == version + 1, "an update that changes the weights must raise the version by one"
    assert read(learner) != before, "the update did not change the weights"
    twin.update(experience)
    assert read(twin) == read(learner), "the same experience must give the same weights"
    tensors, facts = learner.state()
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()), "state().tensors must hold tensors"
    assert json.dumps(facts), "state().facts must be plain JSON"
    # The twin already has the same weights; now it also gets the optimiser and the random streams.
    twin.load_state(copy.deepcopy(learner.state()))
    assert twin.version == learner.version, "load_state must restore the version"
    learner.update(experience)
    twin.update(experience)
    assert read(twin) == read(learner), "a learner that loads a state must continue bit for bit"


def _check_interruption(learner: Learner[Any, Any], experience: Any, read: Callable[[Learner[Any, Any]], Any]) -> None:
    def fail() -> None:
        raise CollectorFailed("raised by the check")

    before, facts = read(learner), json.dumps(learner.state().facts)
    try:
        learner.update(experience, poll=fail)
    except CollectorFailed:
        assert read(learner) == before, "an interrupted update must restore the weights"
        assert json.dumps(learner.state().facts) == facts, "an interrupted update must restore the state"
    else:
        # A compiled update is too short to be interrupted.
        assert read(learner) != before, "update() ignored the error that poll raised"


def check_rollout_algorithm(algorithm: RolloutAlgorithm, policy: Any, rollout: Columns) -> None:
    """Check that an algorithm prepares this rollout and computes a loss for this policy."""
    assert not type(algorithm).find_defect(), type(algorithm).find_defect()
    before = {key: map_column(entry, torch.clone) for key, entry in rollout.items()}
    batch = algorithm.prepare_batch(policy, rollout, None, compiled=False)
    for key, entry in before.items():
        pairs = zip(column_parts(entry), column_parts(rollout[key]), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), f"prepare must not change {key} of the rollout"
    size = num_samples(batch)
    for key, entry in batch.items():
        assert all(len(part) == size for part in column_parts(entry)), f"{key} must have {size} rows, one per sample"
    losses = algorithm.losses(policy, batch, clip_range=algorithm.clip_range(0.0))
    total = losses.policy + losses.value
    assert total.shape == (), f"the loss has shape {tuple(total.shape)}, and must be a scalar"
    assert bool(torch.isfinite(total)), f"the loss is {float(total)}"
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    assert any(one is not None and bool(one.any()) for one in gradients), "no gradient reaches any weight"
    assert algorithm.learning_rate(0.0) >= algorithm.learning_rate(1.0) > 0, "the learning rate must stay above 0"
