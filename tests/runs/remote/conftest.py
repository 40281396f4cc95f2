"""A server for every test, and one copy of our package for all of them."""

import pytest
from tests.runs.remote.sshd import run_sshd


@pytest.fixture(scope="session")
def code(tmp_path_factory):
    """Where all servers keep uploaded code, so that the first upload serves all tests."""
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def sshd(tmp_path, code):
    with run_sshd(tmp_path / "sshd") as server:
        server.remote.mkdir()
        (server.remote / "code").symlink_to(code)
        yield server
