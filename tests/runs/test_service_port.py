"""The port of the service: 8710, a free one when that is in use, and the one that was asked for or none."""

import contextlib
import os
import select
import socket
import urllib.parse

import pytest
from tests.runs.service.asking import ask
from tests.runs.serving import end_service, service, service_thread

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs import TrainerService, config
from palaestra.runs.client.connect import find_service
from palaestra.runs.config import ServiceConfig, service_config
from palaestra.runs.service import server


@contextlib.contextmanager
def occupied(host="127.0.0.1"):
    with socket.socket() as other:
        other.bind((host, 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def free_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        return other.getsockname()[1]


@pytest.fixture
def default_port(monkeypatch):
    """Another default for this test, since 8710 may be in use on this machine."""

    def set_default(port):
        monkeypatch.setattr(ServiceConfig.model_fields["port"], "default", port)
        ServiceConfig.model_rebuild(force=True)

    yield set_default
    monkeypatch.undo()
    ServiceConfig.model_rebuild(force=True)


def _port(url):
    return urllib.parse.urlsplit(url).port


def test_the_default_is_8710_and_is_not_a_choice_of_the_user(home):
    assert (ServiceConfig().port, config.DEFAULT_PORT) == (8710, 8710)
    assert "port" not in service_config(home, {"max_running": 2}).model_fields_set
    assert "port" in service_config(home, {"port": 8710}).model_fields_set


def test_the_default_port_is_used_when_it_is_free(home, default_port, free_port):
    default_port(free_port)
    for _ in range(2):  # stable: the next service has the same address
        with service_thread(home) as url:
            assert _port(url) == free_port


def test_a_free_port_is_chosen_when_the_default_is_in_use(home, default_port):
    with occupied() as port:
        default_port(port)
        with service_thread(home) as url:
            assert _port(url) not in (port, 0)
            assert TrainerService(home).runs() == []
            assert find_service(home).url == url


@pytest.mark.parametrize("where", ["setting", "file"])
def test_a_port_that_was_asked_for_and_is_in_use_is_refused(home, where):
    with occupied() as port:
        settings = {"port": port}
        if where == "file":
            home.path.mkdir(parents=True)
            (home.path / "service.yaml").write_text(f"port: {port}\n")
            settings = {}
        with service(home, **settings) as told:
            assert told["error"]["place"] == "service.port"
            assert "Address already in use" in told["error"]["reason"]
            assert told["error"]["remedy"] == "Choose another port, or 0 for a free one"
    assert not home.endpoint.exists()


def test_a_host_that_is_not_of_this_machine_is_refused_and_not_tried_with_another_port():
    with pytest.raises(ConfigError, match=r"service\.host = '192\.0\.2\.1'"):
        server._open_socket(ServiceConfig(host="192.0.2.1"))


def test_services_of_several_state_directories_run_beside_each_other(tmp_path, default_port, free_port):
    default_port(free_port)
    homes = [Home(tmp_path / name / "var" / "training") for name in "abc"]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(service_thread(home)) for home in homes]
        assert len(set(urls)) == 3
        assert _port(urls[0]) == free_port
        ids = [
            TrainerService(home).start_run({"steps": 1}, runner="echo", name=f"run-{i}") for i, home in enumerate(homes)
        ]
        for home, run_id in zip(homes, ids, strict=True):
            TrainerService(home).wait(run_id, timeout_s=60)
            assert [run.run_id for run in TrainerService(home).runs()] == [run_id]


def test_a_client_does_not_take_another_service_on_the_same_port_for_its_own(tmp_path, free_port):
    """Its service has ended, and the service of another state directory has taken the port."""
    mine, other = (Home(tmp_path / name / "var" / "training") for name in ("mine", "other"))
    try:
        with service_thread(mine, port=free_port):
            client = TrainerService(mine)
            run_id = client.start_run({"steps": 1}, runner="echo")
            client.wait(run_id, timeout_s=60)
        with service_thread(other, port=free_port) as url:
            assert ask(url, "GET", "/runs", token=mine.token.read_text().strip()).status == 401
            assert [run.run_id for run in client.runs()] == [run_id]
            assert find_service(mine).url != url
    finally:
        end_service(mine)


def test_a_killed_service_leaves_its_port_to_the_next(home, default_port, free_port):
    with service(home, port=free_port) as first:
        watched = os.pidfd_open(first["pid"])
        os.kill(first["pid"], 9)
        assert select.select([watched], [], [], 30)[0]
        os.close(watched)
    with service(home, port=free_port) as second:
        assert second["url"] == first["url"]
