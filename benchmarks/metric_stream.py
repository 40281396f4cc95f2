"""The stream of new metrics under load: processor time of the service and of a client at 5,000 events a second.

    python -m benchmarks.metric_stream [--runs 5] [--rate 1000] [--seconds 20]

Starts a service, echo runs and clients as separate processes. Prints one row per number of clients; the row without
clients is what ingestion alone costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService
from palaestra.runs.phase import Phase

CLIENT = """
import json, sys, time
from pathlib import Path
from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService

seconds, points, batches, runs = float(sys.argv[2]), 0, 0, set()
started = None
for run_id, curves in TrainerService(Home(Path(sys.argv[1]))).watch_metrics(sys.argv[3:]):
    if curves and started is None:
        started, cpu = time.monotonic(), time.process_time()
    points += sum(map(len, curves.values()))
    batches += bool(curves)
    runs.add(run_id)
    if started is not None and time.monotonic() - started > seconds:
        break
took = time.monotonic() - started
print(json.dumps([points / took, batches / took / len(runs), (time.process_time() - cpu) / took]))
"""


def measure(runs: int, rate: float, seconds: float, clients: int) -> str:
    with tempfile.TemporaryDirectory(prefix="palaestra-bench-") as directory:
        home = Home(Path(directory).resolve() / "var" / "training")
        settings = json.dumps({"min_free_disk_mb": 0, "max_running": runs})
        service = subprocess.Popen(
            [sys.executable, "-m", "palaestra.runs.service.server", settings],
            stdout=subprocess.PIPE,
            env={**os.environ, "PALAESTRA_HOME": str(home.base)},
        )
        assert service.stdout is not None
        service.stdout.readline()
        trainer, gate = TrainerService(home), home.path / "go"
        config = {"steps": int(rate * seconds * 3), "rate": rate, "wait_for": str(gate)}
        ids = [trainer.start_run(config, runner="echo") for _ in range(runs)]
        command = [sys.executable, "-c", CLIENT, str(home.path), str(seconds), *ids]
        watching = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(clients)]
        gate.touch()
        for run_id in ids:
            trainer.wait(run_id, phases=[Phase.RUNNING])
        time.sleep(1.0)  # the first batches are larger
        started, cpu = time.monotonic(), _cpu_s(service.pid)
        time.sleep(seconds)
        share = (_cpu_s(service.pid) - cpu) / (time.monotonic() - started)
        reports = [json.loads(client.communicate()[0]) for client in watching]
        for run_id in ids:
            trainer.stop_run(run_id, grace_s=0)
        service.terminate()
        service.wait()
        service.stdout.close()
    points, batches, used = (max(values) for values in zip(*reports, strict=True)) if reports else (0.0, 0.0, 0.0)
    return f"| {clients} | {share:.3f} | {used:.3f} | {points:,.0f} | {batches:.1f} |"


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1000.0, help="updates per second of each run")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    print("| clients | cores, service | cores, client | points/s of a client | batches/s of a run |")
    print("| --- | --- | --- | --- | --- |")
    for clients in (0, 1, 4):
        print(measure(arguments.runs, arguments.rate, arguments.seconds, clients), flush=True)


if __name__ == "__main__":
    main()
