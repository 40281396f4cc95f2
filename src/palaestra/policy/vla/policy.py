"""`VLAPolicy`: a pretrained vision-language-action model as a policy.

`VLAModelInterface` lists the methods a model needs; `VLAPolicy` gives it the interface of a policy. The model stays in
eval mode in training: with dropout on, the probability of an action would differ between acting and learning, and PPO
needs the ratio of the two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import ActResult, TensorObservation
from palaestra.policy.device import Device, choose_device, device_of

if TYPE_CHECKING:
    from tensordict import TensorDict

PLACE = "policy.vla_config"
# Models without a `generator` parameter use torch's global generator. The lock keeps threads that act at the same time
# (an asynchronous collector and an evaluation) from mixing their random numbers.
_GLOBAL_GENERATOR_LOCK = threading.Lock()


class VLAModelInterface(Protocol):
    """The methods that a `torch.nn.Module` needs to be trained.

    `observations` is a TensorDict of batch size `[B]` with the environment's own keys, e.g. `rgb` (uint8
    `[B, H, W, 3]`), `proprio` (float32), `language` (int64 token ids); an environment without keys gives
    `observation`. Models that act in chunks return actions `[B, k, action_dim]`, and log-probabilities and entropies
    `[B, k]`, one per action of the chunk; the log-probability of an action may depend only on earlier ones.

    Optional:

    - `forward(…, *, deterministic: bool, generator: torch.Generator)`: either keyword or both. Without
      `deterministic`, evaluation uses a sample from a fixed seed; without `generator`, samples come from torch's
      global generator, which is seeded before each call.
    - `act(observations, *, deterministic, generator) -> (actions, log_prob, value)` and
      `evaluate(observations, actions) -> (log_prob, entropy, value)`: the same numbers in one pass through the
      backbone instead of two or three.
    - `fresh_weights: tuple[str, …]`: parts (by prefix) that a checkpoint need not contain, such as a value head.
    - `checkpoint_config(path) -> dict` (class method): keyword arguments that follow from the checkpoint's files.
    - `checkpoint_weights(tensors) -> dict`: a checkpoint's tensors under the names this class uses.
    """

    def forward(self, observations: TensorDict) -> Tensor:
        """Sample actions `[B, action_dim]` from the distribution that `evaluate_actions` evaluates."""

    def get_value(self, observations: TensorDict) -> Tensor:
        """Values `[B, 1]`: the expected discounted return."""

    def evaluate_actions(self, observations: TensorDict, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability `[B]` (differentiable) and entropy `[B]` of actions."""


@functools.lru_cache(maxsize=64)  # called at every step, and as slow as a small network
def parameter_names(function: Any) -> frozenset[str]:
    """Names of the parameters of a function or class; empty if they cannot be inspected."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def as_tensordict(observation: TensorObservation) -> TensorDict:
    """Observations `[B, ...]` as a TensorDict; keys joined by "/" become nested keys."""
    from tensordict import TensorDict

    if isinstance(observation, Tensor):
        return TensorDict({"observation": observation}, batch_size=[len(observation)])
    nested: dict[str, Any] = {}
    size = 0
    for name, part in observation.items():
        *outer, last = name.split("/")
        level = nested
        for key in outer:
            level = level.setdefault(key, {})
        level[last] = part
        size = len(part)
    return TensorDict(nested, batch_size=[size])


@contextlib.contextmanager
def seed_global_generator(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generator; its state is restored afterwards."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with _GLOBAL_GENERATOR_LOCK, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def sample_actions(method: Any, observations: TensorDict, *, seed: int, deterministic: bool) -> Any:
    """Call a model's `forward` or `act` with the optional keywords it takes."""
    names = parameter_names(getattr(method, "__func__", method))
    keywords: dict[str, Any] = {"deterministic": deterministic} if "deterministic" in names else {}
    device = next(iter(observations.values(include_nested=True, leaves_only=True))).device
    if "generator" in names:
        keywords["generator"] = torch.Generator(device).manual_seed(seed)
        return method(observations, **keywords)
    with seed_global_generator(seed, device):
        return method(observations, **keywords)


def _seed_from(noise: Tensor) -> int:
    """A 63-bit hash of the noise."""
    digest = hashlib.blake2b(noise.detach().cpu().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class BoxActions:
    """Shape of the actions, and their conversion for the environment."""

    noise_kind: Literal["uniform", "normal"] = "uniform"
    noise_size = 2
    """Two numbers of 24 bits per environment seed the sampling of one step."""
    action_dtype = np.float32

    def __init__(self, space: spaces.Box) -> None:
        self.action_shape = tuple(space.shape)
        self._low, self._high = np.asarray(space.low, np.float32), np.asarray(space.high, np.float32)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Clip to the bounds of the space; the log-probability remains that of the unclipped action."""
        clipped: NDArray[Any] = np.clip(action, self._low, self._high)
        return clipped


class VLAPolicy(nn.Module):
    """A model that implements `VLAModelInterface`, as a policy.

    An action space `[d]` means one action per decision, `[k, d]` a chunk of k. `notices` are messages for the user,
    shown before training starts. `device`: `auto`, `cpu`, `cuda:1`, …; None: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        action_dim: int | None = None,
        freeze: Sequence[str] = (),
        learning_rate_scale: Mapping[str, float] | None = None,
        notices: Sequence[str] = (),
        device: Device | None = None,
    ) -> None:
        super().__init__()
        box = check_action_space(action_space, action_dim)
        self.observation_space, self.action_space = observation_space, action_space
        self.action_dim = int(box.shape[-1])
        self.chunk = int(box.shape[0]) if len(box.shape) == 2 else 1
        self.distribution = BoxActions(box)
        self.notices = list(notices)
        self.model: Any = model
        self._convert_to_float32()
        self._frozen = tuple(freeze)
        self._scales = dict(learning_rate_scale or {})
        self._freeze()
        self.eval()
        if device is not None:
            self.to(choose_device(device))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self)

    @property
    def learning_rate_scales(self) -> dict[str, float]:
        """Learning rate factor by parameter group."""
        return {name: self._scales.get(name.removeprefix("policy."), 1.0) for name in self.parameter_groups()}

    def train(self, mode: bool = True) -> VLAPolicy:
        """Stay in eval mode: an action must keep the probability it was sampled with."""
        super().train(False)
        return self

    def act(self, observation: TensorObservation, noise: Tensor | None, *, mask: Tensor | None = None) -> ActResult:
        """Sample actions, seeded by `noise[B, 2]`; without noise, the model's deterministic actions.

        The log-probability is `[B]`, or `[B, k]` for chunks, of which only the executed part counts.
        """
        _reject_mask(mask)
        observations = as_tensordict(observation)
        seed, deterministic = (0, True) if noise is None else (_seed_from(noise), False)
        if hasattr(self.model, "act"):
            action, log_prob, value = sample_actions(
                self.model.act, observations, seed=seed, deterministic=deterministic
            )
        else:
            action = sample_actions(self.model.forward, observations, seed=seed, deterministic=deterministic)
            log_prob, _, value = self._evaluate(observations, action)
        return ActResult(action.float(), log_prob.float(), value.reshape(-1).float())

    def value(self, observation: TensorObservation) -> Tensor:
        """Values `[B]`."""
        value: Tensor = self.model.get_value(as_tensordict(observation))
        return value.reshape(-1).float()

    def evaluate_actions(
        self,
        observation: TensorObservation,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        duration: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value of actions, each `[B]`.

        `duration[B]` is the number of executed actions of each chunk; the others do not count. None: all.
        """
        _reject_mask(mask)
        log_prob, entropy, value = self._evaluate(as_tensordict(observation), action)
        if log_prob.ndim == 2:
            if duration is not None:
                unused = torch.arange(log_prob.shape[1], device=log_prob.device) >= duration.reshape(-1, 1)
                log_prob, entropy = log_prob.masked_fill(unused, 0.0), entropy.masked_fill(unused, 0.0)
            log_prob, entropy = log_prob.sum(-1), entropy.sum(-1)
        return log_prob.float(), entropy.float(), value.reshape(-1).float()

    def _evaluate(self, observations: TensorDict, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if hasattr(self.model, "evaluate"):
            log_prob, entropy, value = self.model.evaluate(observations, action)
            return log_prob, entropy, value
        log_prob, entropy = self.model.evaluate_actions(observations, action)
        return log_prob, entropy, self.model.get_value(observations)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters: `policy`, and `policy.<part>` for every part with its own learning rate."""
        groups: dict[str, list[nn.Parameter]] = {"policy": [], **{f"policy.{part}": [] for part in self._scales}}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                part = match_prefix(name, tuple(self._scales))
                groups["policy" if part is None else f"policy.{part}"].append(parameter)
        return {name: group for name, group in groups.items() if group}

    def _convert_to_float32(self) -> None:
        tensors = [t for t in self.model.state_dict().values() if isinstance(t, Tensor) and t.is_floating_point()]
        names = {str(t.dtype).removeprefix("torch.") for t in tensors if t.dtype != torch.float32}
        if names:
            self.model.float()
            self.notices.append(f"The model's {', '.join(sorted(names))} weights are trained as float32.")

    def _freeze(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        for key, parts in (("freeze", self._frozen), ("learning_rate_scale", tuple(self._scales))):
            for part in parts:
                if not any(match_prefix(name, (part,)) for name in names):
                    tops = sorted({name.split(".")[0] for name in names})
                    close = closest_names(part, [*tops, *names], count=1)
                    remedy = f"Did you mean {close[0]!r}?" if close else f"The parts are {', '.join(tops[:12])}"
                    raise ConfigError(f"{PLACE}.{key}", part, "no parameter's name begins so", remedy)
        for name, parameter in self.model.named_parameters():
            if match_prefix(name, self._frozen) is not None:
                parameter.requires_grad_(False)
        groups = self.parameter_groups()
        if not groups:
            raise ConfigError(f"{PLACE}.freeze", list(self._frozen), "nothing is left to train", "Freeze fewer parts")
        for part in self._scales:
            if f"policy.{part}" not in groups:
                raise ConfigError(
                    f"{PLACE}.learning_rate_scale", part, "all of it is frozen", "Take it out of one of the two"
                )


def check_action_space(space: gymnasium.Space[Any], action_dim: int | None = None) -> spaces.Box:
    """Return the action space, `[d]` or `[k, d]`; `ConfigError` if a model of `action_dim` cannot act in it."""
    if not isinstance(space, spaces.Box) or len(space.shape) not in (1, 2):
        reason = f"its actions are rows of numbers, and the environment's are {space}"
        remedy = "Use policy.name=actor_critic, or an environment with a Box action space"
        raise ConfigError("policy.name", "vla", reason, remedy)
    size = int(space.shape[-1])
    if action_dim is not None and action_dim != size:
        reason = f"an action of the environment has {size} numbers"
        raise ConfigError("policy.action_dim", action_dim, reason, f"Set policy.action_dim={size}, or leave it out")
    return space


def _reject_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise ConfigError("info['action_mask']", tuple(mask.shape), "continuous actions cannot be masked")


def match_prefix(name: str, prefixes: Sequence[str]) -> str | None:
    """The longest of the dotted prefixes that `name` starts with; None if there is none."""
    matches = [p for p in prefixes if name == p or name.startswith(p.rstrip(".") + ".")]
    return max(matches, key=len, default=None)
