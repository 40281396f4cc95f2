"""How many cores a process may use."""

import os

from palaestra.processes.children import usable_cores


def test_processes_of_torchrun_divide_the_cores_of_their_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert usable_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert usable_cores() == 2  # 8 // 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert usable_cores() == 1
