"""What an attempt takes of its machine."""

import asyncio
import os
import time

from tests.runs.attempts import create_attempt, run_attempt, wait_for_output, wait_until
from tests.runs.supervisors import echo, run_supervisor, wait_for_phase

from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import Phase
from palaestra.runs.process.resource_usage import (
    ResourceSample,
    ResourceSampler,
    read_peaks,
    read_samples,
)


def test_a_busy_trainer_is_seen_to_be_busy_and_large(home):
    attempt = create_attempt(home)
    code = "import time; held = bytearray(b'x') * (100 << 20); print('up')\nwhile True: sum(range(1000))"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_for_output(attempt, "up")
            now = [0.0]
            sampler = ResourceSampler(attempt, child.watchdog, clock=lambda: 7.0, monotonic=lambda: now[0])
            assert sampler.sample() is None
            used = os.times()
            await wait_until(lambda: os.times().elapsed - used.elapsed > 0.5, "half a second")
            now[0] = 1.0
            return sampler.sample()

    sample = asyncio.run(body())
    assert sample.time == 7.0
    assert sample.processes == 2
    assert 100 < sample.rss_mb < 400
    assert sample.cpu_percent > 0
    assert read_samples(attempt) == [sample]


def test_what_has_ended_is_not_looked_at(home):
    attempt = create_attempt(home)
    gone = ProcessIdentity(os.getpid(), 1, "another boot")
    assert ResourceSampler(attempt, gone).sample() is None
    assert read_samples(attempt) == []


def test_torn_and_foreign_lines_are_skipped_and_the_last_are_kept(home):
    attempt = create_attempt(home)
    lines = [f'{{"schema":1,"time":{n},"cpu_percent":1,"rss_mb":2,"processes":3,"gpus":[["0",4,5]]}}' for n in range(5)]
    (attempt.path / "system.jsonl").write_text("\n".join([lines[0][:30], "[]", *lines]) + "\n")
    assert [sample.time for sample in read_samples(attempt)] == [0, 1, 2, 3, 4]
    assert read_samples(attempt, last=1) == [ResourceSample(4.0, 1.0, 2.0, 3, (("0", 4.0, 5.0),))]
    assert read_samples(attempt, last=0) == []


def test_the_most_of_everything_is_found_wherever_it_was(home):
    attempt = create_attempt(home)
    assert read_peaks(attempt) is None
    looks = [(10, 5, 1, 90, 1), (200, 2, 3, 10, 7), (30, 900, 2, 0, 2), (1, 1, 1, 0, 0)]
    lines = [
        f'{{"time":1,"cpu_percent":{cpu},"rss_mb":{rss},"processes":{count},"gpus":[["0",{busy},{used}]]}}\n'
        for cpu, rss, count, busy, used in looks
    ]
    (attempt.path / "system.jsonl").write_text("torn\n" + "".join(lines))
    assert read_peaks(attempt) == ResourceSample(1.0, 200.0, 900.0, 3, (("0", 90.0, 7.0),))


def test_the_supervisor_samples_every_run(home):
    async def body():
        async with run_supervisor(home, sample_every_s=0.05) as supervisor:
            run_id = (await supervisor.submit(echo(steps=1, then="hang"))).run_id
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            attempt = home.run(run_id).attempt(1)
            await wait_until(lambda: len(read_samples(attempt)) >= 3, "three samples")
            return read_samples(attempt)

    began = time.time()
    samples = asyncio.run(body())
    assert all(began - 1 <= sample.time <= time.time() + 1 for sample in samples)
    assert all(sample.rss_mb > 5 for sample in samples)
