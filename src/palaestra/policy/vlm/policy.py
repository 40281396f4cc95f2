"""`VLMPolicy`: a vision-language model that answers screenshots and learns from what came of it.

Two networks share everything that does not learn. One learns; the other acts, and takes over what was published
between two batches of answers. So an answer is always of one version, whatever the learner is doing. Prompts, samples
and learning may go on in different threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.vlm import checkpoint, weights
from palaestra.policy.vlm.adapter import adapted
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.loading import Parts, load_parts
from palaestra.policy.vlm.lora import in_vision_tower, trainable_parts
from palaestra.policy.vlm.memory import Memory
from palaestra.policy.vlm.network import Network
from palaestra.policy.vlm.picture import PictureShop
from palaestra.policy.vlm.prompt import Conversation, Prompt, PromptWriter
from palaestra.policy.vlm.sampling import Sampled, SampleRequest, TokenRules, draw
from palaestra.policy.vlm.scoring import TokenLogProbs, TurnInput, joined, score

__all__ = ["VLMPolicy"]

logger = logging.getLogger(__name__)


class VLMPolicy:
    """A vision-language model with its prompts, its sampler, its trainer's side and its checkpoints."""

    def __init__(self, parts: Parts, config: ModelConfig, *, seed: int = 0) -> None:
        self.parts, self.config = parts, config
        memory_bytes = config.picture_memory_mb * 2**20
        shop = PictureShop(parts.image_processor, memory_bytes=memory_bytes // 2)
        wrapped = _made_trainable(parts.model, config, seed)
        self.learner = Network(
            parts.model, shop, wrapped=wrapped, memory=Memory(memory_bytes - memory_bytes // 2),
            value_gradient=config.value_gradient,
        )  # fmt: skip
        self.prompts = PromptWriter(
            parts.tokenizer, parts.chat_template, shop, image_token=self.learner.image_token, history=config.history,
            request=config.request, name=config.name,
        )  # fmt: skip
        self.rules = _token_rules(parts, self.learner, self.prompts)
        self._acting = self.learner.twin()
        # A starting point that is not the bare model is remembered; as adapters it is small.
        self._reference = None if config.adapter is None else self.learner.twin()
        self._speaking, self._desk = threading.Lock(), threading.Lock()
        self._waiting: dict[str, Tensor] | None = None
        self._past: Network | None = None
        """Holds the weights of an earlier version while its tokens are scored."""
        self._version, self._acting_version, self._fingerprint = 0, 0, ""
        self.published_fingerprint = ""
        """Of the weights that were published last."""
        self.publish(0)
        logger.info("trains %s", ", ".join(f"{n:,} ({part})" for part, n in self.trainable_parts().items()))

    @classmethod
    def from_config(cls, config: ModelConfig, *, seed: int = 0) -> VLMPolicy:
        """The policy that a section `model` describes; fresh adapters are drawn from `seed`."""
        return cls(load_parts(config), config, seed=seed)

    @property
    def version(self) -> int:
        """Of the weights that were published last."""
        return self._version

    @property
    def fingerprint(self) -> str:
        """Of the weights that learn, as they are now; samples carry that of the weights that acted."""
        return weights.fingerprint(self.learner.trainable())

    @property
    def factor(self) -> int:
        """Pictures must be a multiple of this wide and high."""
        return self.prompts.shop.factor

    def prompt(self, conversation: Conversation) -> Prompt:
        """The token ids and pictures the model is to answer."""
        return self.prompts.write(conversation)

    def sample(
        self, requests: Sequence[SampleRequest], *, temperature: float = 1.0, max_new_tokens: int | None = None
    ) -> list[Sampled]:
        """An answer to each request, in one batch, by the published weights. At temperature 0, the likeliest one."""
        if temperature < 0:
            raise ConfigError("temperature", temperature, "must not be negative", "1 is the model's own distribution")
        limit = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        with self._speaking:
            with self._desk:
                if self._waiting is not None:
                    self._take_over(self._waiting)
                version, fingerprint = self._acting_version, self._fingerprint
            drawn = draw(self._acting, requests, self.rules, temperature=temperature, max_new_tokens=limit)
        return [
            Sampled(
                token_ids=np.array(one.token_ids, np.int32), log_probs=np.array(one.log_probs, np.float32),
                versions=np.full(len(one.token_ids), version, np.int32), ended=one.ended, fingerprint=fingerprint,
                text=self.text_of(one.token_ids),
            )
            for one in drawn
        ]  # fmt: skip

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What sampled tokens say, without the token that ends an answer."""
        ended = len(token_ids) > 0 and int(token_ids[-1]) in self.rules.ends
        text: str = self.parts.tokenizer.decode(list(token_ids[:-1] if ended else token_ids))
        return text

    def log_probs(
        self, turns: Sequence[TurnInput], *, with_values: bool = False, with_entropy: bool = False, grad: bool = True,
        reference: bool = False, batch_size: int | None = None,
    ) -> TokenLogProbs:  # fmt: skip
        """Log-probabilities of the turns' tokens under the weights that learn, `batch_size` turns a pass.

        With `reference` under the weights before any learning, never differentiated.
        """
        network, apart = self._reference_network() if reference else (self.learner, nullcontext())
        grad = grad and not reference
        network.set_dropout(grad and self.config.lora_dropout > 0)
        size = len(turns) if batch_size is None else batch_size
        if not turns:
            raise ValueError("no turns to score")
        with apart, nullcontext() if grad else torch.no_grad():
            return joined(
                [
                    score(network, turns[start : start + size], self.rules, with_values=with_values,
                          with_entropy=with_entropy)
                    for start in range(0, len(turns), size)
                ]
            )  # fmt: skip

    def past_log_probs(self, turns: Sequence[TurnInput], state: Mapping[str, Tensor]) -> TokenLogProbs:
        """The same under earlier weights (a `trainable_state`), never differentiated."""
        if self._past is None:
            self._past = self.learner.twin()
        weights.copy_weights(state, dict(self._past.named_parameters()))
        self._past.set_dropout(False)
        with torch.no_grad():
            return score(self._past, turns, self.rules, with_values=False, with_entropy=False)

    def keep_reference(self) -> None:
        """Remember the weights as they are as what `log_probs(reference=True)` compares with.

        Without it that is the adapter training started from, or the model without adapters. Full training has to ask.
        """
        self._reference = self.learner.twin()

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser steps."""
        return list(self.learner.trainable().values())

    def trainable_parts(self) -> dict[str, int]:
        """How many numbers learn, by part of the model."""
        return trainable_parts(dict(self.learner.named_parameters()))

    def trainable_state(self) -> dict[str, Tensor]:
        """Copies of the weights that learn."""
        return weights.trainable_state(self.learner)

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Take over weights that were learned elsewhere; they act after the next `publish`."""
        weights.load_trainable_state(self.learner, state)

    def publish(self, version: int) -> str:
        """The weights that learn, as they are now, speak from the next batch on. Returns their fingerprint.

        Never waits: while a batch is being sampled they are put aside, and it ends with the weights it began with.
        """
        with self._desk:
            if version < self._version:
                raise ValueError(f"version {version} after {self._version}: versions only grow")
            self._version = version
            learned = self.learner.trainable()
            if self._speaking.acquire(blocking=False):
                try:
                    self._take_over(learned)
                finally:
                    self._speaking.release()
            else:
                self._waiting = {name: weight.detach().clone() for name, weight in learned.items()}
            self.published_fingerprint = weights.fingerprint(learned)
            return self.published_fingerprint

    def _take_over(self, learned: Mapping[str, Tensor]) -> None:
        """Copy weights into the acting network. Whoever calls holds both locks."""
        acting = dict(self._acting.named_parameters())
        weights.copy_weights(learned, acting)
        self._waiting, self._acting_version = None, self._version
        # Of what lies in the acting network, not of what was sent: the point is to notice when they differ.
        self._fingerprint = weights.fingerprint({name: acting[name] for name in learned})

    def save(self, path: Path) -> str:
        """Write what was learned to a new directory; returns the SHA-256 of its manifest."""
        return checkpoint.save_checkpoint(self.learner, self.parts, path, version=self._version)

    def load(self, path: Path) -> None:
        """Go on from what a directory holds, and publish it under its version."""
        version = checkpoint.load_checkpoint(self.learner, path)
        self._version = min(self._version, version)
        self.publish(version)

    def export_merged(self, path: Path) -> None:
        """Write a plain transformers model with the adapters worked in."""
        checkpoint.export_merged(self.learner, self.parts, path, version=self._version)

    def _reference_network(self) -> tuple[Network, Any]:
        if self._reference is not None:
            return self._reference, nullcontext()
        if self.learner.wrapped is None:
            raise ConfigError(
                "model.use_lora", False, "full training keeps no copy of the weights it started from by itself",
                "Call keep_reference() before learning; it takes as much memory as the model",
            )  # fmt: skip
        return self.learner, self.learner.without_adapters()


def _made_trainable(model: Any, config: ModelConfig, seed: int) -> Any:
    """Decide what learns; returns PEFT's wrapper when adapters do."""
    wrapped = None
    if config.use_lora:
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            wrapped = adapted(model, config)
    else:
        for name, weight in model.named_parameters():
            weight.requires_grad_(not (config.freeze_vision and in_vision_tower(name)))
    # Adapters come in training mode, whatever the model's was.
    model.eval()
    if config.gradient_checkpointing:
        _checkpoint_gradients(model)
    return wrapped


def _checkpoint_gradients(model: Any) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for part in model.modules():
        if isinstance(part, GradientCheckpointingLayer):
            # The flag of the layer alone, not of what is in it: that is all its wrapper asks, and dropout stays off.
            part.training = True


def _token_rules(parts: Parts, network: Network, prompts: PromptWriter) -> TokenRules:
    known = parts.model.config
    ends = parts.model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    ends = {*ends, parts.tokenizer.eos_token_id, prompts.end_of_turn} - {None}
    placeholders = [getattr(known, f"{kind}_token_id", None) for kind in ("image", "video")]
    forbidden = {*range(len(parts.tokenizer), network.vocabulary), *(t for t in placeholders if t is not None)}
    if not ends:
        raise ConfigError(
            "model.name", parts.name, "names no token that ends an answer", "Set eos_token_id in generation_config.json"
        )
    padding = parts.tokenizer.pad_token_id
    return TokenRules(frozenset(ends), tuple(sorted(forbidden)), min(ends) if padding is None else padding)
