"""`VLMPolicy`: a vision-language model that answers screenshots and learns from what came of it.

Two networks share everything that does not learn. One learns; the other acts, and takes over what was published
between two batches of answers. So an answer is always of one version, whatever the learner is doing. Prompts, samples
and learning may go on in different threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import ConfigError, ExperienceError, SessionFailed
from palaestra.experience.trajectory import ParsedReply, TokenLogProbs, Trajectory, TurnInput
from palaestra.policy.codecs.decoding import DecodedAction
from palaestra.policy.codecs.grammar import ActionGrammar, ReplyReader, build_grammar, codec_for_model_type
from palaestra.policy.vlm import checkpoint
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.generation import Completion, SampleRequest, TokenRules, draw
from palaestra.policy.vlm.loading import Parts, load_parts
from palaestra.policy.vlm.lora import adapted, in_vision_tower, trainable_parts
from palaestra.policy.vlm.network import Network, learned_fingerprint, load_trainable_state, trainable_state
from palaestra.policy.vlm.picture import Memory, PicturePreprocessor
from palaestra.policy.vlm.prompt import Conversation, Prompt, PromptWriter
from palaestra.policy.vlm.scoring import score
from palaestra.policy.weight_sync import copy_weights
from palaestra.sessions.action import encode
from palaestra.sessions.screen import Screenshot

__all__ = ["VLMPolicy"]

logger = logging.getLogger(__name__)


class VLMPolicy:
    """A vision-language model with its prompts, its sampler, its trainer's side and its checkpoints."""

    def __init__(
        self,
        parts: Parts,
        config: ModelConfig,
        *,
        seed: int = 0,
        codec: str | None = None,
        describe_grammar: bool | None = None,
    ) -> None:
        self.parts, self.config = parts, config
        memory_bytes = config.picture_memory_mb * 2**20
        shop = PicturePreprocessor(parts.image_processor, memory_bytes=memory_bytes // 2)
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
        # The built-in model was taught its grammar; a description of it would be longer than the rest of the prompt.
        self._describe_grammar = config.name != "tiny" if describe_grammar is None else describe_grammar
        self._grammar = None if codec is None else self._build_grammar(codec)
        self._acting = self.learner.twin()
        # A starting point that is not the bare model is remembered; as adapters it is small.
        self._reference = None if config.adapter is None else self.learner.twin()
        self._speaking, self._desk = threading.Lock(), threading.Lock()
        self._waiting: dict[str, Tensor] | None = None
        self._past: Network | None = None
        """Holds the weights of an earlier version while its tokens are scored."""
        self._version, self._acting_version, self._fingerprint = 0, 0, ""
        self.publish(0)
        logger.info("trains %s", ", ".join(f"{n:,} ({part})" for part, n in self.trainable_parts().items()))

    @classmethod
    def from_config(
        cls, config: ModelConfig, *, seed: int = 0, codec: str | None = None, describe_grammar: bool | None = None
    ) -> VLMPolicy:
        """The policy that a section `model` describes; fresh adapters are drawn from `seed`.

        `codec` names how it writes actions, by default as its family does. `describe_grammar`: whether prompts explain
        it, by default unless the model is the built-in one.
        """
        return cls(load_parts(config), config, seed=seed, codec=codec, describe_grammar=describe_grammar)

    @property
    def version(self) -> int:
        """Of the weights that were published last."""
        return self._version

    @property
    def fingerprint(self) -> str:
        """Of the weights that learn, as they are now; samples carry that of the weights that acted."""
        return learned_fingerprint(self.learner.trainable())

    @property
    def exact_gradients(self) -> bool:
        """Whether a pass with gradients gives the same numbers as one without."""
        return self.config.lora_dropout == 0

    @property
    def half_precision(self) -> bool:
        """Whether any part of the model computes with less than 32 bits."""
        return any(weight.element_size() < 4 for _, weight in self.named_parameters())

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return self.learner.vocabulary

    @property
    def grammar(self) -> ActionGrammar:
        """How it is shown screens and writes actions: by the codec that was named, or that of its family."""
        if self._grammar is None:
            self._grammar = self._build_grammar(codec_for_model_type(str(self.parts.model.config.model_type)))
        return self._grammar

    @property
    def factor(self) -> int:
        """Pictures must be a multiple of this wide and high."""
        return self.prompts.shop.factor

    def prompt(self, conversation: Conversation) -> Prompt:
        """The token ids and pictures the model is to answer."""
        return self.prompts.write(conversation)

    def sample(
        self, requests: Sequence[SampleRequest], *, temperature: float = 1.0, max_new_tokens: int | None = None
    ) -> list[Completion]:
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
            Completion(
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
        self,
        turns: Sequence[TurnInput],
        *,
        with_values: bool = False,
        with_entropy: bool = False,
        grad: bool = True,
        batch_size: int | None = None,
    ) -> TokenLogProbs:
        """Log-probabilities of the turns' tokens under the weights that learn, `batch_size` turns a pass."""
        self.learner.set_dropout(grad and self.config.lora_dropout > 0)
        asked = {"with_values": with_values, "with_entropy": with_entropy}
        with nullcontext() if grad else torch.no_grad():
            return score(self.learner, turns, self.rules, **asked, batch_size=batch_size)

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor:
        """`[B, G]` under the weights from before any learning, never differentiated."""
        network, adapters_off = self._reference_network()
        network.set_dropout(False)
        with adapters_off, torch.no_grad():
            return score(network, turns, self.rules).log_probs

    def past_log_probs(self, turns: Sequence[TurnInput], learned: Mapping[str, Tensor]) -> Tensor:
        """`[B, G]` under earlier values of the weights that learn, never differentiated."""
        if self._past is None:
            self._past = self.learner.twin()
        copy_weights(learned, dict(self._past.named_parameters()))
        self._past.set_dropout(False)
        with torch.no_grad():
            return score(self._past, turns, self.rules).log_probs

    def read_replies(self, trajectory: Trajectory) -> list[ParsedReply]:
        """What the tokens of each turn say, read as the agent read them."""
        reader = ReplyReader(self.grammar.codec, self.grammar.rule)
        replies = []
        for number, turn in enumerate(trajectory.turns):
            try:
                screen = Screenshot.of(trajectory.pictures[turn.pictures[-1]]).size
            except SessionFailed as error:
                raise ExperienceError(f"turn {number}: its picture cannot be read ({error})") from None
            frame, text = reader.frame(screen), self.text_of(turn.token_ids.tolist())
            read = reader.read(text, frame)
            action = encode(read.action) if isinstance(read, DecodedAction) else None
            replies.append(ParsedReply(text, action, (frame.image.width, frame.image.height)))
        return replies

    def keep_reference(self) -> None:
        """Remember the weights as they are as those of `reference_log_probs`.

        Without it that is the adapter training started from, or the model without adapters. Full training has to ask.
        """
        self._reference = self.learner.twin()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight of the network that learns, with its name."""
        return self.learner.named_parameters()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What an optimiser steps."""
        return list(self.learner.trainable().values())

    def value_parameters(self) -> list[nn.Parameter]:
        """Those of them that only the value depends on."""
        return list(self.learner.value_head.parameters())

    def trainable_parts(self) -> dict[str, int]:
        """How many numbers learn, by part of the model."""
        return trainable_parts(dict(self.learner.named_parameters()))

    def trainable_state(self) -> dict[str, Tensor]:
        """Copies of the weights that learn."""
        return trainable_state(self.learner)

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Take over weights that were learned elsewhere; they act after the next `publish`."""
        load_trainable_state(self.learner, state)

    def publish(self, version: int) -> None:
        """The weights that learn, as they are now, speak from the next batch on.

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

    def _take_over(self, learned: Mapping[str, Tensor]) -> None:
        """Copy weights into the acting network. Whoever calls holds both locks."""
        acting = dict(self._acting.named_parameters())
        copy_weights(learned, acting)
        self._waiting, self._acting_version = None, self._version
        # Of what lies in the acting network, not of what was sent: the point is to notice when they differ.
        self._fingerprint = learned_fingerprint({name: acting[name] for name in learned})

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

    def _build_grammar(self, codec: str) -> ActionGrammar:
        return build_grammar(codec, factor=self.factor, in_prompt=self._describe_grammar)

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
