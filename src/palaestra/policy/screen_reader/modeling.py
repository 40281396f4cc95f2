"""The reading model as a transformers model: a connector for the tokens of a screen, and a causal language model.

The language model is any that transformers builds from a configuration: the small one that ships with the package, or
a pretrained one. The rows of `pixel_values` are tokens of the screen, of `screen_tokens.ROW_FEATURES` numbers each.
They have the embeddings that the same tokens have in text, and the connector adds where they stand and what they look
like. The tower that finds them belongs to the image processor, because it is frozen and a picture is read once.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from palaestra.policy.screen_reader.screen_tokens import LOOK_FEATURES

MODEL_TYPE = "palaestra_screen_reader"
FREQUENCIES = 0.5 * 1.25 ** torch.arange(8)
"""Frequencies of the code of coordinates."""
PLACE_CODE = 2 * len(FREQUENCIES)
"""Length of the code of a coordinate."""


class ScreenReaderConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of the reading model."""

    model_type = MODEL_TYPE
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012

    def __init__(self, text_config: Any = None, image_token_id: int = 0, **more: Any) -> None:
        if isinstance(text_config, dict):
            kind = text_config.get("model_type", "llama")
            text_config = AutoConfig.for_model(kind, **{k: v for k, v in text_config.items() if k != "model_type"})
        self.text_config = text_config if text_config is not None else AutoConfig.for_model("llama")
        self.image_token_id = image_token_id
        super().__init__(**more)

    def get_text_config(self, *_: Any, **__: Any) -> Any:
        """The configuration of the language model."""
        return self.text_config


class ScreenConnector(nn.Module):
    """Places and looks of the tokens of a screen as additions to their embeddings."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.place = nn.Linear(2 * PLACE_CODE, hidden, bias=False)
        self.look = nn.Sequential(nn.Linear(LOOK_FEATURES, 64), nn.GELU(), nn.Linear(64, hidden))

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` are [N, ROW_FEATURES]; returns [N, hidden]."""
        places, look = rows[:, 1:3], rows[:, 3:]
        # Not a buffer: those that are not saved are undefined after from_pretrained.
        frequencies = FREQUENCIES.to(rows.device)
        code = torch.cat([fourier_features(places[:, axis], frequencies) for axis in (0, 1)], -1)
        addition: Tensor = self.place(code.to(rows.dtype)) + self.look(look)
        return addition


class ScreenReaderPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Common settings."""

    config_class = ScreenReaderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012


class ScreenReaderModel(ScreenReaderPreTrainedModel):  # type: ignore[no-untyped-call]
    """Screens and text to hidden states."""

    def __init__(self, config: ScreenReaderConfig) -> None:
        super().__init__(config)
        self.language_model = AutoModel.from_config(config.text_config)  # type: ignore[no-untyped-call]
        self.vision_tower = ScreenConnector(config.text_config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> Any:
        """The language model's."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the language model's."""
        self.language_model.set_input_embeddings(value)

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any) -> Any:
        """Embeddings of each picture's tokens, as a tuple in `pooler_output`."""
        counts = image_grid_thw.prod(-1).tolist()
        embeddings = self.get_input_embeddings()(pixel_values[:, 0].long())
        places = self.vision_tower(pixel_values.to(self.vision_tower.place.weight.dtype))
        features = embeddings + places.to(embeddings.dtype)
        return SimpleNamespace(pooler_output=tuple(features.split(counts)))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_encoder_outputs: Any = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states; pictures as rows of tokens (`pixel_values`) or already embedded (`mm_encoder_outputs`)."""
        embeddings = self.get_input_embeddings()(input_ids)
        images = None
        if mm_encoder_outputs is not None:
            images = mm_encoder_outputs["image"]
        elif pixel_values is not None:
            assert image_grid_thw is not None
            images = self.get_image_features(pixel_values, image_grid_thw)
        if images is not None:
            features = torch.cat(list(images.pooler_output)).to(embeddings.dtype)
            mask = (input_ids == self.config.image_token_id).unsqueeze(-1).expand_as(embeddings)
            embeddings = embeddings.masked_scatter(mask, features)
        out: BaseModelOutputWithPast = self.language_model(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **more,
        )
        return out


class ScreenReaderForConditionalGeneration(ScreenReaderPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """With the output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ScreenReaderConfig) -> None:
        super().__init__(config)
        self.model = ScreenReaderModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> Any:
        """The language model's."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the language model's."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        head: nn.Module = self.lm_head
        return head

    def set_output_embeddings(self, new: nn.Module) -> None:
        """Replace the output layer."""
        self.lm_head = new

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutputWithPast:
        """Next-token logits."""
        out = self.model(input_ids, **more)
        return CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state),
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


def register_model() -> None:
    """Make the reading model known to transformers' automatic classes."""
    from transformers import AutoModelForImageTextToText

    AutoConfig.register(MODEL_TYPE, ScreenReaderConfig, exist_ok=True)
    AutoModelForImageTextToText.register(ScreenReaderConfig, ScreenReaderForConditionalGeneration, exist_ok=True)


def fourier_features(value: Tensor, frequencies: Tensor) -> Tensor:
    """Sines and cosines of the values: [values, 2 x frequencies], of mean square 1."""
    phase = 2 * math.pi * value[:, None] * frequencies
    return math.sqrt(2) * torch.cat([phase.sin(), phase.cos()], -1)
