"""`WeightProbe`: tokens that an engine samples for fixed prompts, scored by the learner's code with the same weights.

If an engine answers with the weights it was given, both give the same log-probabilities up to rounding. A difference
above the tolerance means other weights, another model, another picture or another temperature; `explain` finds out
which, by scoring the same tokens under each of these assumptions.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from palaestra.policy.codecs.grammar import ActionGrammar, ReplyReader
from palaestra.policy.vlm.generation import Completion, TokenRules
from palaestra.policy.vlm.network import Network
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Conversation, Prompt
from palaestra.policy.vlm.scoring import score, turn_input
from palaestra.policy.vlm.serving.adapter_export import with_strong_effect, without_effect
from palaestra.policy.vlm.serving.engine import EngineReply, mean_difference
from palaestra.policy.weight_sync import copy_weights
from palaestra.sessions.screen import Size

PROBE_TOKENS = 16
"""Maximum length of a reply to a probe."""
PROBE_TEXTS = ("Click the button that says Continue.", "Type 17 Elm Street into the field, then press Enter.")
PROBE_SCREEN = Size(160, 120)
ROUNDING = 2.0
"""Up to this many times the tolerance, a difference may be the rounding of another precision."""
NEARER = 0.25
"""Other weights are those of an engine if they differ from its answers by less than this share of what ours do."""
NEARER_FROM, NEARER_TOKENS = 1e-3, 8
"""Smaller differences (nats), or fewer tokens, do not tell weights apart."""
STRONG_EFFECT = 20.0
"""The trial adapter changes log-probabilities by at least this many times the tolerance."""


class ServedPolicy(Protocol):
    """What a sampler needs to know of the policy that an engine serves; `VLMPolicy` has it."""

    learner: Network
    rules: TokenRules

    def prompt(self, conversation: Conversation) -> Prompt:
        """The token ids and pictures of the prompt for the next reply."""

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode sampled tokens, without the end token."""


@dataclass(frozen=True)
class ProbeAnswer:
    """What an engine answered to one prompt of the probe."""

    prompt: Prompt
    reply: EngineReply


@dataclass(frozen=True)
class ProbeResult:
    """How far an engine is from the learner."""

    difference: float
    """Mean difference of the log-probabilities, in nats."""
    largest: float
    """Of a single token."""
    tokens: int

    def __str__(self) -> str:
        return f"{self.difference:.4g} nats on average and {self.largest:.4g} at most over {self.tokens} tokens"


class WeightProbe:
    """Fixed prompts, and the learner's log-probabilities for the replies to them. Safe to use from several threads."""

    def __init__(self, policy: ServedPolicy, *, temperature: float, tolerance: float) -> None:
        self._rules, self.temperature, self.tolerance = policy.rules, temperature, tolerance
        # Not the learner's own network: a probe may run while that is training.
        self._network = policy.learner.clone()
        self._network.set_dropout(False)
        self._lock = threading.Lock()
        self.prompts = [policy.prompt(conversation) for conversation in _probe_conversations(policy)]

    def compare(self, weights: Mapping[str, Tensor], answers: Sequence[ProbeAnswer]) -> ProbeResult:
        """Score the tokens of the answers with these weights, and compare."""
        ours = self._score(weights, answers, self.temperature)
        theirs = [log_prob for answer in answers for log_prob in answer.reply.log_probs]
        largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        return ProbeResult(mean_difference(ours, theirs), largest, len(ours))

    def explain(
        self, answers: Sequence[ProbeAnswer], weights: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]
    ) -> str:
        """Why the answers do not match `weights`, as far as can be found out. `others` are weights by description."""
        theirs = [log_prob for answer in answers for log_prob in answer.reply.log_probs]
        for description, other in others.items():
            if mean_difference(self._score(other, answers, self.temperature), theirs) <= self.tolerance:
                return f"the engine answers with {description}"
        if self.temperature != 1.0 and mean_difference(self._score(weights, answers, 1.0), theirs) <= self.tolerance:
            return (
                f"the engine returns log-probabilities from before the temperature {self.temperature:g}; start it "
                "with --logprobs-mode processed_logprobs"
            )
        if mean_difference(self._score(weights, answers, self.temperature), theirs) <= ROUNDING * self.tolerance:
            return (
                "rounding alone may explain so little: start it with the --dtype of the learner, or raise the tolerance"
            )
        return "the engine serves another model, other weights or pictures that it prepares differently"

    def find_nearer(
        self, answers: Sequence[ProbeAnswer], result: ProbeResult, others: Mapping[str, Mapping[str, Tensor]]
    ) -> str:
        """Which other weights the answers clearly come from, though ours are within the tolerance; empty if none.

        A small update changes the probe by less than the tolerance, so an old adapter passes it. Rounding has no
        direction: only an engine that has the other weights is much nearer to them.
        """
        if result.difference < NEARER_FROM or result.tokens < NEARER_TOKENS:
            return ""
        for description, other in others.items():
            if self.compare(other, answers).difference < NEARER * result.difference:
                return f"the engine answers with {description}"
        return ""

    def trial_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights that an engine cannot mistake: they answer very differently from the model without an adapter."""
        plain, scale = without_effect(weights), 0.02
        avoided = {*self._rules.forbidden, *self._rules.ends}
        token_ids = [token for token in range(self._network.vocabulary) if token not in avoided][:8]
        reply = EngineReply(token_ids, [0.0] * len(token_ids), 0)
        answers = [ProbeAnswer(prompt, reply) for prompt in self.prompts]
        base = self._score(plain, answers, 1.0)
        while True:
            trial = with_strong_effect(plain, scale)
            if scale > 100 or mean_difference(self._score(trial, answers, 1.0), base) > STRONG_EFFECT * self.tolerance:
                return trial
            scale *= 2

    def _score(self, weights: Mapping[str, Tensor], answers: Sequence[ProbeAnswer], temperature: float) -> list[float]:
        turns = [turn_input(one.prompt, _completion(one.reply), temperature=temperature) for one in answers]
        with self._lock, torch.no_grad():
            named = dict(self._network.named_parameters())
            copy_weights({name: tensor for name, tensor in weights.items() if name in named}, named)
            scored = score(self._network, turns, self._rules)
        return [float(one) for one in scored.log_probs[scored.mask]]


def _completion(reply: EngineReply) -> Completion:
    return Completion(
        token_ids=np.array(reply.token_ids, np.int32),
        log_probs=np.array(reply.log_probs, np.float32),
        versions=np.zeros(len(reply.token_ids), np.int32),
        text="",
        ended=False,
        fingerprint="",
    )


def _probe_conversations(policy: ServedPolicy) -> list[Conversation]:
    """Two instructions about a screen of coloured blocks; without a picture for a model that takes text only."""
    grammar: ActionGrammar | None = getattr(policy, "grammar", None)
    if grammar is None:
        return [Conversation("", text, (), Picture(b"", (0, 0))) for text in PROBE_TEXTS]
    frame = ReplyReader(grammar.codec, grammar.rule).frame(PROBE_SCREEN)
    size = (frame.image.width, frame.image.height)
    system = grammar.codec.system_prompt(frame) if grammar.in_prompt else ""
    return [Conversation(system, text, (), Picture(_draw_blocks(n), size)) for n, text in enumerate(PROBE_TEXTS)]


def _draw_blocks(number: int) -> bytes:
    from PIL import Image

    colours: Any = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(colours).resize((PROBE_SCREEN.width, PROBE_SCREEN.height), Image.Resampling.NEAREST)
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()
