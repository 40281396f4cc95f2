"""Offline learning beside CORL's own scripts: the same data, networks, batches and updates, on one core, by turns.

Every run trains for the given number of updates without evaluating, so that the speed is that of learning alone. Its
last checkpoint is then evaluated here, for both contenders with the same program, in the environment of the dataset and
with the same seeds. One line per finished run is appended to `results/offline.jsonl`; a stored run is not repeated. The
table, also in `results/offline.md`, has means over seeds with 95 % intervals, the score of the policy that recorded the
data, and the ratio of speeds.

    python -m benchmarks.offline --checkout CORL --datasets pendulum/medium-v0 --updates 2000 --seeds 1 2 --episodes 5
    python -m benchmarks.offline --report
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from scipy import stats

from benchmarks import machine
from palaestra.experience.datasets import Dataset, find_dataset
from palaestra.files.home import Home
from palaestra.runs.checkpoints.files import digest_path
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import AttemptPaths, Machine, PolicyPlan, PolicyRequest
from palaestra.runs.runners.corl import CorlRunner
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import JournalReader, TrainingStep
from palaestra.train.play.environment import PolicyInput
from palaestra.train.play.policies import PolicyCommand, PolicyProcess

RESULTS = Path(__file__).parent / "results"
STORED = RESULTS / "offline.jsonl"
EVAL_SEED = 1_000_003
CONTENDERS = ("corl", "palaestra")
NEVER = 10**9
MEASURED_FROM = 0.1
"""Share of the updates that are not timed: imports, first calls and compilation."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm as both contenders call it: two hidden layers of 256, relu, batches of 256, Adam at 3e-4."""

    script: str
    corl: tuple[tuple[str, Any], ...] = ()
    palaestra: tuple[str, ...] = ()


ALGORITHMS = {
    "bc": Algorithm("any_percent_bc", (("frac", 1.0),)),
    "iql": Algorithm("iql"),
    "td3_bc": Algorithm("td3_bc"),
}
SETTINGS = (
    "policy.hidden=[256,256]", "policy.activation=relu", "env.normalize_observation=true", "algorithm.batch_size=256",
    "algorithm.learning_rate=3e-4", "algorithm.gamma=0.99", "trainer.device=cpu", "trainer.torch_threads=1",
    f"trainer.eval_every={NEVER}", f"trainer.checkpoint_seconds={NEVER}",
)  # fmt: skip
"""Of our learner; CORL's scripts have the same as their defaults."""


@dataclass(frozen=True)
class Trained:
    """A finished training: its speed, and how its last checkpoint acts."""

    updates_per_second: float
    seconds: float
    """Wall time of the whole process, with imports, data and checkpoints."""
    cpu_seconds: float
    """Its CPU time, which other processes on the machine disturb less."""
    policy: PolicyPlan


@dataclass(frozen=True)
class Job:
    """One run of the comparison."""

    contender: str
    algorithm: str
    dataset: str
    updates: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.contender, self.algorithm, self.dataset, self.updates, self.seed)


def train_corl(job: Job, checkout: Path, home: Home, core: int) -> Trained:
    """Run the script as the runner `corl` does, and time the lines that it prints."""
    algorithm = ALGORITHMS[job.algorithm]
    config = {"checkout": str(checkout), "dataset": job.dataset, "max_timesteps": job.updates, "n_episodes": 1}
    config |= {"eval_freq": job.updates, **dict(algorithm.corl)}
    spec = RunSpec(runner="corl", script=algorithm.script, seed=job.seed, config=config)
    here = Machine(environment={**os.environ, "OMP_NUM_THREADS": "1"}, free_disk_bytes=1 << 40)
    refused = [finding for finding in CorlRunner().preflight(spec, here) if finding.level == "refused"]
    if refused:
        raise SystemExit(f"{refused[0].check}: {refused[0].text}. {refused[0].remedy}")
    run = home.run(f"corl-{time.time_ns()}")
    attempt = run.attempt(1)
    plan = CorlRunner().plan(spec, AttemptPaths(run.path.name, 1, run.path, attempt.path, attempt.work), here)
    for name, text in {"work/.keep": "", "tmp/.keep": "", **plan.files}.items():
        (attempt.path / name).parent.mkdir(parents=True, exist_ok=True)
        (attempt.path / name).write_text(text)
    began, cpu_before = time.perf_counter(), _children_cpu_seconds()
    moments = []
    for line, moment in _run(plan.argv, dict(plan.environment), plan.cwd, core):
        event = json.loads(line.partition("@palaestra ")[2]) if "@palaestra {" in line else {}
        if event.get("kind") == "TrainingStep" and "eval_score" not in event["metrics"]:
            moments.append((event["update"], moment))
    seconds, cpu_seconds = time.perf_counter() - began, _children_cpu_seconds() - cpu_before
    (checkpoint,) = plan.cwd.glob("models/*/*.pt")
    digest = digest_path(checkpoint)
    record = CheckpointRecord(
        checkpoint_id=digest.sha256[:16],
        run_id=run.path.name,
        agent_id=f"corl/{algorithm.script}",
        env_id=plan.env_id,
        attempt=1,
        env_step=job.updates,
        path=str(checkpoint),
        sha256=digest.sha256,
        size_bytes=digest.size_bytes,
        format="torch_zip",
        created=0.0,
    )
    request = PolicyRequest(checkpoint=record, spec=spec, command=plan.to_redacted_dict(), deterministic=True)
    return Trained(_speed(moments), seconds, cpu_seconds, CorlRunner().plan_policy(request, here))


def train_palaestra(job: Job, home: Home, core: int) -> Trained:
    """Run `palaestra train`, and time the records of its journal."""
    overrides = [
        *SETTINGS, *ALGORITHMS[job.algorithm].palaestra, f"algorithm.name={job.algorithm}", f"dataset.id={job.dataset}",
        f"trainer.updates={job.updates}", f"trainer.seed={job.seed}", f"name=ours-{time.time_ns()}",
    ]  # fmt: skip
    before = set(home.runs.glob("*"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PALAESTRA_HOME": str(home.base), "PYTHONHASHSEED": "0"}
    empty = home.base / "empty.yaml"
    empty.write_text(json.dumps({"algorithm": {"name": job.algorithm}, "dataset": {"id": job.dataset}}))
    command = (sys.executable, "-m", "palaestra", "train", str(empty), *overrides)
    began, cpu_before = time.perf_counter(), _children_cpu_seconds()
    for _ in _run(command, environment, home.base, core):
        pass
    seconds, cpu_seconds = time.perf_counter() - began, _children_cpu_seconds() - cpu_before
    (directory,) = set(home.runs.glob("*")) - before
    attempt = home.run(directory.name).attempt(1)
    with JournalReader(attempt.journal) as reader:
        records = [record for record in reader.read() if isinstance(record.event, TrainingStep)]
    moments = [(_count_updates(record.event), record.time) for record in records]
    checkpoint = max(attempt.checkpoints.glob("[!.]*"), key=lambda path: (path.is_dir(), path.name))
    argv = (sys.executable, "-P", "-m", "palaestra.train.play.own_policy", str(checkpoint))
    return Trained(_speed(moments), seconds, cpu_seconds, PolicyPlan(argv=argv))


def _children_cpu_seconds() -> float:
    """CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _count_updates(event: TrainingStep) -> int:
    """Gradient steps so far: offline they are the steps of the run."""
    return event.env_step


def _run(argv: Iterable[str], environment: dict[str, str], cwd: Path, core: int) -> Iterator[tuple[str, float]]:
    """Run a command on one core; yields its lines with the moments at which they came. Raises if it fails."""
    process = subprocess.Popen(
        list(argv),
        env={**environment, "PYTHONUNBUFFERED": "1"},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stdout is not None
    last: list[str] = []
    for line in process.stdout:
        last = [*last[-20:], line]
        yield line, time.perf_counter()
    if process.wait() != 0:
        raise SystemExit(f"exit code {process.returncode}:\n{''.join(last)}")


def _speed(moments: list[tuple[int, float]]) -> float:
    """Updates per second after the first tenth."""
    total = moments[-1][0]
    (first, began), (last, ended) = next(m for m in moments if m[0] >= MEASURED_FROM * total), moments[-1]
    return (last - first) / (ended - began) if ended > began else math.nan


def evaluate(policy: PolicyPlan, dataset: Dataset, episodes: int) -> list[float]:
    """Returns of a policy process in the environment of the dataset; episode i has the seed `EVAL_SEED` + i."""
    env = gymnasium.make(dataset.env_id, **(dataset.about.get("env_kwargs") or {}))
    environment = {"OMP_NUM_THREADS": "1", **policy.environment}
    process = PolicyProcess(PolicyCommand(argv=policy.argv, environment=environment, cwd=policy.cwd))
    messages: list[Any] = []

    def receive() -> Any:
        while not messages:
            messages.extend(process.read())
        return messages.pop(0).header

    returns = []
    try:
        first = receive()
        if first["type"] != "ready":
            raise SystemExit(str(first))
        for number in range(episodes):
            process.begin("", number)
            observation, _ = env.reset(seed=EVAL_SEED + number)
            total, has_ended = 0.0, False
            while not has_ended:
                process.ask(PolicyInput({"": np.asarray(observation)}))
                action = np.asarray(receive()["action"], env.action_space.dtype).reshape(env.action_space.shape)
                observation, reward, terminated, truncated, _ = env.step(action)
                total, has_ended = total + float(reward), terminated or truncated
            returns.append(total)
    finally:
        process.close()
        env.close()
    return returns


def behaviour_returns(dataset: Dataset) -> list[float]:
    """Returns of the episodes of a dataset."""
    arrays = dataset.load_transitions()
    ends = np.flatnonzero(arrays.terminated | arrays.truncated)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return [float(arrays.reward[start : end + 1].sum()) for start, end in zip(starts, ends, strict=True)]


def interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of a mean (Student's t); NaN for one value."""
    if len(values) < 2:
        return math.nan
    width = stats.t.ppf(0.975, len(values) - 1)
    return float(width * statistics.stdev(values) / math.sqrt(len(values)))


def read_stored(path: Path) -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_jobs(args: argparse.Namespace) -> None:
    """Run what is not stored yet: the contenders by turns, for every seed."""
    os.environ.setdefault("PYTHONHASHSEED", "0")
    source = Home.default().datasets
    done = {tuple(line[key] for key in Job.__annotations__) for line in read_stored(args.results)}
    jobs = [
        Job(contender, algorithm, dataset, args.updates, seed)
        for seed in args.seeds
        for dataset in args.datasets
        for algorithm in args.algorithms
        for contender in args.contenders
    ]
    for job in jobs:
        if job.key in done:
            continue
        dataset = find_dataset(job.dataset, source)
        with tempfile.TemporaryDirectory(prefix="offline-") as directory:
            home = Home(Path(directory) / "var" / "training")
            home.path.mkdir(parents=True)
            home.datasets.symlink_to(source)
            os.environ["PALAESTRA_HOME"] = directory
            before = machine.load()
            is_corl = job.contender == "corl"
            trained = (
                train_corl(job, args.checkout, home, args.core) if is_corl else train_palaestra(job, home, args.core)
            )
            returns = evaluate(trained.policy, dataset, args.episodes)
        mean = statistics.fmean(returns)
        line = {
            **vars(job),
            "env": dataset.env_id,
            "dataset_sha256": dataset.sha256,
            "return": mean,
            "score": dataset.normalized_score(mean),
            "episodes": args.episodes,
            "updates_per_second": trained.updates_per_second,
            "seconds": trained.seconds,
            "cpu_seconds": trained.cpu_seconds,
            "behaviour_return": statistics.fmean(behaviour_returns(dataset)),
            "behaviour_score": dataset.normalized_score(statistics.fmean(behaviour_returns(dataset))),
            "load": before,
            "date": machine.facts()["date"],
        }
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with open(args.results, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{' '.join(map(str, job.key))}: return {mean:.1f}, {trained.updates_per_second:.0f} updates/s", flush=True
        )


def build_table(lines: list[dict[str, Any]]) -> str:
    """Means over seeds with 95 % intervals, one row per dataset and algorithm. Ratios pair the runs of one seed."""
    rows = [
        "| dataset | algorithm | updates | seeds | behaviour score | CORL score | our score | CORL updates/s "
        "| our updates/s | ratio of speeds | CORL wall time | our wall time | ratio of CPU times |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for dataset, algorithm, updates in sorted({(r["dataset"], r["algorithm"], r["updates"]) for r in lines}):
        group = [r for r in lines if (r["dataset"], r["algorithm"], r["updates"]) == (dataset, algorithm, updates)]
        results = {name: {r["seed"]: r for r in group if r["contender"] == name} for name in CONTENDERS}
        seeds = sorted(results["corl"].keys() & results["palaestra"].keys())
        speeds = [{s: r["updates_per_second"] for s, r in results[name].items()} for name in CONTENDERS]
        behaviour = group[0]["behaviour_return" if group[0]["behaviour_score"] is None else "behaviour_score"]
        cells = [
            dataset,
            algorithm,
            f"{updates:,}",
            "/".join(str(len(results[n])) for n in CONTENDERS),
            f"{behaviour:.1f}",
        ]
        cells += [_format_mean([_score(r) for r in results[name].values()]) for name in CONTENDERS]
        cells += [_format_mean(list(speed.values()), digits=0) for speed in speeds]
        cells.append(_format_ratio([speeds[1][seed] / speeds[0][seed] for seed in seeds]))
        cells += [f"{_format_mean([r['seconds'] for r in results[name].values()], digits=0)} s" for name in CONTENDERS]
        times = [{s: r["cpu_seconds"] for s, r in results[name].items()} for name in CONTENDERS]
        cells.append(_format_ratio([times[0][seed] / times[1][seed] for seed in seeds]))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _score(line: dict[str, Any]) -> float:
    return float(line["return"] if line["score"] is None else line["score"])


def _format_ratio(ratios: list[float]) -> str:
    """The geometric mean of ratios, and its 95 % interval."""
    if not ratios:
        return "–"
    logs = [math.log(ratio) for ratio in ratios]
    mean, spread = statistics.fmean(logs), interval(logs)
    text = f"{math.exp(mean):.2f}"
    return text if math.isnan(spread) else f"{text} ({math.exp(mean - spread):.2f} to {math.exp(mean + spread):.2f})"


def _format_mean(values: list[float], digits: int = 1) -> str:
    if not values:
        return "–"
    spread = interval(values)
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return mean if math.isnan(spread) else f"{mean} ± {spread:,.{digits}f}"


def main() -> None:
    """Run, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, help="CORL checkout")
    parser.add_argument("--datasets", nargs="+", default=["pendulum/medium-v0"])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 11)))
    parser.add_argument("--episodes", type=int, default=20, help="of the evaluation")
    parser.add_argument("--core", type=int, default=0, help="the core that trains")
    parser.add_argument("--results", type=Path, default=STORED)
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    if not args.report:
        if "corl" in args.contenders and args.checkout is None:
            parser.error("--checkout is needed to run CORL's scripts")
        run_jobs(args)
    table = build_table(read_stored(args.results))
    args.results.with_suffix(".md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
