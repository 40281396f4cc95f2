"""`RayCluster`: the connection to a Ray cluster. The only module of the training tower that imports Ray.

It connects to a cluster or starts one on this machine, checks that every node runs the same versions, starts actors,
and translates Ray's errors: `LostActor` (the process or its node is gone: start another), `ActorRaised` (the code
raised an error) and `CollectorFailed` (the head does not answer).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field

import palaestra
from palaestra.config import Section
from palaestra.errors import CollectorFailed, ConfigError
from palaestra.processes.children import usable_cores

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 60.0
"""Time for every node to report its versions, which starts a worker process on each."""
HEAD_CHECK_S = 1.0
"""Interval of the connection test to the head."""
STOP_TIMEOUT_S = 10.0
CLIENT = "ray://"

Ref: TypeAlias = Any
"""A reference to a value in the object store that may not exist yet."""

_log = logging.getLogger(__name__)


class ActorsConfig(Section):
    """Where actors run: in this process and its children, or on a Ray cluster."""

    backend: Literal["local", "ray"] = "local"
    """`local`: on this machine, without further processes unless another section asks for them. `ray`: as Ray actors
    on the nodes of a cluster (`pip install 'palaestra[ray]'`)."""
    address: str | None = None
    """Address of the head, `host:6379` for a driver on a node of the cluster, `ray://host:10001` for one outside. null:
    `$RAY_ADDRESS`, or else a Ray instance on this machine that ends with the run."""
    num_actors: int = Field(default=2, ge=1, le=10_000)
    """Number of actors. Vector environments: each steps a share of `env.num_envs`. Screens: each plays a share of
    `actor_pool.target_concurrent_actors`. Never more than there are of these."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each actor, and for the sampler of screens."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for each actor of a vector environment, or for the sampler of screens. 0: on the CPU."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of Ray that each actor requires, for example `{simulator: 1}`, to choose its node."""
    restarts: int = Field(default=3, ge=0)
    """Number of consecutive replacements of a lost actor, without a result in between, before training fails."""
    start_timeout: float = Field(default=120.0, gt=0)
    """Seconds until every actor must have started."""
    head_timeout: float = Field(default=20.0, gt=0, le=45)
    """Seconds without a connection to the head after which training saves a checkpoint and fails. Ray ends the process
    after 60."""
    autoscaling: bool = False
    """The cluster adds nodes on demand: wait for them instead of refusing a run that needs more than it has now."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Runtime environment of Ray (`pip`, `working_dir`, `env_vars`, …), passed on unchanged. Empty: the nodes have the
    package installed, and no code is sent."""


class LostActor(Exception):
    """The process of an actor or its node is gone. Handled inside the actor package."""


class LostPeer(LostActor):
    """Another actor, which the called actor had called, is gone."""


class ActorRaised(Exception):
    """The code of an actor raised an error. Handled inside the actor package."""

    def __init__(self, error: BaseException, trace: str) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error, self.trace = error, trace


def control(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of an actor that runs beside a long call, as `ray.method(concurrency_group="control")` does."""
    method.__ray_concurrency_group__ = "control"  # type: ignore[attr-defined]
    return method


class RayCluster:
    """A connection to a Ray cluster, as a context manager that ends what it started."""

    def __init__(self, config: ActorsConfig, ray: Any, *, owns_connection: bool) -> None:
        """Use an existing connection; `connect` opens one. `owns_connection`: close it at the end."""
        self.config, self._ray, self._owns_connection = config, ray, owns_connection
        self.is_client = bool(ray.util.client.ray.is_connected())
        self._head = None if self.is_client else _split_address(ray.get_runtime_context().gcs_address)
        self._actors: list[Any] = []
        self._watched = _HeadWatch(self._head)
        self.has_failed = False
        """Whether the head was lost, so that no call may wait for a reply."""

    @classmethod
    def connect(cls, config: ActorsConfig, *, extra_actors: int = 0) -> Self:
        """Connect as the configuration says; `extra_actors`: actors besides `actors.num_actors`.

        `ConfigError` if the cluster cannot be reached, is too small, or has nodes with other versions.
        """
        ray = _import_ray()
        owns = not ray.is_initialized()
        if owns:
            _initialize(ray, config, (config.num_actors + extra_actors) * config.num_cpus)
        cluster = cls(config, ray, owns_connection=owns)
        try:
            cluster._check_capacity(config.num_actors + extra_actors)
            cluster._check_versions()
        except BaseException:
            cluster.close()
            raise
        return cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address for messages."""
        return self.config.address or (":".join(map(str, self._head)) if self._head else CLIENT)

    def node_addresses(self) -> list[str]:
        """IP addresses of the nodes, sorted."""
        return sorted({str(node["NodeManagerAddress"]) for node in self._ray.nodes() if node["Alive"]})

    def is_one_machine(self) -> bool:
        """Whether every node has the address of this machine, so that loopback addresses reach the same services."""
        addresses = set(self.node_addresses())
        own = {"127.0.0.1"} if self.is_client else {"127.0.0.1", self._ray.util.get_node_ip_address()}
        return addresses <= own

    # ------------------------------------------------------------------ actors

    def start_actor(
        self, actor_class: type, *args: Any, gpus: float = 0.0, concurrency: int | None = None, reserve: bool = True
    ) -> Any:
        """Start an actor and return its handle. It is placed when a node has room; call `wait_until_started`.

        `concurrency`: calls that an asyncio actor runs at the same time. Other actors run one call at a time, and
        methods that are marked with `control` beside it. `reserve`: whether it takes CPUs.
        """
        config = self.config
        options: dict[str, Any] = {
            "num_cpus": config.num_cpus if reserve else 0,
            "num_gpus": gpus,
            "resources": config.resources or None,
            "max_restarts": 0,  # a lost actor is replaced by one with another identity
        }
        if config.runtime_env:
            options["runtime_env"] = config.runtime_env
        if concurrency is None:
            options["concurrency_groups"] = {"control": 1}
        else:
            options["max_concurrency"] = concurrency
        with self._detect_disconnection():
            handle = self._ray.remote(**options)(actor_class).remote(*args)
        self._actors.append(handle)
        return handle

    def call(self, method: Any, *args: Any) -> Ref:
        """Call a method of an actor's handle; returns the reference of its result."""
        with self._detect_disconnection():
            return method.remote(*args)

    def wait_until_started(self, refs: Sequence[Ref], what: str) -> None:
        """Wait for the first reply of new actors; `CollectorFailed` if one fails, or is not placed in time."""
        end, waiting = time.monotonic() + self.config.start_timeout, list(refs)
        while waiting:
            self.raise_if_unreachable()
            ready = self.wait(waiting, 0.5)
            for ref in ready:
                try:
                    self.get(ref)
                except LostActor as lost:
                    raise CollectorFailed(f"an actor of {what} was lost while it started: {lost}.") from None
                except ActorRaised as raised:
                    raise describe_failure(f"an actor of {what} could not start", raised) from raised.error
            waiting = [ref for ref in waiting if ref not in ready]
            if waiting and time.monotonic() > end:
                raise CollectorFailed(self.describe_pending(len(waiting), len(refs), what))

    def describe_pending(self, waiting: int, count: int, what: str) -> str:
        """Why actors may not have started in time."""
        return (
            f"{waiting} of {count} actors ({what}) have not started on the Ray cluster at {self.address} within "
            f"actors.start_timeout ({self.config.start_timeout:g} s). Each needs {self._demand()}; "
            f"{self._describe_resources()}. Wait until other programs end, lower actors.num_actors or "
            "actors.num_cpus, or add nodes."
        )

    def stop_actor(self, handle: Any) -> None:
        """End an actor at once."""
        if handle in self._actors:
            self._actors.remove(handle)
        if not self.has_failed:
            with contextlib.suppress(Exception):  # it may be gone already
                self._ray.kill(handle)

    # ------------------------------------------------------------------ values

    def put(self, value: Any) -> Ref:
        """Copy a value into the object store."""
        with self._detect_disconnection():
            return self._ray.put(value)

    def wait(self, refs: Sequence[Ref], timeout: float) -> list[Ref]:
        """The references whose values exist; at least one, unless `timeout` seconds pass before."""
        if not refs:
            return []
        with self._detect_disconnection():
            if not self._ray.wait(list(refs), num_returns=1, timeout=timeout, fetch_local=False)[0]:
                return []
            return list(self._ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0])

    def get(self, ref: Ref) -> Any:
        """The value of a reference; raises `LostActor` or `ActorRaised` if there is none."""
        with self._detect_disconnection(), _translate_errors(self._ray.exceptions):
            return self._ray.get(ref)

    async def get_soon(self, ref: Ref) -> Any:
        """As `get`, in an event loop."""
        with self._detect_disconnection(), _translate_errors(self._ray.exceptions):
            return await ref

    # ------------------------------------------------------------------ health

    def raise_if_unreachable(self) -> None:
        """Raise `CollectorFailed` if the head has not answered for `actors.head_timeout` seconds."""
        if time.monotonic() - self._watched.answered_at > self.config.head_timeout:
            self.has_failed = True
            raise CollectorFailed(
                f"the head of the Ray cluster at {self.address} has not answered for {self.config.head_timeout:g} s "
                "(actors.head_timeout). Start the cluster again, and resume."
            )

    @contextlib.contextmanager
    def _detect_disconnection(self) -> Iterator[None]:
        """Raise `CollectorFailed` if a call fails because a driver outside the cluster has lost its connection."""
        try:
            yield
        except Exception as error:  # Ray raises several types, also this one
            is_lost = isinstance(error, ConnectionError) or not self._ray.util.client.ray.is_connected()
            if not self.is_client or not is_lost:
                raise
            self.has_failed = True
            text = f"the connection to the Ray cluster at {self.address} was lost. Start it again, and resume."
            raise CollectorFailed(text) from None

    def close(self) -> None:
        """End every actor, and the Ray instance if it was started here. May be called repeatedly."""
        self._watched.stop()
        for handle in list(self._actors):
            self.stop_actor(handle)
        if self._owns_connection:
            self._owns_connection = False
            # Without a head the shutdown may wait for ever.
            stop = threading.Thread(target=self._ray.shutdown, name="palaestra-ray-shutdown", daemon=True)
            stop.start()
            stop.join(STOP_TIMEOUT_S if self.has_failed else None)

    def _check_capacity(self, num_actors: int) -> None:
        """Raise `ConfigError` if the cluster can never hold all actors."""
        config = self.config
        if config.autoscaling or not config.num_cpus:
            return
        cpus = [node["Resources"].get("CPU", 0.0) for node in self._ray.nodes() if node["Alive"]]
        room = sum(math.floor(count / config.num_cpus + 1e-9) for count in cpus)
        if room < num_actors:
            raise ConfigError(
                "actors.num_actors",
                config.num_actors,
                f"the run needs {num_actors} actors of {config.num_cpus:g} CPUs, and the Ray cluster at {self.address} "
                f"has room for {room}: {self._describe_resources()}",
                "Lower it or actors.num_cpus, add nodes, or set actors.autoscaling=true if the cluster adds them",
            )

    def _check_versions(self) -> None:
        """Raise `ConfigError` unless every node has the versions of this process."""
        own = _describe_versions()
        probes = {}
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in self._ray.nodes():
            if node["Alive"]:
                where = strategy(node["NodeID"], soft=False)
                options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": where, "max_retries": 1}
                if self.config.runtime_env:
                    options["runtime_env"] = self.config.runtime_env
                probe = self._ray.remote(**options)(_make_probe())
                probes[probe.remote()] = str(node["NodeManagerAddress"])
        done, late = self._ray.wait(list(probes), num_returns=len(probes), timeout=PROBE_TIMEOUT_S)
        for ref in done:
            try:
                found = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                reason = f"node {probes[ref]} cannot run a task ({_first_line(error)})"
                raise ConfigError("actors.address", self.address, reason, "Look at the log of the node") from None
            _compare_versions(own, found, probes[ref], self.address)
        if late:
            reason = f"node {probes[late[0]]} has not run a task within {PROBE_TIMEOUT_S:g} s"
            raise ConfigError("actors.address", self.address, reason, "Look at the log of the node")

    def _demand(self) -> str:
        config = self.config
        extra = [f"{amount:g} {name}" for name, amount in config.resources.items()]
        return " and ".join([f"{config.num_cpus:g} CPUs", *extra])

    def _describe_resources(self) -> str:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        names = ["CPU", *self.config.resources]
        parts = [f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in names]
        nodes = sum(bool(node["Alive"]) for node in self._ray.nodes())
        return f"{' and '.join(parts)} are free on {nodes} nodes"


class _HeadWatch:
    """Tests the connection to the head in a thread, without Ray, whose calls would wait."""

    def __init__(self, head: tuple[str, int] | None) -> None:
        """`head`: None outside the cluster, where a lost connection fails every call."""
        self._head, self._stopping = head, threading.Event()
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="palaestra-ray-head", daemon=True)
        if head is not None:
            self._thread.start()

    @property
    def answered_at(self) -> float:
        """When the head last answered."""
        return self._last if self._thread.is_alive() else time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._head is not None
        while not self._stopping.wait(HEAD_CHECK_S):
            if _is_reachable(self._head, HEAD_CHECK_S):
                self._last = time.monotonic()


def describe_failure(what: str, raised: ActorRaised) -> CollectorFailed:
    """The error of an actor's code as one sentence, with the traceback of the actor as a note."""
    failure = CollectorFailed(f"{what}: {raised}")
    failure.add_note(f"In the actor:\n{raised.trace.rstrip()}")
    return failure


# ---------------------------------------------------------------------- connecting


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Calls that nothing waits for any more fail when their actor is ended.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray 2 warns about a change of the next version in actors without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        remedy = "Install it: pip install 'palaestra[ray]'"
        raise ConfigError("actors.backend", "ray", "the package ray is not installed", remedy) from None
    return ray


def _initialize(ray: Any, config: ActorsConfig, cpus: float) -> None:
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        ray.init(
            "local",
            num_cpus=max(usable_cores(), math.ceil(cpus)),
            include_dashboard=False,
            configure_logging=True,
            **quiet,
        )
        return
    place = _split_address(address.removeprefix(CLIENT))
    if address != "auto" and (place is None or not _is_reachable(place, CONNECT_TIMEOUT_S)):
        reason = "no Ray cluster can be reached there" if place else "is not host:port or ray://host:port"
        remedy = "Start one (ray start --head), or leave the key out to start Ray on this machine"
        raise ConfigError("actors.address", address, reason, remedy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says the same
            ray.init(address, **quiet)
    except (RuntimeError, ConnectionError, OSError, ValueError) as error:
        with contextlib.suppress(Exception):
            ray.shutdown()
        text = " ".join(str(error).split())
        if "ersion mismatch" in text:
            reason, remedy = (
                f"the versions differ ({text})",
                "Install the same versions of Ray and Python here and there",
            )
        else:
            reason, remedy = f"the connection failed ({text[:300]})", "Is it the address of a head, and its token here?"
        raise ConfigError("actors.address", address, reason, remedy) from None


def _split_address(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isascii() and port.isdigit() else None


def _is_reachable(place: tuple[str, int], timeout: float) -> bool:
    try:
        socket.create_connection(place, timeout).close()
    except (OSError, UnicodeError, OverflowError):  # the last two: not a host name, not a port
        return False
    return True


def _describe_versions() -> dict[str, str]:
    import ray

    return {"Python": platform.python_version(), "Ray": ray.__version__, "palaestra": palaestra.__version__}


def _make_probe() -> Callable[[], dict[str, str]]:
    # A function inside a function is sent by value, so that it runs where the package is missing.
    def probe() -> dict[str, str]:
        import platform

        import ray

        found = {"Python": platform.python_version(), "Ray": str(ray.__version__)}
        try:
            import palaestra

            found["palaestra"] = str(palaestra.__version__)
        except ImportError as error:
            found["error"] = str(error)
        return found

    return probe


def _compare_versions(own: Mapping[str, str], found: Mapping[str, str], node: str, address: str) -> None:
    if "error" in found:
        reason = f"node {node} cannot import palaestra ({found['error']})"
        remedy = f"Install palaestra {own['palaestra']} on it, or name it in actors.runtime_env"
        raise ConfigError("actors.address", address, reason, remedy)
    for name, version in own.items():
        if found[name] != version:
            reason = f"node {node} has {name} {found[name]}, and this process has {version}"
            raise ConfigError("actors.address", address, reason, "Install the same version on every node")


# ---------------------------------------------------------------------- errors


@contextlib.contextmanager
def _translate_errors(exceptions: Any) -> Any:
    """Raise `ActorRaised` for errors of the code, and `LostActor` for those of processes and nodes."""
    try:
        yield
    except exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, exceptions.RayActorError | exceptions.NodeDiedError):
            raise LostPeer(_first_line(cause)) from None
        raise ActorRaised(cause, str(error)) from None
    except exceptions.RuntimeEnvSetupError as error:
        raise ConfigError("actors.runtime_env", "{…}", f"cannot be set up ({_first_line(error)})") from None
    except (exceptions.RayError, ConnectionError) as error:
        raise LostActor(_explain_loss(error, exceptions)) from None


def _explain_loss(error: BaseException, exceptions: Any) -> str:
    text = _first_line(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "low on memory" in str(error):
        # Ray's text goes on for pages about its settings.
        return f"{text.partition('. ')[0]} (run fewer environments or actors per node: raise actors.num_cpus)"
    return text[:400]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
