"""Conformance checks for a `TrajectoryPolicy` and a `TrajectoryAlgorithm`.

Run these on your own implementation before training with it. They raise `AssertionError` naming the violated rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from palaestra.experience.trajectory import Outcome, Trajectory, Turn
from palaestra.experience.turn_scoring import TokenLogProbs, TurnInput, turn_inputs
from palaestra.learner.trajectories.algorithm import TrainingSample, TrajectoryAlgorithm, token_counts
from palaestra.learner.trajectories.policy import KeepsReference, SeparateValueHead, TrajectoryPolicy, trainable_weights
from palaestra.learner.trajectories.reward import RewardConfig, training_rewards
from palaestra.learner.trajectories.scoring import ScoredTurn, build_token_batch


def check_trajectory_policy(
    policy: TrajectoryPolicy,
    turns: Sequence[TurnInput],
    *,
    fresh: bool = True,
    with_values: bool = True,
    with_entropy: bool = True,
    tolerance: float = 1e-4,
) -> None:
    """`turns` should differ in length; `fresh`: the policy sampled them with its present weights.

    `with_values` and `with_entropy`: whether the policy provides them; not every algorithm needs them.
    """
    turns = list(turns)
    lengths = [len(each.turn.token_ids) for each in turns]
    with torch.no_grad():
        whole = policy.log_probs(turns, with_values=with_values, with_entropy=with_entropy, grad=False)
    shape = (len(turns), max(lengths))
    assert whole.log_probs.shape == shape, f"log_probs has shape {tuple(whole.log_probs.shape)}, not {shape}"
    assert whole.mask.shape == shape, "the mask has another shape than the log-probabilities"
    for row, length in enumerate(lengths):
        what = f"row {row} has {length} tokens"
        assert bool(whole.mask[row, :length].all()), f"{what}, and not all of them are in the mask"
        assert not bool(whole.mask[row, length:].any()), f"{what}, and more in the mask"
        assert not bool(whole.log_probs[row, length:].any()), "log-probabilities must be 0 where padded"
    assert bool(torch.isfinite(whole.log_probs).all()), "a log-probability is not finite"
    assert float(whole.log_probs.max()) <= tolerance, "a log-probability is above 0"
    if with_entropy:
        assert whole.entropy is not None, "the policy returned no entropy although it was requested"
        assert whole.entropy.shape == shape, "entropy has another shape than the log-probabilities"
        assert not bool((whole.entropy * ~whole.mask).any()), "entropy must be 0 where padded"
    assert not whole.log_probs.requires_grad, "grad=False must not record a graph"
    for row, each in enumerate(turns):
        _check_turn(policy, each, whole.log_probs[row], tolerance, fresh=fresh, name=f"turn {row}")
    reference = policy.reference_log_probs(turns) if isinstance(policy, KeepsReference) else None
    assert reference is None or reference.shape == shape, "the reference has another shape than the log-probabilities"
    _check_gradients(policy, turns, with_values=with_values)


def _check_turn(
    policy: TrajectoryPolicy, each: TurnInput, batched: Tensor, tolerance: float, *, fresh: bool, name: str
) -> None:
    alone = policy.log_probs([each], grad=False)
    assert alone.values is None, "the policy returned values that were not requested"
    assert alone.entropy is None, "the policy returned an entropy that was not requested"
    apart = float((alone.log_probs[0] - batched[: alone.log_probs.shape[1]]).abs().max())
    assert apart <= tolerance, f"{name} differs by {apart:.2g} alone and in company: padding leaks into it"
    recorded = torch.tensor(each.turn.log_probs, device=batched.device)
    apart = float((batched[: len(recorded)] - recorded).abs().max())
    assert apart <= tolerance or not fresh, f"{name} was recorded with log-probabilities that differ by {apart:.2g}"


def _check_gradients(policy: TrajectoryPolicy, turns: list[TurnInput], *, with_values: bool) -> None:
    weights = trainable_weights(policy)
    assert weights, "there is nothing to train"
    again = trainable_weights(policy)
    assert list(weights) == list(again), "trainable_parameters must keep its order"
    assert all(weights[name] is again[name] for name in weights), "trainable_parameters must keep its parameters"
    now = policy.log_probs(turns, with_values=with_values, grad=True)
    assert now.log_probs.requires_grad, "grad=True must record a graph"
    head = set(policy.value_parameters()) if isinstance(policy, SeparateValueHead) else set()
    assert head <= set(weights.values()), "value_parameters must be among trainable_parameters"
    body = [parameter for parameter in weights.values() if parameter not in head]
    pushed = torch.autograd.grad(now.log_probs.sum(), body, retain_graph=True, allow_unused=True)
    is_pushed = any(part is not None and bool(part.any()) for part in pushed)
    assert is_pushed, "no gradient reaches any weight from the tokens"
    if not with_values:
        return
    assert now.values is not None, "the policy returned no values although they were requested"
    assert now.values.shape == (len(turns),), f"values has shape {tuple(now.values.shape)}, not ({len(turns)},)"
    if head:
        valued = torch.autograd.grad(now.values.sum(), list(head), allow_unused=True)
        assert all(part is not None for part in valued), "no gradient reaches the value head from the values"


def check_trajectory_algorithm(make_algorithm: Callable[[], TrajectoryAlgorithm]) -> None:
    """`make_algorithm` builds the same algorithm each time."""
    group = _sample_group(max(4, make_algorithm().group_size))
    rewards = [training_rewards(one, RewardConfig()) for one in group]
    before = repr(group), [earned.copy() for earned in rewards]
    chosen, again = (list(make_algorithm().select(group, rewards)) for _ in range(2))
    names = [one.episode_id for one in chosen]
    assert names, "select keeps nothing of a group of successes and failures"
    assert names == [one.episode_id for one in again], "select must give the same for the same group"
    assert len(set(names)) == len(names), "select gives an episode twice"
    assert set(names) <= {one.episode_id for one in group}, "select gives an episode that is not in the group"
    assert all(one.learnable for one in chosen), "select keeps an episode with an environment failure"
    earned = [rewards[int(name)] for name in names]
    values = [np.linspace(0.1, 0.5, len(one)) for one in chosen] if make_algorithm().needs_values else None
    samples, others = (make_algorithm().samples(chosen, earned, values=values) for _ in range(2))
    assert samples, "samples gives nothing for episodes that it selected"
    assert samples == others, "samples must give the same for the same episodes"
    _check_samples(samples, turns=sum(len(one) for one in chosen), has_values=values is not None)
    _check_loss(make_algorithm(), chosen, samples)
    assert repr(group) == before[0], "it changed a trajectory"
    assert all(np.array_equal(*pair) for pair in zip(rewards, before[1], strict=True)), "it changed the rewards"


def _sample_group(size: int) -> list[Trajectory]:
    """Episodes with one start: successes and failures of several lengths, the last with an environment failure."""
    rng, picture = np.random.default_rng(0), b"a screen"
    sha, prompt = hashlib.sha256(picture).hexdigest(), np.arange(4, dtype=np.int32)

    def play_turn(length: int, reward: float) -> Turn:
        tokens = rng.integers(0, 10, length).astype(np.int32)
        log_probs, versions = -rng.random(length).astype(np.float32), np.zeros(length, np.int32)
        seen = (sha,), ((32, 32),)
        return Turn(*seen, prompt, tokens, log_probs, versions, text="", action={"kind": "wait"}, reward=reward)

    group = []
    for number in range(size + 1):
        turns = [play_turn(1 + (number + turn) % 3, 0.0) for turn in range(number % 3)]
        turns.append(play_turn(2, float(number % 2)))
        outcome = Outcome.SUCCESS if number % 2 else Outcome.FAILURE
        task = {"task": "check/start", "seed": 0, "params": {}}
        group.append(Trajectory(str(number), task, tuple(turns), outcome, {sha: picture}, group="g"))
    return [*group[:-1], replace(group[-1], outcome=Outcome.ENVIRONMENT_FAILED)]


def _check_samples(samples: Sequence[TrainingSample], *, turns: int, has_values: bool) -> None:
    for sample in samples:
        assert 0 <= sample.turn < turns, f"a sample of turn {sample.turn}, and there are {turns}"
        numbers = sample.advantage, sample.weight, sample.value_target or 0.0
        assert all(np.isfinite(numbers)), f"a number of the sample of turn {sample.turn} is not finite"
        assert not has_values or sample.value_target is not None, "needs_values, and a sample has no value_target"


def _check_loss(algorithm: TrajectoryAlgorithm, chosen: list[Trajectory], samples: list[TrainingSample]) -> None:
    tokens = sum(token_counts(chosen))
    turns = [each.turn for one in chosen for each in turn_inputs(one)]
    recorded = [torch.tensor(turn.log_probs) for turn in turns]
    rows = [ScoredTurn(own, torch.ones_like(own), value=0.2, reference=own - 0.1) for own in recorded]

    def measure(some: Sequence[TrainingSample]) -> tuple[dict[str, float], Tensor]:
        shares = {"token_share": 1 / tokens, "turn_share": 1 / len(samples)}
        batch = build_token_batch(some, rows, **shares, device=torch.device("cpu"))
        kept = {name: part.clone() for name, part in vars(batch).items() if isinstance(part, Tensor)}
        log_probs = (batch.proximal + 0.05 * batch.mask).requires_grad_()
        entropy = batch.mask.float() if algorithm.needs_entropy else None
        values = torch.full((len(some),), 0.2) if algorithm.needs_values else None
        loss = algorithm.loss(batch, TokenLogProbs(log_probs, batch.mask, entropy, values))
        assert loss.total.shape == (), f"the loss has shape {tuple(loss.total.shape)}, and must be a scalar"
        assert bool(torch.isfinite(loss.total)), f"the loss is {float(loss.total)}"
        assert all(torch.equal(kept[name], getattr(batch, name)) for name in kept), "the loss changed its batch"
        assert loss.total.requires_grad, "no gradient reaches the loss"
        (slope,) = torch.autograd.grad(loss.total, log_probs)
        assert bool(torch.isfinite(slope).all()), "the gradient of a log-probability is not finite"
        assert not bool(slope[~batch.mask].any()), "a padded position has a gradient: multiply by batch.weight"
        numbers = {"loss": loss.total.detach(), **loss.metrics}
        slopes = [slope[row, : len(turns[one.turn].token_ids)] for row, one in enumerate(some)]
        return {name: float(number) for name, number in numbers.items()}, torch.cat(slopes)

    (whole, slope), parts = measure(samples), [measure([sample]) for sample in samples]
    hint = "the losses of microbatches must add up to the loss of the whole: sum over batch.weight, take no mean"
    for name, number in whole.items():
        added = sum(part[name] for part, _ in parts)
        assert abs(added - number) <= 1e-5 * max(1.0, abs(number)), f"metric {name}: {hint}"
    assert torch.allclose(slope, torch.cat([own for _, own in parts]), atol=1e-6), hint
