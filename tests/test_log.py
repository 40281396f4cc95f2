"""`palaestra.log`: one line per call, from any process, at no risk for the program."""

import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest

import palaestra.log


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file that a run service names."""
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("PALAESTRA_LOG", str(path))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_call_appends_one_event_with_its_time(path):
    before = time.time()
    palaestra.log.step(100, loss=0.25, steps=3)
    palaestra.log.step(200, {"train/loss": 0.5}, acc=1)
    palaestra.log.episode(210, 21.0, 7)

    first, second, third = lines(path)
    assert before <= first.pop("time") <= second.pop("time") <= third.pop("time") <= time.time()
    assert first == {"kind": "TrainingStep", "env_step": 100, "metrics": {"loss": 0.25, "steps": 3}}
    assert second == {"kind": "TrainingStep", "env_step": 200, "metrics": {"train/loss": 0.5, "acc": 1}}
    assert third == {"kind": "EpisodeSummary", "env_step": 210, "episode_return": 21.0, "length": 7}


def test_without_a_service_nothing_is_written_or_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PALAESTRA_LOG", raising=False)
    palaestra.log.step(1, loss=0.5)
    palaestra.log.episode(1, 2.0)

    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


class Awkward:
    """A value that raises an error whatever is done with it."""

    def __float__(self):
        raise RuntimeError

    def __repr__(self):
        raise RuntimeError


def test_values_are_converted_and_what_is_no_number_is_written_as_text(path):
    class Tensor:
        def __float__(self):
            return 1.5

    palaestra.log.step("7", a=Tensor(), b=float("nan"), c=True, d="much", e=Awkward())
    palaestra.log.step(Awkward(), a=1)

    first, second = lines(path)
    assert first["env_step"] == 7
    assert math.isnan(first["metrics"].pop("b"))
    assert first["metrics"] == {"a": 1.5, "c": 1.0, "d": "'much'", "e": "a Awkward"}
    assert second["env_step"] == "a Awkward"


@pytest.mark.parametrize("place", ["", "no/such/directory/log.jsonl"])
def test_a_file_that_cannot_be_written_does_not_disturb_the_program(tmp_path, monkeypatch, place, capfd):
    monkeypatch.setenv("PALAESTRA_LOG", str(tmp_path / place))
    palaestra.log.step(1, loss=0.5)

    assert capfd.readouterr() == ("", "")


def test_lines_of_threads_and_forked_processes_do_not_mix(path):
    def report(worker):
        for step in range(250):
            palaestra.log.step(step, {f"worker{worker}": step}, text="x" * 50)

    threads = [threading.Thread(target=report, args=(worker,)) for worker in range(4)]
    palaestra.log.step(0, parent=0)
    for thread in threads:
        thread.start()
    code = "import palaestra.log\nfor step in range(250): palaestra.log.step(step, started=step)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    for thread in threads:
        thread.join()
    pid = os.fork()
    if pid == 0:
        report(4)
        os._exit(0)
    os.waitpid(pid, 0)
    assert [process.wait() for process in processes] == [0, 0]

    events = lines(path)
    assert len(events) == 1 + 5 * 250 + 2 * 250
    for worker in range(5):
        assert [e["env_step"] for e in events if f"worker{worker}" in e["metrics"]] == list(range(250))


def test_a_descriptor_that_the_program_has_reused_is_left_alone(path, tmp_path):
    palaestra.log.step(1, loss=0.5)
    descriptor = palaestra.log._files[str(path)].descriptor
    os.close(descriptor)
    other = os.open(tmp_path / "mine.txt", os.O_WRONLY | os.O_CREAT)
    assert other == descriptor
    palaestra.log.step(2, loss=0.25)
    os.close(other)

    assert (tmp_path / "mine.txt").read_bytes() == b""
    assert [event["env_step"] for event in lines(path)] == [1, 2]


def test_a_line_that_was_cut_off_by_a_full_disk_does_not_spoil_the_next(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    palaestra.log.step(1, loss=0.5)
    monkeypatch.undo()
    os.environ["PALAESTRA_LOG"] = str(path)
    try:
        palaestra.log.step(2, loss=0.25)
    finally:
        del os.environ["PALAESTRA_LOG"]

    torn, intact = path.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(intact)["env_step"] == 2


def test_a_call_costs_less_than_20_microseconds(path):
    def measure():
        # Time of the processor, in short stretches: other programs may use the same cores.
        begun = time.thread_time()
        for step in range(100):
            palaestra.log.step(step, loss=0.123456, lr=3e-4, grad_norm=1.5)
        return (time.thread_time() - begun) / 100

    assert min(measure() for _ in range(50)) < 20e-6


def test_the_module_loads_nothing_heavy_and_runs_as_a_copy(path, tmp_path):
    copy = tmp_path / "mylog.py"
    with open(palaestra.log.__file__) as file:
        copy.write_text(file.read())
    code = """
import sys, palaestra.log, mylog
heavy = [name for name in ("torch", "numpy", "pydantic", "yaml") if name in sys.modules]
mylog.step(3, loss=0.5)
sys.exit(str(heavy) if heavy else 0)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert [event["env_step"] for event in lines(path)] == [3]
