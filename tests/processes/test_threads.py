"""Threads are few while we train and as many as before afterwards."""

import subprocess
import sys

import torch

from palaestra.processes.threads import limit_threads


def test_torch_gets_its_threads_back_even_after_an_error():
    before = torch.get_num_threads()
    try:
        with limit_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError
    except KeyError:
        pass
    assert torch.get_num_threads() == before


def test_every_openblas_is_held_to_one_thread_also_the_one_the_kernels_load_late():
    code = """
import threadpoolctl
from palaestra.processes.threads import limit_threads
with limit_threads(None):
    import scipy.linalg.cython_blas
    found = [lib for lib in threadpoolctl.threadpool_info() if lib["internal_api"] == "openblas"]
    assert len(found) >= 2, found
    assert {lib["num_threads"] for lib in found} == {1}, found
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"OPENBLAS_NUM_THREADS": "4"}
    )
    assert done.returncode == 0, done.stderr
