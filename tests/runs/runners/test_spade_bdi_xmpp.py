"""The XMPP side of BDI agents: only this machine can reach the embedded server, and every failure has a reason."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.runners.bdi import SHORT, bdi_spec, read_events
from tests.runs.runners.conftest import prepare, run, start

from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import list_descendants
from palaestra.runs.process.attempt_process import AttemptProcess
from palaestra.runs.runners.spade_bdi import SpadeBdiRunner
from palaestra.runs.state.attempt_files import read_status
from palaestra.telemetry import CheckpointSaved, EpisodeSummary
from palaestra.telemetry.event import Belief, LogLine, PhaseChanged

ENDLESS = {**SHORT, "episodes": 10_000_000}
PROSODY = shutil.which("prosody")
LISTEN = "0A"


def _wait_for_login(plan, process):
    log = Attempt(plan.paths.attempt_dir).stdout
    deadline = time.monotonic() + 60
    while not (log.exists() and "is logged in" in log.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _listening_addresses(*pids):
    """The addresses of all listening sockets of some processes, as the kernel knows them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    addresses = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                addresses.append(_read_address(fields[1].partition(":")[0]))
    return addresses


def _read_address(text):
    # Words of four bytes in the byte order of the machine.
    data = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def test_addresses_are_read_as_the_kernel_writes_them():
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert {"127.0.0.1", "::1"} <= set(_listening_addresses(os.getpid()))


def test_every_socket_is_on_the_loopback_interface_and_no_process_is_forked(paths, machine):
    plan = SpadeBdiRunner().plan(bdi_spec(config=ENDLESS), paths, machine)
    with start(plan) as process:
        _wait_for_login(plan, process)
        tree = {process.pid, *list_descendants(process.pid)}
        addresses = _listening_addresses(*tree)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130

    assert tree == {process.pid}
    # One for clients, one for servers.
    assert addresses == ["127.0.0.1", "127.0.0.1"]
    events = read_events(plan)
    assert any(isinstance(event, CheckpointSaved) for event in events)
    assert events[-1] == PhaseChanged("stopped", "asked")


def test_nothing_is_left_of_a_worker_that_was_killed(paths, machine):
    plan = SpadeBdiRunner().plan(bdi_spec(config=ENDLESS), paths, machine)
    attempt = prepare(plan)

    async def body():
        child = await AttemptProcess.launch(plan, attempt)
        try:
            while "is logged in" not in attempt.stdout.read_text():
                await asyncio.sleep(0.05)
            (port,) = [
                line.rpartition(":")[2] for line in attempt.stdout.read_text().splitlines() if "logged in" in line
            ]
            os.kill(child.trainer.pid, signal.SIGKILL)
            await child.wait()
            return int(port.strip('"}'))
        finally:
            child.close()

    port = asyncio.run(asyncio.wait_for(body(), 60))

    assert not read_status(attempt).alive
    assert read_status(attempt).exit.signal == signal.SIGKILL
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


COUNTER = """
import sys
sys.path.insert(0, sys.argv[1])
from bdi import training, xmpp

step_agent, idle = xmpp.step_agent, 0

def count(agent, capture):
    global idle
    is_ready = step_agent(agent, capture)
    idle += not is_ready
    return is_ready

xmpp.step_agent = count
code = training.main(sys.argv[2:])
print("idle steps:", idle)
sys.exit(code)
"""


def test_an_agent_that_waits_does_not_poll(paths, machine, tmp_path):
    asl = tmp_path / "wait.asl"
    asl.write_text("!live.\n+!live <- .begin_episode; .wait(2000); while (not over) { .do(1) }.\n")
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "episodes": 1, "asl": str(asl)}), paths, machine)
    python, program, command, *arguments = plan.argv
    assert command == "train"

    code, output = run(replace(plan, argv=(python, "-c", COUNTER, str(Path(program).parent), *arguments)))

    assert code == 0, output
    # It looks for messages once per second, and a timer may be a little early; polling would be thousands of steps.
    (line,) = [line for line in output.splitlines() if line.startswith("idle steps: ")]
    assert 1 <= int(line.rpartition(" ")[2]) < 20
    assert any(isinstance(event, EpisodeSummary) for event in read_events(plan))


def test_plans_that_end_within_the_last_episode_are_a_failed_run(paths, machine, tmp_path):
    asl = tmp_path / "plans.asl"
    asl.write_text("!live.\n+!live <- .begin_episode; .do(0).\n")
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "episodes": 1, "asl": str(asl)}), paths, machine)

    code, output = run(plan)

    assert code == 1
    assert "the plans have nothing left to do after 0 of 1 episodes" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("!live.\n\n+!live <- .begin_episode; !swim.\n", "plans.asl:3: no applicable plan for +!swim/0"),
        ("!live.\n+!live <- .begin_episode;\n  .do(7).\n", "plans.asl:3: action 7 is not one of 0 to 3"),
        ("!live.\n+!live <- .begin_episode; .do(1.7).\n", "plans.asl:2: action 1.7 is not a whole number from 0 to 3"),
        ('!live.\n+!live <- .begin_episode; .do("left").\n', 'action "left" is not a whole number from 0 to 3'),
        ("!live.\n+!live <- .forbid(ice, 0, -1).\n", "plans.asl:2: action -1 is not one of 0 to 3"),
        ("!live.\n+!live <- .use_only(ice, 1).\n", "plans.asl:2: 1 is not a list of actions, such as [0, 1]"),
        ("!live.\n+!live <- .do(0).\n", "the episode is over: .do needs .begin_episode first"),
        (
            "!live.\n+!live <- !act.\n+!act : far(1) <- .do(1).\nfar(X) :- near(X).\nnear(X) :- far(X).\n",
            "use themselves without end",
        ),
        (
            "!live.\n+!live <- while (.more_episodes) {\n  .begin_episode;\n  .do(0);\n  .begin_episode }.\n",
            "plans.asl:5: the episode is not over: .begin_episode has to wait until the belief over holds",
        ),
        (
            "!live.\n+!live <- .begin_episode; .learn(ice).\n",
            "plans.asl:2: no step of this episode to learn from: .learn needs .do first",
        ),
        ("!live.\n+!live <- .begin_episode.\n", "the plans have nothing left to do after 0 of 60 episodes"),
    ],
)
def test_a_plan_that_fails_is_a_failed_run_with_file_and_line(paths, machine, tmp_path, text, reason):
    asl = tmp_path / "plans.asl"
    asl.write_text(text)
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "asl": str(asl)}), paths, machine)

    code, output = run(plan)

    assert code == 1
    assert reason in output.splitlines()[-1]
    assert output.splitlines()[-1].startswith("spade-bdi: ")
    assert [event.phase for event in read_events(plan) if isinstance(event, PhaseChanged)] == ["running", "failed"]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("!live.\n+!live <- .do(1).\n\n+!swim : at(X <- .do(2).\n", "plans.asl:4: "),
        ("!live.\n\n+!live <- .fly(1).\n", "plans.asl:3: no such action '.fly/1'"),
        ("+!live <- .do(1).\n", "plans.asl: has no initial goal"),
        ("!live.\n", "no applicable plan for +!live/0"),
        (
            "!live.\nknown(1).\n+!live : far(1) <- .do(1).\nfar(X) :- known(X) & far(X).\n",
            "plans.asl:4: the rules of far/1 use themselves without end, or too often",
        ),
        ("!live.\n+!live <- .do(" + "(" * 2000 + "1" + ")" * 2000 + ").\n", "plans.asl: an expression is nested too"),
    ],
)
def test_plans_that_cannot_be_used_are_refused_before_the_run_with_file_and_line(machine, tmp_path, text, finding):
    asl = tmp_path / "plans.asl"
    asl.write_text(text)

    findings = SpadeBdiRunner().preflight(bdi_spec(config={**SHORT, "asl": str(asl)}), machine)

    (refused,) = [one for one in findings if one.level == "refused"]
    assert refused.check == "asl"
    assert finding in refused.text
    assert refused.remedy


def test_a_plan_file_that_disappears_is_a_failed_run(paths, machine, tmp_path):
    asl = tmp_path / "plans.asl"
    asl.write_text("!live.\n+!live <- .begin_episode.\n")
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "asl": str(asl)}), paths, machine)
    asl.unlink()

    code, output = run(plan)

    assert code == 1
    assert "plans.asl cannot be read" in output.splitlines()[-1]


def test_a_taken_port_is_refused_before_the_run_and_ends_one_that_meets_it(paths, machine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = bdi_spec(config={**SHORT, "xmpp": {"port": port}})
        findings = SpadeBdiRunner().preflight(spec, machine)
        code, output = run(SpadeBdiRunner().plan(spec, paths, machine))

    (refused,) = [one for one in findings if one.level == "refused"]
    assert (refused.check, refused.remedy) == ("xmpp", "Set xmpp.port=0 for a free port")
    assert str(port) in refused.text
    assert code == 1
    assert f"port {port} of the embedded XMPP server cannot be used (Address already in use)" in output


def _external(machine, port, **xmpp):
    account = {"host": "127.0.0.1", "port": port, "jid": "agent@localhost", "verify_tls": False, **xmpp}
    machine.environment["PALAESTRA_XMPP_PASSWORD"] = "not-in-any-file"
    return bdi_spec(config={**SHORT, "xmpp": account})


def test_a_server_that_does_not_answer_is_refused_before_the_run(machine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    findings = SpadeBdiRunner().preflight(_external(machine, port), machine)

    (refused,) = [one for one in findings if one.level == "refused"]
    assert refused.check == "xmpp"
    assert f"the server at 127.0.0.1:{port} does not answer" in refused.text
    assert "embedded" in refused.remedy


def test_a_server_that_accepts_and_says_nothing_is_refused_and_ends_a_run_that_meets_it_in_time(paths, machine):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        spec = _external(machine, port, timeout_s=1)
        findings = SpadeBdiRunner().preflight(spec, machine)
        code, output = run(SpadeBdiRunner().plan(spec, paths, machine))

    (refused,) = [one for one in findings if one.level == "refused"]
    assert refused.check == "xmpp"
    assert f"the server at 127.0.0.1:{port} does not answer (it began no XMPP stream within 3 s)" in refused.text
    assert "embedded" in refused.remedy
    assert code == 1
    assert f"the XMPP server at 127.0.0.1:{port} did not answer within 1 s" in output.splitlines()[-1]


@contextlib.contextmanager
def _server_that_answers(answer):
    """A server that reads until the header of a stream is complete, sends an answer and closes the connection."""
    received = []

    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            data = b""
            while not data.endswith(b"streams'>"):
                data += connection.recv(4096)
            received.append(data.decode())
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield listener.getsockname()[1], received
        thread.join(30)


STREAM = b"<?xml version='1.0'?><stream:stream xmlns='jabber:client' from='localhost' version='1.0'>"


def test_a_server_that_begins_a_stream_answers(machine):
    with _server_that_answers(STREAM) as (port, received):
        findings = SpadeBdiRunner().preflight(_external(machine, port), machine)

    assert [(one.level, one.text) for one in findings if one.check == "xmpp"] == [
        ("ok", f"the server at 127.0.0.1:{port} answers")
    ]
    assert 'to="localhost"' in received[0]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_server_of_another_protocol_is_refused_with_its_answer(machine, answer):
    with _server_that_answers(answer) as (port, _):
        findings = SpadeBdiRunner().preflight(_external(machine, port), machine)

    (refused,) = [one for one in findings if one.level == "refused"]
    assert f"the server at 127.0.0.1:{port} does not answer (it began no XMPP stream; its answer was" in refused.text
    assert answer[:8].decode() in refused.text


def test_a_missing_password_names_the_variable(machine):
    spec = _external(machine, 5222, password_variable="OTHER_PASSWORD")

    (refused,) = [one for one in SpadeBdiRunner().preflight(spec, machine) if one.level == "refused"]

    assert refused.check == "xmpp"
    assert "OTHER_PASSWORD" in refused.remedy


def _answers(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture
def prosody(tmp_path):
    """A server of Debian's package on the loopback interface, with the account agent@localhost."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    data = tmp_path / "prosody"
    data.mkdir()
    (data / "prosody.cfg.lua").write_text(
        f"""
        pidfile = "{data}/prosody.pid"; data_path = "{data}"; run_as_root = true
        modules_enabled = {{ "roster", "saslauth", "tls", "disco", "ping" }}
        modules_disabled = {{ "s2s", "http" }}
        interfaces = {{ "127.0.0.1" }}; c2s_ports = {{ {port} }}; c2s_direct_tls_ports = {{}}
        authentication = "internal_hashed"; log = {{ debug = "{data}/prosody.log" }}
        ssl = {{ key = "{data}/key.pem", certificate = "{data}/certificate.pem" }}
        VirtualHost "localhost"
        """
    )
    certificate = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    files = ["-keyout", str(data / "key.pem"), "-out", str(data / "certificate.pem")]
    subprocess.run(["openssl", "req", *certificate, *files], check=True, capture_output=True)
    config = ["--config", str(data / "prosody.cfg.lua")]
    subprocess.run(["prosodyctl", *config, "register", "agent", "localhost", "not-in-any-file"], check=True)
    process = subprocess.Popen([PROSODY, *config, "-F"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not _answers(port):
            assert time.monotonic() < deadline, (data / "prosody.log").read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


SENDER = """
import asyncio, sys
from spade.agent import Agent
from spade.behaviour import OneShotBehaviour
from spade.message import Message

class Tell(OneShotBehaviour):
    async def run(self):
        for kind, body in zip(sys.argv[3::2], sys.argv[4::2]):
            metadata = {"performative": "BDI", "ilf_type": kind}
            await self.send(Message(to="agent@localhost", body=body, metadata=metadata))

async def main():
    agent = Agent(sys.argv[2] + "@localhost", "secret", port=int(sys.argv[1]))
    tell = Tell()
    agent.add_behaviour(tell)
    await asyncio.wait_for(agent.start(), 30)
    await tell.join(30)
    # The server answers after it has read the messages, which came before on the same stream.
    await agent.client["xep_0199"].send_ping("localhost", timeout=30)
    await agent.stop()

asyncio.run(main())
"""


def test_a_peer_can_send_a_belief_and_neither_a_stranger_nor_a_plan_gets_through(paths, machine, tmp_path):
    asl = tmp_path / "wait.asl"
    asl.write_text(
        '!live.\n+!live <- .wait("+go(_)"); while (.more_episodes) { .begin_episode; while (not over) { .do(1) } }.\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    xmpp = {"port": port, "peers": ["operator@localhost"]}
    spec = bdi_spec(config={**SHORT, "episodes": 1, "asl": str(asl), "xmpp": xmpp})
    plan = SpadeBdiRunner().plan(spec, paths, machine)
    with start(plan) as process:
        _wait_for_login(plan, process)
        try:
            plan_by_message = ("tellHow", "+!live <- .do(7).")
            for sender, messages in (
                ("stranger", ("tell", "go(1)")),
                ("operator", (*plan_by_message, "tell", "go(2)")),
            ):
                command = [spec.python, "-c", SENDER, str(port), sender, *messages]
                subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
            assert process.wait(20) == 0
        finally:
            process.kill()

    beliefs = [event for event in read_events(plan) if isinstance(event, Belief)][-1].beliefs["beliefs"]
    assert [text for text in beliefs if text.startswith("go(")] == ["go(2)"]
    assert LogLine("warning", "2 messages were ignored") in read_events(plan)


@pytest.mark.skipif(PROSODY is None, reason="prosody is not installed (apt install prosody)")
def test_an_external_server_serves_as_well_and_the_password_is_in_no_file(paths, machine, prosody):
    plan = SpadeBdiRunner().plan(_external(machine, prosody), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    (line,) = [event.text for event in read_events(plan) if isinstance(event, LogLine) and "logged in" in event.text]
    assert line == f"agent@localhost is logged in at 127.0.0.1:{prosody}"
    files = [path for path in paths.run_dir.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert all(b"not-in-any-file" not in path.read_bytes() for path in files)
    assert "not-in-any-file" not in str(plan.argv) + str(plan.to_redacted_dict())


@pytest.mark.skipif(PROSODY is None, reason="prosody is not installed (apt install prosody)")
def test_a_wrong_password_is_a_failed_run_with_the_account(paths, machine, prosody):
    spec = _external(machine, prosody)
    machine.environment["PALAESTRA_XMPP_PASSWORD"] = "another one"

    code, output = run(SpadeBdiRunner().plan(spec, paths, machine))

    assert code == 1
    assert f"the XMPP server at 127.0.0.1:{prosody} refused the login of agent@localhost" in output.splitlines()[-1]


def test_no_module_of_palaestra_imports_the_libraries_of_the_agent():
    code = """
import importlib, importlib.abc, pkgutil, sys
FORBIDDEN = {"agentspeak", "spade", "spade_bdi", "pyjabber", "slixmpp"}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refuse())
import palaestra.runs
for module in pkgutil.walk_packages(palaestra.runs.__path__, "palaestra.runs."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    root = Path(__file__).parents[3]
    worker = root / "src" / "palaestra" / "runs" / "runners" / "programs" / "bdi"
    importing = [
        path
        for path in (root / "src").rglob("*.py")
        if any(
            line.strip().startswith((f"import {name}", f"from {name}"))
            for line in path.read_text().splitlines()
            for name in ("agentspeak", "spade", "pyjabber", "slixmpp", "loguru")
        )
    ]
    assert importing
    assert {path.parent for path in importing} == {worker}
    assert not (worker / "__init__.py").exists()
    requirements = (root / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    assert not any(name in requirements for name in ("agentspeak", "spade", "pyjabber"))
