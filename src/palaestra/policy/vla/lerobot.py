"""Policies of the LeRobot library as models to train: `model_class: palaestra.policy.vla.lerobot:LeRobotModel`.

Such a policy predicts one chunk of actions, without a probability. The adapter adds what reinforcement learning needs:
a normal distribution around the chunk, with a learned width, and a value head on the input of the action head. A
policy that generates actions from noise (flow matching) always starts from zero noise, so that its prediction is a
function of the observation; only the normal distribution explores.

LeRobot is imported when a model is built, not before: it brings dozens of packages.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from torch import Tensor, nn

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.policy.vla.conformance import random_observations
from palaestra.policy.vla.models import GaussianHead, GaussianVLA

if TYPE_CHECKING:
    from palaestra.policy.vla.models import Observations

PLACE = "policy.vla_config.model_config"
ACTION, STATE, ENVIRONMENT = "action", "observation.state", "observation.environment_state"
IMAGE = "observation.image"
"""Prefix of image names, such as `observation.image` or `observation.images.top`."""
TOKENS, TOKENS_MASK = "observation.language.tokens", "observation.language.attention_mask"
HEADS = {"act": "model.action_head", "smolvla": "model.action_out_proj", "pi0": "model.action_out_proj"}
"""The last layer of each known policy; its input is also the input of the value head."""
USUAL_INPUTS = {
    **dict.fromkeys(("proprio", "state"), (STATE,)),
    **dict.fromkeys(("environment_state", "object_state"), (ENVIRONMENT,)),
    "observation": (STATE, ENVIRONMENT),  # no keys: the observation is the state, which some policies read twice
    "language": (TOKENS,),
}
"""LeRobot's inputs by the usual keys of environments."""
BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}


class LeRobotModel(GaussianVLA):
    """A LeRobot policy with a normal distribution around its actions and a value head."""

    fresh_weights = ("gaussian", "value_head", "normalization")

    def __init__(
        self,
        policy: str,
        observation_space: gymnasium.Space[Any],
        action_dim: int,
        chunk: int = 1,
        *,
        config: Mapping[str, Any] | None = None,
        keys: Mapping[str, str] | None = None,
        stats: Mapping[str, Mapping[str, Any]] | None = None,
        features: str | None = None,
        value_hidden: int = 256,
        log_std_init: float = -1.0,
    ) -> None:
        """Build the policy, the Gaussian head and the value head.

        Args:
            policy: LeRobot's name of the policy: `act`, `smolvla`, …
            observation_space: Observation space of the environment.
            action_dim: Size of one action.
            chunk: Actions executed per decision, at most the number that the policy predicts.
            config: Fields of LeRobot's configuration class; input and output features follow from the spaces.
            keys: Map of LeRobot's input names to the environment's keys, e.g. `{observation.images.top: rgb}`.
            stats: Normalisation statistics by LeRobot's names, e.g. `{observation.state: {mean: […], std: […]}}`.
            features: Path of the last layer, for policies that are not in `HEADS`.
            value_hidden: Width of the value head.
            log_std_init: Initial logarithm of the standard deviation, in units of normalised actions.
        """
        super().__init__()
        observation = {name: part[0] for name, part in random_observations(observation_space, 1).items()}
        fields = dict(config or {})
        self._keys = _match_keys(fields.get("input_features"), keys, observation)
        cls = _policy_class(policy)
        self._chunked = chunk != 1
        self._chunk = chunk
        settings = _settings(cls.config_class, fields, self._keys, observation, action_dim, chunk)
        self.policy = cls(settings)
        self._check_trainable(policy, settings, action_dim)
        self.normalization = _Normalization(settings, stats or {})
        self._head = features or HEADS.get(policy, "")
        width = self._last_layer(policy).in_features
        self.value_head = nn.Sequential(nn.Linear(width, value_hidden), nn.Tanh(), nn.Linear(value_hidden, 1))
        self.gaussian = GaussianHead(action_dim, log_std_init)
        with torch.no_grad():
            self.gaussian.log_std.add_(self.normalization.scale_of(ACTION, action_dim).log())

    @classmethod
    def checkpoint_config(cls, path: str) -> dict[str, Any]:
        """Policy name, configuration and statistics from the files that `save_pretrained` wrote."""
        from palaestra.policy.vla.loading import read_weights

        place = Path(path).expanduser()
        directory = place if place.is_dir() else place.parent
        config_file = directory / "config.json"
        if not config_file.is_file():
            return {}
        try:
            fields = dict(json.loads(config_file.read_text(encoding="utf-8")))
            policy = str(fields.pop("type"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"its config.json is not LeRobot's ({type(error).__name__}: {error})"
            remedy = "Name a directory that LeRobot's save_pretrained wrote"
            raise ConfigError("policy.vla_config.model_path", path, reason, remedy) from None
        if "pretrained_backbone_weights" in fields:
            fields["pretrained_backbone_weights"] = None  # the file contains all weights; download nothing
        stats: dict[str, dict[str, Any]] = {}
        for file in sorted(directory.glob("*normalizer_processor.safetensors")):
            for name, tensor in read_weights(file).items():
                key, _, statistic = name.rpartition(".")
                stats.setdefault(key, {})[statistic] = tensor.tolist()
        return {"policy": policy, "config": fields, **({"stats": stats} if stats else {})}

    def checkpoint_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """LeRobot's tensors under the prefix `policy`."""
        return {f"policy.{name}": value for name, value in tensors.items()}

    def predict(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """The policy's actions in the environment's units, and the values."""
        inputs: list[Tensor] = []
        # The hook exists for one call: a module that keeps a function cannot be sent to another process.
        layer = self.policy.get_submodule(self._head)
        hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            chunk = self._predict_chunk(self._build_batch(observations))
        finally:
            hook.remove()
        features = inputs[-1].float()
        value: Tensor = self.value_head(features.flatten(1, -2).mean(1) if features.ndim > 2 else features)
        chunk = self.normalization.denormalize(ACTION, chunk.float())
        return (chunk[:, : self._chunk] if self._chunked else chunk[:, 0]), value

    def _predict_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        # LeRobot decorates the method with no_grad; the wrapped function is differentiable.
        predict = inspect.unwrap(type(self.policy).predict_action_chunk)
        keywords = {}
        if "noise" in inspect.signature(predict).parameters:
            config: Any = self.policy.config
            shape = (len(next(iter(batch.values()))), config.chunk_size, config.max_action_dim)
            keywords["noise"] = next(iter(batch.values())).new_zeros(shape, dtype=torch.float32)
        chunk: Tensor = predict(self.policy, batch, **keywords)
        return chunk

    def _build_batch(self, observations: Any) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for name, key in self._keys.items():
            part = observations[tuple(key.split("/"))]
            if name.startswith(IMAGE):
                part = part.permute(0, 3, 1, 2).float() / (255.0 if part.dtype == torch.uint8 else 1.0)
            elif name == TOKENS:
                batch[TOKENS_MASK] = part != 0
            else:
                part = part.reshape(len(part), -1).float()
            batch[name] = self.normalization.normalize(name, part)
        return batch

    def _check_trainable(self, policy: str, settings: Any, action_dim: int) -> None:
        if not hasattr(type(self.policy), "predict_action_chunk") or getattr(settings, "n_obs_steps", 1) != 1:
            reason = "it uses earlier observations, a stored step holds one"
            remedy = "Use a policy with n_obs_steps=1 that predicts chunks, such as act"
            raise ConfigError(f"{PLACE}.policy", policy, reason, remedy)
        if getattr(settings, "temporal_ensemble_coeff", None) is not None:
            place, value = f"{PLACE}.config.temporal_ensemble_coeff", settings.temporal_ensemble_coeff
            reason = "averaging over earlier chunks makes an action depend on more than its observation"
            raise ConfigError(place, value, reason, "Set it to null")
        shape = tuple(settings.output_features[ACTION].shape)
        if shape != (action_dim,):
            reason = f"the environment's have {action_dim} numbers"
            remedy = "Use an environment with the robot the policy was trained for"
            raise ConfigError(f"{PLACE}.config.output_features", f"{ACTION} {shape}", reason, remedy)
        if self._chunk > settings.chunk_size:
            reason = f"env.action_chunk executes {self._chunk} actions"
            remedy = f"Set env.action_chunk={settings.chunk_size} or less"
            raise ConfigError(f"{PLACE}.config.chunk_size", settings.chunk_size, reason, remedy)

    def _last_layer(self, policy: str) -> nn.Linear:
        try:
            layer = self.policy.get_submodule(self._head) if self._head else None
        except AttributeError:
            layer = None
        if not isinstance(layer, nn.Linear):
            linear = [name for name, module in self.policy.named_modules() if isinstance(module, nn.Linear)]
            remedy = f"Name the one that gives the actions, e.g. {', '.join(linear[-3:])}"
            raise ConfigError(f"{PLACE}.features", self._head or None, f"is not a linear layer of {policy}", remedy)
        return layer


class _Normalization(nn.Module):
    """LeRobot's scaling of inputs and actions: `(x - offset) / scale`, by feature."""

    def __init__(self, settings: Any, stats: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        kinds = {
            name: feature.type for name, feature in {**settings.input_features, **settings.output_features}.items()
        }
        modes = {_name(kind): _name(mode) for kind, mode in settings.normalization_mapping.items()}
        for name, kind in kinds.items():
            mode = modes.get(_name(kind), "IDENTITY")
            if name in stats and mode != "IDENTITY":
                offset, scale = _offset_and_scale(name, mode, stats[name])
                self.register_buffer(_buffer_name(name) + "_offset", offset)
                self.register_buffer(_buffer_name(name) + "_scale", scale)

    def normalize(self, name: str, value: Tensor) -> Tensor:
        buffers = dict(self.named_buffers())
        if _buffer_name(name) + "_scale" not in buffers:
            return value
        return (value - buffers[_buffer_name(name) + "_offset"]) / buffers[_buffer_name(name) + "_scale"]

    def denormalize(self, name: str, value: Tensor) -> Tensor:
        buffers = dict(self.named_buffers())
        if _buffer_name(name) + "_scale" not in buffers:
            return value
        return value * buffers[_buffer_name(name) + "_scale"] + buffers[_buffer_name(name) + "_offset"]

    def scale_of(self, name: str, size: int) -> Tensor:
        return dict(self.named_buffers()).get(_buffer_name(name) + "_scale", torch.ones(size))


def _name(member: Any) -> str:
    return str(getattr(member, "value", member))


def _buffer_name(name: str) -> str:
    return name.replace(".", "_")


def _offset_and_scale(name: str, mode: str, stats: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    wanted = ("mean", "std") if mode == "MEAN_STD" else BOUNDS[mode]
    if any(statistic not in stats for statistic in wanted):
        reason = f"{mode} needs {' and '.join(wanted)}"
        raise ConfigError(f"{PLACE}.stats.{name}", sorted(stats), reason, "Give both, or no statistics")
    one, two = (torch.as_tensor(stats[statistic], dtype=torch.float32) for statistic in wanted)
    if mode == "MEAN_STD":
        return one, two + 1e-8
    half = (two - one) / 2
    # LeRobot maps a constant feature to -1 by dividing by its epsilon.
    half = torch.where(half == 0, torch.full_like(half, 0.5e-8), half)
    return one + half, half


def _policy_class(policy: str) -> Any:
    if not policy.isidentifier():
        raise ConfigError(f"{PLACE}.policy", policy, "is not a name", "Write policy: act")
    try:
        importlib.import_module("lerobot.policies")
    except ImportError as error:
        reason, remedy = f"LeRobot cannot be imported ({error})", "Install it: pip install 'palaestra[lerobot]'"
        raise ConfigError(f"{PLACE}.policy", policy, reason, remedy) from error
    try:
        module = importlib.import_module(f"lerobot.policies.{policy}.modeling_{policy}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(f"lerobot.policies.{policy}"):
            reason, remedy = f"LeRobot's {policy} needs more ({error})", "Install LeRobot's extra for this policy"
        else:
            reason, remedy = "LeRobot has no such policy", "Write policy: act"
        raise ConfigError(f"{PLACE}.policy", policy, reason, remedy) from error
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and getattr(cls, "name", None) == policy:
            return cls
    raise ConfigError(f"{PLACE}.policy", policy, f"{module.__name__} holds no policy of that name", "Write policy: act")


def _settings(
    config_class: Any,
    fields: dict[str, Any],
    keys: Mapping[str, str],
    observation: Mapping[str, Tensor],
    size: int,
    chunk: int,
) -> Any:
    """LeRobot's configuration object: the given fields, and features that follow from the spaces."""
    types = importlib.import_module("lerobot.configs.types")
    known = {field.name for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {**fields, "device": "cpu"}  # the owner of the model moves it
    for feature_set in ("input_features", "output_features"):
        if fields.get(feature_set):
            values[feature_set] = {
                name: types.PolicyFeature(types.FeatureType(f["type"]), tuple(f["shape"]))
                for name, f in fields[feature_set].items()
            }
    if not fields.get("input_features"):
        values["input_features"] = {
            name: types.PolicyFeature(types.FeatureType(_kind(name)), _shape(name, observation[key]))
            for name, key in keys.items()
            if name != TOKENS
        }
    if not fields.get("output_features"):
        values["output_features"] = {ACTION: types.PolicyFeature(types.FeatureType.ACTION, (size,))}
    if fields.get("normalization_mapping"):
        values["normalization_mapping"] = {
            kind: types.NormalizationMode(mode) for kind, mode in fields["normalization_mapping"].items()
        }
    for name in ("chunk_size", "n_action_steps"):
        if name in known:
            values.setdefault(name, min(chunk, values["chunk_size"]) if name == "n_action_steps" else chunk)
    if "pretrained_backbone_weights" in known:
        values.setdefault("pretrained_backbone_weights", None)  # the default would be downloaded
    for name in values.keys() - known:
        close = closest_names(name, known, count=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Its fields: {', '.join(sorted(known))}"
        raise ConfigError(f"{PLACE}.config.{name}", values[name], f"{config_class.__name__} has no such field", remedy)
    return config_class(**values)


def _kind(name: str) -> str:
    if name.startswith(IMAGE):
        return "VISUAL"
    return "ENV" if name == ENVIRONMENT else "STATE"


def _shape(name: str, part: Tensor) -> tuple[int, ...]:
    if name.startswith(IMAGE):
        height, width, channels = part.shape
        return (channels, height, width)
    return (part.numel(),)


def _match_keys(
    wanted: Mapping[str, Any] | None, given: Mapping[str, str] | None, observation: Mapping[str, Tensor]
) -> dict[str, str]:
    """Map LeRobot's input names to keys of the environment."""
    images = [key for key, part in observation.items() if part.ndim == 3 and part.shape[-1] in (1, 3)]
    if given is None:
        matched = {f"{IMAGE}s.{key.replace('/', '.')}": key for key in images}
        for key in observation:
            matched |= dict.fromkeys(USUAL_INPUTS.get(key.rpartition("/")[2], ()), key)
        theirs = [name for name in wanted or {} if name.startswith(IMAGE)]
        if len(theirs) == len(images) == 1:
            matched = {name: key for name, key in matched.items() if key != images[0]} | {theirs[0]: images[0]}
        given = {name: key for name, key in matched.items() if wanted is None or name in wanted or name == TOKENS}
    for name, key in given.items():
        if key not in observation:
            close = closest_names(key, observation, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"It shows {', '.join(observation)}"
            raise ConfigError(f"{PLACE}.keys.{name}", key, "the environment shows no such key", remedy)
    missing = sorted(set(wanted or {}) - set(given))
    if missing or not given:
        first = (missing or [STATE])[0]
        fitting = [key for key in observation if (key in images) == first.startswith(IMAGE)] or list(observation)
        reason = f"the policy needs {', '.join(missing) or 'an input'}"
        example = f"{{{first}: {fitting[0]}}}; the environment shows {', '.join(observation)}"
        raise ConfigError(f"{PLACE}.keys", dict(given), reason, f"Say where it comes from, e.g. {example}")
    return dict(given)
