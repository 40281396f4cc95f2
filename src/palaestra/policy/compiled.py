"""`CompiledActorCritic`: acting and evaluation with compiled kernels, and which policies support it.

A policy qualifies when it is an `ActorCritic` of plain multilayer perceptrons over a vector of numbers, with
discrete or Gaussian actions, float32 on the CPU. All others run as ordinary torch; the choice is automatic. The kernels
work on the policy's own memory, so that kernels and module see each other's changes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.errors import ExperienceError
from palaestra.kernels import acting
from palaestra.kernels import network as kernels
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.device import device_of
from palaestra.policy.distribution import Categorical, Gaussian
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.network import ACTIVATIONS, ObservationNormalizer

F32 = np.float32


def why_not_compiled(policy: nn.Module, *, learning: bool = True) -> str | None:
    """Why the policy cannot run compiled; None if it can. `learning=False`: whether it can act compiled."""
    reason = why_never_compiled(policy, learning=learning)
    if reason is None and device_of(policy).type != "cpu":
        return f"the kernels run on the CPU only, and the weights are on {device_of(policy)}"
    return reason


def why_never_compiled(policy: nn.Module, *, learning: bool = True) -> str | None:
    """The same, regardless of the policy's device."""
    if type(policy) is not ActorCritic or policy.network is not None:
        return "the network is your own"
    if not policy.encoder.is_plain_vector:
        return "observations are not a vector of numbers"
    if type(policy.distribution) not in (Categorical, Gaussian):
        return f"{type(policy.distribution).__name__} actions"
    for parameter in policy.parameters():
        if parameter.dtype is not torch.float32:
            return "weights are not float32"
        if learning and not parameter.requires_grad:
            return "some weights are frozen"
    outputs = policy.distribution.num_parameters
    if not (_matches_config(policy, policy.actor, outputs) and _matches_config(policy, policy.critic, 1)):
        return "actor or critic is not the network that its configuration describes"
    return None


def _matches_config(policy: ActorCritic, network: nn.Module, outputs: int) -> bool:
    """Whether a network has the layers of its configuration, which the kernels assume."""
    sizes = (policy.encoder.size, *policy.config.hidden, outputs)
    layers = list(network.children())
    if type(network) is not nn.Sequential or len(layers) != 2 * len(sizes) - 3:
        return False
    activation = ACTIVATIONS[policy.config.activation]
    linear = all(
        type(layer) is nn.Linear and (layer.in_features, layer.out_features) == pair and layer.bias is not None
        for layer, pair in zip(layers[::2], pairwise(sizes), strict=True)
    )
    return linear and all(type(layer) is activation for layer in layers[1::2])


class CompiledActorCritic:
    """Acts and evaluates with compiled kernels on the policy's own weights."""

    def __init__(self, policy: ActorCritic) -> None:
        self.policy = policy
        self.flat = FlatParameters.of(policy)
        vector = self.flat.vector.numpy()
        self.actor: NDArray[np.float32] = vector[self.flat.groups["actor"]]
        self.critic: NDArray[np.float32] = vector[self.flat.groups["critic"]]
        self.discrete = isinstance(policy.distribution, Categorical)
        outputs = policy.distribution.num_parameters
        inputs, hidden = policy.encoder.size, policy.config.hidden
        self.actor_sizes = np.array([inputs, *hidden, outputs], np.int64)
        self.critic_sizes = np.array([inputs, *hidden, 1], np.int64)
        self.activation = kernels.TANH if policy.config.activation == "tanh" else kernels.RELU
        self._kernel = kernels.act_categorical if self.discrete else kernels.act_gaussian
        self._inputs, self._outputs = inputs, outputs
        self._scratch: dict[int, tuple[NDArray[np.float32], ...]] = {}
        normalizers = list(policy.encoder.normalizers.values())
        self._normalizer = normalizers[0] if normalizers else None
        self.takes_raw = self._normalizer is None
        """Whether the policy does not normalise observations."""

    def is_current(self) -> bool:
        """Whether the policy's weights are still in the memory that the kernels read."""
        return self.flat is FlatParameters.of(self.policy)

    def normalize(self, observation: NDArray[Any]) -> NDArray[np.float32]:
        """Flatten observations `[B, ...]` to float32, and normalise them if the policy does."""
        flat = np.ascontiguousarray(observation.reshape(len(observation), -1), F32)
        if flat.shape[1] != self._inputs:
            raise ExperienceError(_shape_error(observation.shape, self._inputs))
        statistics = self.statistics()
        if statistics is None:
            return flat
        mean, scale, clip = statistics
        normalized: NDArray[np.float32] = kernels.normalize_rows(flat, mean, scale, clip[0], np.empty_like(flat))
        return normalized

    def statistics(self) -> tuple[NDArray[np.float32], ...] | None:
        """Mean, 1 / standard deviation and clip of the observation normaliser, copied; None if there is none."""
        if self._normalizer is None:
            return None
        assert isinstance(self._normalizer, ObservationNormalizer)
        mean, scale = self._normalizer.mean.float().numpy(), self._normalizer.scale().numpy()
        return mean, scale, np.array([self._normalizer.clip], F32)

    def action_bounds(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Lower and upper bounds of a Gaussian action, flat."""
        assert isinstance(self.policy.distribution, Gaussian)
        low, high = self.policy.distribution.bounds
        return np.ascontiguousarray(low.reshape(-1)), np.ascontiguousarray(high.reshape(-1))

    def act_into(
        self,
        observation: Any,
        noise: NDArray[np.float32],
        mask: None,
        action: NDArray[Any],
        log_prob: NDArray[np.float32],
        value: NDArray[np.float32],
    ) -> None:
        """Write action, log-probability and value for observations `[B, ...]`. The kernels know no masks.

        Rows of float32 that the policy does not normalise are not copied.
        """
        if not (self.takes_raw and observation.ndim == 2 and observation.dtype == F32):
            observation = self.normalize(observation)
        if action.ndim != 2 and not self.discrete:
            action = action.reshape(len(action), -1)  # a view: the kernel expects rows
        batch = len(observation)
        if observation.shape != (batch, self._inputs):
            raise ExperienceError(_shape_error(observation.shape, self._inputs))
        # The kernel does not check the bounds of these arrays.
        shape = (batch, self._outputs)
        expected = ((batch, 1), (batch,)) if self.discrete else (shape, shape)
        if (noise.shape, action.shape) != expected or not (log_prob.shape == value.shape == (batch,)):
            raise ExperienceError(
                f"act: noise {noise.shape}, action {action.shape}, log_prob {log_prob.shape} and value {value.shape} "
                f"do not fit {batch} observations."
            )
        self._kernel(
            observation,
            noise,
            self.actor,
            self.critic,
            self.actor_sizes,
            self.critic_sizes,
            self.activation,
            self.scratch(batch),
            action,
            log_prob,
            value,
        )

    def value(self, observation: Any) -> NDArray[np.float32]:
        """Values `[B]` of observations `[B, ...]`."""
        x = self.normalize(observation)
        hidden, _, values, transposed = self.scratch(len(x))
        kernels.forward_mlp(x, self.critic, self.critic_sizes, self.activation, hidden, values, transposed)
        return values[:, 0].copy()

    def scratch(self, batch: int) -> tuple[NDArray[np.float32], ...]:
        """Working memory for a batch: hidden activations, outputs, values, a transposed weight matrix."""
        scratch = self._scratch.get(batch)
        if scratch is None:
            hidden = int(self.actor_sizes[1:-1].sum())
            widest = int((self.actor_sizes[:-1] * self.actor_sizes[1:]).max())
            scratch = (
                np.zeros(max(1, batch * hidden), F32),
                np.zeros((batch, int(self.actor_sizes[-1])), F32),
                np.zeros((batch, 1), F32),
                np.zeros(widest, F32),
            )
            self._scratch[batch] = scratch
        return scratch


class RowActor:
    """Acts on the rows of arrays `[T, N, ...]`, in one short kernel call per step, with the bits of `act_into`."""

    def __init__(
        self,
        net: CompiledActorCritic,
        observation: NDArray[Any],
        noise: NDArray[np.float32],
        action: NDArray[Any],
        log_prob: NDArray[np.float32],
        value: NDArray[np.float32],
    ) -> None:
        """`observation` may have more rows than the others. `fits` tells whether the arrays are suitable."""
        steps, batch = log_prob.shape
        inputs, outputs = net.actor_sizes[0], net.actor_sizes[-1]
        width = 1 if net.discrete else outputs
        sizes = (observation[:steps].size, noise.size, action.size, value.size)
        rows = steps * batch
        if sizes != (rows * inputs, rows * width, rows * width, rows):
            raise ExperienceError(
                f"act: observation {observation.shape}, noise {noise.shape}, action {action.shape} and value "
                f"{value.shape} do not fit {steps} steps of {batch} environments."
            )
        self._net = net
        self._rows = (observation.reshape(len(observation), batch, -1), noise, action.reshape(steps, batch, -1))
        self._outputs = (log_prob, value)
        self.act = self._act_categorical if net.discrete else self._act_gaussian
        """Writes action, log-probability and value of a row."""
        self.env_action: NDArray[np.float32] | None = None if net.discrete else np.empty(action.shape, F32)
        """Gaussian actions clipped to the bounds of the space, as `Gaussian.to_env`."""
        self._scratch = hidden, out, values, transposed = net.scratch(batch)
        table = np.zeros(acting.NUM_ENTRIES, np.int64)
        table[[acting.BATCH, acting.INPUTS, acting.OUTPUTS]] = batch, inputs, outputs
        table[[acting.LAYERS, acting.ACTIVATION]] = len(net.actor_sizes), net.activation
        table[[acting.ACTOR_SIZE, acting.CRITIC_SIZE]] = net.actor.size, net.critic.size
        table[[acting.HIDDEN_SIZE, acting.TRANSPOSED_SIZE]] = hidden.size, transposed.size
        arrays = {
            acting.OBSERVATION: observation,
            acting.NOISE: noise,
            acting.ACTION: action,
            acting.LOG_PROB: log_prob,
            acting.VALUE: value,
            acting.ACTOR: net.actor,
            acting.CRITIC: net.critic,
            acting.ACTOR_SIZES: net.actor_sizes,
            acting.CRITIC_SIZES: net.critic_sizes,
            acting.HIDDEN: hidden,
            acting.OUT: out,
            acting.VALUES: values,
            acting.TRANSPOSED: transposed,
        }
        if self.env_action is not None:
            low, high = net.action_bounds()
            arrays |= {acting.CLIPPED: self.env_action, acting.LOW: low, acting.HIGH: high}
        self._statistics = net.statistics()
        if self._statistics is not None:
            mean, scale, clip = self._statistics
            arrays |= {acting.MEAN: mean, acting.SCALE: scale, acting.CLIP: clip}
            arrays[acting.NORMALIZED] = self._normalized = np.empty((batch, inputs), F32)
        for place, array in arrays.items():
            table[place] = array.__array_interface__["data"][0]
        self._table, self._arrays = table, arrays  # the arrays must live as long as their addresses

    @staticmethod
    def fits(*arrays: Any) -> bool:
        """Whether observation, noise, action, log-probability and value have the types that the kernels expect."""
        kinds = ("f4", "f4", ("f4", "i8"), "f4", "f4")
        return all(
            isinstance(array, np.ndarray) and array.flags.c_contiguous and array.dtype.str[1:] in kind
            for array, kind in zip(arrays, kinds, strict=True)
        )

    def _act_categorical(self, row: int) -> None:
        acting.act_categorical_row(self._table, row)

    def _act_gaussian(self, row: int) -> None:
        net, (observation, noise, action), (log_prob, value) = self._net, self._rows, self._outputs
        if self._statistics is not None:
            acting.normalize_row(self._table, row)
        kernels.act_gaussian(
            observation[row] if self._statistics is None else self._normalized,
            noise[row],
            net.actor,
            net.critic,
            net.actor_sizes,
            net.critic_sizes,
            net.activation,
            self._scratch,
            action[row],
            log_prob[row],
            value[row],
        )
        acting.clip_row(self._table, row)

    def refresh(self) -> None:
        """Read the observation statistics again, after the weights have changed."""
        if self._statistics is not None:
            for mine, new in zip(self._statistics, self._net.statistics() or (), strict=True):
                np.copyto(mine, new)


def _shape_error(shape: tuple[int, ...], inputs: int) -> str:
    return f"act: observations have shape {list(shape)}, and this policy sees rows of {inputs} numbers."


def device_notices(policy: nn.Module) -> list[str]:
    """Messages for the user about the device of a policy; none for the CPU."""
    device = device_of(policy)
    if device.type == "cpu":
        return []
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    notices = [f"The policy acts and learns on {device}{name}."]
    if why_never_compiled(policy) is None:
        notices.append(
            "The compiled kernels run on the CPU only and are not used. For a network this small trainer.device=cpu is "
            "faster."
        )
    return notices
