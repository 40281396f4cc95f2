"""Which pretrained vision-language-action model to train on, and which of its weights may move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, model_serializer

from palaestra.config import Section

__all__ = ["VLAConfig"]


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
