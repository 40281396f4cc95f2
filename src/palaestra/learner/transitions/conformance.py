"""Conformance check for a `TransitionAlgorithm`. Run it on your own algorithm before training with it.

It raises `AssertionError` naming the violated rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from palaestra.experience.columns import column_parts, map_column
from palaestra.experience.replay import TransitionBatch
from palaestra.learner.transitions.algorithm import TransitionAlgorithm
from palaestra.learner.transitions.learner import TransitionLearner


def check_transition_algorithm(algorithm: TransitionAlgorithm, policy: Any, batch: TransitionBatch) -> None:
    """Check that an algorithm computes losses of these transitions that train this policy, and changes nothing else."""
    assert not type(algorithm).find_defect(), type(algorithm).find_defect()
    groups = set(policy.parameter_groups())
    assert set(algorithm.target_groups) <= groups, f"target_groups must be parts of the policy ({sorted(groups)})"
    learner = TransitionLearner(policy, algorithm, compiled=False)
    before = {name: map_column(column, np.array) for name, column in batch.columns.items()}
    rows = {name: map_column(column, lambda part: torch.as_tensor(part[0])) for name, column in batch.columns.items()}
    if algorithm.noise_per_sample:
        size = int(np.prod(policy.distribution.action_shape))
        rows["noise"] = torch.zeros(batch.shape[1], algorithm.noise_per_sample, size)
    trained = set()
    for step in algorithm.losses(policy, learner.target, rows, 0):
        assert step.group in groups, f"a loss trains {step.group!r}, and the policy has {sorted(groups)}"
        assert step.loss.shape == (), f"the loss of {step.group} has shape {tuple(step.loss.shape)}, not a scalar"
        assert bool(torch.isfinite(step.loss)), f"the loss of {step.group} is {step.loss.item()}"
        members = policy.parameter_groups()[step.group]
        gradients = torch.autograd.grad(step.loss, members, allow_unused=True)
        assert any(one is not None and bool(one.any()) for one in gradients), f"no gradient reaches {step.group}"
        if step.td_error is not None:
            assert step.td_error.shape == (batch.shape[1],), "td_error must have one number per transition"
        trained.add(step.group)
    assert trained, "losses yielded nothing"
    unknown = set(algorithm.learning_rates(0.0)) - groups
    assert not unknown, f"learning_rates names {sorted(unknown)}, which the policy does not have"
    learner.update(batch)
    for name, column in before.items():
        pairs = zip(column_parts(column), column_parts(batch.columns[name]), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs), f"losses must not change {name} of the batch"
    assert algorithm.learning_rate(0.0) >= algorithm.learning_rate(1.0) > 0, "the learning rate must stay above 0"
