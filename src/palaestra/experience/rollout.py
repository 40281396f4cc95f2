"""`Rollout`: `[T, N]` steps of experience as a TensorDict, time first.

Recorded columns are never modified; advantages are added to a copy when learning. Each of the N columns is one
environment's unbroken stream, identified by `stream` and counted by `env_step`, so that `combine_rollouts` can join
consecutive rollouts.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from palaestra.errors import CheckpointError, ExperienceError
from palaestra.experience.columns import NO_FINGERPRINT, PLURALS, Columns
from palaestra.files.atomic import write_bytes

SCHEMA = 1
MIN_STEPS_TO_COMPARE = 16
"""Rollouts with fewer steps may be equal by chance."""
_COMPARED = ("observation", "action", "reward")


class Rollout(TensorDict):  # type: ignore[no-untyped-call]
    """T steps of N environments; every entry is `[T, N, ...]`.

    observation     input of the policy; a nested TensorDict for Dict spaces
    action          as sampled (a Gaussian before clipping)
    log_prob        under the weights that acted
    value           of `observation`, under the weights that acted
    next_value      of the next observation: 0 after termination, of the last observation after truncation
    reward          as returned by the environment
    terminated      the task ended
    truncated       the episode was cut off, for example by a time limit
    policy_version  version of the acting weights, counted in updates
    policy_fingerprint  hash of the acting weights (0 or missing: not recorded, as in older files)
    reward_scale    factor for rewards in learning (1 without reward normalisation)
    stream          id of the environment, unique within one process
    env_step        number of steps that the environment had taken before
    action_mask     allowed actions (only with masks)
    duration        number of executed actions of the chunk (only with action chunks)
    valid           False where the environment ignored the action (only if there are such steps)

    Plural keys are accepted as well: `rollout["observations"]`, `"actions" in rollout`.
    """

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(PLURALS.get(index, index) if isinstance(index, str) else index)

    def __contains__(self, key: Any) -> bool:
        return (PLURALS.get(key, key) if isinstance(key, str) else key) in self.keys()

    @classmethod
    def from_columns(cls, columns: Columns) -> Rollout:
        """A view over plain tensors; nothing is copied."""
        shape = tuple(columns["reward"].shape[:2])
        entries = dict(columns)
        if isinstance(entries["observation"], dict):
            entries["observation"] = TensorDict(entries["observation"], batch_size=shape)
        return cls(entries, batch_size=shape)

    def columns(self) -> Columns:
        """The entries as plain tensors; a nested observation as a dict."""
        columns = {str(key): self.get(key) for key in self.keys()}
        if isinstance(columns["observation"], TensorDict):
            nested = columns["observation"]
            columns["observation"] = {str(key): nested.get(key) for key in nested.keys()}
        return columns

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.to_dict(), tuple(self.batch_size))

    def total_reward(self) -> float:
        """Sum of all rewards."""
        return float(self.get("reward").double().sum())

    def save(self, path: str | os.PathLike[str]) -> Path:  # type: ignore[override]
        """Write one safetensors file atomically, with a schema version and a SHA-256."""
        from safetensors.torch import save as to_bytes

        flat = self._leaves()
        facts = {"schema": str(SCHEMA), "kind": "rollout", "shape": json.dumps(list(self.batch_size))}
        facts["sha256"] = _fingerprint(flat, facts["shape"])
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, to_bytes(flat, metadata=facts))
        return target

    def _leaves(self) -> dict[str, Tensor]:
        leaves: Any = self.items(include_nested=True, leaves_only=True)
        return {"/".join(key) if isinstance(key, tuple) else key: value.contiguous() for key, value in leaves}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rollout:  # type: ignore[override]
        """Read a saved rollout; `CheckpointError` if the file is truncated, altered or too new."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                flat = {key: file.get_tensor(key) for key in file.keys()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError("rollout file", str(path), f"cannot be read ({error})", "Collect it again") from None
        schema = facts.get("schema", "")
        if facts.get("kind") != "rollout" or not schema.isdecimal() or int(schema) > SCHEMA:
            raise CheckpointError("rollout file", str(path), f"is not a rollout of schema {SCHEMA} or older")
        if facts.get("sha256") != _fingerprint(flat, facts.get("shape", "")):
            raise CheckpointError("rollout file", str(path), "contents do not match their SHA-256", "Collect it again")
        shape = json.loads(facts["shape"])
        rollout = cls({}, batch_size=shape)
        for key, value in flat.items():
            rollout.set(tuple(key.split("/", 1)) if "/" in key else key, value)
        return rollout


def _rebuild(entries: dict[str, Any], shape: tuple[int, ...]) -> Rollout:
    return Rollout(entries, batch_size=shape)


# Allow rollouts written by `torch.save` in the `weights_only` mode of `torch.load`.
torch.serialization.add_safe_globals([_rebuild])


def _fingerprint(flat: dict[str, Tensor], shape: str = "") -> str:
    digest = hashlib.sha256(shape.encode())
    for key in sorted(flat):
        value = flat[key].detach().cpu().contiguous()
        digest.update(f"{key}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def combine_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Join rollouts without mixing streams.

    Consecutive rollouts of the same environments are joined along time, exactly as if collected at once. Other rollouts
    are joined as further environments, which requires equal lengths.
    """
    if not rollouts:
        raise ExperienceError("combine_rollouts: an empty list. Collect at least one rollout.")
    keys = {frozenset(str(key) for key in rollout.keys()) for rollout in rollouts}
    if len(keys) > 1:
        common = frozenset.intersection(*keys)
        extra = sorted(set().union(*keys) - common)
        if set(extra) - {"valid", "policy_fingerprint"}:
            raise ExperienceError(f"combine_rollouts: only some of the rollouts have {', '.join(extra)}.")
        rollouts = [_fill_missing(rollout, extra) for rollout in rollouts]
    if _same_streams(rollouts):
        ordered = sorted(rollouts, key=lambda rollout: int(rollout.get("env_step")[0, 0]))
        if all(torch.equal(a.get("env_step")[-1] + 1, b.get("env_step")[0]) for a, b in pairwise(ordered)):
            return _join(ordered, dim=0)
    lengths = sorted({rollout.batch_size[0] for rollout in rollouts})
    if len(lengths) > 1:
        raise ExperienceError(
            f"combine_rollouts: rollouts of different environments have different lengths {lengths}. "
            "Collect the same n_steps from each, or pass the list to learn() as it is."
        )
    _warn_about_copies(rollouts)
    return _join(rollouts, dim=1)


def _join(rollouts: Sequence[Rollout], dim: int) -> Rollout:
    joined: Any = torch.cat([TensorDict(dict(r.items()), batch_size=r.batch_size) for r in rollouts], dim=dim)
    return Rollout(dict(joined.items()), batch_size=joined.batch_size)


def _fill_missing(rollout: Rollout, keys: Sequence[str]) -> Rollout:
    """Add missing columns: all steps valid, no fingerprint."""
    shape, missing = tuple(rollout.batch_size), [key for key in keys if key not in rollout.keys()]
    if not missing:
        return rollout
    whole = Rollout(dict(rollout.items()), batch_size=rollout.batch_size)
    for key in missing:
        whole.set(key, torch.full(shape, True if key == "valid" else NO_FINGERPRINT))
    return whole


def _warn_about_copies(rollouts: Sequence[Rollout]) -> None:
    """Warn about identical rollouts, which collectors with the same seed produce."""
    seen: dict[str, int] = {}
    for number, rollout in enumerate(rollouts):
        if rollout.numel() < MIN_STEPS_TO_COMPARE:
            continue
        compared = [item for item in rollout._leaves().items() if item[0].split("/")[0] in _COMPARED]
        first = seen.setdefault(_fingerprint(dict(compared)), number)
        if first != number:
            warnings.warn(
                f"combine_rollouts: rollouts {first} and {number} are the same, step by step, so they count twice and "
                "add nothing. If two trainers collected them, give each its own seed: Trainer(..., seed=1).",
                stacklevel=3,
            )
            return


def _same_streams(rollouts: Sequence[Rollout]) -> bool:
    first = rollouts[0]
    if any("stream" not in r.keys() or "env_step" not in r.keys() for r in rollouts):
        return False
    return all(torch.equal(r.get("stream")[0], first.get("stream")[0]) for r in rollouts)
