"""A service without doors: the lock, the registry and a supervisor in a process that a test can kill.

python -m tests.runs.service_program SPEC_JSON...      submits them, says their ids, and goes on until it is killed
"""

import asyncio
import json
import signal
import sys

from palaestra.runs.layout import Home
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.service_lock import ServiceLock
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor import Supervisor, SupervisorConfig


async def main(specs):
    home = Home.default()
    with ServiceLock(home):
        registry = open_registry(home)
        config = SupervisorConfig(min_free_disk_mb=0, max_running=16, alarm_every_s=0.1)
        supervisor = Supervisor(home, registry, {"echo": EchoRunner()}, config)
        report = await supervisor.start()
        ids = [(await supervisor.submit(RunSpec(**json.loads(spec)))).run_id for spec in specs]
        sys.stdout.write(json.dumps({"ids": ids, "adopted": report.adopted, "ended": report.ended}) + "\n")
        sys.stdout.flush()
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await over.wait()
        await supervisor.close()
        registry.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
