"""`EnginePool`: several engines, the adapters they have, and what happens when one of them is lost.

All turns of an episode go to one engine (rendezvous hashing), so that its prefix cache is used. An adapter is used
after every engine has proven it with a probe, and unloaded when no request in flight uses it. A request whose
connection breaks is sent again with the same seed. An engine that was lost comes back after it has proven the adapter
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from palaestra.errors import CollectorFailed, ConfigError
from palaestra.policy.vlm.lora import adapter_tensors
from palaestra.policy.vlm.prompt import Prompt
from palaestra.policy.vlm.sampler import InferenceConfig
from palaestra.policy.vlm.serving.adapter_export import ExportedAdapter, without_effect
from palaestra.policy.vlm.serving.engine import (
    Engine,
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    PromptEncoder,
)
from palaestra.policy.vlm.serving.probe import PROBE_TOKENS, ProbeAnswer, ProbeResult, WeightProbe

_log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval in which lost engines are asked whether they are back, while none answers."""
CLOSE_S = 5.0
"""Time limit of unloading all adapters at the end: the last checkpoint is saved after it."""
RETRY_S = 0.25
"""Delay before a request is sent again to an engine that answers others, such as a busy one; doubled each time."""
NO_ADAPTER = "the model without an adapter"


@dataclass(eq=False)
class PublishedAdapter:
    """A version of the adapter that engines have under a name of its own."""

    version: int
    name: str
    exported: ExportedAdapter
    in_flight: int = 0


@dataclass
class SamplerCounts:
    """What happened since the start."""

    retries: int = 0
    """Requests that were sent again."""
    reloads: int = 0
    """Adapters that were loaded again into an engine that had lost them."""
    engines_lost: int = 0
    moved: set[str] = field(default_factory=set)
    """Episodes that were answered by another engine than their own."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    publish_s: float = 0.0
    """Duration of the last publication: writing, loading and probing."""
    probe: ProbeResult | None = None
    """The worst probe of the last publication."""

    def metrics(self) -> dict[str, float]:
        """The counts as metrics."""
        metrics = {
            "inference_retries": float(self.retries),
            "inference_reloads": float(self.reloads),
            "inference_engines_lost": float(self.engines_lost),
            "inference_episodes_moved": float(len(self.moved)),
            "publish_seconds": self.publish_s,
        }
        if self.probe is not None:
            metrics["probe_difference"] = self.probe.difference
        if self.cached_tokens:
            metrics["prefix_cache_share"] = self.cached_tokens / self.prompt_tokens
        return metrics


class EnginePool:
    """Engines that serve the same model. Bound to one event loop."""

    def __init__(
        self,
        engines: Sequence[Engine],
        config: InferenceConfig,
        probe: WeightProbe,
        encoder: PromptEncoder,
        *,
        max_tokens: int,
    ) -> None:
        self._engines, self._config, self._max_tokens = list(engines), config, max_tokens
        self._probe, self._encoder = probe, encoder
        self._model = config.model or ""
        self.current: PublishedAdapter | None = None
        """The adapter of requests from now on."""
        self._published: list[PublishedAdapter] = []
        self._recovery = asyncio.Lock()
        self._silent_since: float | None = None
        """When the last engine was lost; None while one answers."""
        self.closing = False
        """Requests that are withdrawn unload nothing any more; `close` does."""
        self.counts = SamplerCounts()
        self.notices: list[str] = []
        """What went wrong and was put right, in words."""

    async def find_model(self) -> None:
        """Find the name of the model on every engine; `ConfigError` if one does not answer or has no such model."""
        for engine in self._engines:
            with _as_config_error(engine):
                self._choose_model(engine, await engine.list_models())

    async def check(self, trial: PublishedAdapter) -> None:
        """Prove that every engine serves the learner's model and uses the trial adapter; `ConfigError` if not."""
        weights = adapter_tensors(trial.exported.path)
        plain = without_effect(weights)
        for engine in self._engines:
            with _as_config_error(engine):
                await self._compare(engine, self._model, plain, {})
                await self._load(engine, trial)
                try:
                    await self._compare(engine, trial.name, weights, {NO_ADAPTER: plain})
                finally:
                    with contextlib.suppress(EngineLost, EngineRefused):
                        await engine.unload_adapter(trial.name)

    def _choose_model(self, engine: Engine, served: Sequence[str]) -> None:
        names = ", ".join(served)
        if not self._model and len(served) == 1:
            self._model = served[0]
        if not self._model:
            if not served:
                raise ConfigError("inference.urls", engine.url, "the engine serves no model", "Start it with one")
            reason = f"{engine.url} serves several models"
            raise ConfigError("inference.model", None, reason, f"Name the one of model.name: {names}")
        if self._model not in served:
            reason = f"{engine.url} serves no model of this name"
            raise ConfigError("inference.model", self._model, reason, f"It serves {names}")

    # Replies

    def hold(self, adapter: PublishedAdapter) -> None:
        """Keep an adapter loaded until `sample` has used it once."""
        adapter.in_flight += 1

    async def sample(self, request: EngineRequest, adapter: PublishedAdapter, *, temperature: float) -> EngineReply:
        """Sample a reply with an adapter that is held; releases it."""
        try:
            reply = await self._ask_until_answered(request, adapter, temperature)
        finally:
            adapter.in_flight -= 1
            await self._unload_unused()
        self.counts.prompt_tokens += len(request.prompt.ids)
        self.counts.cached_tokens += reply.cached_tokens
        return reply

    async def _ask_until_answered(
        self, request: EngineRequest, adapter: PublishedAdapter, temperature: float
    ) -> EngineReply:
        attempt = 0
        while True:
            engine = await self._route(request.session, adapter)
            generation, failed = engine.generation, False
            try:
                return await engine.sample(
                    request, model=adapter.name, temperature=temperature, max_new_tokens=self._max_tokens
                )
            except EngineLost as error:
                reason, failed = str(error), True
                if not await engine.answers():
                    # Not one of the attempts: the time without an engine is bounded instead.
                    self._mark_lost(engine, reason)
                    self.counts.retries += 1
                    continue
            except EngineRefused as refusal:
                reason = str(refusal)
                if refusal.status != 404:
                    raise CollectorFailed(f"{engine.url} {refusal}") from None
                # An engine that was restarted answers, and has no adapters.
                await self._reload(engine, adapter, generation)
            attempt += 1
            if attempt > self._config.retries:
                raise CollectorFailed(f"{engine.url} failed {attempt} times to answer a request, the last: {reason}.")
            self.counts.retries += 1
            if failed:
                await asyncio.sleep(RETRY_S * 2 ** (attempt - 1))

    # Engines

    async def _route(self, episode: str, adapter: PublishedAdapter) -> Engine:
        """The engine of an episode; waits for one to come back if none answers."""
        ranked = sorted(self._engines, key=lambda engine: _rank(episode, engine.url))
        while all(engine.lost for engine in ranked):
            await self._wait_for_return(adapter)
        engine = next(engine for engine in ranked if not engine.lost)
        if engine is not ranked[0]:
            self.counts.moved.add(episode)
        return engine

    def _mark_lost(self, engine: Engine, reason: str) -> None:
        if engine.lost:
            return
        engine.lost = reason
        self.counts.engines_lost += 1
        if all(one.lost for one in self._engines):
            self._silent_since = time.monotonic()
        self._notice(f"the inference engine {engine.url} does not answer any more ({reason})")

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        _log.warning("%s", text)

    async def _wait_for_return(self, adapter: PublishedAdapter) -> None:
        """Wait until an engine answers with the adapter; `CollectorFailed` after the time limit."""
        async with self._recovery:
            while all(engine.lost for engine in self._engines):
                for engine in self._engines:
                    await self._try_return(engine, adapter)
                if not all(engine.lost for engine in self._engines):
                    return
                limit = self._config.unreachable_s
                if self._silent_since is not None and time.monotonic() - self._silent_since >= limit:
                    reasons = "; ".join(f"{engine.url}: {engine.lost}" for engine in self._engines)
                    raise CollectorFailed(
                        f"no inference engine has answered for {limit:g} s ({reasons}). Start one of inference.urls "
                        "again and resume the run."
                    )
                await asyncio.sleep(POLL_S)

    async def _try_return(self, engine: Engine, adapter: PublishedAdapter) -> None:
        """Use a lost engine again if it answers with the adapter."""
        if not await engine.answers():
            return
        try:
            await self._load(engine, adapter)
            await self._prove(engine, adapter)
        except (EngineLost, EngineRefused) as error:
            engine.lost = str(error).rstrip(".")
            return
        engine.lost, engine.generation, self._silent_since = "", engine.generation + 1, None
        self._notice(f"the inference engine {engine.url} answers again")

    async def _reload(self, engine: Engine, adapter: PublishedAdapter, generation: int) -> None:
        """Load an adapter that an engine has lost, once for all requests that miss it."""
        async with self._recovery:
            if engine.generation != generation:
                return
            try:
                await self._load(engine, adapter)
                await self._prove(engine, adapter)
            except EngineLost as error:
                self._mark_lost(engine, str(error))
            except EngineRefused as refusal:
                raise CollectorFailed(f"{engine.url} {refusal}") from None
            else:
                engine.generation += 1
                self.counts.reloads += 1
                self._notice(f"the inference engine {engine.url} had lost adapter {adapter.name} and has it again")

    # Adapters

    async def switch(self, adapter: PublishedAdapter) -> None:
        """Load and prove an adapter on every engine, then use it; `CollectorFailed` if an engine refuses."""
        results = []
        try:
            for engine in self._engines:
                if engine.lost:
                    await self._try_return(engine, adapter)
                    continue
                try:
                    await self._load(engine, adapter)
                    results.append(await self._prove(engine, adapter))
                except EngineLost as error:
                    self._mark_lost(engine, str(error))
                except EngineRefused as refusal:
                    raise CollectorFailed(f"{engine.url} {refusal} Version {adapter.version} is refused.") from None
            if all(engine.lost for engine in self._engines):
                await self._wait_for_return(adapter)
        except BaseException:
            await self._unload(adapter)
            raise
        self.counts.probe = max(results, key=lambda result: result.difference, default=None)
        self.current = adapter
        self._published.append(adapter)
        await self._unload_unused()

    async def _load(self, engine: Engine, adapter: PublishedAdapter) -> None:
        """Load an adapter, unless the engine has it."""
        try:
            await engine.load_adapter(adapter.name, adapter.exported.path)
        except EngineRefused as refusal:
            if "already" not in refusal.reason:
                raise

    async def _prove(self, engine: Engine, adapter: PublishedAdapter) -> ProbeResult:
        """Compare the engine's answers with the learner's log-probabilities; `EngineRefused` if they differ."""
        weights = await asyncio.to_thread(adapter_tensors, adapter.exported.path)
        others = {NO_ADAPTER: without_effect(weights)}
        if self.current is not None and self.current is not adapter:
            previous = f"the adapter of version {self.current.version}"
            others = {previous: adapter_tensors(self.current.exported.path), **others}
        return await self._compare(engine, adapter.name, weights, others)

    async def _compare(
        self, engine: Engine, model: str, weights: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]
    ) -> ProbeResult:
        answers = await self._sample_probe(engine, model)
        result = await asyncio.to_thread(self._probe.compare, weights, answers)
        if not result.difference <= self._probe.tolerance:
            why = await asyncio.to_thread(self._probe.explain, answers, weights, others)
            raise EngineRefused(
                f"answers a probe of {model} with other log-probabilities than the learner: {result}, and "
                f"inference.probe_tolerance is {self._probe.tolerance:g}; {why}"
            )
        nearer = await asyncio.to_thread(self._probe.find_nearer, answers, result, others)
        if nearer:
            raise EngineRefused(f"differs in a probe of {model} from the learner by {result}: {nearer}")
        return result

    async def _sample_probe(self, engine: Engine, model: str) -> list[ProbeAnswer]:
        temperature, count = self._probe.temperature, min(PROBE_TOKENS, self._max_tokens)

        async def ask(number: int, prompt: Prompt) -> ProbeAnswer:
            name = f"probe-{secrets.token_hex(4)}"
            encoded = replace(self._encoder.encode(prompt, seed=number), request_id=name, session=name)
            return ProbeAnswer(
                prompt, await engine.sample(encoded, model=model, temperature=temperature, max_new_tokens=count)
            )

        return list(await asyncio.gather(*(ask(*each) for each in enumerate(self._probe.prompts))))

    async def _unload_unused(self) -> None:
        """Unload adapters that are neither current nor used by a request in flight."""
        if self.closing:
            return
        unused = [one for one in self._published if one is not self.current and not one.in_flight]
        self._published = [one for one in self._published if one not in unused]
        for adapter in unused:
            await self._unload(adapter)

    async def _unload(self, adapter: PublishedAdapter) -> None:
        for engine in self._engines:
            if not engine.lost:
                with contextlib.suppress(EngineLost, EngineRefused):
                    await engine.unload_adapter(adapter.name)
        await asyncio.to_thread(shutil.rmtree, adapter.exported.path, ignore_errors=True)

    async def close(self) -> None:
        """Unload every adapter; engines that do not answer keep theirs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                for adapter in self._published:
                    await self._unload(adapter)


@contextlib.contextmanager
def _as_config_error(engine: Engine) -> Iterator[None]:
    """Before training, an engine that cannot be used is a wrong setting."""
    try:
        yield
    except EngineLost as error:
        reason = f"the engine does not answer ({error})"
        raise ConfigError("inference.urls", engine.url, reason, "Start it, or correct its address") from None
    except EngineRefused as refusal:
        raise ConfigError("inference.urls", engine.url, f"it {refusal.reason}", refusal.remedy) from None


def _rank(episode: str, url: str) -> bytes:
    """Place of an engine in the order for an episode. Without one of them, the order of the others stays the same."""
    return hashlib.sha256(f"{episode} {url}".encode()).digest()
