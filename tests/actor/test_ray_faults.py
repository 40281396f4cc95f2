"""What a Ray cluster can do to a run: each failure is one sentence, nothing is lost, and nothing is left running."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.actor.ray_clusters import NODE, actors_on, children_of, start_cluster, wait_until
from tests.actor.test_ray_actors import build, collect, run_config

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.env import EnvConfig
from palaestra.errors import CollectorFailed, ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.train import train
from palaestra.transport.ray_cluster import ActorsConfig, RayCluster

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes():
    with start_cluster(nodes=1, ray_client_server_port=23001) as cluster:
        yield cluster


def start_run(address, home, *settings):
    """Start `palaestra train` with actors on a cluster, in a process group of its own."""
    command = [
        sys.executable, "-m", "palaestra", "train", str(ROOT / "configs/ppo/cartpole.yaml"), "actors.backend=ray",
        "actors.num_cpus=0.5", "trainer.total_timesteps=100000000", "trainer.checkpoint_every=1",
        "telemetry.progress=false", *settings,
    ]  # fmt: skip
    if address is not None:
        command.append(f"actors.address={address}")
    variables = {**os.environ, "PALAESTRA_HOME": str(home), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    variables["RAY_memory_monitor_refresh_ms"] = "0"  # of an instance that the run starts
    return subprocess.Popen(
        command, cwd=home, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def saved_updates(home):
    return len(list(home.rglob("update_*")))


@pytest.fixture
def home(tmp_path):
    started = []
    yield tmp_path, started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_whose_head_is_killed_saves_a_checkpoint_and_says_so(home):
    path, started = home
    with start_cluster(nodes=1) as cluster:
        started.append(process := start_run(cluster.address, path, "actors.head_timeout=5"))
        wait_until(lambda: saved_updates(path) >= 3, 120)
        cluster.head_node.kill_gcs_server(check_alive=False)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert re.search(r"the head of the Ray cluster at \S+ has not answered for 5 s .*Resume with", output), output
    run = RunDirectory(next(path.rglob("checkpoints")).parents[1])
    assert load_checkpoint(run.latest_checkpoint()).progress["updates"] >= 2


def descendants(pid):
    found = children_of(pid)
    return found + [each for child in found for each in descendants(child)]


def test_ctrl_c_ends_a_run_with_its_own_ray_instance_and_leaves_no_process(home):
    path, started = home
    started.append(process := start_run(None, path))
    wait_until(lambda: saved_updates(path) >= 3, 180)
    family = descendants(process.pid)
    assert len(family) >= 5  # the head, the node and its workers
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Stopping after this update" in output
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def test_a_driver_outside_the_cluster_trains_through_a_client_address(nodes, home):
    path, started = home
    settings = ["trainer.total_timesteps=4096", "trainer.rollout_length=128", "algorithm.batch_size=256"]
    started.append(process := start_run("ray://127.0.0.1:23001", path, *settings))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    wait_until(lambda: not any(actors_on(nodes.worker_nodes)))


def test_a_driver_outside_the_cluster_that_loses_it_saves_a_checkpoint_and_says_so(home):
    path, started = home
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with start_cluster(nodes=1, ray_client_server_port=port) as cluster:
        settings = ["trainer.rollout_length=64", "algorithm.batch_size=64"]
        started.append(process := start_run(f"ray://127.0.0.1:{port}", path, *settings))
        wait_until(lambda: saved_updates(path) >= 3 or process.poll() is not None, 200)
        assert process.poll() is None, process.stdout.read()
        server = cluster.head_node.all_processes["ray_client_server"][0].process.pid
        for pid in (*children_of(server), server):
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 1, output
    message = r"^error: the connection to the Ray cluster at ray://\S+ was lost. .*Resume with"
    assert re.search(message, output, re.MULTILINE), output
    assert "Traceback" not in output


@contextlib.contextmanager
def node_with(cluster, package):
    """A node whose processes find this module instead of ours."""
    node = cluster.add_node(**NODE, env_vars={"PYTHONPATH": str(package)})
    try:
        yield
    finally:
        cluster.remove_node(node)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__version__ = '0.0.1'", r"node \S+ has palaestra 0.0.1, and this process has \S+. Install the same version"),
        (
            "raise ModuleNotFoundError(\"No module named 'palaestra'\")",
            r"cannot import palaestra \(No module named 'palaestra'\). Install palaestra",
        ),
    ],
    ids=["other version", "missing"],
)
def test_a_node_with_another_version_or_without_the_package_is_refused(text, message, nodes, tmp_path):
    (tmp_path / "palaestra.py").write_text(text)
    with node_with(nodes, tmp_path), pytest.raises(ConfigError, match=message):
        RayCluster.connect(ActorsConfig(backend="ray", address=nodes.address))
    RayCluster.connect(ActorsConfig(backend="ray", address=nodes.address)).close()


def test_another_version_of_ray_is_refused(nodes, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "__version__", "2.1.0")
    with pytest.raises(ConfigError, match=r"the versions differ \(.*Ray: 2.1.0.*Install the same versions"):
        RayCluster.connect(ActorsConfig(backend="ray", address=nodes.address))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere", "a..b:6379", "127.0.0.1:²"])
def test_an_address_without_a_cluster_is_refused(address):
    with pytest.raises(ConfigError, match=rf"actors.address = '{address}': (no Ray cluster|is not host:port)"):
        RayCluster.connect(ActorsConfig(backend="ray", address=address))


def test_a_port_that_belongs_to_another_program_is_refused(home):
    path, started = home
    with socket.create_server(("127.0.0.1", 0)) as server:
        started.append(process := start_run(f"ray://127.0.0.1:{server.getsockname()[1]}", path))
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    assert re.search(r"actors.address = .*: the connection failed", output), output
    assert not saved_updates(path)


def test_a_step_that_hangs_ends_the_run(nodes, tmp_path):
    config = run_config(
        "tests.actor.rooms:Stuck", {"at": 20}, {"backend": "ray", "num_cpus": 0.5, "address": nodes.address},
        collection="asynchronous", step_timeout=3.0, total_timesteps=10_000,
    )  # fmt: skip
    with pytest.raises(CollectorFailed, match=r"hangs: its step has not ended for .*trainer.step_timeout is 3"):
        train(config, root=tmp_path, run_id="a")
    wait_until(lambda: not any(actors_on(nodes.worker_nodes)))


def test_a_late_result_of_an_actor_that_was_given_up_is_counted_and_not_used(nodes):
    import ray

    ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        with RayCluster.connect(ActorsConfig(backend="ray", num_cpus=0.5)) as cluster:
            training = build(EnvConfig(id="CartPole-v1", num_envs=2), cluster, AsyncConfig())
            workers = training.source._workers

            def give_up(number):
                if number == 3:
                    # The result arrives, although the actor counts as lost.
                    refs = list(workers.all[0].calls)
                    cluster.wait(refs, 30.0)
                    workers._replace(workers.all[0], "given up")

            seen, _ = collect(training, 8, between=give_up)
            assert len(seen) == 8
            assert workers.counts["discarded_results"] >= 1
            assert training.source.progress.steps == 8 * 32 * 2
    finally:
        ray.shutdown()
