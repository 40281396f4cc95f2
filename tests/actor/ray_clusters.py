"""Real Ray clusters of several nodes on this machine, and the processes that their nodes have."""

import contextlib
import os
import signal
import time
import warnings
from pathlib import Path

SYSTEM = {
    "memory_monitor_refresh_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 1000,
    "health_check_timeout_ms": 1000,
}
"""A node that is killed counts as dead after a second or two instead of fifteen, and Ray ends no actor because another
program on this machine needs memory."""
NODE = {"num_cpus": 4, "object_store_memory": 100 << 20}


@contextlib.contextmanager
def start_cluster(nodes=2, system=None, **head):
    """A head without CPUs, and `nodes` nodes with four each, on which all actors run."""
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20, **head}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves the log files of its client server open
        cluster = Cluster(
            initialize_head=True, head_node_args={**arguments, "_system_config": {**SYSTEM, **(system or {})}}
        )
    try:
        for _ in range(nodes):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class Reader:
    """An actor that returns the weights it is given."""

    def read(self, weights):
        return [array.tolist() for array in weights]


def raylet_pid(node):
    return node.all_processes["raylet"][0].process.pid


def kill_node(cluster, node):
    """End a node as a power failure would: its raylet and all of its workers at once."""
    victims = [*children_of(raylet_pid(node)), raylet_pid(node)]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.worker_nodes.discard(node)
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def children_of(parent):
    """Ids of the living child processes of a process."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                state, ppid = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(ppid) == parent and state != "Z":
                    found.append(int(path.name))
    return found


def actors_on(nodes, name="RolloutWorker"):
    """Process ids of the actors of a class on some nodes, by node."""
    return [[pid for pid in children_of(raylet_pid(node)) if f"ray::{name}" in read_title(pid)] for node in nodes]


def read_title(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def wait_until(holds, seconds=60.0):
    """Poll a condition, for processes that cannot be waited for."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
