"""From a configuration to a policy: ours by name, a pretrained model by its class, the user's own by address."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import nn

from palaestra.config import closest_names, import_address
from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import Device, choose_device, move_to
from palaestra.policy.vla.conformance import check_vla_model
from palaestra.policy.vla.loading import load_vla_model
from palaestra.policy.vla.policy import VLAPolicy, check_action_space

__all__ = ["build_policy"]

POLICIES: dict[str, type[nn.Module]] = {"actor_critic": ActorCritic, "vla": VLAPolicy}


def build_policy(
    config: PolicyConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    *,
    normalize_observation: bool = False,
    seed: int = 0,
    pretrained: bool = True,
    device: Device = "cpu",
) -> nn.Module:
    """The policy that `config` names, on `device`, with weights drawn from `seed` where no file gives them.

    `pretrained=False` leaves a pretrained model's file unread, for a checkpoint that brings every weight itself.
    """
    chosen = choose_device(device)
    network = None
    if config.name == "vla":
        if normalize_observation:
            raise ConfigError(
                "env.normalize_observation", True, "a pretrained model receives observations as they are",
                "Set env.normalize_observation=false",
            )  # fmt: skip
        return _vla_policy(config, observation_space, action_space, seed, pretrained, chosen)
    if ":" in config.name:
        network = _own_network(config, observation_space, action_space, seed)
        if hasattr(network, "evaluate_actions"):  # a whole policy, not just a network
            return network.to(chosen)
    elif config.name not in POLICIES:
        close = closest_names(config.name, POLICIES, count=1)
        raise ConfigError(
            "policy.name", config.name, f"not one of ours ({', '.join(POLICIES)})",
            f"Did you mean {close[0]!r}?" if close else "For your own class write its address 'package.module:Class'",
        )  # fmt: skip
    policy = ActorCritic(
        observation_space, action_space, config, network=network, normalize_observation=normalize_observation,
        seed=seed, device=chosen,
    )  # fmt: skip
    if network is not None:
        _try_out(policy, config)
    return policy


def _vla_policy(
    config: PolicyConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    seed: int,
    pretrained: bool,
    device: torch.device,
) -> VLAPolicy:
    """The model, in the interface of a policy, after every rule it has to keep was tried on it."""
    assert config.vla_config is not None
    box = check_action_space(action_space, config.action_dim)
    notices: list[str] = []
    model = load_vla_model(
        config.vla_config,
        action_dim=int(box.shape[-1]),
        chunk=int(box.shape[0]) if len(box.shape) == 2 else 1,
        observation_space=observation_space,
        seed=seed,
        pretrained=pretrained,
        notices=notices,
    )
    policy = VLAPolicy(
        model,
        observation_space,
        action_space,
        freeze=config.vla_config.freeze,
        learning_rate_scale=config.vla_config.learning_rate_scale,
        notices=notices,
        device=device,
    )
    # On the device it will train on: a model that makes tensors elsewhere is found here.
    check_vla_model(model, observation_space, box)
    return policy


def _own_network(
    config: PolicyConfig, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], seed: int
) -> nn.Module:
    cls = import_address(config.name, place="policy.name")
    # A network of the user's initialises itself from torch's global generator; it is put back as it was found.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network = cls(observation_space, action_space, **config.kwargs)
        except TypeError as error:
            raise ConfigError(
                "policy.kwargs", config.kwargs, f"{config.name} refused them ({error})",
                "It is called as Class(observation_space, action_space, **policy.kwargs)",
            ) from error  # fmt: skip
    if not isinstance(network, nn.Module):
        raise ConfigError("policy.name", config.name, "gives something that is not a torch.nn.Module")
    return network


def _try_out(policy: ActorCritic, config: PolicyConfig) -> None:
    """One forward pass before anything is launched: a wrong shape is the usual mistake."""
    sample = policy.observation_space.sample()
    if isinstance(sample, dict):
        observation: Any = {name: torch.as_tensor(part).unsqueeze(0) for name, part in sample.items()}
    else:
        observation = torch.as_tensor(sample).unsqueeze(0)
        observation = observation.float() if observation.is_floating_point() else observation
    wanted = policy.distribution.num_parameters
    try:
        with torch.no_grad():
            policy(move_to(policy.device, observation))
    except ConfigError as error:
        raise ConfigError("policy.name", config.name, error.reason, error.remedy) from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "policy.name", config.name, f"its forward failed on one observation ({error})",
            f"forward(observation) must return (parameters [B, {wanted}], value [B])",
        ) from error  # fmt: skip
