"""Build a policy from its configuration: a built-in one, a pretrained model, or the user's own class."""

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
from palaestra.policy.off_policy import TRANSITION_POLICIES, TransitionPolicy
from palaestra.policy.tabular import TabularPolicy
from palaestra.policy.vla.conformance import check_vla_model
from palaestra.policy.vla.loading import load_vla_model
from palaestra.policy.vla.policy import VLAPolicy, check_action_space

_TRANSITION_POLICIES: dict[str, type[TransitionPolicy]] = {**TRANSITION_POLICIES, TabularPolicy.name: TabularPolicy}
POLICIES: dict[str, type[nn.Module]] = {"actor_critic": ActorCritic, "vla": VLAPolicy, **_TRANSITION_POLICIES}


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
    """Build the policy on `device`; weights that no file contains are initialised from `seed`.

    `pretrained=False` does not read a pretrained model's file, for a checkpoint that contains all weights.
    """
    chosen = choose_device(device)
    network = None
    if config.name == "vla":
        if normalize_observation:
            reason = "a pretrained model receives observations as they are"
            raise ConfigError("env.normalize_observation", True, reason, "Set env.normalize_observation=false")
        return _build_vla_policy(config, observation_space, action_space, seed, pretrained, chosen)
    if config.name in _TRANSITION_POLICIES:
        return _TRANSITION_POLICIES[config.name](
            observation_space,
            action_space,
            config,
            normalize_observation=normalize_observation,
            seed=seed,
            device=chosen,
        )
    if ":" in config.name:
        network = _build_own_network(config, observation_space, action_space, seed)
        if isinstance(network, TransitionPolicy) or hasattr(network, "evaluate_actions"):  # a whole policy
            return network.to(chosen)
    elif config.name not in POLICIES:
        close = closest_names(config.name, POLICIES, count=1)
        own = "For your own class write its address 'package.module:Class'"
        remedy = f"Did you mean {close[0]!r}?" if close else own
        raise ConfigError("policy.name", config.name, f"is not a built-in policy ({', '.join(POLICIES)})", remedy)
    policy = ActorCritic(
        observation_space,
        action_space,
        config,
        network=network,
        normalize_observation=normalize_observation,
        seed=seed,
        device=chosen,
    )
    if network is not None:
        _check_forward(policy, config)
    return policy


def _build_vla_policy(
    config: PolicyConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    seed: int,
    pretrained: bool,
    device: torch.device,
) -> VLAPolicy:
    """Load a pretrained model and check that it conforms to `VLAModelInterface`."""
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
    # On the training device, to find models that create tensors on another one.
    check_vla_model(model, observation_space, box)
    return policy


def _build_own_network(
    config: PolicyConfig, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], seed: int
) -> nn.Module:
    cls = import_address(config.name, place="policy.name")
    # The user's network initialises itself from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network = cls(observation_space, action_space, **config.kwargs)
        except TypeError as error:
            remedy = "It is called as Class(observation_space, action_space, **policy.kwargs)"
            reason = f"{config.name} refused them ({error})"
            raise ConfigError("policy.kwargs", config.kwargs, reason, remedy) from error
    if not isinstance(network, nn.Module):
        raise ConfigError("policy.name", config.name, "gives something that is not a torch.nn.Module")
    return network


def _check_forward(policy: ActorCritic, config: PolicyConfig) -> None:
    """Run one forward pass before training starts; a wrong shape is the usual mistake."""
    sample = policy.observation_space.sample()
    if isinstance(sample, dict):
        observation: Any = {name: torch.as_tensor(part).unsqueeze(0) for name, part in sample.items()}
    else:
        observation = torch.as_tensor(sample).unsqueeze(0)
        observation = observation.float() if observation.is_floating_point() else observation
    try:
        with torch.no_grad():
            policy(move_to(policy.device, observation))
    except ConfigError as error:
        raise ConfigError("policy.name", config.name, error.reason, error.remedy) from None
    except (TypeError, ValueError, RuntimeError) as error:
        width = policy.distribution.num_parameters
        remedy = f"forward(observation) must return (parameters [B, {width}], value [B])"
        reason = f"its forward failed on one observation ({error})"
        raise ConfigError("policy.name", config.name, reason, remedy) from error
