"""A service that cannot start says why, in one line, to whoever waits for it."""

import json

import pytest

from palaestra.errors import ConfigError, ServiceUnreachable
from palaestra.runs.client.connect import ensure_service
from palaestra.runs.service import server as service
from palaestra.runs.wire import error_from_json


def test_a_registry_that_is_a_directory_is_named_to_the_client(home):
    home.registry.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"registry.sqlite.*: is a directory\. Move it away"):
        ensure_service(home)


def test_a_fault_of_its_own_is_the_services_last_word(home, monkeypatch, capsys):
    def broken(config, home, told):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(service, "run_service", broken)
    with pytest.raises(ZeroDivisionError):
        service.main([])
    error = error_from_json(json.loads(capsys.readouterr().out)["error"])
    assert isinstance(error, ServiceUnreachable)
    assert str(error) == "the run service failed (ZeroDivisionError: a bug of ours)"


def test_a_service_that_dies_without_a_word_is_not_called_slow(home, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'libfoo.so: cannot open shared object file' >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("palaestra.runs.client.connect.sys.executable", str(python))
    message = r"did not start \(exit code 3\)\. Its log is .*; it ends with: libfoo.so: cannot open shared object file"
    with pytest.raises(ServiceUnreachable, match=message):
        ensure_service(home)
