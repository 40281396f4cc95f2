"""Samplers: replies to batches of conversations, from a policy in this process or in a child process.

`palaestra.policy.vlm.serving` has the sampler for inference engines.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable
from urllib.parse import urlsplit

import numpy.typing as npt
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from palaestra.config import Section
from palaestra.errors import CollectorFailed
from palaestra.policy.device import check_device_name
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.generation import Completion, SampleRequest
from palaestra.policy.vlm.picture import PicturePreprocessor
from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.prompt import Conversation, Prompt

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Time limit for the child process to load its model."""
STOP_TIMEOUT_S = 10.0
CHILD_NICENESS = 5
"""The child yields to the learner: an update in time is worth more than another reply of old weights."""


class InferenceConfig(Section):
    """How replies are sampled."""

    max_batch: int = Field(default=64, ge=1)
    """Maximum replies per batch. Larger is faster until memory is full."""
    backend: Literal["thread", "process", "server"] = "thread"
    """`thread` shares the frozen weights with the learner; `process` uses its own copy and CPU core, which only
    asynchronous collection benefits from; `server` sends every request to the inference engines of `urls`."""
    device: str | None = None
    """Device that samples: `cpu`, `cuda:1`, …; null: that of the learner, `model.device`. On another device the sampler
    has a copy of all weights."""
    torch_threads: int = Field(default=1, ge=1)
    """Number of torch threads for sampling."""
    restarts: int = Field(default=3, ge=0)
    """`process`: maximum consecutive restarts of a sampler process that died, without a reply in between."""
    urls: tuple[str, ...] = ()
    """`server`: addresses of the engines, such as `http://127.0.0.1:8000`. An episode stays with one engine, so that
    its prefix cache is used; the episodes of an engine that is lost move to another one."""
    model: str | None = None
    """`server`: name under which the engines serve the model of `model.name`. null: the only one they serve."""
    api_key_file: Path | None = None
    """`server`: file with the key of the engines. null: that of PALAESTRA_INFERENCE_API_KEY, if it is set."""
    adapter_directory: Path | None = None
    """`server`: directory for published adapters, which this machine and the engines see under the same path. null: a
    temporary directory, which is enough for engines on this machine."""
    probe_tolerance: float = Field(default=0.1, gt=0, le=100)
    """`server`: maximum mean difference (nats) between the log-probabilities of an engine and those of the learner for
    the same tokens. In float32 they differ by 1e-6; a model of 135 million weights in bfloat16 differs by 0.03 to 0.05.
    A high value hides a broken weight transfer."""
    max_concurrency: int = Field(default=64, ge=1)
    """`server`: maximum requests in flight; the engines batch them continuously."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """`server`: time limit of one reply, and of loading an adapter."""
    retries: int = Field(default=3, ge=0)
    """`server`: how many times a request is sent again, with the same seed, to engines that answer other requests."""
    unreachable_s: float = Field(default=60.0, ge=0)
    """`server`: how long to wait for an engine to come back when none answers. After that training fails, with a
    checkpoint."""

    @field_validator("urls", mode="before")
    @classmethod
    def _accept_single_url(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in given)
        for url in urls:
            if "@" in url:
                raise ValueError("holds a user or password, which would be stored with the run: use api_key_file")
            if not _is_base_url(url):
                raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        if len(set(urls)) != len(urls):
            raise ValueError("names an engine twice")
        return urls

    @model_validator(mode="after")
    def _server_has_urls(self) -> Self:
        if self.backend == "server" and not self.urls:
            raise ValueError("backend: server needs urls, the addresses of the engines")
        if self.backend != "server" and self.urls:
            raise ValueError("urls counts only with backend: server")
        if self.backend == "server" and self.device is not None:
            raise ValueError("device has no effect with backend: server, whose engines have their own: leave it out")
        return self

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, value: Any) -> Any:
        if value is not None:
            check_device_name(value, place="inference.device")
        return value


def _is_base_url(url: str) -> bool:
    """Whether routes can be appended to it."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not re.search(r"[?#\s]", url)
        )
    except ValueError:  # a port that is not a number, or too high
        return False


@dataclass(frozen=True)
class ReplyRequest:
    """A conversation to reply to, and the seed of the reply."""

    conversation: Conversation
    seed: int
    episode: str = ""
    """Requests of one episode have the same name; they are sent to the same engine."""


@dataclass(frozen=True)
class SampledReply:
    """A reply and the prompt it was sampled for."""

    prompt: Prompt
    completion: Completion


class ReplySampler(Protocol):
    """Samples replies to a batch of conversations."""

    def sample(self, requests: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """Sample a reply to each request, in one batch. Blocks until all are done."""


@runtime_checkable
class ConcurrentSampler(ReplySampler, Protocol):
    """A sampler that takes requests one by one at any time and batches them itself."""

    def submit(self, request: ReplyRequest, *, temperature: float) -> Future[SampledReply]:
        """Start sampling a reply. Cancelling the future drops the reply; the sampler may finish it all the same."""


def sample_replies(policy: Any, requests: Sequence[ReplyRequest], temperature: float) -> list[SampledReply]:
    """Sample a reply to each request with a `VLMPolicy`."""
    prompts = [policy.prompt(request.conversation) for request in requests]
    samples = [SampleRequest(prompt, request.seed) for prompt, request in zip(prompts, requests, strict=True)]
    completions = policy.sample(samples, temperature=temperature)
    return [SampledReply(*pair) for pair in zip(prompts, completions, strict=True)]


class LocalSampler:
    """Samples with a policy in this process."""

    def __init__(self, policy: Any, *, threads: int) -> None:
        self._policy, self._threads = policy, threads

    def sample(self, requests: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """Sample a reply to each request, in one batch."""
        # The number of threads is a property of the calling thread, which runs only batched inference.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return sample_replies(self._policy, requests, temperature)


def _run_child(pipe: Connection, config: str, seed: int, threads: int) -> None:
    """Main function of the child: load the model, then serve requests until the pipe closes."""
    # Signals to the process group are handled by the parent, which closes the pipe after the last episode.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    os.nice(CHILD_NICENESS)
    with contextlib.suppress(EOFError, OSError):
        try:
            policy = VLMPolicy.from_config(ModelConfig.model_validate_json(config), seed=seed)
        except BaseException as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
            raise
        pipe.send(("done", None))
        while True:
            kind, *content = pipe.recv()
            answer: object = None
            try:
                if kind == "weights":
                    version, arrays = content
                    policy.load_trainable_state({name: torch.from_numpy(array) for name, array in arrays.items()})
                    policy.publish(version)
                else:
                    requests, temperature = content
                    readings = policy.preprocessor.read_new(request.conversation.now for request in requests)
                    answer = sample_replies(policy, requests, temperature), readings
            except Exception:  # noqa: BLE001  reported to the parent
                pipe.send(("failed", traceback.format_exc()))
                continue
            pipe.send(("done", answer))


class ProcessSampler:
    """Samples with a copy of a policy in a child process, so that sampling and learning do not share an interpreter.

    The child builds the same model from the same configuration, so only trained weights are sent, over a private pipe.
    Replies come with what the child read on new pictures, so that the learner need not read them again.
    New weights are sent with the next batch: publishing never blocks, and a batch has one version. The child exits when
    the pipe closes. A child that dies is replaced by one with the same weights, which repeats the lost batch.
    """

    _main = staticmethod(_run_child)

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int,
        threads: int,
        restarts: int = 3,
        preprocessor: PicturePreprocessor | None = None,
    ) -> None:
        """`restarts`: maximum consecutive restarts of the child, without a reply in between.

        `preprocessor` is the learner's, which gets what the child reads on pictures.
        """
        self._preprocessor = preprocessor
        self._arguments = (config.model_dump_json(), seed, threads)
        self._max_restarts, self._restarts = restarts, 0
        self.failures: list[str] = []
        """Why each replaced child had exited."""
        self._call_lock = threading.Lock()
        self._publish_lock = threading.Lock()
        self._published: tuple[int, dict[str, npt.NDArray[Any]]] | None = None
        self._sent: object = None
        """The value of `_published` that the child has; None: the weights it was built with."""
        self._ready = self._closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._child.pid

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Use these weights from the next batch on. Returns immediately."""
        arrays = {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in state.items()}
        with self._publish_lock:
            # Kept after they were sent: a replacement child needs them too.
            self._published = (version, arrays)

    def sample(self, requests: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """Sample a reply to each request, in one batch. A restart does not change the replies."""
        with self._call_lock:
            while True:
                try:
                    replies = self._sample_once(requests, temperature)
                except (EOFError, OSError) as error:
                    self._replace_child(error)
                    continue
                self._restarts = 0
                return replies

    def close(self) -> None:
        """Stop the child."""
        self._closed = True
        self._stop_child(STOP_TIMEOUT_S)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._child = context.Process(
            target=self._main, args=(child_end, *self._arguments), name="palaestra-sampler", daemon=True
        )
        self._child.start()
        child_end.close()
        self._ready, self._sent = False, None

    def _sample_once(self, requests: Sequence[ReplyRequest], temperature: float) -> list[SampledReply]:
        with self._publish_lock:
            published = self._published
        if published is not None and published is not self._sent:
            self._call("weights", *published)
            self._sent = published
        replies: list[SampledReply]
        replies, readings = self._call("sample", list(requests), temperature)
        if self._preprocessor is not None:
            self._preprocessor.add_readings(readings)
        return replies

    def _replace_child(self, error: Exception) -> None:
        """Start another child; `CollectorFailed` after too many consecutive restarts."""
        self._stop_child(1.0)
        reason = f"the sampler process ended with status {self._child.exitcode} ({error!r})"
        if self._closed:
            raise CollectorFailed(f"{reason}.") from None
        if self._restarts >= self._max_restarts:
            raise CollectorFailed(
                f"{reason}, after {self._restarts} of at most {self._max_restarts} restarts in a row. Status -9 "
                "usually means that memory ran out: lower inference.max_batch."
            ) from None
        self._restarts += 1
        self.failures.append(reason)
        _log.warning("%s; it is started again (%d of %d)", reason, self._restarts, self._max_restarts)
        self._start()

    def _stop_child(self, timeout_s: float) -> None:
        self._pipe.close()
        self._child.join(timeout_s)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    def _call(self, *message: Any) -> Any:
        if not self._ready:
            if not self._pipe.poll(START_TIMEOUT_S):
                raise CollectorFailed(f"the sampler process has not loaded its model within {START_TIMEOUT_S:g} s.")
            self._receive()
            self._ready = True
        self._pipe.send(message)
        return self._receive()

    def _receive(self) -> Any:
        kind, content = self._pipe.recv()
        if kind == "failed":
            raise CollectorFailed(f"the sampler process failed: {content}")
        return content
