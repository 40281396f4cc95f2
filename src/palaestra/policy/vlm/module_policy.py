"""`ModulePolicy`: a user's own `nn.Module` in the place of a Hugging Face model, for training on screens.

The module answers two questions:

    sample(requests, *, temperature)     for each `SampleRequest` (a prompt and a seed) the token ids it drew and their
                                         log-probabilities, as a pair of sequences
    log_probs(turns, *, with_values=False, with_entropy=False, grad=True)
                                         a `TokenLogProbs` of the recorded tokens (palaestra.experience)

and may have `prompt(conversation) -> Prompt` and `text_of(token_ids) -> str`; without them token ids are the bytes of
UTF-8. A copy of the module acts, and takes over the weights that were published between two batches of answers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from palaestra.errors import CheckpointError, ConfigError, ExperienceError
from palaestra.experience.trajectory import TokenLogProbs, TurnInput
from palaestra.files.atomic import read_json, write_json
from palaestra.policy.codecs.grammar import ActionGrammar, build_grammar
from palaestra.policy.fingerprint import weights_fingerprint
from palaestra.policy.vlm.generation import Completion, SampleRequest
from palaestra.policy.vlm.prompt import Conversation, Prompt

__all__ = ["ModulePolicy", "as_vlm_policy"]

WEIGHTS, FACTS = "model.safetensors", "palaestra.json"


def as_vlm_policy(policy: Any, *, codec: str | None = None) -> Any:
    """The policy itself, or an `nn.Module` that answers `sample` and `log_probs` as one."""
    missing = [name for name in ("sample", "log_probs") if not callable(getattr(policy, name, None))]
    if missing:
        raise ConfigError(
            "policy",
            type(policy).__name__,
            f"it does not answer {' and '.join(missing)}",
            "See palaestra.policy.vlm.module_policy",
        )
    return ModulePolicy(policy, codec=codec) if isinstance(policy, nn.Module) else policy


class ModulePolicy:
    """An `nn.Module` with its acting copy, its grammar and its checkpoints."""

    exact_gradients = False
    """A module may have dropout."""

    def __init__(self, module: nn.Module, *, codec: str | None = None, factor: int = 28) -> None:
        """`codec` names how it writes actions, by default as Qwen2.5-VL; `factor`: its pictures are multiples of it."""
        self.module, self._acting = module, copy.deepcopy(module).eval()
        self.grammar: ActionGrammar = build_grammar(codec or "qwen2.5-vl", factor=factor)
        self._reference: nn.Module | None = None
        self._past: nn.Module | None = None
        self._sampling = threading.Lock()
        self.version = 0
        self._fingerprint = self.fingerprint

    @property
    def fingerprint(self) -> str:
        """Of the weights that learn, as they are now."""
        return weights_fingerprint(self._learned(self.module))

    @property
    def half_precision(self) -> bool:
        """Whether any part of the module computes with less than 32 bits."""
        return any(weight.element_size() < 4 for weight in self.module.parameters())

    def prompt(self, conversation: Conversation) -> Prompt:
        """What the module is to answer."""
        module: Any = self.module
        if hasattr(module, "prompt"):
            prompt: Prompt = module.prompt(conversation)
            return prompt
        text = f"{conversation.system}\n{conversation.instruction}".encode()
        return Prompt(np.frombuffer(text, np.uint8).astype(np.int32), (conversation.now,))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What sampled tokens say."""
        module: Any = self.module
        if hasattr(module, "text_of"):
            return str(module.text_of(token_ids))
        return bytes(int(token) & 255 for token in token_ids).decode(errors="replace")

    def sample(self, requests: Sequence[SampleRequest], *, temperature: float = 1.0) -> list[Completion]:
        """An answer to each request, by the published weights."""
        with self._sampling, torch.no_grad():
            version, fingerprint = self.version, self._fingerprint
            acting: Any = self._acting
            drawn = acting.sample(requests, temperature=temperature)
        self._check_replies(drawn, requests)
        return [
            Completion(
                token_ids=np.asarray(token_ids, np.int32),
                log_probs=np.asarray(log_probs, np.float32),
                versions=np.full(len(token_ids), version, np.int32),
                text=self.text_of(token_ids),
                ended=True,
                fingerprint=fingerprint,
            )
            for token_ids, log_probs in drawn
        ]

    def _check_replies(self, drawn: Any, requests: Sequence[SampleRequest]) -> None:
        place = f"{type(self.module).__name__}.sample"
        if not isinstance(drawn, Sequence) or len(drawn) != len(requests):
            given = f"{len(drawn)} replies" if isinstance(drawn, Sequence) else f"a {type(drawn).__name__}"
            raise ExperienceError(f"{place} gave {given} to {len(requests)} requests. Return one pair for each.")
        for number, reply in enumerate(drawn):
            if len(reply) != 2 or len(reply[0]) != len(reply[1]):
                raise ExperienceError(
                    f"{place} gave {[len(part) for part in reply]} numbers to request {number}. Return token ids and "
                    "as many log-probabilities."
                )

    def log_probs(self, turns: Sequence[TurnInput], *, grad: bool = True, **wanted: bool) -> TokenLogProbs:
        """Of the recorded tokens under the weights that learn."""
        return self._score(self.module, turns, grad=grad, **wanted)

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor | None:
        """`[B, G]` under the weights of `keep_reference`; None before it was called."""
        return None if self._reference is None else self._score(self._reference, turns, grad=False).log_probs

    def past_log_probs(self, turns: Sequence[TurnInput], learned: Mapping[str, Tensor]) -> Tensor:
        """`[B, G]` under earlier values of the weights that learn."""
        if self._past is None:
            self._past = copy.deepcopy(self.module).eval()
        self._copy(learned, self._past)
        return self._score(self._past, turns, grad=False).log_probs

    def keep_reference(self) -> None:
        """Remember the weights as they are as those of `reference_log_probs`."""
        self._reference = copy.deepcopy(self.module).eval()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight of the module."""
        return self.module.named_parameters()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What an optimiser steps."""
        return list(self._learned(self.module).values())

    def publish(self, version: int) -> None:
        """The weights that learn answer from the next batch on; waits for the batch that is being sampled."""
        with self._sampling:
            self._copy(self._learned(self.module), self._acting)
            # Running statistics change while it learns, too.
            for acting, buffer in zip(self._acting.buffers(), self.module.buffers(), strict=True):
                acting.copy_(buffer)
            self.version, self._fingerprint = version, weights_fingerprint(self._learned(self._acting))

    def save(self, path: Path) -> None:
        """Write the weights to a new directory."""
        path.mkdir(parents=True)
        # Copies, because safetensors refuses weights that are tied.
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in self.module.state_dict().items()}
        save_file(tensors, path / WEIGHTS)
        write_json(path / FACTS, {"kind": "module", "class": type(self.module).__qualname__, "version": self.version})

    def load(self, path: Path) -> None:
        """Go on from what a directory holds, and publish it under its version."""
        try:
            weights = load_file(path / WEIGHTS)
            self.module.load_state_dict(weights)
            # What does not learn is in no `publish`, and need not be as it was when this module was made.
            self._acting.load_state_dict(weights)
            self._past = None
            version = int((read_json(path / FACTS) or {})["version"])
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            reason = f"does not fit this {type(self.module).__name__} ({' '.join(str(error).split())})"
            raise CheckpointError("checkpoint", str(path), reason, "Use the module it was trained with") from None
        self.publish(version)

    @staticmethod
    def _score(module: Any, turns: Sequence[TurnInput], *, grad: bool, **wanted: bool) -> TokenLogProbs:
        with torch.set_grad_enabled(grad):
            scored = module.log_probs(turns, grad=grad, **wanted)
        place = f"{type(module).__name__}.log_probs"
        if not isinstance(scored, TokenLogProbs):
            raise ExperienceError(f"{place} gave a {type(scored).__name__}. Return a TokenLogProbs.")
        expected = (len(turns), max(len(each.turn.token_ids) for each in turns))
        for name, tensor in (("log_probs", scored.log_probs), ("mask", scored.mask)):
            if tuple(tensor.shape) != expected:
                raise ExperienceError(
                    f"{place} gave {name} of shape {list(tensor.shape)}, expected {list(expected)}: turns, and "
                    "tokens of the longest."
                )
        return scored

    @staticmethod
    def _learned(module: nn.Module) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}

    @staticmethod
    def _copy(learned: Mapping[str, Tensor], target: nn.Module) -> None:
        weights = dict(target.named_parameters())
        with torch.no_grad():
            for name, value in learned.items():
                weights[name].copy_(value)
