"""How long does an update take in one process and in two under torchrun, on this machine, with gloo?

Learns from one rollout of a VLA (`SmallVLA` on TableReach) or of a wide network (CartPole, 256 x 256). Each process
has its share of the environments. The wall-clock time of an update is that of the slowest process; processor seconds
are those of all of them and do not depend on the load of the machine. Run it as `python -m benchmarks.distributed`; it
writes `results/distributed.json` and `results/distributed.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import machine
from benchmarks.learning import RESULTS, ROOT

UPDATES = 6
CASES = {
    "SmallVLA, TableReach-v0": ("vla/table_reach", ("trainer.rollout_length=128",)),
    "256 x 256, CartPole-v1": (
        "ppo/cartpole",
        ("policy.hidden=[256,256]", "env.num_envs=8", "algorithm.batch_size=256", "trainer.rollout_length=256"),
    ),
}
"""Name, configuration and overrides."""


def measure() -> None:
    """In each process: time the updates of every case, and print them in the first one."""
    from palaestra.actor.collector import Collector
    from palaestra.actor.compatibility import rollout_spec
    from palaestra.learner.rollout_learner import RolloutLearner
    from palaestra.train.config import load_config, make_algorithm
    from palaestra.train.evaluation import make_env_and_policy
    from palaestra.transport.ranks import join_ranks

    found: dict[str, Any] = {}
    with join_ranks(1800.0) as ranks:
        for name, (config_name, overrides) in CASES.items():
            config = load_config(ROOT / "configs" / f"{config_name}.yaml", [*overrides, "trainer.device=cpu"])
            share = ranks.share(config.env.num_envs)
            env, policy = make_env_and_policy(config, share=share)
            collector = Collector(env, policy, seed=0, compiled="off", share=share)
            algorithm, spec = make_algorithm(config.algorithm, "rollouts"), rollout_spec(env, policy)
            learner = RolloutLearner(policy, algorithm, spec, compiled=False, ranks=ranks)
            wall, processor = [], []
            for _ in range(UPDATES):
                buffer = collector.collect(config.rollout_length, policy_version=learner.version)
                ranks.gather(None)  # start together
                began, used = time.perf_counter(), time.process_time()
                learner.update(buffer)
                wall.append(max(ranks.gather(time.perf_counter() - began)))
                processor.append(sum(ranks.gather(time.process_time() - used)))
            env.close()
            # The first update allocates.
            found[name] = {"wall_s": wall[1:], "processor_s": processor[1:]}
        if ranks.is_first:
            sys.stdout.write(json.dumps(found))


def main() -> None:
    """Measure with one and with two processes, and write the results."""
    results: dict[str, Any] = {"machine": machine.facts(), "updates": UPDATES - 1, "processes": {}}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for count in (1, 2):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        done = subprocess.run(
            [*launch, "-m", "benchmarks.distributed", "measure"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        results["processes"][count] = json.loads(done.stdout)
    results["machine"]["load_at_end"] = machine.load()
    (RESULTS / "distributed.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "distributed.md").write_text(describe(results))


def describe(results: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [
        "# An update in one process and in two",
        "",
        f"`python -m benchmarks.distributed`: median (least) of {results['updates']} updates, gloo on one machine, one "
        f"torch thread per process. Load of the machine {results['machine']['load_at_start']} before and "
        f"{results['machine']['load_at_end']} after, on {results['machine']['cores']} cores: with other load, only the "
        "processor seconds mean anything.",
        "",
        "| policy | processes | wall-clock of an update, s | processor of all processes, s |",
        "| --- | --- | --- | --- |",
    ]
    for name in CASES:
        for count, found in results["processes"].items():
            wall, used = (found[name][key] for key in ("wall_s", "processor_s"))
            columns = [f"{statistics.median(times):.3f} ({min(times):.3f})" for times in (wall, used)]
            lines.append(f"| {name} | {count} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
