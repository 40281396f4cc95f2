"""Policies as safetensors files: weights, normaliser and configuration. Nothing is unpickled.

A policy with the user's own network stores that network's weights; loading it needs the network, because the file does
not contain code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.config import parse_section
from palaestra.errors import CheckpointError
from palaestra.files.atomic import write_bytes
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import Device
from palaestra.policy.weight_sync import copy_weights

SCHEMA = 1


def policy_bytes(policy: nn.Module) -> bytes:
    """The content of a safetensors file with the policy."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in policy.state_dict().items()}
    facts: dict[str, Any] = {"schema": SCHEMA, "class": type(policy).__qualname__}
    if isinstance(policy, ActorCritic):
        facts |= {
            "config": policy.config.model_dump(mode="json"),
            "observation_space": space_to_json(policy.observation_space),
            "action_space": space_to_json(policy.action_space),
            "normalize_observation": bool(len(policy.encoder.normalizers)),
            "own_network": policy.network is not None,
        }
    return save(tensors, metadata={"palaestra": json.dumps(facts)})


def save_policy(policy: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write the policy to a file atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, policy_bytes(policy))
    return target


def load_policy(
    path: str | os.PathLike[str], *, network: nn.Module | None = None, device: Device | None = None
) -> ActorCritic:
    """Rebuild a policy from a file on `device` (None: the CPU)."""
    facts, tensors = _read(path)
    if facts.get("own_network") and network is None:
        reason = "holds the weights of a network of your own"
        raise CheckpointError("policy file", str(path), reason, "Pass it: load_policy(path, network=…)")
    if "observation_space" not in facts:
        raise CheckpointError("policy file", str(path), "does not describe an ActorCritic", "Build the policy yourself")
    policy = ActorCritic(
        space_from_json(facts["observation_space"]),
        space_from_json(facts["action_space"]),
        parse_section(PolicyConfig, facts["config"], place="policy"),
        network=network,
        normalize_observation=facts["normalize_observation"],
        device=device,
    )
    _copy_tensors(policy, tensors, path)
    return policy


def load_weights(policy: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load the weights of a file into a policy; `CheckpointError`, with nothing changed, if they do not fit."""
    _copy_tensors(policy, _read(path)[1], path)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError("policy file", str(path), f"cannot be read ({error})", "Use another checkpoint") from None
    try:
        facts: dict[str, Any] = json.loads(metadata["palaestra"])
        known = int(facts["schema"]) <= SCHEMA
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise CheckpointError("policy file", str(path), f"is not a policy of schema {SCHEMA} or older")
    return facts, tensors


def _copy_tensors(policy: nn.Module, tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    own = policy.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        names = f"missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}"
        reason = f"is of another architecture ({names})"
        raise CheckpointError("policy file", str(path), reason, "Use the configuration it was trained with")
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            reason = f"{name} has shape {tuple(tensors[name].shape)}, this policy needs {tuple(value.shape)}"
            remedy = "Use the environment and policy configuration it was trained with"
            raise CheckpointError("policy file", str(path), reason, remedy)
    copy_weights(tensors, own)


def space_to_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """A space as JSON."""
    if isinstance(space, spaces.Box):
        return {
            "kind": "Box",
            "low": _compact(space.low),
            "high": _compact(space.high),
            "shape": list(space.shape),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    assert isinstance(space, spaces.Dict)
    return {"kind": "Dict", "spaces": {name: space_to_json(part) for name, part in space.spaces.items()}}


def space_from_json(facts: dict[str, Any]) -> gymnasium.Space[Any]:
    """The space from the JSON of `space_to_json`."""
    kind = facts["kind"]
    if kind == "Box":
        dtype = np.dtype(facts["dtype"])
        shape = tuple(facts["shape"])
        bounds = [np.broadcast_to(np.array(facts[side], np.float64), shape).astype(dtype) for side in ("low", "high")]
        return spaces.Box(bounds[0], bounds[1], shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(facts["n"], start=facts["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(facts["nvec"], start=facts.get("start"))
    if kind == "MultiBinary":
        # MultiBinary([n]) does not compare equal to MultiBinary(n).
        return spaces.MultiBinary(facts["shape"] if len(facts["shape"]) != 1 else facts["shape"][0])
    return spaces.Dict({name: space_from_json(part) for name, part in facts["spaces"].items()})


def _compact(bound: Any) -> Any:
    # One number if all bounds are equal, as for images.
    values = np.asarray(bound, np.float64)
    if values.size and (values == values.flat[0]).all():
        return float(values.flat[0])
    return values.tolist()
