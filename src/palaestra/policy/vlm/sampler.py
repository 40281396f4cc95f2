"""Samplers: batches of replies for several actors, from a policy in this process or in a child process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section
from palaestra.errors import CollectorFailed
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.generation import Completion, SampleRequest
from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.prompt import Conversation, Prompt

__all__ = [
    "InferenceConfig",
    "LocalSampler",
    "ProcessSampler",
    "ReplyRequest",
    "ReplySampler",
    "SampledReply",
    "sample_replies",
]


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
class ReplyRequest:
    """A conversation to reply to, and the seed of the reply."""

    conversation: Conversation
    seed: int


@dataclass(frozen=True)
class SampledReply:
    """A reply, and the very prompt that it answers."""

    prompt: Prompt
    completion: Completion


class ReplySampler(Protocol):
    """Replies to several questions at once; blocks meanwhile."""

    def sample(self, questions: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """An answer to each, in one batch."""


def sample_replies(policy: Any, questions: Sequence[ReplyRequest], temperature: float) -> list[SampledReply]:
    """Answers of a `VLMPolicy`, in one batch."""
    prompts = [policy.prompt(question.conversation) for question in questions]
    requests = [SampleRequest(prompt, question.seed) for prompt, question in zip(prompts, questions, strict=True)]
    replies = policy.sample(requests, temperature=temperature)
    return [SampledReply(prompt, sampled) for prompt, sampled in zip(prompts, replies, strict=True)]


class LocalSampler:
    """Answers with a policy in this process."""

    def __init__(self, policy: Any, *, threads: int) -> None:
        self._policy, self._threads = policy, threads

    def sample(self, questions: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """An answer to each, in one batch."""
        # Threads are a property of the calling thread, which is the one of batched inference.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return sample_replies(self._policy, questions, temperature)


_log = logging.getLogger(__name__)

START_S = 300.0
"""How long the child may take to load its model."""
BEHIND_THE_LEARNER = 5
"""Niceness: an update in time is worth more than another answer of old weights, and both more than a browser."""
STOP_S = 10.0


class ProcessSampler:
    """Answers with a copy of a policy in a child process; a child that dies is replaced."""

    def __init__(self, config: ModelConfig, *, seed: int, threads: int, restarts: int = 3) -> None:
        """`restarts`: how many times in a row, without an answer in between, a child that ended is replaced."""
        self._arguments = (config.model_dump_json(), seed, threads)
        self._max_restarts, self._unanswered = restarts, 0
        self.failures: list[str] = []
        """Why each child that was replaced had ended."""
        self._turn = threading.Lock()
        self._news = threading.Lock()
        self._published: tuple[int, dict[str, npt.NDArray[Any]]] | None = None
        self._sent: object = None
        """What of `_published` the child has; None: the weights it was built with."""
        self._ready = self._closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        """The child's."""
        return self._child.pid

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Act with these weights from the next batch on. Returns at once."""
        arrays = {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in state.items()}
        with self._news:
            # Kept after they were sent: a child that replaces another needs them too.
            self._published = (version, arrays)

    def sample(self, questions: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """An answer to each, in one batch. The same questions give the same answers after a restart."""
        with self._turn:
            while True:
                try:
                    answers = self._ask(questions, temperature)
                except (EOFError, OSError) as error:
                    self._replace_child(error)
                    continue
                self._unanswered = 0
                return answers

    def close(self) -> None:
        """End the child."""
        self._closed = True
        self._end_child(STOP_S)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=self._main, args=(theirs, *self._arguments), name="palaestra-sampler", daemon=True
        )
        self._child.start()
        theirs.close()
        self._ready, self._sent = False, None

    def _ask(self, questions: Sequence[ReplyRequest], temperature: float) -> list[SampledReply]:
        with self._news:
            published = self._published
        if published is not None and published is not self._sent:
            self._call("weights", *published)
            self._sent = published
        answers: list[SampledReply] = self._call("answer", list(questions), temperature)
        return answers

    def _replace_child(self, error: Exception) -> None:
        """Start another child; `CollectorFailed` when too many ended in a row."""
        self._end_child(1.0)
        reason = f"the sampler process ended with status {self._child.exitcode} ({error!r})"
        if self._closed:
            raise CollectorFailed(f"{reason}.") from None
        if self._unanswered >= self._max_restarts:
            raise CollectorFailed(
                f"{reason}, after {self._unanswered} of at most {self._max_restarts} restarts in a row. Status -9 "
                "usually means that memory ran out: lower inference.max_batch."
            ) from None
        self._unanswered += 1
        self.failures.append(reason)
        _log.warning("%s; it is started again (%d of %d)", reason, self._unanswered, self._max_restarts)
        self._start()

    def _end_child(self, within_s: float) -> None:
        self._pipe.close()
        self._child.join(within_s)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    def _call(self, *message: Any) -> Any:
        if not self._ready:
            if not self._pipe.poll(START_S):
                raise CollectorFailed(f"the sampler process has not loaded its model within {START_S:g} s.")
            self._read()
            self._ready = True
        self._pipe.send(message)
        return self._read()

    def _read(self) -> Any:
        kind, content = self._pipe.recv()
        if kind == "failed":
            raise CollectorFailed(f"the sampler process failed: {content}")
        return content

    @staticmethod
    def _main(pipe: Connection, config: str, seed: int, threads: int) -> None:
        _run_child(pipe, config, seed, threads)


def _run_child(pipe: Connection, config: str, seed: int, threads: int) -> None:
    """The child: load the model, then answer until the pipe ends."""
    # Signals to the whole group are for the parent, who ends us by the pipe when the last episode is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    os.nice(BEHIND_THE_LEARNER)
    with contextlib.suppress(EOFError, OSError):
        try:
            policy = VLMPolicy.from_config(ModelConfig.model_validate_json(config), seed=seed)
        except BaseException as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
            raise
        pipe.send(("done", None))
        while True:
            kind, *content = pipe.recv()
            done = None
            try:
                if kind == "weights":
                    _load(policy, *content)
                else:
                    done = sample_replies(policy, *content)
            except Exception:  # noqa: BLE001  told to whoever asked
                pipe.send(("failed", traceback.format_exc()))
                continue
            pipe.send(("done", done))


def _load(policy: VLMPolicy, version: int, arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
    policy.load_trainable_state({name: torch.from_numpy(array) for name, array in arrays.items()})
    policy.publish(version)
