"""`VLMPolicy`: a vision-language model as a policy that acts on screenshots and learns by reinforcement.

Two networks share all frozen weights. One learns; the other one samples replies, and takes over published weights
between two batches, so that a reply always has one version. Prompts, sampling and learning may run in different
threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import ConfigError, ExperienceError, SessionFailed
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_scoring import ParsedReply, TokenLogProbs, TurnInput
from palaestra.policy.codecs.decoding import DecodedAction
from palaestra.policy.codecs.grammar import ActionGrammar, ReplyReader, build_grammar, codec_for_model_type
from palaestra.policy.codecs.qwen_texts import REQUEST
from palaestra.policy.vlm import checkpoint
from palaestra.policy.vlm.config import INSTRUCTION_ONLY, ModelConfig
from palaestra.policy.vlm.generation import Completion, SampleRequest, TokenRules, generate_tokens
from palaestra.policy.vlm.loading import BUILT_IN, LoadedModel, load_model
from palaestra.policy.vlm.lora import add_adapters, in_vision_tower, trainable_parts
from palaestra.policy.vlm.network import Network, sampling_fingerprint
from palaestra.policy.vlm.picture import LRUCache, PicturePreprocessor
from palaestra.policy.vlm.prompt import Conversation, Ints, Prompt, PromptWriter
from palaestra.policy.vlm.scoring import score
from palaestra.policy.vlm.sharding import shard_layers
from palaestra.policy.weight_sync import copy_weights
from palaestra.sessions.action import encode
from palaestra.sessions.screen import Screenshot

_log = logging.getLogger(__name__)


class VLMPolicy:
    """A vision-language model with its prompts, sampling, scoring and checkpoints."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: ModelConfig,
        *,
        seed: int = 0,
        codec: str | None = None,
        describe_grammar: bool | None = None,
    ) -> None:
        """See `from_config`."""
        self.loaded, self.config = loaded, config
        memory_bytes = config.picture_memory_mb * 2**20
        preprocessor = PicturePreprocessor(loaded.image_processor, memory_bytes=memory_bytes // 2)
        self.learner = Network(
            loaded.model,
            preprocessor,
            wrapped=_make_trainable(loaded.model, config, seed),
            feature_cache=LRUCache(memory_bytes - memory_bytes // 2),
            value_gradient=config.value_gradient,
        )
        self.prompts = PromptWriter(
            loaded.tokenizer,
            loaded.chat_template,
            preprocessor,
            image_token=self.learner.image_token,
            history=config.history,
            request=config.request or (INSTRUCTION_ONLY if preprocessor.reads_pictures else REQUEST),
            name=config.name,
        )
        self.rules = _token_rules(loaded, self.learner, self.prompts)
        # The built-in models know their grammar; the description would be longer than the rest of the prompt.
        knows_grammar = config.name in BUILT_IN or preprocessor.reads_pictures
        self._describe_grammar = not knows_grammar if describe_grammar is None else describe_grammar
        self._grammar = None if codec is None else self._build_grammar(codec)
        self._acting: Network | None = self.learner.clone()
        # Training that starts from an adapter keeps a copy of it as the reference.
        self._reference = None if config.adapter is None else self.learner.clone()
        self._sampling_lock, self._publish_lock = threading.Lock(), threading.Lock()
        self._pending: dict[str, Tensor] | None = None
        """Weights that were published while a batch was being sampled."""
        self._computes_half = False
        self._past: Network | None = None
        """Holds the weights of an earlier version while its tokens are scored."""
        self._version, self._acting_version, self._acting_fingerprint = 0, 0, ""
        self.publish(0)
        _log.info("trains %s", ", ".join(f"{n:,} ({part})" for part, n in self.trainable_parts().items()))

    @classmethod
    def from_config(
        cls, config: ModelConfig, *, seed: int = 0, codec: str | None = None, describe_grammar: bool | None = None
    ) -> VLMPolicy:
        """Build the policy of a section `model`; new adapters are initialised from `seed`.

        `codec` is the action grammar, by default that of the model's family. `describe_grammar` is whether prompts
        explain it, by default for all models but the built-in ones.
        """
        return cls(load_model(config), config, seed=seed, codec=codec, describe_grammar=describe_grammar)

    @property
    def version(self) -> int:
        """Version of the weights that were published last."""
        return self._version

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the current trainable weights; completions carry that of the acting weights."""
        return sampling_fingerprint(self.learner.whole_trainable())

    @property
    def exact_gradients(self) -> bool:
        """Whether a forward pass with gradients gives the same numbers as one without."""
        return self.config.lora_dropout == 0

    @property
    def half_precision(self) -> bool:
        """Whether any weight has less than 32 bits, or is used with less."""
        return self._computes_half or any(weight.element_size() < 4 for _, weight in self.named_parameters())

    @property
    def vocabulary(self) -> int:
        """Number of tokens the model knows."""
        return self.learner.vocabulary

    @property
    def grammar(self) -> ActionGrammar:
        """How screens are shown to the model and how it writes actions."""
        if self._grammar is None:
            self._grammar = self._build_grammar(codec_for_model_type(str(self.loaded.model.config.model_type)))
        return self._grammar

    @property
    def preprocessor(self) -> PicturePreprocessor:
        """What turns pictures into patches, for learning and for acting."""
        return self.prompts.preprocessor

    @property
    def factor(self) -> int:
        """Widths and heights of pictures must be multiples of this."""
        return self.preprocessor.factor

    def prompt(self, conversation: Conversation) -> Prompt:
        """The token ids and pictures of the prompt for the next reply."""
        return self.prompts.write(conversation)

    def sample(
        self, requests: Sequence[SampleRequest], *, temperature: float = 1.0, max_new_tokens: int | None = None
    ) -> list[Completion]:
        """Sample a reply to each request with the published weights, in one batch. Temperature 0 is greedy."""
        if temperature < 0:
            raise ConfigError("temperature", temperature, "must not be negative", "1 is the model's own distribution")
        limit = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        assert self._acting is not None, "this process does not sample"
        with self._sampling_lock:
            with self._publish_lock:
                if self._pending is not None:
                    self._update_acting(self._pending)
                version, fingerprint = self._acting_version, self._acting_fingerprint
            replies = generate_tokens(self._acting, requests, self.rules, temperature=temperature, max_new_tokens=limit)
        return [
            Completion(
                token_ids=np.array(reply.token_ids, np.int32),
                log_probs=np.array(reply.log_probs, np.float32),
                versions=np.full(len(reply.token_ids), version, np.int32),
                text=self.text_of(reply.token_ids),
                ended=reply.ended,
                fingerprint=fingerprint,
            )
            for reply in replies
        ]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode sampled tokens, without the end token."""
        ended = len(token_ids) > 0 and int(token_ids[-1]) in self.rules.ends
        text: str = self.loaded.tokenizer.decode(list(token_ids[:-1] if ended else token_ids))
        return text

    def write_reply(self, text: str) -> Ints:
        """The token ids of a reply with this text and its end token.

        `ExperienceError` if the model could not have sampled them, or if they decode to another text.
        """
        ids = self.prompts.tokenize_reply(text)
        end = self.prompts.end_of_turn if self.prompts.end_of_turn is not None else min(self.rules.ends)
        if not ids or {*ids} & {*self.rules.ends, *self.rules.forbidden}:
            raise ExperienceError(f"the reply {text!r} is empty or contains a token that ends a reply or is forbidden.")
        if len(ids) + 1 > self.config.max_new_tokens:
            limit = self.config.max_new_tokens
            raise ExperienceError(
                f"the reply {text[:80]!r} has {len(ids) + 1} tokens, and model.max_new_tokens is {limit}."
            )
        if self.text_of([*ids, end]) != text:
            raise ExperienceError(f"the tokens of the reply {text!r} decode to {self.text_of([*ids, end])!r}.")
        return np.array([*ids, end], np.int32)

    def prompt_format(self) -> dict[str, Any]:
        """Everything that determines the tokens of prompts and replies, as plain JSON."""
        grammar = self.grammar
        rule = grammar.rule
        return {
            **self.prompts.format(),
            "codec": grammar.codec.name,
            "describe_grammar": grammar.in_prompt,
            "picture_rule": [rule.factor, rule.min_pixels, rule.max_pixels],
        }

    def log_probs(
        self,
        turns: Sequence[TurnInput],
        *,
        with_values: bool = False,
        with_entropy: bool = False,
        with_imitation: bool = False,
        grad: bool = True,
    ) -> TokenLogProbs:
        """Log-probabilities of the turns' tokens under the trainable weights, in one batch."""
        self.learner.set_dropout(grad and self.config.lora_dropout > 0)
        wanted = {"with_values": with_values, "with_entropy": with_entropy, "with_imitation": with_imitation}
        with nullcontext() if grad else torch.no_grad():
            return score(self.learner, turns, self.rules, **wanted)

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor:
        """`[B, G]` under the weights from before training, without gradient."""
        network, adapters_off = self._reference_network()
        network.set_dropout(False)
        with adapters_off, torch.no_grad():
            return score(network, turns, self.rules).log_probs

    def past_log_probs(self, turns: Sequence[TurnInput], learned: Mapping[str, Tensor]) -> Tensor:
        """`[B, G]` under earlier values of the trainable weights, without gradient."""
        if self._past is None:
            self._past = self.learner.clone()
        copy_weights(learned, dict(self._past.named_parameters()))
        self._past.set_dropout(False)
        with torch.no_grad():
            return score(self._past, turns, self.rules).log_probs

    def read_replies(self, trajectory: Trajectory) -> list[ParsedReply]:
        """Decode the replies of a recorded trajectory as the agent did."""
        reader = ReplyReader(self.grammar.codec, self.grammar.rule)
        replies = []
        for number, turn in enumerate(trajectory.turns):
            try:
                screen = Screenshot.of(trajectory.pictures[turn.pictures[-1]]).size
            except SessionFailed as error:
                raise ExperienceError(f"turn {number}: its picture cannot be read ({error})") from None
            frame, text = reader.frame(screen), self.text_of(turn.token_ids.tolist())
            result = reader.read(text, frame)
            action = encode(result.action) if isinstance(result, DecodedAction) else None
            replies.append(ParsedReply(text, action, (frame.image.width, frame.image.height)))
        return replies

    def keep_reference(self) -> None:
        """Use the current weights for `reference_log_probs`.

        By default that is the adapter that training started from, or the model without adapters. Full training has to
        call this first.
        """
        self._reference = self.learner.clone()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights of the learning network by name."""
        return self.learner.named_parameters()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights for an optimiser."""
        return list(self.learner.trainable().values())

    def value_parameters(self) -> list[nn.Parameter]:
        """The weights that only the value depends on."""
        return list(self.learner.value_head.parameters())

    def trainable_parts(self) -> dict[str, int]:
        """Number of trainable weights by part of the model."""
        return trainable_parts(dict(self.learner.named_parameters()))

    def trainable_state(self) -> dict[str, Tensor]:
        """Copies of the trainable weights on the CPU."""
        return {name: weight.cpu().clone() for name, weight in self.learner.whole_trainable().items()}

    def sample_on(self, device: torch.device) -> None:
        """Sample on another device than the learning one, with a copy of all weights. Call it before `shard`."""
        with self._sampling_lock, self._publish_lock:
            self._acting = self.learner.clone(device)
            self._update_acting(self.learner.trainable())

    def shard(self, *, compute_dtype: torch.dtype | None = None, samples: bool = True) -> None:
        """Divide the learning weights among all processes, which call this (`palaestra.policy.vlm.sharding`).

        `samples`: whether this process samples; it then keeps a whole copy of the published weights.
        """
        shard_layers(self.learner, compute_dtype=compute_dtype)
        self._computes_half = compute_dtype is not None and compute_dtype.itemsize < 4
        if not samples:
            self._acting = None

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Load weights that were trained elsewhere; they act after the next `publish`."""
        self.learner.load_trainable(state)

    def publish(self, version: int) -> None:
        """Sample with the current trainable weights from the next batch on.

        Never waits: while a batch is being sampled the weights are copied, and that batch keeps the old ones.
        """
        with self._publish_lock:
            if version < self._version:
                raise ValueError(f"version {version} after {self._version}: versions only grow")
            self._version = version
            learned: Mapping[str, Tensor] = self.learner.whole_trainable()
            if self._acting is None:
                return
            if self._sampling_lock.acquire(blocking=False):
                try:
                    self._update_acting(learned)
                finally:
                    self._sampling_lock.release()
            else:
                self._pending = {name: weight.detach().clone() for name, weight in learned.items()}

    def _update_acting(self, learned: Mapping[str, Tensor]) -> None:
        """Copy weights into the acting network. The caller holds both locks."""
        assert self._acting is not None
        acting = dict(self._acting.named_parameters())
        copy_weights(learned, acting)
        self._pending, self._acting_version = None, self._version
        # Of the acting network's own memory, so that a copy that went wrong is noticed.
        self._acting_fingerprint = sampling_fingerprint({name: acting[name] for name in learned})

    def save(self, path: Path) -> str:
        """Write the trained weights to a new directory; returns the SHA-256 of its manifest."""
        return checkpoint.save_checkpoint(self.learner, self.loaded, path, version=self._version)

    def gather_for_save(self) -> Callable[[Path], str]:
        """`save` for a sharded model: all processes call this, and one calls the result."""
        weights = {name: tensor.cpu() for name, tensor in self.learner.whole_trainable().items()}
        return partial(checkpoint.save_checkpoint, self.learner, self.loaded, version=self._version, weights=weights)

    def load(self, path: Path) -> None:
        """Load a checkpoint directory and publish it under its version."""
        version = checkpoint.load_checkpoint(self.learner, path)
        self._version = min(self._version, version)
        self.publish(version)

    def export_merged(self, path: Path) -> None:
        """Write a plain transformers model with the adapters merged."""
        checkpoint.export_merged(self.learner, self.loaded, path, version=self._version)

    def _build_grammar(self, codec: str) -> ActionGrammar:
        return build_grammar(codec, factor=self.factor, in_prompt=self._describe_grammar)

    def _reference_network(self) -> tuple[Network, Any]:
        if self._reference is not None:
            return self._reference, nullcontext()
        if self.learner.wrapped is None:
            reason = "full training keeps no copy of the weights it started from"
            remedy = "Call keep_reference() before learning; it takes as much memory as the model"
            raise ConfigError("model.use_lora", False, reason, remedy)
        return self.learner, self.learner.without_adapters()


def _make_trainable(model: Any, config: ModelConfig, seed: int) -> Any:
    """Add adapters, or unfreeze the model; returns PEFT's wrapper if there are adapters."""
    wrapped = None
    if config.use_lora:
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            wrapped = add_adapters(model, config)
    else:
        for name, weight in model.named_parameters():
            weight.requires_grad_(not (config.freeze_vision and in_vision_tower(name)))
    model.eval()  # new adapters are in training mode
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return wrapped


def _token_rules(loaded: LoadedModel, network: Network, prompts: PromptWriter) -> TokenRules:
    ends = loaded.model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    ends = {*ends, loaded.tokenizer.eos_token_id, prompts.end_of_turn} - {None}
    placeholders = [getattr(loaded.model.config, f"{kind}_token_id", None) for kind in ("image", "video")]
    forbidden = {*range(len(loaded.tokenizer), network.vocabulary), *(t for t in placeholders if t is not None)}
    if not ends:
        raise ConfigError(
            "model.name",
            loaded.name,
            "has no token that ends a reply",
            "Set eos_token_id in generation_config.json",
        )
    padding = loaded.tokenizer.pad_token_id
    return TokenRules(frozenset(ends), tuple(sorted(forbidden)), min(ends) if padding is None else padding)
