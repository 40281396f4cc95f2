"""GPUs as the driver's tool reports them."""

import subprocess
from types import SimpleNamespace

import pytest

from palaestra.runs.process.resource_usage import Gpu, detect_gpus


def _answering(text, returncode=0):
    return lambda *_, **__: SimpleNamespace(returncode=returncode, stdout=text)


def test_every_line_is_a_gpu():
    text = "0, GPU-ab, NVIDIA A100-SXM4-80GB, 81920\n1, GPU-cd, Odd, name, 24564\n"
    assert detect_gpus(_answering(text), {}) == (
        Gpu("0", "GPU-ab", "NVIDIA A100-SXM4-80GB", 81920),
        Gpu("1", "GPU-cd", "Odd,name", 24564),
    )


def _missing(*_, **__):
    raise FileNotFoundError


def _slow(*_, **__):
    raise subprocess.TimeoutExpired("nvidia-smi", 10)


@pytest.mark.parametrize(
    "run",
    [_missing, _slow, _answering("", 9), _answering("NVIDIA-SMI has failed"), _answering("No devices were found\n")],
)
def test_no_driver_no_gpus(run):
    assert detect_gpus(run, {}) == ()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("1", ["1"]), ("1,0", ["1", "0"]), ("GPU-cd", ["1"]), ("0,-1,1", ["0"]), ("", []), ("MIG-e/1/0", ["MIG-e/1/0"])],
)
def test_what_is_withheld_from_the_service_is_not_given_away(visible, seen):
    text = "0, GPU-ab, A, 81920\n1, GPU-cd, B, 24564\n"

    assert [gpu.index for gpu in detect_gpus(_answering(text), {"CUDA_VISIBLE_DEVICES": visible})] == seen


def test_a_variable_says_it_without_asking():
    assert detect_gpus(_missing, {"PALAESTRA_GPUS": "0, 3"}) == (Gpu("0"), Gpu("3"))
    assert detect_gpus(_answering("0, a, b, 1"), {"PALAESTRA_GPUS": ""}) == ()
