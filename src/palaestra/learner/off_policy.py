"""Learning from what an older policy did: its steps evaluated by the policy that is about to learn.

Three policies are told apart: the *behaviour* policy acted and left its log-probabilities, the *proximal* one is where
this update starts, the *current* one moves. PPO clips current against proximal; a sample counts by how much likelier
the proximal policy was to act so. Its own steps keep their recorded numbers, so fresh experience is learned from
exactly as by plain PPO. Edits nothing: what it changes, it copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from palaestra.experience.columns import NO_FINGERPRINT, UNKNOWN_VERSION, Columns
from palaestra.learner.batch import TrainBatch, evaluate_actions, map_entry, minibatch
from palaestra.policy.network import eval_mode

__all__ = ["reevaluate", "stale_steps", "staleness_metrics"]

ROWS_AT_ONCE = 1024
"""Steps per forward pass: enough to be fast, few enough for images of a large model."""


def stale_steps(rollout: Columns, version: int, fingerprint: int = NO_FINGERPRINT) -> Tensor | None:
    """Which steps other weights took than those of `fingerprint`, `[T, N]`; None when these took all of them.

    A step without a recorded fingerprint is judged by its version, and one without a version counts as fresh.
    """
    recorded = rollout.get("policy_fingerprint")
    older: Tensor = (rollout["policy_version"] != version) & (rollout["policy_version"] != UNKNOWN_VERSION)
    if recorded is None or fingerprint == NO_FINGERPRINT:
        stale = older
    elif bool((recorded == fingerprint).all()):
        return None
    else:
        unknown = recorded == NO_FINGERPRINT
        stale = torch.where(unknown, older, recorded != fingerprint)
    return stale if bool(stale.any()) else None


def staleness_metrics(rollouts: Sequence[Columns], version: int, stale: Sequence[Tensor | None]) -> dict[str, float]:
    """How many updates old the weights behind the steps are, given what `stale_steps` says of each rollout.

    Steps of the current weights are 0 updates old, whatever their version. A step is foreign when its version
    says that it is not older than the current weights, and other weights took it; it counts as one update old.
    """
    if all(one is None for one in stale):
        return {"staleness": 0.0, "staleness_max": 0.0}
    lags, foreign = [], []
    for rollout, one in zip(rollouts, stale, strict=True):
        lag = (version - rollout["policy_version"]).reshape(-1)
        old = torch.zeros_like(lag, dtype=torch.bool) if one is None else one.reshape(-1)
        lags.append(torch.where(old, lag.clamp(min=1), 0))
        foreign.append(old & (lag <= 0))
    lag = torch.cat(lags)
    metrics = {"staleness": float(lag.double().mean()), "staleness_max": float(lag.max())}
    share = float(torch.cat(foreign).double().mean())
    return metrics | ({"foreign_steps": share} if share else {})


@torch.no_grad()
def reevaluate(policy: Any, rollout: Columns, stale: Tensor) -> tuple[Columns, Tensor]:
    """The rollout as the proximal policy sees it, and log(proximal / behaviour) `[T, N]`.

    `log_prob`, `value` and `next_value` of stale steps are the proximal policy's; for its own steps nothing changes and
    the log-weight is exactly 0.
    """
    rows = stale.reshape(-1).nonzero().squeeze(1)
    keys = ("observation", "action", "action_mask", "duration")
    flat: TrainBatch = {key: map_entry(rollout[key], lambda part: part.flatten(0, 1)) for key in keys if key in rollout}
    log_prob, value = rollout["log_prob"].flatten().clone(), rollout["value"].flatten().clone()
    with eval_mode(policy):  # as it would act
        for some in rows.split(ROWS_AT_ONCE):
            found, _, worth = evaluate_actions(policy, minibatch(flat, some))
            log_prob[some], value[some] = found.to(log_prob.dtype), worth.to(value.dtype)
    log_prob, value = log_prob.view_as(rollout["log_prob"]), value.view_as(rollout["value"])
    # What follows within the segment is evaluated as well; where it does not, the recorded estimate has to do.
    next_value = rollout["next_value"].clone()
    goes_on = ~(rollout["terminated"] | rollout["truncated"])[:-1]
    next_value[:-1] = torch.where(goes_on & stale[1:], value[1:], next_value[:-1])
    current = {**rollout, "log_prob": log_prob, "value": value, "next_value": next_value}
    return current, log_prob - rollout["log_prob"]
