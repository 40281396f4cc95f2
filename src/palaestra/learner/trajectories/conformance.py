"""Whether a policy keeps what `TrajectoryPolicy` promises. Run it on your own policy before you train it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palaestra.experience.turn_input import TurnInput
from palaestra.learner.trajectories.policy import SeparateValueHead, TrajectoryPolicy

__all__ = ["check_trajectory_policy"]


def check_trajectory_policy(
    policy: TrajectoryPolicy, turns: Sequence[TurnInput], *, fresh: bool = True, tolerance: float = 1e-4
) -> None:
    """Raise `AssertionError` with the broken rule.

    `turns` should differ in length; `fresh`: the policy sampled them with the weights it has.
    """
    turns = list(turns)
    lengths = [len(each.turn.token_ids) for each in turns]
    with torch.no_grad():
        whole = policy.log_probs(turns, with_values=True, with_entropy=True, grad=False)
    shape = (len(turns), max(lengths))
    assert whole.log_probs.shape == shape, f"log_probs has shape {tuple(whole.log_probs.shape)}, not {shape}"
    assert whole.mask.shape == shape, "the mask has another shape than the log-probabilities"
    for row, length in enumerate(lengths):
        assert bool(whole.mask[row, :length].all()), (
            f"row {row} has {length} tokens, and not all of them are in the mask"
        )
        assert not bool(whole.mask[row, length:].any()), f"row {row} has {length} tokens, and more in the mask"
        assert not bool(whole.log_probs[row, length:].any()), "log-probabilities must be 0 where padded"
    assert bool(torch.isfinite(whole.log_probs).all()), "a log-probability is not finite"
    assert float(whole.log_probs.max()) <= tolerance, "a log-probability is above 0"
    assert whole.entropy is not None, "asked for the entropy, it gave none"
    assert whole.entropy.shape == shape, "entropy has another shape than the log-probabilities"
    assert not bool((whole.entropy * ~whole.mask).any()), "entropy must be 0 where padded"
    assert not whole.log_probs.requires_grad, "grad=False must not record a graph"
    _check_each_alone(policy, turns, whole.log_probs, tolerance)
    if fresh:
        _check_agreement(turns, whole.log_probs, tolerance)
    reference = policy.reference_log_probs(turns)
    assert reference is None or reference.shape == shape, "the reference has another shape than the log-probabilities"
    _check_gradients(policy, turns)


def _check_each_alone(
    policy: TrajectoryPolicy, turns: list[TurnInput], together: torch.Tensor, tolerance: float
) -> None:
    for row, each in enumerate(turns):
        alone = policy.log_probs([each], grad=False)
        assert alone.values is None, "values were not asked for"
        assert alone.entropy is None, "entropy was not asked for"
        apart = float((alone.log_probs[0] - together[row, : alone.log_probs.shape[1]]).abs().max())
        assert apart <= tolerance, f"turn {row} differs by {apart:.2g} alone and in company: padding leaks into it"


def _check_agreement(turns: list[TurnInput], found: torch.Tensor, tolerance: float) -> None:
    for row, each in enumerate(turns):
        recorded = torch.tensor(each.turn.log_probs, device=found.device)
        apart = float((found[row, : len(recorded)] - recorded).abs().max())
        assert apart <= tolerance, f"turn {row} was recorded with log-probabilities that differ by {apart:.2g}"


def _check_gradients(policy: TrajectoryPolicy, turns: list[TurnInput]) -> None:
    parameters = list(policy.trainable_parameters())
    assert parameters, "there is nothing to train"
    order = [id(parameter) for parameter in parameters]
    assert order == [id(p) for p in policy.trainable_parameters()], "trainable_parameters must keep its order"
    now = policy.log_probs(turns, with_values=True, grad=True)
    assert now.log_probs.requires_grad, "grad=True must record a graph"
    assert now.values is not None, "asked for values, it gave none"
    assert now.values.shape == (len(turns),), f"values has shape {tuple(now.values.shape)}, not ({len(turns)},)"
    head = list(policy.value_parameters()) if isinstance(policy, SeparateValueHead) else []
    assert {id(p) for p in head} <= set(order), "value_parameters must be among trainable_parameters"
    body = [parameter for parameter in parameters if id(parameter) not in {id(p) for p in head}]
    pushed = torch.autograd.grad(now.log_probs.sum(), body, retain_graph=True, allow_unused=True)
    assert any(part is not None and bool(part.any()) for part in pushed), (
        "no gradient reaches any weight from the tokens"
    )
    if head:
        valued = torch.autograd.grad(now.values.sum(), head, allow_unused=True)
        assert all(part is not None for part in valued), "no gradient reaches the value head from the values"
