"""What cannot fit into memory is refused before it is allocated."""

import os

import pytest

from palaestra.errors import ConfigError
from palaestra.processes.memory import check_fits_in_memory, format_bytes, memory_limit

RAM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_limit_is_the_machines_memory_or_that_of_the_nearest_control_group_with_one(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/job/part\n")
    (tmp_path / "job" / "part").mkdir(parents=True)
    assert memory_limit(tmp_path, own) == RAM
    (tmp_path / "job" / "part" / "memory.max").write_text("max\n")
    (tmp_path / "job" / "memory.max").write_text("1000000\n")
    assert memory_limit(tmp_path, own) == 1_000_000


def test_the_older_control_groups_are_understood_and_a_container_sees_its_own_as_the_root(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,memory:/docker/abc\n1:name=systemd:/x\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000")
    assert memory_limit(tmp_path, own) == 5000


def test_bytes_are_shown_in_the_unit_that_fits():
    assert [format_bytes(n) for n in (7, 1_500, 36_100_000_000_000)] == ["7 B", "1.5 kB", "36.1 TB"]


def test_a_refusal_names_every_part_and_the_limit():
    check_fits_in_memory("x", 1, {"a": 60, "b": 40}, "Less", limit=100)
    with pytest.raises(ConfigError) as refused:
        check_fits_in_memory("x", 1, {"a": 61_000, "b": 40}, "Use less", limit=100)
    assert str(refused.value) == (
        "x = 1: it needs about 61.0 kB of memory (a 61.0 kB, b 40 B), but 100 B is available. Use less."
    )
