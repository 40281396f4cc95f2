"""Which pretrained vision-language-action model to train on, and which of its weights may move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from palaestra.config import Section
from palaestra.errors import ConfigError

__all__ = ["PolicyConfig", "VLAConfig"]


class VLAConfig(Section):
    """A pretrained model: its class, its weights, and how they are trained."""

    model_path: str | None = Field(default=None, min_length=1)
    """File (.safetensors, .pt, .pth, .bin) or directory with the weights, relative to the configuration file. null:
    fresh ones, drawn from the seed."""

    model_class: str
    """Address of the class, `package.module:Class` or `package.module.Class`."""

    # pydantic keeps the name `model_config` for itself, so the key and the attribute differ.
    settings: dict[str, Any] = Field(default_factory=dict, alias="model_config")
    """Keyword arguments of the class."""

    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Parts of the model that stay as loaded, by the start of their parameters' names, e.g. `vision_encoder`."""

    learning_rate_scale: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Factor on the learning rate by part, e.g. `{vision_encoder: 0.1}`; 1 for every other part."""

    strict: bool = True
    """Refuse weights that do not fit the class name by name. false: load what fits and say what did not."""

    @model_serializer(mode="wrap")
    def _with_the_name_it_is_read_by(self, plain: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # What is written down (resolved.json) must load again.
        return {"model_config" if key == "settings" else key: value for key, value in plain(self).items()}


class PolicyConfig(Section):
    """Which policy acts, and how large it is."""

    name: str = "actor_critic"
    """`actor_critic`, `vla` for a pretrained model (see docs/vla.md), or the address `package.module:Class` of your own
    `nn.Module` (see docs/algorithms.md)."""

    hidden: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = (64, 64)
    """Widths of the hidden layers of actor and critic (each has its own). Wider learns harder tasks and runs slower."""

    activation: Literal["tanh", "relu"] = "tanh"
    """Between the layers. tanh keeps small on-policy networks stable; relu suits wide ones."""

    distribution: Literal["auto", "gaussian", "squashed_gaussian"] = "auto"
    """For Box actions: `gaussian` clips to the bounds, `squashed_gaussian` bends onto them. auto: gaussian."""

    log_std_init: float = Field(default=0.0, ge=-20, le=5)
    """Starting log standard deviation of Box actions. Lower explores less from the start."""

    image_features: int = Field(default=512, ge=1)
    """Width of the vector an image becomes."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to your own class after the two spaces."""

    action_dim: int | None = Field(default=None, ge=1)
    """For `vla`: numbers in one action. null: as many as the environment wants."""

    vla_config: VLAConfig | None = None
    """For `vla`: the model. Keys: `model_path`, `model_class`, `model_config`, `freeze`, `learning_rate_scale`,
    `strict` (see docs/vla.md)."""

    @model_validator(mode="after")
    def _model_belongs_to_vla(self) -> PolicyConfig:
        # Raised as it is, not as pydantic's: it has a remedy to tell.
        if self.name == "vla" and self.vla_config is None:
            raise ConfigError(
                "policy.vla_config", None, "policy.name=vla needs it",
                "Name the model: vla_config: {model_class: package.module:Class, model_path: weights.safetensors}",
            )  # fmt: skip
        if self.name != "vla":
            for key in ("vla_config", "action_dim"):
                if getattr(self, key) is not None:
                    value = "{...}" if key == "vla_config" else self.action_dim
                    raise ConfigError(
                        f"policy.{key}", value, f"policy.name is {self.name!r}, which does not read it",
                        "Set policy.name=vla, or leave it out",
                    )  # fmt: skip
        return self
