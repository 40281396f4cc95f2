"""Real vLLM servers on loopback: those of $PALAESTRA_VLLM_URL, else started with $PALAESTRA_VLLM_PYTHON.

PALAESTRA_VLLM_PYTHON       interpreter of an environment with vLLM
PALAESTRA_VLLM_URL          a running server of the built-in model, started with the flags below
PALAESTRA_VLLM_TEXT_MODEL   directory of a language model, such as SmolLM2-135M-Instruct
PALAESTRA_VLLM_TEXT_URL     a running server of it
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

import palaestra.policy.tiny_vlm as tiny_vlm
from palaestra.policy.vlm import ModelConfig

MODEL = ModelConfig(name="tiny", max_new_tokens=12, history=2, lora_rank=8)
TINY = Path(tiny_vlm.__file__).parent / "checkpoint"
FLAGS = [
    "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "32", "--enable-scale-out",
    "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details", "--max-num-seqs", "8",
]  # fmt: skip
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
START_S = 600


class Vllm:
    """A vLLM server of a model directory, which can be killed and started again on its port."""

    def __init__(self, model, log, *flags):
        python = os.environ.get("PALAESTRA_VLLM_PYTHON")
        if not python:
            pytest.skip("PALAESTRA_VLLM_PYTHON does not name the interpreter of an environment with vLLM")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self._command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "served",
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "1024",
            *FLAGS, *flags,
        ]  # fmt: skip
        self.start()

    def start(self):
        """Start it and wait until it answers."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **ON_A_CPU}, start_new_session=True,
            )  # fmt: skip
        began = time.monotonic()
        while not self.is_ready():
            assert self._child.poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() - began < START_S, self.log.read_text(errors="replace")[-4000:]
            time.sleep(1)

    def is_ready(self):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        return False

    def kill(self):
        """End all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


@pytest.fixture(scope="session")
def own_engine(tmp_path_factory):
    """A server of the built-in model that a test may kill."""
    server = Vllm(TINY, tmp_path_factory.mktemp("vllm") / "log", "--dtype", "float32")
    yield server
    server.kill()


@pytest.fixture
def engine(request):
    """The URL of a server of the built-in model."""
    return os.environ.get("PALAESTRA_VLLM_URL") or request.getfixturevalue("own_engine").url


@pytest.fixture(scope="session")
def text_model():
    """The directory of a language model."""
    if not os.environ.get("PALAESTRA_VLLM_TEXT_MODEL"):
        pytest.skip("PALAESTRA_VLLM_TEXT_MODEL does not name the directory of a language model")
    return Path(os.environ["PALAESTRA_VLLM_TEXT_MODEL"])


@pytest.fixture(scope="session")
def text_engine(text_model, tmp_path_factory):
    """The URL of a server of the language model, in bfloat16."""
    if os.environ.get("PALAESTRA_VLLM_TEXT_URL"):
        yield os.environ["PALAESTRA_VLLM_TEXT_URL"]
        return
    server = Vllm(text_model, tmp_path_factory.mktemp("vllm") / "text.log", "--dtype", "bfloat16")
    yield server.url
    server.kill()
