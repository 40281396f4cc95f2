"""`ServerSampler`: replies from inference engines, with the newest adapter that was proven to answer.

Publishing writes the adapter to a new directory, loads it on every engine under a name that holds its version, and
probes every engine; requests use the new name only after that, so that an old adapter cannot answer for a new one. A
version that fails its probe is unloaded again and refused.

A request goes out at once; engines batch continuously. An answer is kept, so that the same request to the same version
never has two answers. Everything that talks to engines runs in one thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from safetensors import SafetensorError
from torch import Tensor

from palaestra.errors import CollectorFailed, ConfigError
from palaestra.policy.vlm.generation import Completion
from palaestra.policy.vlm.prompt import Prompt
from palaestra.policy.vlm.sampler import InferenceConfig, ReplyRequest, SampledReply
from palaestra.policy.vlm.serving.adapter_export import ExportedAdapter, adapter_weights, export_adapter
from palaestra.policy.vlm.serving.engine import (
    API_KEY_VARIABLE,
    Engine,
    EngineRequest,
    PromptEncoder,
    read_api_key,
)
from palaestra.policy.vlm.serving.engine_pool import EnginePool, PublishedAdapter, SamplerCounts
from palaestra.policy.vlm.serving.probe import ServedPolicy, WeightProbe

PICTURE_MEMORY_BYTES = 64 * 2**20
ANSWERS_KEPT = 1024
"""Answers that are kept in case the same request comes again."""
T = TypeVar("T")


class ServerSampler:
    """Samples replies with inference engines. `check` proves the engines; `publish` makes them use an adapter."""

    def __init__(
        self, policy: ServedPolicy, config: InferenceConfig, *, temperature: float, max_new_tokens: int
    ) -> None:
        """`temperature` is that of training, at which engines are probed."""
        try:
            import aiohttp
        except ImportError:
            remedy = "Install it with pip install 'palaestra[ui]'"
            raise ConfigError("inference.backend", "server", "needs aiohttp, which is not installed", remedy) from None
        if policy.learner.wrapped is None:
            reason = "engines take LoRA adapters, and this policy trains all of its weights"
            raise ConfigError("inference.backend", "server", reason, "Set model.use_lora=true, or use backend: thread")
        self._policy, self._config = policy, config
        network, key = policy.learner, read_api_key(config.api_key_file, os.environ.get(API_KEY_VARIABLE))
        self._encoder = PromptEncoder(network.preprocessor, network.image_token, memory_bytes=PICTURE_MEMORY_BYTES)
        probe = WeightProbe(policy, temperature=temperature, tolerance=config.probe_tolerance)
        self._trial_weights = probe.trial_weights
        self._tag = secrets.token_hex(3)
        """Part of the names of our adapters: other runs may use the same engines."""
        self._directory = _make_directory(config.adapter_directory)
        self._answers: OrderedDict[str, asyncio.Task[Completion]] = OrderedDict()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="palaestra-engines", daemon=True)
        self._thread.start()

        async def open_pool() -> EnginePool:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))
            self._slots = asyncio.Semaphore(config.max_concurrency)
            known, timeout_s = (policy.rules, network.vocabulary), config.request_timeout_s
            engines = [Engine(url, self._http, *known, timeout_s=timeout_s) for url in config.urls]
            return EnginePool(engines, config, probe, self._encoder, max_tokens=max_new_tokens)

        self._pool = self._wait(open_pool())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def counts(self) -> SamplerCounts:
        """Retries, lost engines and the last probe."""
        return self._pool.counts

    @property
    def notices(self) -> list[str]:
        """Engines that were lost and came back, in words."""
        return self._pool.notices

    @property
    def version(self) -> int | None:
        """Version that answers at present; None before the first publication."""
        return None if self._pool.current is None else self._pool.current.version

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Prove that every engine serves the learner's model, and that it uses an adapter it is given.

        `ConfigError` about the first engine that does not. `weights` are the trainable ones, of any value.
        """
        self._wait(self._pool.find_model())
        # Not the learner's own adapter: a new one changes nothing, so that ignoring it would go unnoticed.
        exported = self._export("trial", self._trial_weights(adapter_weights(weights)))
        try:
            self._wait(self._pool.check(PublishedAdapter(-1, f"palaestra-{self._tag}-trial", exported)))
        finally:
            shutil.rmtree(exported.path, ignore_errors=True)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Load the adapter on every engine, and answer with it once every engine has proven that it does.

        Returns after that. `CollectorFailed` if an engine cannot load it or answers with something else: the version
        is refused, and the previous one goes on answering.
        """
        if self._closed or (self.version is not None and version <= self.version):
            return
        began = time.perf_counter()
        exported = self._export(f"v{version}", weights)
        self._wait(self._pool.switch(PublishedAdapter(version, f"palaestra-{self._tag}-v{version}", exported)))
        self.counts.publish_s = time.perf_counter() - began

    def submit(self, request: ReplyRequest, *, temperature: float) -> Future[SampledReply]:
        """Send a request at once. The same request to the same version always has the same answer."""
        if self._closed:
            raise CollectorFailed("the connection to the inference engines is closed.")
        return asyncio.run_coroutine_threadsafe(self._answer(request, temperature), self._loop)

    def sample(self, requests: Sequence[ReplyRequest], *, temperature: float) -> list[SampledReply]:
        """Send all requests at once; blocks until all are answered."""
        futures = [self.submit(request, temperature=temperature) for request in requests]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Withdraw all requests, unload our adapters, and remove their files."""
        if self._closed:
            return
        self._closed = True
        self._wait(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the event loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _export(self, name: str, weights: Mapping[str, Tensor]) -> ExportedAdapter:
        path = self._directory / f"{name}-{secrets.token_hex(2)}"
        try:
            return export_adapter(self._policy.learner, weights, path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CollectorFailed(
                f"adapter {name} cannot be written to {self._directory} ({reason}). Free space there, or name another "
                "inference.adapter_directory, and resume the run."
            ) from None

    async def _answer(self, request: ReplyRequest, temperature: float) -> SampledReply:
        prompt = await asyncio.to_thread(self._policy.prompt, request.conversation)
        async with self._slots:
            encoded = await asyncio.to_thread(self._encoder.encode, prompt, seed=request.seed)
            # From here to the task nothing waits: a publication in between would unload the adapter.
            adapter = self._pool.current
            if adapter is None:
                raise CollectorFailed("no adapter was published to the inference engines yet.")
            key = _request_key(request, prompt, temperature, adapter)
            task = self._answers.get(key)
            if task is None:
                named = replace(encoded, request_id=key, session=request.episode or key)
                self._pool.hold(adapter)
                task = self._answers[key] = asyncio.ensure_future(self._sample(named, adapter, temperature))
                task.add_done_callback(lambda done: self._forget_failure(key, done))
                while len(self._answers) > ANSWERS_KEPT and next(iter(self._answers.values())).done():
                    self._answers.popitem(last=False)
            # Shielded: another actor may wait for the same answer, and a request that comes again finds it.
            return SampledReply(prompt, await asyncio.shield(task))

    def _forget_failure(self, key: str, task: asyncio.Task[Completion]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._answers.pop(key, None)

    async def _sample(self, request: EngineRequest, adapter: PublishedAdapter, temperature: float) -> Completion:
        reply = await self._pool.sample(request, adapter, temperature=temperature)
        count = len(reply.token_ids)
        return Completion(
            token_ids=np.array(reply.token_ids, np.int32),
            # A greedy token has probability 1 under the distribution it was taken from.
            log_probs=np.array(reply.log_probs if temperature else [0.0] * count, np.float32),
            versions=np.full(count, adapter.version, np.int32),
            text=self._policy.text_of(reply.token_ids),
            ended=reply.token_ids[-1] in self._policy.rules.ends,
            fingerprint=adapter.exported.fingerprint,
        )

    async def _shut_down(self) -> None:
        self._pool.closing = True
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._pool.close()
        await self._http.close()


def _make_directory(parent: Path | None) -> Path:
    """A new directory for adapters, which engines of other users can read."""
    try:
        if parent is not None:
            parent = parent.expanduser().absolute()
            parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="palaestra-adapters-", dir=parent))
        directory.chmod(0o755)
    except OSError as error:
        remedy = "Name a directory that this machine can write and the engines can read"
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("inference.adapter_directory", str(parent), reason, remedy) from None
    return directory


def _request_key(request: ReplyRequest, prompt: Prompt, temperature: float, adapter: PublishedAdapter) -> str:
    """Name of a request: version, episode, turn (by its prompt), seed and temperature."""
    digest = hashlib.sha256(prompt.ids.tobytes())
    for picture in prompt.pictures:
        digest.update(f"{picture.sha256} {picture.size}".encode())
    digest.update(f"{request.episode} {request.seed} {temperature!r}".encode())
    return f"{adapter.name}-{digest.hexdigest()[:24]}"
