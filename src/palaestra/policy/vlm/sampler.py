"""Sampling replies for several actors at once: the `Sampler` protocol, and the one that uses a policy in this process.

`palaestra.policy.vlm.sampler_process` has the one in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from palaestra.config import Section
from palaestra.policy.vlm.prompt import Conversation, Prompt
from palaestra.policy.vlm.sampling import Sampled, SampleRequest

__all__ = ["Answer", "InferenceConfig", "LocalSampler", "Question", "Sampler", "answer_questions"]


class InferenceConfig(Section):
    """How answers are made."""

    max_batch: int = Field(default=64, ge=1)
    """Answers per batch. More are faster until memory is full."""
    backend: Literal["thread", "process"] = "thread"
    """`thread` shares the frozen weights with the learner; `process` has a copy, and a core, of its own. Only
    asynchronous collection gains from the latter."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch that answer."""
    restarts: int = Field(default=3, ge=0)
    """`process`: how many times in a row, without an answer in between, a sampler process that died is replaced."""


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
