"""What a processor can do decides in which type models compute on it."""

import platform
from pathlib import Path

import pytest
import torch

from palaestra.policy.device import has_bfloat16_instructions

CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPUINFO.exists(), reason="reads the flags of an x86 processor"
)
def test_bfloat16_is_used_where_the_processor_has_instructions_for_it_and_not_where_torch_emulates_it():
    flags = next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")).split()
    assert has_bfloat16_instructions() == bool({"avx512_bf16", "amx_tile"} & set(flags))


def test_torch_without_mkldnn_has_no_instructions_for_bfloat16(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert not has_bfloat16_instructions()
