"""A port that cannot be used: the error names the cause, and not something else."""

import pytest

from palaestra.errors import ConfigError
from palaestra.http.server import listen


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_not_blamed_on_the_port(host):
    with pytest.raises(ConfigError) as refused:
        listen(host, 0, "service.port")

    assert (refused.value.place, refused.value.value) == ("service.host", host)
    assert "port" not in refused.value.remedy


def test_a_port_that_is_taken_is():
    with listen("127.0.0.1", 0, "service.port") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            listen("127.0.0.1", port, "service.port")

    assert (refused.value.place, refused.value.value) == ("service.port", f"127.0.0.1:{port}")
    assert "another port" in refused.value.remedy
