"""`ModulePolicy`: a user's own `nn.Module` in place of a Hugging Face model, for training on screens.

The module has two methods:

    sample(requests, *, temperature)     for each `SampleRequest` (a prompt and a seed) the token ids it drew and their
                                         log-probabilities, as a pair of sequences
    log_probs(turns, *, with_values=False, with_entropy=False, grad=True)
                                         a `TokenLogProbs` of the recorded tokens (palaestra.experience)

and may have `prompt(conversation) -> Prompt` and `text_of(token_ids) -> str`; without them token ids are the bytes of
UTF-8. A copy of the module acts, and takes over published weights between two batches.
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
from palaestra.experience.turn_scoring import TokenLogProbs, TurnInput
from palaestra.files.atomic import read_json, write_json
from palaestra.policy.codecs.grammar import ActionGrammar, build_grammar
from palaestra.policy.fingerprint import weights_fingerprint
from palaestra.policy.vlm.generation import Completion, SampleRequest
from palaestra.policy.vlm.prompt import Conversation, Prompt
from palaestra.policy.weight_sync import copy_weights

WEIGHTS, MANIFEST = "model.safetensors", "palaestra.json"


def as_vlm_policy(policy: Any, *, codec: str | None = None) -> Any:
    """Wrap an `nn.Module` with `sample` and `log_probs` as a policy; other policies are returned unchanged."""
    missing = [name for name in ("sample", "log_probs") if not callable(getattr(policy, name, None))]
    if missing:
        reason = f"it has no method {' and '.join(missing)}"
        raise ConfigError("policy", type(policy).__name__, reason, "See palaestra.policy.vlm.module_policy")
    return ModulePolicy(policy, codec=codec) if isinstance(policy, nn.Module) else policy


class ModulePolicy:
    """An `nn.Module` with its acting copy, its grammar and its checkpoints."""

    exact_gradients = False
    """A module may have dropout."""

    def __init__(self, module: nn.Module, *, codec: str | None = None) -> None:
        """`codec` is the action grammar, by default that of Qwen2.5-VL; sizes of pictures are multiples of 28."""
        self.module, self._acting = module, copy.deepcopy(module).eval()
        self.grammar: ActionGrammar = build_grammar(codec or "qwen2.5-vl", factor=28)
        self._reference: nn.Module | None = None
        self._past: nn.Module | None = None
        self._sampling_lock = threading.Lock()
        self.version = 0
        self._acting_fingerprint = self.fingerprint

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the current trainable weights."""
        return weights_fingerprint(_trainable(self.module))

    @property
    def half_precision(self) -> bool:
        """Whether any weight has less than 32 bits."""
        return any(weight.element_size() < 4 for weight in self.module.parameters())

    def prompt(self, conversation: Conversation) -> Prompt:
        """The prompt for the module's next reply."""
        module: Any = self.module
        if hasattr(module, "prompt"):
            prompt: Prompt = module.prompt(conversation)
            return prompt
        text = f"{conversation.system}\n{conversation.instruction}".encode()
        return Prompt(np.frombuffer(text, np.uint8).astype(np.int32), (conversation.now,))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode sampled tokens."""
        module: Any = self.module
        if hasattr(module, "text_of"):
            return str(module.text_of(token_ids))
        return bytes(int(token) & 255 for token in token_ids).decode(errors="replace")

    def sample(self, requests: Sequence[SampleRequest], *, temperature: float = 1.0) -> list[Completion]:
        """Sample a reply to each request with the published weights."""
        with self._sampling_lock, torch.no_grad():
            version, fingerprint = self.version, self._acting_fingerprint
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
        """Log-probabilities of the recorded tokens under the trainable weights."""
        return _score(self.module, turns, grad=grad, **wanted)

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor | None:
        """`[B, G]` under the weights of `keep_reference`; None if it was not called."""
        return None if self._reference is None else _score(self._reference, turns, grad=False).log_probs

    def past_log_probs(self, turns: Sequence[TurnInput], learned: Mapping[str, Tensor]) -> Tensor:
        """`[B, G]` under earlier values of the trainable weights."""
        if self._past is None:
            self._past = copy.deepcopy(self.module).eval()
        copy_weights(learned, dict(self._past.named_parameters()))
        return _score(self._past, turns, grad=False).log_probs

    def keep_reference(self) -> None:
        """Use the current weights for `reference_log_probs`."""
        self._reference = copy.deepcopy(self.module).eval()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights of the module by name."""
        return self.module.named_parameters()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights for an optimiser."""
        return list(_trainable(self.module).values())

    def publish(self, version: int) -> None:
        """Sample with the current trainable weights from the next batch on; waits for the current batch."""
        with self._sampling_lock:
            copy_weights(_trainable(self.module), dict(self._acting.named_parameters()))
            # Running statistics change in training, too.
            for acting, buffer in zip(self._acting.buffers(), self.module.buffers(), strict=True):
                acting.copy_(buffer)
            self.version, self._acting_fingerprint = version, weights_fingerprint(_trainable(self._acting))

    def save(self, path: Path) -> None:
        """Write the weights to a new directory."""
        path.mkdir(parents=True)
        # Copies, because safetensors refuses weights that are tied.
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in self.module.state_dict().items()}
        save_file(tensors, path / WEIGHTS)
        write_json(
            path / MANIFEST, {"kind": "module", "class": type(self.module).__qualname__, "version": self.version}
        )

    def load(self, path: Path) -> None:
        """Load a checkpoint directory and publish it under its version."""
        try:
            weights = load_file(path / WEIGHTS)
            self.module.load_state_dict(weights)
            # `publish` copies trainable weights only; the checkpoint may contain other values of the frozen ones.
            self._acting.load_state_dict(weights)
            self._past = None
            version = int((read_json(path / MANIFEST) or {})["version"])
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            reason = f"does not fit this {type(self.module).__name__} ({' '.join(str(error).split())})"
            raise CheckpointError("checkpoint", str(path), reason, "Use the module it was trained with") from None
        self.publish(version)


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


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
