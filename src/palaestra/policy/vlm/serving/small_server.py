"""A small inference server of our own that speaks the part of vLLM's API that `Engine` uses.

It samples with the same code as the sampler in this process: the same seed gives the same reply, bit by bit. Tests use
it in place of vLLM, with the built-in model; `python -m palaestra.policy.vlm.serving.small_server` starts it in a
process of its own. `fault` makes it misbehave as engines do, one way at a time.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from palaestra.errors import ConfigError
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.generation import Completion, SampleRequest, TokenRules, generate_tokens
from palaestra.policy.vlm.lora import adapter_tensors
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.prompt import Prompt
from palaestra.policy.vlm.scoring import score, turn_input
from palaestra.policy.vlm.serving.adapter_export import without_effect
from palaestra.policy.weight_sync import copy_weights

Fault = Literal[
    "", "ignores adapters", "keeps old adapter", "refuses adapters", "no log-probs", "raw log-probs", "other prompt",
    "breaks connection", "breaks connection once", "internal error",
]  # fmt: skip
"""`breaks connection` applies to replies only, after the reply was sampled."""


class ServedRequest(NamedTuple):
    """A reply that was sampled."""

    session: str
    request_id: str
    model: str
    seed: int


class _Refusal(Exception):
    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class SmallServer:
    """Serves a model on a loopback port, in threads of this process, until it is closed."""

    def __init__(
        self, config: ModelConfig | None = None, *, served_name: str = "tiny", port: int = 0, api_key: str = ""
    ) -> None:
        """`config`: by default the built-in model with adapters of rank 4."""
        policy = VLMPolicy.from_config(config or ModelConfig(name="tiny", lora_rank=4), seed=0)
        self._network, self._padding = policy.learner.clone(), policy.rules.padding
        self._plain = without_effect(dict(policy.learner.trainable()))
        self._adapters: dict[str, dict[str, Tensor]] = {}
        self._loaded: object = None
        self._lock, self._count_lock = threading.Lock(), threading.Lock()
        self.served_name, self.api_key = served_name, api_key
        self.fault: Fault = ""
        self.served: deque[ServedRequest] = deque(maxlen=10_000)
        """Replies that were sampled, oldest first."""
        self.most_at_once = 0
        """The largest number of requests that were under way at the same time."""
        self._under_way = 0
        self._http = _LoopbackServer(port, self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="small-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._adapters)

    def close(self) -> None:
        """Stop at once: connections are closed, and requests under way are not answered."""
        self._http.shutdown()
        self._thread.join()
        self._http.close_connections()
        self._http.server_close()

    def forget_adapters(self) -> None:
        """Lose all adapters, as a restart does."""
        self._adapters.clear()

    def answer(self, method: str, route: str, body: dict[str, Any], headers: Mapping[str, str]) -> Any:
        """The answer to a request; `_Refusal` with a status otherwise."""
        if self.api_key and headers.get("Authorization") != f"Bearer {self.api_key}":
            raise _Refusal(401, "Unauthorized")
        if (method, route) == ("GET", "/v1/models"):
            base = {"id": self.served_name, "parent": None}
            return {"data": [base, *({"id": name, "parent": self.served_name} for name in self._adapters)]}
        if (method, route) == ("POST", "/v1/load_lora_adapter"):
            return self._load_adapter(str(body["lora_name"]), Path(body["lora_path"]))
        if (method, route) == ("POST", "/v1/unload_lora_adapter"):
            if self._adapters.pop(str(body["lora_name"]), None) is None:
                raise _Refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            return {}
        if (method, route) == ("POST", "/v1/completions"):
            prompt, sampling = Prompt(np.array(body["prompt"], np.int32), ()), body
        elif (method, route) == ("POST", "/inference/v1/generate"):
            prompt, sampling = self._expand_pictures(body), body["sampling_params"]
        else:
            raise _Refusal(404, f"there is no {method} {route}")
        return self._reply(str(body["model"]), prompt, sampling, headers)

    def _load_adapter(self, name: str, path: Path) -> dict[str, Any]:
        if name in self._adapters:
            raise _Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            tensors = adapter_tensors(path)
            own = dict(self._network.named_parameters())
            unfit = [key for key, one in tensors.items() if key not in own or own[key].shape != one.shape]
        except (OSError, SafetensorError) as error:
            raise _Refusal(404, f"Loading lora {name} failed: No adapter found for {path} ({error})") from None
        if unfit or self.fault == "refuses adapters":
            raise _Refusal(400, f"Loading lora {name} failed: its rank or layers do not fit this model")
        if self.fault == "keeps old adapter" and self._adapters:
            tensors = next(reversed(self._adapters.values()))
        self._adapters[name] = tensors
        return {}

    def _expand_pictures(self, body: dict[str, Any]) -> Prompt:
        """The prompt with as many placeholders as each picture has tokens."""
        from PIL import Image

        pictures = []
        for part in body["content_parts"]:
            data = base64.b64decode(part["url"].partition("base64,")[2])
            with Image.open(io.BytesIO(data)) as image:
                pictures.append(Picture(data, image.size))
        ids: list[int] = []
        remaining = iter(pictures)
        for token in body["token_ids"]:
            if token != self._network.image_token:
                ids.append(token)
                continue
            picture = next(remaining, None)
            if picture is None:
                raise _Refusal(400, f"the prompt has more placeholders than its {len(pictures)} pictures")
            ids += [token] * self._network.preprocessor.count_tokens(picture)
        return Prompt(np.array(ids, np.int32), tuple(pictures))

    def _reply(
        self, model: str, prompt: Prompt, sampling: dict[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        weights = self._find_weights(model)
        if prompt.ids.max() >= self._network.vocabulary:
            raise _Refusal(400, f"Token id {prompt.ids.max()} is out of vocabulary")
        ends = [int(token) for token in sampling["stop_token_ids"]]
        forbidden = sorted(int(token) for token, bias in sampling["logit_bias"].items() if bias <= -100)
        rules = TokenRules(frozenset(ends), tuple(forbidden), self._padding)
        request, temperature = SampleRequest(prompt, int(sampling["seed"])), float(sampling["temperature"])
        count = int(sampling["max_tokens"])
        with self._count_request():
            token_ids, log_probs = self._sample(weights, request, rules, temperature, count)
        self.served.append(
            ServedRequest(headers.get("X-Session-ID", ""), headers.get("X-Request-Id", ""), model, request.seed)
        )
        if self.fault.startswith("breaks connection"):
            self.fault = "breaks connection" if self.fault == "breaks connection" else ""
            raise ConnectionAbortedError
        if self.fault == "internal error":
            raise _Refusal(500, "EngineCore encountered an issue")
        ids = [*prompt.ids.tolist(), *([0] if self.fault == "other prompt" else [])]
        choice: dict[str, Any] = {
            "token_ids": token_ids,
            "finish_reason": "stop" if token_ids[-1] in ends else "length",
            "prompt_token_ids": ids,
            "logprobs": None,
        }
        if self.fault != "no log-probs":
            content = [{"token_id": token, "logprob": one} for token, one in zip(token_ids, log_probs, strict=True)]
            # One shape for each of the two routes.
            choice["logprobs"] = {"content": content, "token_logprobs": log_probs}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(token_ids)}
        return {"model": model, "choices": [choice], "prompt_token_ids": ids, "usage": usage}

    def _find_weights(self, model: str) -> dict[str, Tensor]:
        if model != self.served_name and model not in self._adapters:
            raise _Refusal(404, f"The model `{model}` does not exist.")
        return self._plain if self.fault == "ignores adapters" else self._adapters.get(model, self._plain)

    @contextlib.contextmanager
    def _count_request(self) -> Iterator[None]:
        with self._count_lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            yield
        finally:
            with self._count_lock:
                self._under_way -= 1

    def _sample(
        self, weights: dict[str, Tensor], request: SampleRequest, rules: TokenRules, temperature: float, count: int
    ) -> tuple[list[int], list[float]]:
        with self._lock:
            if torch.get_num_threads() != 1:
                torch.set_num_threads(1)
            if self._loaded is not weights:
                copy_weights(weights, dict(self._network.named_parameters()))
                self._loaded = weights
            try:
                (reply,) = generate_tokens(
                    self._network, [request], rules, temperature=temperature, max_new_tokens=count
                )
            except ConfigError as error:
                raise _Refusal(400, str(error)) from None
            log_probs = reply.log_probs
            if self.fault == "raw log-probs":
                token_ids = np.array(reply.token_ids, np.int32)
                zeros = np.zeros(len(token_ids))
                sampled = Completion(token_ids, zeros.astype(np.float32), zeros.astype(np.int32), "", True, "")
                with torch.no_grad():
                    log_probs = score(self._network, [turn_input(request.prompt, sampled)], rules).log_probs[0].tolist()
        return reply.token_ids, log_probs


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _LoopbackServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, document = (
                200,
                self.server.small.answer(method, self.path, json.loads(raw or b"{}"), dict(self.headers)),
            )
        except _Refusal as refusal:
            status, document = refusal.status, {"error": {"message": str(refusal), "code": refusal.status}}
        except (KeyError, TypeError, ValueError) as error:
            status, document = 400, {"error": {"message": f"{type(error).__name__}: {error}", "code": 400}}
        except ConnectionAbortedError:
            self.close_connection = True
            return
        body = json.dumps(document).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


class _LoopbackServer(ThreadingHTTPServer):
    # Closing waits for the threads of the connections.
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, port: int, small: SmallServer) -> None:
        self.small = small
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Connection)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients may leave at any time."""

    def close_connections(self) -> None:
        """Break every connection."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Serve until the standard input closes, so that no server outlives the process that started it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="tiny", help="a name that model.name accepts")
    parser.add_argument("--served-model-name", default="tiny")
    parser.add_argument("--max-lora-rank", type=int, default=4, help="the rank of adapters, exactly")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    config = ModelConfig(name=given.model, lora_rank=given.max_lora_rank)
    with SmallServer(config, served_name=given.served_model_name, port=given.port) as server:
        print(json.dumps({"url": server.url}), flush=True)  # noqa: T201
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()


if __name__ == "__main__":
    main()
