"""The agent on XMPP: a server of our own on the loopback interface or an external one, the login, and the behaviour.

What the libraries do not do is done here: the embedded server listens on 127.0.0.1 only and has neither an HTTP port
nor worker processes, a login has a time limit and a reason, an error of a plan reaches the caller, and an idle agent
waits instead of polling.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import shutil
import socket
import ssl
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import agentspeak
import agentspeak.runtime
import loguru
import pyjabber.server
from pyjabber import AppConfig
from pyjabber.plugins.xep_0363.upload_server import UploadHttpServer
from pyjabber.plugins.xep_0363.xep_0363 import HTTPFieldUpload
from pyjabber.queues.workers.MessageQueueWorker import queue_worker
from pyjabber.server_parameters import Parameters
from slixmpp.exceptions import IqError, IqTimeout
from spade.xmpp_client import XMPPClient
from spade_bdi.bdi import BDIAgent
from spade_bdi.bdi_behaviour import BDIBehaviour
from spade_bdi.utils import parse_literal

from .actions import PlanActions
from .agent import Body, LogCapture, PlanError, build_agent, step_agent

EMBEDDED_HOST = "localhost"
_REGISTER = "jabber:iq:register"
_UPLOAD = "urn:xmpp:http:upload:0"
"""The plugin that opens an HTTP port."""
_SLICE_S = 0.05
"""Time for which the agent reasons before messages are looked at."""
_IDLE_S = 1.0
_LOGIN_ATTEMPTS = 3


_MESSAGES = {
    "tell": (agentspeak.Trigger.addition, agentspeak.GoalType.belief),
    "untell": (agentspeak.Trigger.removal, agentspeak.GoalType.belief),
    "achieve": (agentspeak.Trigger.addition, agentspeak.GoalType.achievement),
}


class XmppError(Exception):
    """The server or the login failed. `args` are the reason and the remedy."""


@dataclass(frozen=True)
class Account:
    """Where and as what the agent logs in."""

    host: str
    port: int
    jid: str
    password: str
    verify_tls: bool
    register: bool
    timeout_s: float
    peers: tuple[str, ...] = ()
    """Addresses whose messages the agent takes; all others are ignored."""


class EmbeddedServer:
    """An XMPP server in this process that only this machine can reach."""

    def __init__(self, port: int, timeout_s: float, peers: tuple[str, ...]) -> None:
        self._timeout_s, self._wanted_port, self._peers = timeout_s, port, peers
        self._tasks: list[asyncio.Task[Any]] = []
        self._errors: list[str] = []
        self._certificates = tempfile.mkdtemp(prefix="xmpp-")

    async def start(self) -> Account:
        """Start it and wait until it answers; returns the account of the agent."""
        loguru.logger.remove()
        loguru.logger.add(lambda text: self._errors.append(str(text).strip()), level="ERROR", format="{message}")
        self._check_port()
        authority = os.path.join(os.path.dirname(pyjabber.server.__file__), "network", "certs")
        for name in ("ca_cert.pem", "ca_key.pem"):
            shutil.copy(os.path.join(authority, name), self._certificates)
        # The library would also listen on the address of the machine's network, and fork a worker per core.
        pyjabber.server.setup_query_local_ip = lambda: None
        pyjabber.server.ProcessPoolExecutor = ThreadPoolExecutor
        defaults = Parameters()
        server = pyjabber.server.Server(
            Parameters(
                host=EMBEDDED_HOST,
                client_port=self._wanted_port,
                server_port=0,
                database_in_memory=True,
                message_persistence=False,
                cert_path=self._certificates,
                plugins=[name for name in defaults.plugins if name != _UPLOAD],
                items={name: {**item, "extra": {"max-size": 0}} for name, item in defaults.items.items()},
            )
        )
        # With TLS 1.3 the first stanza of a client can arrive before the server expects it, and is then lost.
        AppConfig.app_config.ssl_context.maximum_version = ssl.TLSVersion.TLSv1_2
        # Every session needs this object, also without its HTTP server; without it, no stanza would be answered.
        HTTPFieldUpload(UploadHttpServer())
        # Not `start()`, which replaces the handlers of signals.
        self._tasks = [asyncio.create_task(self._run(server)), asyncio.create_task(queue_worker())]
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait([ready, *self._tasks], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            ended = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
            reasons = [*self._errors, *(str(error) for error in ended if error is not None)]
            reason = reasons[0] if reasons else f"it was not ready within {self._timeout_s:.0f} s"
            raise XmppError(f"the embedded XMPP server did not start: {reason}", "Set xmpp.port=0 for a free port")
        sockets = [*server._client_listener.sockets, *server._server_listener.sockets]
        for listener in sockets:
            if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
                reason = (
                    f"the embedded XMPP server listens on {listener.getsockname()[0]}, which other machines can reach"
                )
                raise XmppError(reason, f"Let the name {EMBEDDED_HOST} mean 127.0.0.1 in /etc/hosts")
        port = server._client_listener.sockets[0].getsockname()[1]
        return Account(
            host="127.0.0.1",
            port=port,
            jid=f"agent@{EMBEDDED_HOST}",
            password=secrets.token_urlsafe(24),
            verify_tls=False,
            register=True,
            timeout_s=self._timeout_s,
            peers=self._peers,
        )

    def close_registration(self) -> None:
        """Close the registration of accounts, unless peers need one."""
        if not self._peers and AppConfig.app_config is not None:
            AppConfig.app_config.plugins.remove(_REGISTER)

    async def stop(self) -> None:
        """Stop it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._certificates, ignore_errors=True)

    async def _run(self, server: Any) -> None:
        try:
            await server.run_server()
        except SystemExit:
            raise RuntimeError("the server gave up") from None

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._wanted_port))
            except OSError as error:
                reason = f"port {self._wanted_port} of the embedded XMPP server cannot be used ({error.strerror})"
                raise XmppError(reason, "Set xmpp.port=0 for a free port") from None


class ReasoningBehaviour(BDIBehaviour):  # type: ignore[misc]  # the library has no types
    """Executes plans until the training is over, and takes messages in between."""

    async def run(self) -> None:
        """One slice of reasoning; an error of a plan is the result of the agent."""
        agent = self.agent
        await agent.released.wait()
        if agent.result.done():
            self.kill()
            return
        try:
            self._take_messages()
            end = time.monotonic() + _SLICE_S
            while time.monotonic() < end:
                for _ in range(200):
                    if agent.body.stop_requested or not step_agent(agent.bdi_agent, agent.capture):
                        await self._rest()
                        return
        except Exception as error:  # noqa: BLE001 - the library would log it and go on as if alive
            agent.finish(error)

    def _take_messages(self) -> None:
        """Move messages of known peers to the mailbox of the library's own handling."""
        while not self.queue.empty():
            message = self.queue.get_nowait()
            sender = str(message.sender).partition("/")[0]
            if sender in self.agent.account.peers:
                self.agent.hear(message)
            else:
                self.agent.ignored_messages += 1

    async def _rest(self) -> None:
        """Nothing is ready: the training is over, or a plan waits for time or a message."""
        agent, body = self.agent, self.agent.body
        if body.stop_requested or body.finished_episodes >= body.max_episodes:
            agent.finish(None)
            return
        deadline = agent.bdi_agent.shortest_deadline()
        if deadline is None and not agent.account.peers:
            done = f"{body.finished_episodes} of {body.max_episodes}"
            agent.finish(PlanError(f"the plans have nothing left to do after {done} episodes"))
            return
        wait_s = _IDLE_S if deadline is None else min(_IDLE_S, max(0.0, deadline - time.time()))
        message = await self.receive(timeout=wait_s or 0.001)
        if message is not None:
            self.queue.put_nowait(message)


class BdiLearner(BDIAgent):  # type: ignore[misc]  # the library has no types
    """A SPADE agent whose plans choose the actions of a body."""

    def __init__(
        self, account: Account, body: Body, asl: str, file_name: str, capture: LogCapture, beliefs: list[str]
    ) -> None:
        self.account, self.body, self.capture = account, body, capture
        self._asl, self._file_name, self._beliefs = asl, file_name, beliefs
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.released = asyncio.Event()
        """Set when the plans may begin."""
        self.ignored_messages = 0
        super().__init__(account.jid, account.password, file_name, port=account.port)
        self.verify_security = account.verify_tls

    def add_behaviour(self, behaviour: Any, template: Any = None) -> None:
        """Use our behaviour in place of the library's."""
        is_default = type(behaviour) is BDIBehaviour
        super().add_behaviour(ReasoningBehaviour() if is_default else behaviour, template)

    def add_custom_actions(self, actions: Any) -> None:
        """Add the actions of the body."""
        PlanActions(self.body).add_to(actions)

    def _load_asl(self) -> None:
        self.bdi_agent = build_agent(
            self._asl, self._file_name, self.body, self.bdi_actions, self.capture, self._beliefs
        )
        self.resume_bdi()

    def finish(self, error: Exception | None) -> None:
        """End the training with an error, or without one."""
        if not self.result.done():
            if error is None:
                self.result.set_result(None)
            else:
                self.result.set_exception(error)

    def hear(self, message: Any) -> None:
        """Take a message of a peer: a belief (tell, untell) or a goal (achieve). One that makes no sense is ignored."""
        try:
            trigger, goal_type = _MESSAGES[message.get_metadata("ilf_type")]
            functor, arguments = parse_literal(message.body)
            source = agentspeak.Literal("source", (agentspeak.Literal(str(message.sender)),))
            term = agentspeak.freeze(agentspeak.Literal(functor, arguments), {}, {}).with_annotation(source)
            self.bdi_agent.call(trigger, goal_type, term, agentspeak.runtime.Intention(), delayed=True)
        except Exception:  # noqa: BLE001 - whatever a peer sends, the agent lives on
            self.ignored_messages += 1

    async def log_in(self) -> None:
        """Log in within the time limit of the account. `XmppError` if that fails."""
        account = self.account
        for _ in range(_LOGIN_ATTEMPTS):
            try:
                await asyncio.wait_for(self.start(auto_register=account.register), account.timeout_s / _LOGIN_ATTEMPTS)
                await self._ping()
            except TimeoutError:
                self.client.abort()
            else:
                return
        reason = f"the XMPP server at {account.host}:{account.port} did not answer within {account.timeout_s:.0f} s"
        raise XmppError(reason, "Start the server, or set xmpp.host and xmpp.port; without them one is embedded")

    async def _ping(self) -> None:
        """Wait for any answer of the server, because a server can accept a login and answer nothing afterwards."""
        try:
            await self.client["xep_0199"].send_ping(self.jid.domain, timeout=self.account.timeout_s / _LOGIN_ATTEMPTS)
        except IqError:
            return
        except IqTimeout:
            raise TimeoutError from None

    async def _async_connect(self) -> None:
        """Connect to the host of the account, which need not be the domain of its address."""
        client: XMPPClient = self.client
        account = self.account
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def report(event: str) -> Any:
            def handle(detail: Any = None) -> None:
                if not outcome.done():
                    outcome.set_result(f"{event} {detail}" if event == "unreachable" else event)

            return handle

        client.add_event_handler("session_start", report("connected"))
        client.add_event_handler("failed_all_auth", report("refused"))
        client.add_event_handler("connection_failed", report("unreachable"))
        client.add_event_handler("disconnected", report("disconnected"))
        client.add_event_handler("message", self._message_received)
        client.connect(host=account.host, port=account.port)
        result = await outcome
        if result == "connected":
            return
        where = f"{account.host}:{account.port}"
        client.abort()
        if result == "refused":
            reason = f"the XMPP server at {where} refused the login of {account.jid}"
            raise XmppError(reason, "Check xmpp.jid and the variable with its password")
        if result == "disconnected":
            reason = f"the XMPP server at {where} closed the connection of {account.jid}"
            raise XmppError(reason, "Check the log of the server; its certificate may need xmpp.verify_tls=false")
        reason = f"the XMPP server at {where} cannot be reached ({result.partition(' ')[2]})"
        raise XmppError(reason, "Start the server, or set xmpp.host and xmpp.port; without them one is embedded")

    async def log_out(self, timeout_s: float = 5.0) -> None:
        """End the behaviours and the connection."""
        try:
            await asyncio.wait_for(self.stop(), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            return
