"""A sampler in a process of its own: its batches and the learner's gradients do not share an interpreter.

The child builds the same model from the same configuration, so only what is trained travels, over a pipe that nobody
else can reach. New weights wait here until the next batch is asked for: the learner is never held up, and a batch is of
one version. The child ends with the pipe, however we end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from palaestra.actor.inference import Answered, Question
from palaestra.errors import CollectorFailed
from palaestra.policy.vlm import ModelConfig, SampleRequest, VLMPolicy

__all__ = ["ProcessSampler"]

START_S = 300.0
"""How long the child may take to load its model."""
BEHIND_THE_LEARNER = 5
"""Niceness: an update in time is worth more than another answer of old weights, and both more than a browser."""
STOP_S = 10.0


class ProcessSampler:
    """Answers with a copy of a policy in a child process."""

    def __init__(self, config: ModelConfig, *, seed: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=_live, args=(theirs, config.model_dump_json(), seed, threads), name="palaestra-sampler", daemon=True
        )
        self._child.start()
        theirs.close()
        self._turn = threading.Lock()
        self._news = threading.Lock()
        self._pending: tuple[int, dict[str, npt.NDArray[Any]]] | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The child's."""
        return self._child.pid

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Act with these weights from the next batch on. Returns at once."""
        arrays = {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in state.items()}
        with self._news:
            self._pending = (version, arrays)

    def answer(self, questions: Sequence[Question], *, temperature: float) -> list[Answered]:
        """An answer to each, in one batch."""
        with self._turn:
            with self._news:
                news, self._pending = self._pending, None
            if news is not None:
                self._said("weights", *news)
            answers: list[Answered] = self._said("answer", list(questions), temperature)
            return answers

    def close(self) -> None:
        """End the child."""
        self._pipe.close()
        self._child.join(STOP_S)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    def _said(self, *message: Any) -> Any:
        try:
            if not self._ready:
                if not self._pipe.poll(START_S):
                    raise CollectorFailed(f"the sampler process has not loaded its model within {START_S:g} s.")
                self._read()
                self._ready = True
            self._pipe.send(message)
            return self._read()
        except (EOFError, OSError) as error:
            self._child.join(1.0)
            raise CollectorFailed(
                f"the sampler process ended with status {self._child.exitcode} ({error!r})."
            ) from None

    def _read(self) -> Any:
        kind, content = self._pipe.recv()
        if kind == "failed":
            raise CollectorFailed(f"the sampler process failed: {content}")
        return content


def _live(pipe: Connection, config: str, seed: int, threads: int) -> None:
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
            try:
                done = _loaded(policy, *content) if kind == "weights" else _answered(policy, *content)
            except Exception:  # noqa: BLE001  told to whoever asked
                pipe.send(("failed", traceback.format_exc()))
                continue
            pipe.send(("done", done))


def _loaded(policy: VLMPolicy, version: int, arrays: Mapping[str, npt.NDArray[np.float32]]) -> str:
    policy.load_trainable_state({name: torch.from_numpy(array) for name, array in arrays.items()})
    return policy.publish(version)


def _answered(policy: VLMPolicy, questions: Sequence[Question], temperature: float) -> list[Answered]:
    prompts = [policy.prompt(question.conversation) for question in questions]
    requests = [SampleRequest(prompt, question.seed) for prompt, question in zip(prompts, questions, strict=True)]
    drawn = policy.sample(requests, temperature=temperature)
    return [Answered(prompt, sampled) for prompt, sampled in zip(prompts, drawn, strict=True)]
