"""Whether a learner and an algorithm on rollouts keep what the training loop relies on.

Run these on your own before you train with them. They raise `AssertionError` with the broken rule.
`palaestra.learner.trajectories.conformance` has the ones for policies and algorithms on trajectories.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import torch

from palaestra.errors import CollectorFailed
from palaestra.experience.columns import Columns
from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.batch import list_parts, map_entry, num_samples
from palaestra.learner.protocol import Learner

__all__ = ["check_learner", "check_rollout_algorithm"]


def check_learner(
    make: Callable[[], Learner[Any, Any]], experience: Any, read: Callable[[Learner[Any, Any]], Any]
) -> None:
    """`make` builds the same learner each time; `read` gives its policy's weights in a form that `==` compares."""
    learner, twin = make(), make()
    before, version = read(learner), learner.version
    assert read(twin) == before, "make must build the same weights each time"
    _check_interruption(make(), experience, read)
    metrics = learner.update(experience)
    assert all(math.isfinite(number) for number in metrics.values()), "a metric is not finite"
    assert learner.version == version + 1, "an update that changes the weights raises the version by one"
    assert read(learner) != before, "nothing was learned"
    twin.update(experience)
    assert read(twin) == read(learner), "the same experience must give the same weights"
    tensors, facts = learner.state()
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()), "a state's tensors must be tensors"
    assert json.dumps(facts), "a state's facts must be plain JSON"
    # The twin has the same weights, and from here on also the same optimiser and random streams.
    twin.load_state(copy.deepcopy(learner.state()))
    assert twin.version == learner.version, "a state brings its version"
    learner.update(experience)
    twin.update(experience)
    assert read(twin) == read(learner), "a learner that loads a state must continue bit for bit"


def _check_interruption(learner: Learner[Any, Any], experience: Any, read: Callable[[Learner[Any, Any]], Any]) -> None:
    def fail() -> None:
        raise CollectorFailed("on purpose")

    before, facts = read(learner), json.dumps(learner.state().facts)
    try:
        learner.update(experience, poll=fail)
    except CollectorFailed:
        assert read(learner) == before, "an interrupted update must leave the weights as they were"
        assert json.dumps(learner.state().facts) == facts, "an interrupted update must leave the state as it was"
    else:
        # A compiled update is too short to be interrupted.
        assert read(learner) != before, "poll raised, and the error was lost"


def check_rollout_algorithm(algorithm: RolloutAlgorithm, policy: Any, rollout: Columns) -> None:
    """Whether an algorithm prepares this rollout and gives a loss for this policy."""
    assert not type(algorithm).find_defect(), type(algorithm).find_defect()
    before = {key: map_entry(entry, torch.clone) for key, entry in rollout.items()}
    batch = algorithm.prepare_batch(policy, rollout, None, compiled=False)
    for key, entry in before.items():
        pairs = zip(list_parts(entry), list_parts(rollout[key]), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), f"prepare must not change {key} of the rollout"
    size = num_samples(batch)
    for key, entry in batch.items():
        assert all(len(part) == size for part in list_parts(entry)), f"{key} has not one row for each of {size} samples"
    losses = algorithm.losses(policy, batch, clip_range=algorithm.clip_range(0.0))
    total = losses.policy + losses.value
    assert total.shape == (), f"the loss has shape {tuple(total.shape)}, and must be one number"
    assert bool(torch.isfinite(total)), f"the loss is {float(total)}"
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    assert any(one is not None and bool(one.any()) for one in gradients), "no gradient reaches any weight"
    assert algorithm.learning_rate(0.0) >= algorithm.learning_rate(1.0) > 0, "the learning rate must stay above 0"
