"""What `palaestra plan` predicts beside what real runs do.

Short runs with few sessions calibrate; the planner predicts others: more sessions, larger batches, asynchronous
collection. Then those are run and compared, calibration and validation in turns, because the machine is shared.
Three kinds: `screens` (sessions, sampler and learner wait, as for remote screens and accelerators; the rest of the run
is real), `tiny` (the tiny model samples and learns on the processor) and `vector` (PPO behind a slow policy, as
`benchmarks.overlap`). Writes benchmarks/results/planner.{json,md}.
Run it as `python -m benchmarks.planner [screens] [tiny] [vector] [--rounds N]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.machine import facts, load
from palaestra.files.run_directory import RunDirectory, new_run_id
from palaestra.planner.measurement import MeasuredRun, fit_times, read_run, read_setup
from palaestra.planner.throughput import Setup, simulate
from palaestra.telemetry import JournalReader, TrainingStep

RESULTS = Path(__file__).parent / "results"
STEP_SECONDS, VARIATION = 1.5, 0.2
"""Of a session step: as long as on a loaded desktop, so that what this machine's processor adds is little."""
UPDATES = 6
CALIBRATION = (
    {"sessions": 2, "batch_size": 4, "collection": "synchronous"},
    {"sessions": 4, "batch_size": 4, "collection": "synchronous"},
)
VALIDATION = (
    {"sessions": 8, "batch_size": 16, "collection": "synchronous"},
    {"sessions": 4, "batch_size": 8, "collection": "asynchronous"},
    {"sessions": 8, "batch_size": 16, "collection": "asynchronous"},
    {"sessions": 8, "batch_size": 8, "collection": "asynchronous", "max_staleness": 2},
)
INFER_SECONDS, LEARN_SECONDS, STEPS = 0.05, 0.06, 8
VECTOR_CALIBRATION = ({"rows": 1}, {"rows": 2})
VECTOR_VALIDATION = (
    {"rows": 4, "collection": "synchronous"},
    {"rows": 1, "collection": "asynchronous", "max_staleness": 1},
    {"rows": 4, "collection": "asynchronous", "max_staleness": 1},
    {"rows": 4, "collection": "asynchronous", "max_staleness": 3},
    {"rows": 1, "collection": "asynchronous", "max_staleness": 0},
)


@contextlib.contextmanager
def slow_server() -> Iterator[str]:
    """The address of a server of slow sessions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(STEP_SECONDS), str(VARIATION), "--port", str(port), "--until-eof"]
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.slow_sessions", *words], stdin=subprocess.PIPE)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            with contextlib.suppress(OSError), urlopen(f"{url}/health", timeout=1):
                break
            time.sleep(0.1)
        yield url
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)


def screen_config(url: str, setup: dict[str, Any], seed: int, *, tiny: bool) -> dict[str, Any]:
    overlaps = setup["collection"] == "asynchronous"
    return {
        "experiment_name": "planner",
        "model": {"name": "tiny", "max_new_tokens": 24, "history": 1, "lora_rank": 8},
        "tasks": [{"task": "fake/button", "params": {"step_limit": 3}}],
        "algorithm": {"name": "ppo"} if tiny else {"name": "rejection_sampling", "reward_threshold": -2.0},
        "reward": {"assumed_range": [-2, 2]},
        "trainer": {
            "batch_size": setup["batch_size"], "num_training_steps": UPDATES, "learning_rate": 1e-7,
            "collection": setup["collection"], "max_staleness": setup.get("max_staleness", 1), "seed": seed,
            "microbatch_turns": 16, "checkpoint_seconds": 1e6,
        },
        "actor_pool": {"target_concurrent_actors": setup["sessions"]},
        "environment": {"session_servers": [url]},
        "inference": {"backend": "process" if overlaps and tiny else "thread"},
        "telemetry": {"progress": False},
    }  # fmt: skip


def run_screens(url: str, setup: dict[str, Any], home: Path, seed: int) -> RunDirectory:
    """Train a slow policy on slow sessions."""
    from benchmarks.slow_policy import SlowScreenPolicy
    from palaestra.train.screen_config import screen_config_from
    from palaestra.train.screens import train_screens

    config = screen_config_from(screen_config(url, setup, seed, tiny=False))
    policy = SlowScreenPolicy(click_rate=1e-6, batch_seconds=0.6, reply_seconds=0.02, turn_seconds=0.15)
    root = home / "var" / "training" / "runs"
    return train_screens(config, policy=policy, root=root, run_id=new_run_id("planner")).run


def run_tiny(url: str, setup: dict[str, Any], home: Path, seed: int) -> RunDirectory:
    """Train the tiny model in a process of its own."""
    file = home / "config.json"
    file.write_text(json.dumps(screen_config(url, setup, seed, tiny=True)))
    command = [sys.executable, "-m", "palaestra", "train", str(file), "--quiet", "--json"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PALAESTRA_HOME": str(home)}
    )
    return RunDirectory.find(json.loads(done.stdout)["run_id"], home / "var" / "training" / "runs")


def measured_rates(run: RunDirectory) -> dict[str, float]:
    """Seconds per update and mean staleness after the pipeline is full."""
    records = JournalReader(run.attempts()[-1].journal).read()
    steps = [record for record in records if isinstance(record.event, TrainingStep)][1:]
    stale = statistics.fmean(step.event.metrics.get("staleness", 0.0) for step in steps)
    return {"update_seconds": (steps[-1].time - steps[0].time) / (len(steps) - 1), "staleness": stale}


def screens(rounds: int, kind: str = "screens", run: Any = run_screens) -> list[dict[str, Any]]:
    rows = []
    with slow_server() as url, tempfile.TemporaryDirectory(prefix="palaestra-planner-") as directory:
        home = Path(directory)
        for number in range(rounds):
            # On both sides of the runs that are predicted: other programs on the machine come and go.
            runs = [read_run(run(url, setup, home, number)) for setup in CALIBRATION]
            actual = [measured_rates(run(url, setup, home, number)) for setup in VALIDATION]
            runs += [read_run(run(url, setup, home, number)) for setup in CALIBRATION]
            for setup, rates in zip(VALIDATION, actual, strict=True):
                rows.append(compare(kind, setup, runs, rates, variation=VARIATION))
    return rows


def tiny(rounds: int) -> list[dict[str, Any]]:
    return screens(rounds, "tiny", run_tiny)


def compare(
    kind: str, setup: dict[str, Any], runs: list[MeasuredRun], actual: dict[str, float], *, variation: float = 0.0
) -> dict[str, Any]:
    """Prediction and measurement of one setting."""
    times = fit_times(runs, session_variation=variation)
    predicted = simulate(times, Setup(**setup), updates=40)
    error = predicted.update_seconds / actual["update_seconds"] - 1
    row = {
        "kind": kind,
        "setup": setup,
        "predicted": {"update_seconds": predicted.update_seconds, "staleness": predicted.staleness},
        "measured": actual,
        "error": error,
        "times": times.model_dump(),
        "load": load(),
    }
    sides = (
        f"predicted {predicted.update_seconds:.3f} s, measured {actual['update_seconds']:.3f} s ({100 * error:+.0f} %)"
    )
    print(f"{kind} {setup}: {sides}, staleness {predicted.staleness:.2f} and {actual['staleness']:.2f}", flush=True)
    return row


def run_vector(setup: dict[str, Any], updates: int = 10) -> tuple[MeasuredRun, dict[str, float]]:
    """PPO in CartPole with a slow policy: what was measured of its parts, and its rates."""
    from benchmarks.slow_policy import SlowPolicy
    from palaestra.actor.asynchronous import AsyncConfig
    from palaestra.env import make_env
    from palaestra.env.make import EnvConfig
    from palaestra.learner.ppo import PPO
    from palaestra.train.trainer import Trainer

    envs, overlaps = setup["rows"], setup.get("collection") == "asynchronous"
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=envs))
    policy = SlowPolicy(env.observation_space, env.action_space, seed=0)
    policy.infer_seconds, policy.learn_seconds, policy.learn_rows = INFER_SECONDS, LEARN_SECONDS, STEPS
    algorithm = PPO(n_epochs=4, batch_size=STEPS)
    background = AsyncConfig(max_staleness=setup.get("max_staleness", 1)) if overlaps else None
    trainer = Trainer(policy, env, algorithm, asynchronous=background)
    moments: list[float] = []
    parts: list[dict[str, float]] = []

    def note(_: Trainer, metrics: dict[str, float]) -> None:
        moments.append(time.perf_counter())
        parts.append(dict(metrics))

    try:
        trainer.train(updates * STEPS * envs, STEPS, callback=note)
    finally:
        trainer.env.close()
    collect, learn = (statistics.fmean(one[key] for one in parts[1:]) for key in ("collect_seconds", "learn_seconds"))
    whole = (moments[-1] - moments[0]) / (updates - 1)
    plan = read_setup({"env": {"num_envs": envs}, "trainer": {"collection": "synchronous"}})
    measured = MeasuredRun(
        "", plan, collect=collect, busy=collect, learn=learn, overhead=max(0.0, whole - collect - learn),
        turns=STEPS, turns_variation=0.0, failure_rate=0.0, on_screens=False, memory={},
    )  # fmt: skip
    stale = statistics.fmean(one.get("staleness", 0.0) for one in parts[2:])
    return measured, {"update_seconds": (moments[-1] - moments[1]) / (updates - 2), "staleness": stale}


def vector(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for _ in range(rounds):
        runs = [run_vector(setup)[0] for setup in VECTOR_CALIBRATION]
        for setup in VECTOR_VALIDATION:
            _, actual = run_vector(setup)
            rows.append(compare("vector", {"sessions": 1, "batch_size": 1, **setup}, runs, actual))
    return rows


PARTS = {"screens": screens, "tiny": tiny, "vector": vector}


def markdown(found: dict[str, Any]) -> str:
    """Medians over the rounds."""
    lines = [
        "| run | collection | sessions × environments | per update | predicted, s | measured, s | error | staleness "
        "predicted | measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in found:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in found[kind]["rows"]:
            groups.setdefault(json.dumps(row["setup"]), []).append(row)
        for rows in groups.values():
            setup = rows[0]["setup"]

            def middle(side: str, key: str, rows: list[dict[str, Any]] = rows) -> float:
                return statistics.median(row[side][key] for row in rows)

            error = middle("predicted", "update_seconds") / middle("measured", "update_seconds") - 1
            bound = f", staleness ≤ {setup['max_staleness']}" if "max_staleness" in setup else ""
            lines.append(
                f"| {kind} | {setup.get('collection', 'synchronous')}{bound} | {setup['sessions']} × "
                f"{setup.get('rows', 1)} | {setup['batch_size']} | {middle('predicted', 'update_seconds'):.2f} | "
                f"{middle('measured', 'update_seconds'):.2f} | {100 * error:+.0f} % | "
                f"{middle('predicted', 'staleness'):.2f} | {middle('measured', 'staleness'):.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of all settings (3)")
    parser.add_argument("--render", action="store_true", help="only write the table again")
    asked = parser.parse_args()
    stored = RESULTS / "planner.json"
    found: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    for name in [] if asked.render else asked.parts or PARTS:
        found[name] = {"machine": facts(), "rows": PARTS[name](asked.rounds)}
        stored.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "planner.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
