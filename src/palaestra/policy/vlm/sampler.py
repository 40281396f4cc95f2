"""Sampling replies for several actors at once: the `Sampler` protocol, and the one that uses a policy in this process.

`palaestra.policy.vlm.sampler_process` has the one in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from palaestra.policy.vlm.prompt import Conversation, Prompt
from palaestra.policy.vlm.sampling import Sampled, SampleRequest

__all__ = ["Answer", "LocalSampler", "Question", "Sampler", "answer_questions"]


@dataclass(frozen=True)
class Question:
    """A conversation to reply to, and the seed of the reply."""

    conversation: Conversation
    seed: int


@dataclass(frozen=True)
class Answer:
    """A reply, and the very prompt that it answers."""

    prompt: Prompt
    sampled: Sampled


class Sampler(Protocol):
    """Replies to several questions at once; blocks meanwhile."""

    def answer(self, questions: Sequence[Question], *, temperature: float) -> list[Answer]:
        """An answer to each, in one batch."""


def answer_questions(policy: Any, questions: Sequence[Question], temperature: float) -> list[Answer]:
    """Answers of a `VLMPolicy`, in one batch."""
    prompts = [policy.prompt(question.conversation) for question in questions]
    requests = [SampleRequest(prompt, question.seed) for prompt, question in zip(prompts, questions, strict=True)]
    replies = policy.sample(requests, temperature=temperature)
    return [Answer(prompt, sampled) for prompt, sampled in zip(prompts, replies, strict=True)]


class LocalSampler:
    """Answers with a policy in this process."""

    def __init__(self, policy: Any, *, threads: int) -> None:
        self._policy, self._threads = policy, threads

    def answer(self, questions: Sequence[Question], *, temperature: float) -> list[Answer]:
        """An answer to each, in one batch."""
        # Threads are a property of the calling thread, which is the one of batched inference.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return answer_questions(self._policy, questions, temperature)
