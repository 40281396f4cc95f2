"""One service for the tests of a module, and a way to ask it."""

import pytest
from tests.runs.service.asking import ask
from tests.runs.serving import service_thread

from palaestra.files.home import Home
from palaestra.runs import TrainerService


class Served:
    def __init__(self, home, url):
        self.home, self.url, self.token = home, url, home.token.read_text().strip()
        self.trainer = TrainerService(home)

    def ask(self, method, path, body=None, **more):
        return ask(self.url, method, path, body, **{"token": self.token, **more})

    def done(self, **config):
        run_id = self.trainer.start_run({"steps": 3, **config}, runner="echo")
        self.trainer.wait(run_id, timeout_s=30)
        return run_id


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("served").resolve() / "var" / "training")
    with service_thread(home) as url:
        yield Served(home, url)
