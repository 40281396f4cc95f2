"""Actors on a Ray cluster against the local asynchronous collector: throughput, and the way of weights to the actors.

A cluster of a head and two nodes is started on this machine with `ray.cluster_utils.Cluster`, so figures include Ray's
processes but no network. Collection is timed with a learner that learns nothing: it takes a batch, publishes weights
and releases it, as fast as it can. Two environments: CartPole-v1, whose step takes microseconds, and one whose step
waits 2 ms like a simulator or a server. Backends alternate within a repeat; ratios are of the same repeat. Writes
benchmarks/results/ray_actors.{json,md}. Run it as `python -m benchmarks.ray_actors`.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import gymnasium
import numpy as np

from benchmarks.machine import facts

RESULTS = Path(__file__).parent / "results"
NUM_ENVS, LENGTH, SEGMENTS, STEP_S = 8, 128, 40, 0.002
SIZES = {"0.05 MB": 12_500, "5 MB": 1_250_000, "50 MB": 12_500_000}


class Waiting(gymnasium.Env):
    """Each step waits 2 ms; an episode has 200 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action):
        time.sleep(STEP_S)
        self._steps += 1
        return np.zeros(4, np.float32), 1.0, False, self._steps == 200, {}


class Echo:
    """An actor that says when weights have arrived."""

    def receive(self, weights):
        return sum(int(array.nbytes) for array in weights)


ENVIRONMENTS = {"CartPole-v1": SEGMENTS, "benchmarks.ray_actors:Waiting": 6}


def measure(env_id, segments, *, cluster=None, asynchronous=None):
    """Steps per second of a run that only collects, after one segment to warm up."""
    from palaestra.actor.cluster.env_share import RemoteEnvs
    from palaestra.env import EnvConfig, make_env
    from palaestra.learner import PPO
    from palaestra.policy import ActorCritic, PolicyConfig
    from palaestra.train.vector import VectorTraining

    config = EnvConfig(id=env_id, num_envs=NUM_ENVS, vectorization="in_process")
    env = make_env(config)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(), seed=1)
    env = env if cluster is None else RemoteEnvs(env, NUM_ENVS)
    training = VectorTraining(
        policy, env, PPO(batch_size=64), seed=1, env_config=config, cluster=cluster, asynchronous=asynchronous
    )
    training.start((segments + 1) * LENGTH * NUM_ENVS, LENGTH)
    version, began = 0, 0.0
    try:
        with training.limit_threads():
            training.publisher.publish(0, training.learner.weights())
            for number in range(segments + 1):
                batch = training.source.next_batch()
                version += 1
                training.publisher.publish(version, training.learner.weights())
                training.source.release(batch, version)
                if number == 0:
                    began = time.perf_counter()
        return segments * LENGTH * NUM_ENVS / (time.perf_counter() - began)
    finally:
        training.source.close()


def measure_weights(cluster, repeats):
    """Milliseconds to publish weights, and until an actor on each of two nodes has them."""
    from palaestra.transport.object_store import ObjectStorePublisher

    rows = {}
    for name, count in SIZES.items():
        publisher = ObjectStorePublisher(cluster, lambda weights: weights)
        actors = [cluster.start_actor(Echo) for _ in range(2)]
        weights = [np.random.default_rng(0).standard_normal(count, dtype=np.float32)]
        publish, arrive = [], []
        for version in range(repeats + 1):
            began = time.perf_counter()
            publisher.publish(version, weights)
            middle = time.perf_counter()
            for ref in [actor.receive.remote(publisher.ref(version)) for actor in actors]:
                cluster.get(ref)
            publish.append(1e3 * (middle - began))
            arrive.append(1e3 * (time.perf_counter() - began))
        for actor in actors:
            cluster.stop_actor(actor)
        rows[name] = {"publish_ms": publish[1:], "two_nodes_ms": arrive[1:]}
    return rows


def start_nodes():
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=400 << 20)
    return cluster


def run(repeats):
    from palaestra.actor.asynchronous import AsyncConfig
    from palaestra.transport.ray_cluster import ActorsConfig, RayCluster

    nodes = start_nodes()
    settings = AsyncConfig(max_staleness=1)
    local = {
        "local, synchronous": {},
        "local, thread": {"asynchronous": settings},
        "local, process": {"asynchronous": settings.model_copy(update={"collector": "process"})},
    }
    result = {"machine": facts(), "steps_per_second": {}, "weights": {}}
    try:
        started = time.perf_counter()
        clusters = {
            count: RayCluster.connect(ActorsConfig(backend="ray", address=nodes.address, num_actors=count))
            for count in (1, 2)
        }
        result["connect_seconds"] = time.perf_counter() - started
        remote = {
            "ray, synchronous, 1 actor": {"cluster": clusters[1]},
            "ray, synchronous, 2 actors": {"cluster": clusters[2]},
            "ray, asynchronous, 1 actor": {"cluster": clusters[1], "asynchronous": settings},
            "ray, asynchronous, 2 actors": {"cluster": clusters[2], "asynchronous": settings},
        }
        for env_id, segments in ENVIRONMENTS.items():
            rows = result["steps_per_second"][env_id.rpartition(":")[2]] = {name: [] for name in local | remote}
            for _ in range(repeats):
                for name, arguments in (local | remote).items():
                    rows[name].append(measure(env_id, segments, **arguments))
        result["weights"] = measure_weights(clusters[2], 10)
        for cluster in clusters.values():
            cluster.close()
    finally:
        nodes.shutdown()
    return result


def table(result):
    machine = result["machine"]
    lines = [
        "# Actors on a Ray cluster", "",
        f"Two nodes and a head on one machine ({machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load_at_start']} at the start), {NUM_ENVS} environments, segments of {LENGTH} steps, no learning. "
        "Median over repeats; the ratio is the median of the ratios to the local thread in the same repeat. Raw "
        "numbers: ray_actors.json.", "",
        "| environment | backend | steps/s | ratio |", "| --- | --- | ---: | ---: |",
    ]  # fmt: skip
    for env, rows in result["steps_per_second"].items():
        base = rows["local, thread"]
        for name, values in rows.items():
            ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
            lines.append(f"| {env} | {name} | {statistics.median(values):,.0f} | {ratio:.2f} |")
    lines += ["", "| weights | publish, ms (min–median) | on two nodes, ms (min–median) |", "| --- | ---: | ---: |"]
    for name, row in result["weights"].items():
        cells = [f"{min(values):.1f}–{statistics.median(values):.1f}" for values in row.values()]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    result = run(arguments.repeats)
    (arguments.results / "ray_actors.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.results / "ray_actors.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
