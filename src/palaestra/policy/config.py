"""`PolicyConfig` and `VLAConfig`: the section `policy` of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from palaestra.config import Section
from palaestra.errors import ConfigError


class VLAConfig(Section):
    """A pretrained vision-language-action model: its class, its weights, and how they are trained."""

    model_path: str | None = Field(default=None, min_length=1)
    """File (.safetensors, .pt, .pth, .bin) or directory with the weights, relative to the configuration file. null:
    random weights from the seed."""

    model_class: str
    """Address of the class, `package.module:Class` or `package.module.Class`."""

    # pydantic reserves the name `model_config`, so the key and the attribute differ.
    settings: dict[str, Any] = Field(default_factory=dict, alias="model_config")
    """Keyword arguments of the class."""

    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Frozen parts of the model, as prefixes of parameter names, e.g. `vision_encoder`."""

    learning_rate_scale: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Learning rate factor by part, e.g. `{vision_encoder: 0.1}`; 1 for all other parts."""

    strict: bool = True
    """Refuse weights whose names or shapes do not match the class. false: load those that match and report the rest."""

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # By alias, so that a written configuration (resolved.json) loads again.
        return {"model_config" if key == "settings" else key: value for key, value in serialize(self).items()}


class PolicyConfig(Section):
    """The policy and its size."""

    name: str = "actor_critic"
    """`actor_critic`, `vla` for a pretrained model (see docs/vla.md), or the address `package.module:Class` of your own
    `nn.Module` (see docs/algorithms.md)."""

    hidden: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = (64, 64)
    """Widths of the hidden layers of the actor, and of the critic. Wider learns harder tasks and runs slower."""

    activation: Literal["tanh", "relu"] = "tanh"
    """Activation function. tanh keeps small on-policy networks stable; relu suits wide ones."""

    distribution: Literal["auto", "gaussian", "squashed_gaussian"] = "auto"
    """For Box actions: `gaussian` clips to the bounds, `squashed_gaussian` applies tanh. auto: gaussian."""

    log_std_init: float = Field(default=0.0, ge=-20, le=5)
    """Initial log standard deviation of Box actions. Lower explores less."""

    image_features: int = Field(default=512, ge=1)
    """Size of the feature vector of an image."""

    image_precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the activations of the convolutional encoder; weights, losses and Adam are float32 in any case.
    `bfloat16` is 1.2 to 1.6 times as fast on processors with AVX-512 BF16 or AMX, and slower on others."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own class, after the two spaces."""

    action_dim: int | None = Field(default=None, ge=1)
    """For `vla`: size of one action. null: that of the environment."""

    vla_config: VLAConfig | None = None
    """For `vla`: the model. Keys: `model_path`, `model_class`, `model_config`, `freeze`, `learning_rate_scale`,
    `strict` (see docs/vla.md)."""

    @model_validator(mode="after")
    def _check_vla_keys(self) -> PolicyConfig:
        # ConfigError passes through pydantic unchanged, and has a remedy.
        if self.name == "vla" and self.vla_config is None:
            remedy = "Name the model: vla_config: {model_class: package.module:Class, model_path: weights.safetensors}"
            raise ConfigError("policy.vla_config", None, "policy.name=vla needs it", remedy)
        if self.name != "vla":
            for key in ("vla_config", "action_dim"):
                if getattr(self, key) is not None:
                    value = "{...}" if key == "vla_config" else self.action_dim
                    reason = f"policy.name is {self.name!r}, which does not read it"
                    raise ConfigError(f"policy.{key}", value, reason, "Set policy.name=vla, or leave it out")
        return self
