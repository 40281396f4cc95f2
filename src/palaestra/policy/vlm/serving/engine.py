"""`Engine`: one inference server over HTTP. Token ids go in; token ids and their log-probabilities come out.

Prompts of text alone use the OpenAI route `/v1/completions`. Prompts with pictures use vLLM's `/inference/v1/generate`,
which takes token ids with one placeholder for each picture and returns the ids that it made of them. Both return the
prompt's ids, which must equal ours, and the name of the adapter that answered. Sampling is over the whole vocabulary,
whatever defaults the model's own files suggest.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra.errors import ConfigError
from palaestra.policy.vlm.generation import TokenRules
from palaestra.policy.vlm.picture import LRUCache, Picture, PicturePreprocessor
from palaestra.policy.vlm.prompt import Prompt

if TYPE_CHECKING:
    import aiohttp

API_KEY_VARIABLE = "PALAESTRA_INFERENCE_API_KEY"
GENERATE = "/inference/v1/generate"
"""Route for prompts with pictures, which vLLM has with --enable-scale-out only."""
CONNECT_S = 10.0
"""Time limit of a connection."""
ANSWER_S = 30.0
"""Time limit of a question that needs no computation; a busy engine takes seconds."""
LEAST_LOG_PROB = -9000.0
"""vLLM returns -9999 for a log-probability that is minus infinity or not a number."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum size of an answer; one of 10,000 tokens takes a few MB."""
FORBID = -100.0
"""The bias of a token that must not be drawn; the lowest that the API allows."""


class EngineLost(Exception):
    """The engine cannot be reached, broke the connection, or failed inside. Another attempt may succeed."""


class EngineRefused(Exception):
    """The engine refused a request, or answered what cannot be used. Another attempt would be refused as well."""

    def __init__(self, reason: str, remedy: str = "", *, status: int = 0) -> None:
        self.reason, self.remedy, self.status = reason, remedy, status
        super().__init__(f"{reason}. {remedy}." if remedy else f"{reason}.")


@dataclass(frozen=True)
class EngineRequest:
    """A prompt as an engine takes it."""

    prompt: Prompt
    collapsed: tuple[int, ...]
    """The prompt's ids with one placeholder for each picture."""
    pictures: tuple[str, ...]
    """As `data:` URLs, at the size at which the model sees them."""
    seed: int
    request_id: str = ""
    session: str = ""
    """Name of the episode, for engines that consist of several."""


@dataclass(frozen=True)
class EngineReply:
    """Sampled tokens and their log-probabilities."""

    token_ids: list[int]
    log_probs: list[float]
    cached_tokens: int
    """Tokens of the prompt that came from the engine's prefix cache, where it says so."""


class PromptEncoder:
    """Turns prompts into what an engine takes; pictures are encoded once."""

    def __init__(self, preprocessor: PicturePreprocessor | None, image_token: int, *, memory_bytes: int) -> None:
        """`preprocessor` is None for a model that takes text only."""
        self._preprocessor, self._image_token = preprocessor, image_token
        self._urls: LRUCache[str] = LRUCache(memory_bytes)

    def encode(self, prompt: Prompt, *, seed: int) -> EngineRequest:
        """The request for a prompt, without names."""
        collapsed = tuple(self._collapse(prompt)) if prompt.pictures else tuple(prompt.ids.tolist())
        urls = tuple(self._picture_url(picture) for picture in prompt.pictures)
        return EngineRequest(prompt, collapsed, urls, seed)

    def _collapse(self, prompt: Prompt) -> list[int]:
        assert self._preprocessor is not None
        ids, collapsed, at = prompt.ids.tolist(), [], 0
        counts = iter([self._preprocessor.count_tokens(picture) for picture in prompt.pictures])
        while at < len(ids):
            collapsed.append(ids[at])
            at += next(counts) if ids[at] == self._image_token else 1
        return collapsed

    def _picture_url(self, picture: Picture) -> str:
        assert self._preprocessor is not None
        url = self._urls.get(picture.key)
        if url is None:
            # Resized here, with our own rule: an engine resizes differently, and must find nothing to do.
            written = io.BytesIO()
            self._preprocessor.resize(picture).save(written, "PNG", compress_level=1)
            url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
            self._urls.put(picture.key, url, len(url))
        return url


class Engine:
    """One inference server. Bound to the event loop of its HTTP session."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, rules: TokenRules, vocabulary: int, *, timeout_s: float
    ) -> None:
        """`vocabulary`: number of token ids of the learner's model."""
        self.url = url
        self.lost = ""
        """Why it cannot be used at present; empty if it can."""
        self.generation = 0
        """How many times it has lost its adapters and got them again."""
        self._http, self._rules, self._timeout_s = http, rules, timeout_s
        self._bias = dict.fromkeys(map(str, rules.forbidden), FORBID)
        self._vocabulary, self._forbidden = range(vocabulary), frozenset(rules.forbidden)

    async def list_models(self) -> list[str]:
        """Names of the models it serves, without adapters."""
        listed = await self._call("GET", "/v1/models", timeout_s=ANSWER_S)
        try:
            return [str(one["id"]) for one in listed["data"] if one.get("parent") is None]
        except (KeyError, TypeError, AttributeError):
            raise EngineRefused("GET /v1/models returned no list of models", "Give the URL of a vLLM server") from None

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter; its name is then a model."""
        remedy = (
            "Start the engine with --enable-lora, --max-lora-rank of at least model.lora_rank and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and let inference.adapter_directory be a directory that it can read"
        )
        try:
            await self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except EngineRefused as refusal:
            raise EngineRefused(f"did not load adapter {name} ({refusal.reason})", remedy) from None
        except EngineLost as error:
            # A broken adapter makes vLLM answer with status 500, while it goes on answering other requests.
            if not await self.answers():
                raise
            raise EngineRefused(f"did not load adapter {name} ({error})", remedy) from None

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses."""
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=ANSWER_S)

    async def answers(self) -> bool:
        """Whether it answers at all."""
        try:
            await self.list_models()
        except (EngineLost, EngineRefused):
            return False
        return True

    async def sample(
        self, request: EngineRequest, *, model: str, temperature: float, max_new_tokens: int
    ) -> EngineReply:
        """Sample a reply. Greedy at temperature 0."""
        sampling = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": request.seed,
            "logprobs": 0,
            "stop_token_ids": sorted(self._rules.ends),
            "ignore_eos": True,
            "logit_bias": self._bias,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        headers = {"X-Request-Id": request.request_id, "X-Session-ID": request.session}
        if request.pictures:
            body: dict[str, Any] = {
                "model": model,
                "token_ids": request.collapsed,
                "content_parts": [{"type": "image_url", "url": url} for url in request.pictures],
                "return_token_ids": True,
                "sampling_params": sampling,
            }
            answer = await self._call("POST", GENERATE, body, headers=headers)
            return self._check(_read_reply(answer, request.prompt, model, _generated_log_probs), max_new_tokens)
        body = {"model": model, "prompt": request.collapsed, "return_token_ids": True, **sampling}
        answer = await self._call("POST", "/v1/completions", body, headers=headers)
        return self._check(_read_reply(answer, request.prompt, model, _completed_log_probs), max_new_tokens)

    def _check(self, reply: EngineReply, max_new_tokens: int) -> EngineReply:
        """The reply; `EngineRefused` if it has tokens that the learner cannot have sampled."""
        token_ids, remedy = reply.token_ids, "Serve the model of model.name with vLLM"
        if len(token_ids) > max_new_tokens:
            raise EngineRefused(f"returned {len(token_ids)} tokens for a reply of at most {max_new_tokens}", remedy)
        wrong = [token for token in token_ids if token not in self._vocabulary or token in self._forbidden]
        if wrong:
            raise EngineRefused(f"returned token {wrong[0]}, which may not be drawn", remedy)
        if not self._rules.ends.isdisjoint(token_ids[:-1]):
            raise EngineRefused("went on with a reply after an end token", remedy)
        return reply

    async def _call(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._http.request(
                method, self.url + route, json=body, headers=headers, timeout=limit, allow_redirects=False
            ) as got:
                status, text = got.status, (await _read_body(got)).decode(errors="replace")
                key = self._http.headers.get("Authorization", "").removeprefix("Bearer ")
        except TimeoutError:
            raise EngineLost(f"{method} {route} took more than {limit.total:g} s") from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise EngineLost(f"{method} {route}: {str(error) or type(error).__name__}") from None
        if status >= 300 and key:
            text = text.replace(key, "***")  # some servers repeat the headers of a request that they refuse
        if status >= 500 or status == 429:
            raise EngineLost(f"{method} {route} answered status {status}: {_error_text(text)}")
        if status >= 300:
            raise EngineRefused(f"answered {method} {route} with status {status}: {_error_text(text)}",
                                _remedy(status, route, text), status=status)  # fmt: skip
        try:
            return json.loads(text) if text.startswith(("{", "[")) else None
        except (ValueError, RecursionError):
            raise EngineRefused(f"answered {method} {route} with text that is not JSON", "Give a vLLM server") from None


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in answer.content.iter_chunked(2**16):
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise EngineRefused(f"sends an answer of more than {MAX_ANSWER_BYTES:,} bytes", "Give a vLLM server")
    return bytes(body)


def _error_text(text: str) -> str:
    """The message of an error body, in one short line."""
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= 300 else f"{line[:297]}..."


def _remedy(status: int, route: str, text: str) -> str:
    if status == 401:
        return "Give its key: inference.api_key_file, or " + API_KEY_VARIABLE
    if status < 400:
        return "Give the address to which it redirects"
    missing = status in (404, 405) and route == GENERATE and "does not exist" not in text
    if missing or "--enable-scale-out" in text:
        return "Start the engine with --enable-scale-out, which pictures need"
    if "maximum context length" in text or "max_model_len" in text:
        return "Start the engine with a larger --max-model-len, or lower model.history"
    return ""


def _generated_log_probs(choice: dict[str, Any]) -> list[float]:
    return [float(one["logprob"]) for one in choice["logprobs"]["content"]]


def _completed_log_probs(choice: dict[str, Any]) -> list[float]:
    return [float(one) for one in choice["logprobs"]["token_logprobs"]]


def _read_reply(answer: Any, prompt: Prompt, model: str, read_log_probs: Any) -> EngineReply:
    """The reply in an answer; `EngineRefused` if anything that the learner needs is missing or wrong."""
    try:
        choice = answer["choices"][0]
        token_ids = [int(token) for token in choice["token_ids"]]
        # `/v1/completions` returns the ids of the prompt in the choice, the other route beside the choices.
        ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        prompt_ids = None if ids is None else [int(token) for token in ids]
        name, reason = str(answer["model"]), choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise EngineRefused("returned no token ids", "Use a version of vLLM that knows return_token_ids") from None
    if name != model:
        raise EngineRefused(f"answered as {name!r} to a request for {model!r}", "Give the URL of one vLLM server")
    if reason not in ("stop", "length") or not token_ids:
        raise EngineLost(f"ended a reply after {len(token_ids)} tokens for the reason {reason!r}")
    try:
        log_probs = read_log_probs(choice)
    except (KeyError, TypeError, ValueError, OverflowError):
        log_probs = []
    if len(log_probs) != len(token_ids) or not all(LEAST_LOG_PROB < one <= 1e-3 for one in log_probs):
        state = "no" if not log_probs else "unusable"
        remedy = "Use an engine that returns those of sampled tokens; vLLM does, unless --max-logprobs forbids it"
        raise EngineRefused(f"returned {state} log-probabilities for {len(token_ids)} tokens", remedy)
    _compare_prompts(prompt.ids.tolist(), prompt_ids)
    return EngineReply(token_ids, [min(0.0, one) for one in log_probs], _read_cached_tokens(answer))


def _read_cached_tokens(answer: dict[str, Any]) -> int:
    try:
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0  # only a metric


def _compare_prompts(ours: list[int], theirs: list[int] | None) -> None:
    if theirs is None:
        raise EngineRefused("did not return the prompt's token ids", "Use a version of vLLM that knows them")
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    place = next((at for at, (mine, other) in enumerate(pairs) if mine != other), min(len(ours), len(theirs)))
    reason = f"made {len(theirs)} token ids of a prompt of {len(ours)}, which differ from number {place} on"
    raise EngineRefused(reason, "Serve the model of model.name with its own image processor, and without resizing")


def read_api_key(path: Path | None, environment: str | None) -> str:
    """The key of the engines, from a file or else from the environment; empty if there is none."""
    if path is None:
        key = (environment or "").strip()
        if key and not _fits_header(key):
            reason = "holds characters that a key cannot have"
            raise ConfigError(API_KEY_VARIABLE, "(hidden)", reason, "Set it to the key alone, in one line")
        return key
    try:
        key = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError("inference.api_key_file", str(path), reason) from None
    if not key or not _fits_header(key):
        raise ConfigError("inference.api_key_file", str(path), "holds no key", "Write the key into its first line")
    return key


def _fits_header(key: str) -> bool:
    return key.isprintable() and key.isascii()


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Mean absolute difference of two lists of log-probabilities."""
    return math.fsum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(1, len(ours))
